"""`jaxtrain doctor` in real processes: a table of their hosts, in which the odd one is marked."""

import json

import pytest
from clusters import finished, flags_of

DOCTOR = "multiprocess/doctor_run.py"


def doctor(workdir, *words, nodes=("node0", "node1", "node2"), places=None, odd=None):
    """(exit codes, outputs); each process is told its node."""
    variables = [{"JAXTRAIN_NODE": node, "TOY_AT": "odd" * (node == odd)} for node in nodes]
    num_processes = len(nodes)
    if places is None:
        coordinator, count, _ = flags_of(num_processes)[0]
        for process_id, environ in enumerate(variables):
            environ["JAXTRAIN_COORDINATOR"] = coordinator.partition("=")[2]
            environ["JAXTRAIN_NUM_PROCESSES"] = count.partition("=")[2]
            environ["JAXTRAIN_PROCESS_ID"] = str(process_id)
        places = [[]] * num_processes
    options = {"places": places, "variables": variables, "script": DOCTOR}
    return finished(workdir, *words, num_processes=num_processes, **options)


def line_of(check, output):
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [check]]
    return line


def test_hosts_that_are_alike(tmp_path):
    codes, outputs = doctor(tmp_path, nodes=("node0", "node0", "node1", "node1"))
    assert codes == [0] * 4, "\n".join(outputs)
    assert "node0  0-1        1 cpu    none" in outputs[0]
    assert "node1  2-3        1 cpu    none" in outputs[0]
    assert "*" not in outputs[0]
    assert "launcher jaxtrain: process 0 of 4" in line_of("launcher", outputs[0])
    assert "4 processes fit together" in line_of("together", outputs[0])
    assert "at most" in line_of("clocks", outputs[0])
    assert outputs[0].endswith("nothing is wrong\n")
    # Process 0 speaks for all, and nothing stays behind.
    assert outputs[1:] == [""] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_odd_host_is_marked(tmp_path):
    codes, outputs = doctor(tmp_path, odd="node1")
    assert codes == [2] * 3, "\n".join(outputs)
    row = line_of("node1", outputs[0])
    assert "8.00 GiB*" in row
    assert "jax 0.9.1*" in row
    assert "+90.0" in row
    assert "*" not in line_of("node0", outputs[0]) + line_of("node2", outputs[0])
    assert "process 1 on" in line_of("together", outputs[0])
    assert "has jax 0.9.1 instead of" in line_of("together", outputs[0])
    assert "node1 has packages jax 0.9.1 instead of" in line_of("hosts", outputs[0])
    assert line_of("clocks", outputs[0]).split()[1] == "note"
    assert "that of node1" in line_of("clocks", outputs[0])


def test_json_is_for_scripts(tmp_path):
    codes, outputs = doctor(tmp_path, "--json", nodes=("node0", "node1"), odd="node1")
    assert codes == [2, 2]
    found = json.loads(outputs[0][outputs[0].index("{\n") :])
    assert found["verdict"] == "wrong"
    verdicts = {finding["check"]: finding["verdict"] for finding in found["together"]}
    assert verdicts == {
        "together": "wrong",
        "shares": "ok",
        "hosts": "wrong",
        "shared": "ok",
        "clocks": "note",
    }
    skews = [process["clock_skew_seconds"] for process in found["processes"]]
    assert skews == pytest.approx([0, 90], abs=1)
    assert [row["odd"] for row in found["hosts"]] == [[], ["packages", "memory"]]


def test_a_workdir_that_is_not_shared(tmp_path):
    places = flags_of(2)
    for process_id, place in enumerate(places):
        (tmp_path / str(process_id)).mkdir()
        place.append(f"--workdir={tmp_path / str(process_id)}")
    codes, outputs = doctor(tmp_path, nodes=("a", "b"), places=places)
    assert codes == [2, 2], "\n".join(outputs)
    assert "process 0 does not see the workdir of process 1" in line_of("shared", outputs[0])


def test_processes_that_do_not_come_are_named(tmp_path):
    places = [[*place, "--init_timeout_seconds=1"] for place in flags_of(3)[:2]]
    codes, outputs = doctor(tmp_path, nodes=("a", "b"), places=places)
    assert codes == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "absent: 2" in line_of("meeting", output)
        # What each has found out by itself is said all the same.
        assert line_of("devices", output).endswith("ok     1 device: cpu")
