"""`jaxtrain doctor` on one machine: what it finds, and the verdicts on machines of all kinds."""

import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from jaxtrain import doctor_checks, doctor_facts
from jaxtrain.doctor_checks import check_process, check_together, hosts
from jaxtrain.errors import ConfigError
from jaxtrain.launch.local_devices import local_device_ids

GIB = 2**30
GPUS = {
    "driver": "550.54.15",
    "cuda": 12040,
    "installed": 8,
    "device_bytes": 80 * GIB,
    "visible_devices": None,
    "visible": 8,
    "on_bus": 8,
    "plugins": ["jax_cuda12_plugin"],
    "platforms": "",
}
NO_GPUS = GPUS | {"driver": "", "cuda": 0, "installed": 0, "visible": 0, "on_bus": 0, "plugins": []}
NAMES = {
    "host": "node01",
    "addresses": ["10.0.0.1"],
    "is_loopback": False,
    "coordinator": "",
    "coordinator_addresses": [],
}
WRITABLE = {"path": "/runs/lm", "error": "", "free_bytes": 100 * GIB}
LAPTOP = {
    "num_processes": 1,
    "devices": {"platform": "cpu", "count": 1, "kinds": ["cpu"]},
    "gpus": NO_GPUS,
    "memory_bytes": 16 * GIB,
    "names": NAMES,
    "port": 0,
    "outgoing_ports": [32768, 60999],
    "workdir": WRITABLE,
    "cache": WRITABLE | {"path": "", "store": ""},
    "versions": {"python": "3.12.1", "jax": "0.12.0"},
}
BOX = LAPTOP | {
    "devices": {"platform": "gpu", "count": 8, "kinds": ["NVIDIA H100"]},
    "gpus": GPUS,
    "memory_bytes": 1024 * GIB,
}


def troubles(facts, **changes):
    """{check: (verdict, text)} of what is not ok; each says what to do."""
    found = [f for f in check_process({**facts, **changes}) if f.verdict != "ok"]
    assert all(finding.advice for finding in found)
    return {finding.check: (finding.verdict, finding.text) for finding in found}


# What is found on this machine


