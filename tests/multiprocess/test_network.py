"""Two hosts with names and addresses of their own: namespaces joined by a bridge."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import looping
import numpy as np
import pytest
from clusters import JOIN, PYTHON, TOY, finished
from processes import Run

DOCTOR = "multiprocess/doctor_run.py"

BRIDGE, NETWORK = "jaxtrain0", "10.77.0"
HOSTS = ("jaxtrain-h1", "jaxtrain-h2")
WORDS = ["--mesh=data:-1", "--eval_every_steps=0"]
# A name of its own for the process and what it starts.
AS_HOST = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']


def ip(*words, check=True):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


def reason_against_namespaces():
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return "needs root, iproute2, util-linux and hostname"
    made = ip("netns", "add", "jaxtrain-try", check=False)
    if made.returncode:
        return f"needs network namespaces (a container needs --privileged): {made.stderr.strip()}"
    ip("netns", "delete", "jaxtrain-try")
    return ""


@pytest.fixture(scope="module")
def network():
    """Both hosts, with their cables in a switch."""
    if reason := reason_against_namespaces():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "delete", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, host in enumerate(HOSTS, 1):
            ip("netns", "add", host)
            stack.callback(ip, "netns", "delete", host)
            cable = f"jaxtrain{number}"
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", host)
            ip("link", "set", cable, "master", BRIDGE, "up")
            ip("-n", host, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host, "link", "set", device, "up")
        yield


@contextlib.contextmanager
def hosts_files(own_address="{network}.{number}"):
    """What each host finds in /etc/hosts; of itself it finds `own_address`."""
    with contextlib.ExitStack() as stack:
        for number, host in enumerate(HOSTS, 1):
            # `ip netns exec` binds the files in there over those of /etc.
            directory = Path("/etc/netns", host)
            directory.mkdir(parents=True)
            stack.callback(shutil.rmtree, directory)
            lines = ["127.0.0.1 localhost"]
            lines += [f"{own_address.format(network=NETWORK, number=number)} {host}"]
            lines += [
                f"{NETWORK}.{other} {name}" for other, name in enumerate(HOSTS, 1) if name != host
            ]
            (directory / "hosts").write_text("\n".join(lines) + "\n")
        yield


@contextlib.contextmanager
def started_on_hosts(script, workdir, *words, coordinator, ats=("", "")):
    """A run on each host; `ats` is the TOY_AT of each."""
    with contextlib.ExitStack() as stack:
        runs = []
        for process_id, host in enumerate(HOSTS):
            place = [f"--coordinator={coordinator}", "--num_processes=2"]
            run = Run(
                workdir,
                *(*words, *place, f"--process_id={process_id}"),
                at=ats[process_id],
                script=script,
                variables=PYTHON,
                prefix=["ip", "netns", "exec", host, *AS_HOST, host],
            )
            stack.callback(run.close)
            runs.append(run)
        yield runs


def on_hosts(script, workdir, *words, **options):
    """(exit codes, outputs) of a process on each host."""
    with started_on_hosts(script, workdir, *words, **options) as runs:
        return [run.end() for run in runs], [run.output for run in runs]


def test_two_hosts_train_as_one_does(tmp_path, network):
    with hosts_files():
        codes, outputs = on_hosts(
            TOY, tmp_path / "two", *WORDS, "--num_cpu_devices=1", coordinator=f"{HOSTS[0]}:61450"
        )
    assert codes == [0, 0], "\n".join(outputs)
    assert "joined: 2 processes on 2 nodes" in outputs[0]
    words = [*WORDS, "--num_cpu_devices=2"]
    codes, outputs = finished(tmp_path / "one", *words, num_processes=1, places=[[]], script=TOY)
    assert codes == [0], outputs[0]
    two, one = (
        [record["loss"] for record in looping.train_records(tmp_path / name)]
        for name in ("two", "one")
    )
    assert len(one) == 10
    assert two == pytest.approx(one, rel=1e-5)


def test_a_cable_that_is_cut_ends_both_and_costs_the_steps_since_the_last_checkpoint(
    tmp_path, network
):
    workdir, whole = tmp_path / "cut", tmp_path / "whole"
    words = ["--mesh=data:-1", "--num_cpu_devices=1"]
    with hosts_files():
        codes, outputs = on_hosts(TOY, whole, *words, coordinator=f"{HOSTS[0]}:61455")
        assert codes == [0, 0], "\n".join(outputs)
        with started_on_hosts(
            *(TOY, workdir, *words), coordinator=f"{HOSTS[0]}:61456", ats=("", "step 7 ask")
        ) as runs:
            # Process 0 waits for process 1 in the sum of the gradients.
            runs[1].wait_for("at step 7")
            ip("link", "set", "jaxtrain2", "down")
            begin = time.monotonic()
            codes = [run.end() for run in runs]
            seconds = time.monotonic() - begin
            ip("link", "set", "jaxtrain2", "up")
        assert codes == [76, 76], "\n".join(run.output for run in runs)
        assert seconds < 15
        for process_id, run in enumerate(runs):
            peer = f"process {1 - process_id} ({HOSTS[1 - process_id]}, pid "
            (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
            assert line.startswith(f"error: {peer}"), line
            assert "its guardian was silent for" in line
        assert looping.saved_steps(workdir) == [5]
        codes, outputs = on_hosts(TOY, workdir, *words, coordinator=f"{HOSTS[0]}:61457")
    assert codes == [0, 0], "\n".join(outputs)
    assert looping.records(workdir) == looping.records(whole)
    found, expected = (np.load(directory / "final.npz") for directory in (workdir, whole))
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


def test_the_doctor_sees_two_hosts(network, tmp_path):
    with hosts_files():
        codes, outputs = on_hosts(DOCTOR, tmp_path, "--json", coordinator=f"{HOSTS[0]}:61451")
    assert codes == [0, 0], "\n".join(outputs)
    found = json.loads(outputs[0][outputs[0].index("{\n") :])
    assert [row["host"] for row in found["hosts"]] == list(HOSTS)
    for number, process in enumerate(found["processes"], 1):
        assert process["address"] == f"{NETWORK}.{number}"
        assert process["names"]["addresses"] == [f"{NETWORK}.{number}"]
        # Both read the same clock.
        assert abs(process["clock_skew_seconds"]) <= process["round_trip_seconds"] / 2 + 1e-3


def test_a_host_name_that_means_the_host_itself_is_refused_and_found(network, tmp_path):
    """As many distributions write /etc/hosts: gloo would give 127.0.1.1 to the other host."""
    with hosts_files(own_address="127.0.1.1"):
        codes, outputs = on_hosts(JOIN, "", coordinator=f"{NETWORK}.1:61452")
        assert codes == [2, 2], "\n".join(outputs)
        for output in outputs:
            assert f"the host name of {', '.join(HOSTS)} resolves to a loopback address" in output
        codes, outputs = on_hosts(DOCTOR, tmp_path, coordinator=f"{NETWORK}.1:61453")
    assert codes == [2, 2], "\n".join(outputs)
    (line,) = [line for line in outputs[0].splitlines() if line.startswith("together ")]
    assert line.split()[1] == "wrong"
    assert "resolves to a loopback address there" in line
    assert "-> map it to the machine's own address in /etc/hosts" in outputs[0]


def test_an_address_that_nobody_has_is_said_by_both(network):
    words = ["--init_timeout_seconds=2"]
    with hosts_files():
        codes, outputs = on_hosts(JOIN, "", *words, coordinator=f"{NETWORK}.9:61454")
    assert codes == [76, 76], "\n".join(outputs)
    assert "1 of 2 processes came" in outputs[0]
    assert f"did not meet process 0 at {NETWORK}.9 port 61454" in outputs[1]
