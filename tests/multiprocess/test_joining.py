"""Real processes find each other, or say why not: cases A2 to A5, and every way to tell them."""

import socket
import subprocess
import sys
import time

import pytest
from clusters import JOIN, finished, flags_of, free_port, said, started
from experimenting import ROOT

from jaxtrain import ExitCode


def joined(num_processes=2, **options):
    """What each process found."""
    codes, outputs = finished("", num_processes=num_processes, script=JOIN, **options)
    assert codes == [0] * num_processes, "\n".join(outputs)
    found = [said(output) for output in outputs]
    for process_id, process in enumerate(found):
        assert process["process"] == process_id
        assert process["count"] == num_processes
        assert process["everybody"] == list(range(num_processes))
    return found, outputs


def failed(code, words, num_processes=2, **options):
    """All processes end with the code, and an error of one line with the words."""
    codes, outputs = finished("", num_processes=num_processes, script=JOIN, **options)
    assert codes == [code] * num_processes, "\n".join(outputs)
    for output in outputs:
        last = output.splitlines()[-1]
        assert last.startswith("error: "), output
        for word in words:
            assert word in last
    return outputs


def at(moment):
    return [{"TOY_AT": moment}]


def test_a3_two_processes_meet_by_flags_and_again_after_it():
    found, outputs = joined()
    assert "process 0 of 2, coordinator 127.0.0.1:" in outputs[0]
    assert "joined: 2 processes on one node" in outputs[0]
    assert len(set(map(tuple, (process["nodes"] for process in found)))) == 1
    assert max(process["seconds"] for process in found) < 30


def test_a3_ipv6():
    joined(places=flags_of(2, "[::1]"))


def test_a3_an_absent_process_is_named_on_all_others():
    places = flags_of(3)[:2]  # the third never comes
    begin = time.monotonic()
    outputs = failed(
        ExitCode.PEER_LOST,
        ["2 of 3 processes came within 2 s", "absent: 2"],
        places=[[*place, "--init_timeout_seconds=2"] for place in places],
    )
    assert time.monotonic() - begin < 60
    assert "dump" not in "".join(outputs).lower()


def test_a3_an_absent_process_0_is_named():
    place = [*flags_of(2)[1], "--init_timeout_seconds=1"]
    words = ["did not meet process 0 at 127.0.0.1", "Connection refused", "Was it started there"]
    failed(ExitCode.PEER_LOST, words, num_processes=1, places=[place])


def test_two_processes_with_one_id_are_told_so():
    zero, one, _ = flags_of(3)
    codes, outputs = finished("", num_processes=3, script=JOIN, places=[zero, one, one])
    assert codes == [ExitCode.CONFIG] * 3, "\n".join(outputs)
    assert all("are both process 1 of 3" in output for output in outputs)


def test_other_ideas_of_the_number_are_told():
    zero, one = flags_of(2)
    one[1] = "--num_processes=4"
    failed(ExitCode.CONFIG, ["is one of 4 processes", "is one of 2"], places=[zero, one])


def test_a_port_in_use_is_said():
    place = flags_of(2)[0]
    with socket.create_server(("127.0.0.1", int(place[0].rpartition(":")[2]))):
        words = ["process 0 cannot listen on port", "give another port"]
        failed(ExitCode.CONFIG, words, num_processes=1, places=[place])


def test_a4_too_late():
    words = ["joined too late", "move the first use (jax.devices()"]
    failed(ExitCode.CONFIG, words, num_processes=1, places=flags_of(2)[:1], variables=at("late"))


def test_a4_twice_is_a_line_and_otherwise_an_error():
    _, outputs = joined(variables=at("twice") * 2)
    assert "the processes are joined already; nothing to do" in outputs[0]
    words = ["joined already", "num_processes=3 instead of 2"]
    codes, outputs = finished("", num_processes=2, script=JOIN, variables=at("otherwise") * 2)
    assert codes == [ExitCode.CONFIG] * 2
    assert all(word in output for word in words for output in outputs)


@pytest.mark.parametrize("exception", [{}, {"no_proxy": "127.0.0.1"}])
def test_a5_a_proxy_is_not_asked_for_the_coordinator(exception):
    proxy = "http://127.0.0.1:9"
    found, _ = joined(variables=[{"http_proxy": proxy, **exception}] * 2)
    for process in found:
        assert process["proxies"] == {"http_proxy": proxy, "no_grpc_proxy": None}


def test_torchrun_variables():
    port = str(free_port())
    joined(
        places=[[]] * 2,
        variables=[
            {"RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for i in range(2)
        ],
    )


def test_kubernetes_variables():
    address = f"127.0.0.1:{free_port()}"
    variables = {"PROCESSES_IN_JOB": "1", "REPLICATED_JOB_REPLICAS": "2"}
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JOB_COMPLETION_INDEX": "0"}
    joined(places=[[]] * 2, variables=[{**variables, "JOB_INDEX": str(i)} for i in range(2)])


def test_a2_half_set_slurm_is_an_ordinary_run():
    codes, (output,) = finished(
        "", num_processes=1, script=JOIN, places=[[]], variables=[{"SLURM_JOB_ID": "123"}]
    )
    assert codes == [0]
    assert "slurm was not used: SLURM_JOB_ID=123 is set but not SLURM_PROCID" in output
    assert said(output)["count"] == 1


def test_a_process_that_is_lost_in_the_meeting_may_come_again():
    zero, one, two = flags_of(3)
    with started("", num_processes=2, script=JOIN, places=[zero, one]) as (first, lost):
        lost.wait_for("launcher flags: process 1 of 3")
        lost.process.kill()
        with started("", num_processes=2, script=JOIN, places=[one, two]) as others:
            for run in (first, *others):
                assert run.end() == 0, run.output
                assert said(run.output)["everybody"] == [0, 1, 2]


@pytest.mark.parametrize("module", ["jaxtrain", "train_lm", "train_image", "sample_lm"])
def test_a4_imports_use_no_device(module):
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'experiments')!r})\n"
        f"import {module}\n"
        "from jaxtrain.distributed import _require_no_backend\n"
        "_require_no_backend()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