def doctor(*words, **variables):
    """(exit code, {check: [verdict, text]}, output) of a process of its own."""
    environ = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_")}
    process = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "doctor", *words],
        env={**environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "Traceback" not in process.stderr, process.stderr
    lines = [line.split(None, 2) for line in process.stdout.splitlines() if " -> " not in line]
    return process.returncode, {name: rest for name, *rest in lines}, process.stdout


def test_a_laptop(tmp_path):
    code, found, output = doctor(f"--workdir={tmp_path / 'new' / 'run'}")
    assert code == 0, output
    assert output.endswith("nothing is wrong\n")
    assert found["launcher"] == ["ok", "a single process; no launcher has set its variables"]
    assert found["devices"] == ["ok", "1 device: cpu"]
    assert f"{tmp_path}/new/run can be written" in found["workdir"][1]
    assert {"driver", "gpus", "memory", "names", "ports", "cache", "packages"} <= found.keys()
    assert list(tmp_path.iterdir()) == [], "it only looks"


def test_what_is_set_by_half(tmp_path):
    code, found, output = doctor(f"--workdir={tmp_path}", SLURM_JOB_ID="123")
    assert code == 0, output
    assert found["launcher"][0] == "note"
    assert "SLURM_JOB_ID=123 is set but not SLURM_PROCID" in found["launcher"][1]
    code, found, output = doctor(f"--workdir={tmp_path}", RANK="1", WORLD_SIZE="2")
    assert code == 2, output
    assert found["launcher"][0] == "wrong"
    assert "is set but not MASTER_ADDR" in found["launcher"][1]
    # The rest is looked at all the same.
    assert found["devices"][0] == "ok"


def test_a_workdir_that_cannot_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    code, _, output = doctor(f"--workdir={path}", "--json")
    assert code == 2, output
    (process,) = json.loads(output)["processes"]
    (finding,) = [f for f in process["findings"] if f["check"] == "workdir"]
    assert finding["verdict"] == "wrong"
    assert finding["text"] == f"{path} cannot be written: {path} is a file"
    assert "give another --workdir" in finding["advice"]
    assert json.loads(output)["verdict"] == "wrong"


def test_devices_that_do_not_answer(tmp_path):
    (tmp_path / "jax.py").write_text("import os, time\nos.getppid()\ntime.sleep(1000)\n")
    found = ask_devices(tmp_path, timeout_seconds=1)
    assert found == {"error": "no answer within 1 s"}


def test_devices_that_fail(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('no device for you')\n")
    found = ask_devices(tmp_path, timeout_seconds=100)
    assert found == {"error": "RuntimeError: no device for you"}


def ask_devices(path, timeout_seconds):
    environ = {**os.environ, "PYTHONPATH": str(path)}
    return doctor_facts._ask("devices", timeout_seconds, environ)


def test_a_bad_flag_is_an_error():
    code, _, output = doctor("--wrokdir=x")
    assert (code, output) == (2, "")


def test_a_compile_cache_in_a_file_is_found(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    words = [f"--workdir={tmp_path}", f"--compilation_cache_dir={path}/cache"]
    code, found, output = doctor(*words)
    assert code == 2, output
    assert found["cache"][0] == "wrong"
    assert f"{path} is a file" in found["cache"][1]


def test_the_nearest_directory(tmp_path):
    assert doctor_facts.nearest_directory(str(tmp_path / "a" / "b")) == tmp_path
    assert doctor_facts.nearest_directory(str(tmp_path)) == tmp_path


@pytest.mark.skipif(not os.geteuid(), reason="root may write anywhere")
def test_rights(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert doctor_facts._directory(str(tmp_path / "run"))["error"] == "Permission denied"


def test_names_of_this_machine(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    names = doctor_facts._names("no-such-host.invalid")
    assert names["is_loopback"]
    assert names["coordinator_addresses"] == []
    assert troubles(LAPTOP, names=names)["names"][0] == "wrong"


# Verdicts on other machines


def test_nothing_is_wrong_with_a_laptop_and_a_box():
    assert troubles(LAPTOP) == {}
    assert troubles(BOX) == {}
    texts = {finding.check: finding.text for finding in check_process(BOX)}
    assert texts["driver"] == "NVIDIA 550.54.15, for CUDA up to 12.4"
    assert texts["gpus"] == "8 visible, all used"
    assert texts["memory"] == "1.00 TiB on the host, 640 GiB on its GPUs"


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "words"),
    [
        ({"gpus": {"error": "no answer within 120 s"}}, "driver", "wrong", "no answer within"),
        ({"gpus": NO_GPUS | {"on_bus": 2}}, "driver", "wrong", "NVIDIA GPUs on the bus (2)"),
        ({"gpus": GPUS | {"plugins": ["jax_cuda13_plugin"]}}, "driver", "wrong", "needs CUDA 13"),
        ({"gpus": GPUS | {"plugins": []}}, "gpus", "wrong", "JAX has no package for them"),
        ({"gpus": GPUS | {"platforms": "cpu"}}, "gpus", "note", "JAX_PLATFORMS=cpu"),
        (
            {"gpus": GPUS | {"visible_devices": "", "visible": 0}},
            "gpus",
            "wrong",
            "0 of 8 visible (CUDA_VISIBLE_DEVICES=)",
        ),
        ({"devices": LAPTOP["devices"]}, "gpus", "wrong", "8 visible, 0 used by JAX"),
        ({"devices": {"error": "out of memory"}}, "devices", "wrong", "out of memory"),
        ({"memory_bytes": 512 * GIB}, "memory", "note", "512 GiB on the host, 640 GiB"),
        (
            {"names": NAMES | {"is_loopback": True, "addresses": ["127.0.1.1"]}},
            "names",
            "note",
            "node01 is 127.0.1.1, which other machines cannot reach",
        ),
        ({"names": NAMES | {"addresses": []}}, "names", "note", "has no address"),
        (
            {"names": NAMES | {"addresses": []}, "num_processes": 2},
            "names",
            "wrong",
            "has no address",
        ),
        (
            {"names": NAMES | {"coordinator": "node99"}},
            "names",
            "wrong",
            "the coordinator node99 has no address here",
        ),
        ({"port": 40000}, "ports", "note", "32768 to 60999"),
        ({"workdir": WRITABLE | {"free_bytes": 1000}}, "workdir", "note", "1000 B free"),
        (
            {"cache": WRITABLE | {"error": "Read-only file system"}},
            "cache",
            "wrong",
            "Read-only file system",
        ),
    ],
)
def test_what_is_not_ok_is_said(changes, check, verdict, words):
    found = troubles(BOX, **changes)
    assert found[check][0] == verdict
    assert words in found[check][1]


def test_a_part_of_the_gpus():
    gpus = GPUS | {"visible_devices": "2,3", "visible": 2}
    found = troubles(BOX, gpus=gpus, devices=BOX["devices"] | {"count": 2})
    assert found == {"gpus": ("note", "2 of 8 visible (CUDA_VISIBLE_DEVICES=2,3), all used")}


# Verdicts on several


def process(process_id, node, **changes):
    extra = {"process_id": process_id, "node": node, "num_gpus": 8, "is_shared": True}
    clock = {"clock_skew_seconds": 0.0, "round_trip_seconds": 1e-4}
    return {**BOX, **extra, **clock, **changes}


def together(everybody, process_per="auto", joining=lambda everybody: None):
    def share(visible, place, local):
        return local_device_ids(visible, place, local, process_per)

    found = check_together(everybody, joining, share)
    return {finding.check: (finding.verdict, finding.text) for finding in found}


def test_a_cluster_that_is_alike():
    found = together([process(i, f"node{i // 2}") for i in range(6)])
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    rows = hosts([process(i, f"node{i // 2}") for i in range(6)])
    assert [row["processes"] for row in rows] == ["0-1", "2-3", "4-5"]
    assert [row["odd"] for row in rows] == [[], [], []]


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"gpus": GPUS | {"driver": "535.1"}}, "driver"),
        ({"devices": BOX["devices"] | {"count": 7}}, "devices"),
        ({"versions": {"python": "3.12.1", "jax": "0.9"}}, "packages"),
        ({"memory_bytes": 512 * GIB}, "memory"),
    ],
)
def test_the_odd_host_among_three(changes, column):
    everybody = [process(0, "a"), process(1, "b", **changes), process(2, "c")]
    assert [row["odd"] for row in hosts(everybody)] == [[], [column], []]
    # The first may be the odd one as well.
    everybody = [process(0, "a", **changes), process(1, "b"), process(2, "c")]
    assert [row["odd"] for row in hosts(everybody)] == [[column], [], []]
    verdict, text = together(everybody)["hosts"]
    assert verdict == ("wrong" if column in ("devices", "packages") else "note")
    assert text.startswith(f"a has {column} ")


def test_of_two_hosts_the_first_is_the_measure():
    everybody = [process(0, "a"), process(1, "b", memory_bytes=8 * GIB)]
    assert [row["odd"] for row in hosts(everybody)] == [[], ["memory"]]


def test_a_little_more_memory_is_not_odd():
    everybody = [process(0, "a"), process(1, "b", memory_bytes=1025 * GIB)]
    assert [row["odd"] for row in hosts(everybody)] == [[], []]


def test_gpus_that_nobody_would_use():
    verdict, text = together([process(0, "a"), process(1, "a")], "device")["shares"]
    assert (verdict, text[-14:]) == ("wrong", "3, 4, 5, 6, 7 of a"[-14:])
    assert together([process(i, "a") for i in range(3)])["shares"][0] == "wrong"
    # A scheduler that shows each process its own.
    each = [GPUS | {"visible_devices": str(i), "visible": 1} for i in range(2)]
    found = together([process(i, "a", gpus=each[i], num_gpus=1) for i in range(2)])
    assert found["shares"][0] == "ok"


def test_what_a_run_would_refuse_is_wrong():
    def refuse(everybody):
        raise ConfigError("node02 is too old; install the same on all")

    assert together([process(0, "a"), process(1, "b")], joining=refuse)["together"] == (
        "wrong",
        "node02 is too old",
    )


def test_a_clock_that_is_ahead():
    ahead = process(1, "b", clock_skew_seconds=-3.0)
    assert together([process(0, "a"), ahead])["clocks"] == (
        "note",
        "at most 3.00 s apart (+-50 us): that of b",
    )


def test_every_check_has_a_name_of_its_own():
    names = [f.check for f in check_process(BOX)]
    names += [f.check for f in check_together([process(0, "a")], lambda _: None, lambda *_: ())]
    assert len(set(names)) == len(names)
    assert doctor_checks.__doc__ is not None
