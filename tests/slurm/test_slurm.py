"""A real Slurm of two nodes on this machine, and a real Open MPI; skipped where they are not.

`.ci/run` installs both from Debian, and lets the names node01 and node02 mean this machine.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import looping
import pytest
from clusters import said
from processes import TESTS, environment

from jaxtrain import ExitCode

SECONDS = 120
JOIN = [sys.executable, str(TESTS / "multiprocess" / "join_run.py")]
TOY = [sys.executable, str(TESTS / "faults" / "toy_run.py"), "--num_cpu_devices=1"]

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
NodeName=node[01-02] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_against_slurm():
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        return "needs root, slurm-wlm and munge"
    try:
        socket.getaddrinfo("node01", None)
    except OSError:
        return "needs '127.0.0.1 node01 node02' in /etc/hosts"
    return ""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Two nodes; yields the environment that commands need."""
    if reason := reason_against_slurm():
        pytest.skip(reason)
    at = tmp_path_factory.mktemp("slurm")
    (at / "state").mkdir()
    (at / "slurm.conf").write_text(CONFIGURATION.format(at=at))
    variables = {**environment(), "SLURM_CONF": str(at / "slurm.conf"), "PYTHONWARNINGS": "error"}
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged --force"], check=True)
    for command in (["slurmctld"], ["slurmd", "-N", "node01"], ["slurmd", "-N", "node02"]):
        subprocess.run(command, env=variables, check=True)
    wait_until(lambda: call(["sinfo", "-h", "-o", "%T %D"], variables).strip() == "idle 2")
    yield variables
    for pid in [*at.glob("*.pid"), Path("/run/munge/munged.pid")]:
        os.kill(int(pid.read_text()), 15)


def call(command, variables):
    return subprocess.run(
        command, env=variables, text=True, capture_output=True, timeout=SECONDS, check=False
    ).stdout


def wait_until(is_so):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def run(command, variables):
    """(exit code, output) of a command that ends by itself."""
    ended = subprocess.run(
        command,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_srun_starts_a_run_on_two_nodes(slurm):
    code, output = run(["srun", "-N2", "--ntasks-per-node=2", "-l", *JOIN], slurm)
    assert code == 0, output
    assert "launcher slurm: process 3 of 4, coordinator node01:" in output
    assert "joined: 4 processes on 2 nodes" in output
    assert '"nodes": ["node01", "node01", "node02", "node02"]' in output


def test_scancel_stops_a_batch_job_with_75_and_the_next_one_goes_on(slurm, tmp_path):
    script = tmp_path / "job.sh"
    words = [f"--workdir={tmp_path / 'run'}", "--mesh=data:-1", "--log_every_steps=50"]
    words += ["--num_steps=1000000", "--eval_every_steps=0", "--checkpoint.every_steps=0"]
    toy = " ".join([*TOY, *words])
    script.write_text(f"#!/bin/bash\nsrun --ntasks-per-node=1 {toy}\necho ended with $?\n")
    out = tmp_path / "job.out"

    def submit():
        out.write_text("")
        job = call(["sbatch", "--parsable", "-N2", f"--output={out}", str(script)], slurm).strip()
        wait_until(lambda: out.read_text().count("/1000000  loss") > 1)
        call(["scancel", "--signal=TERM", f"{job}.0"], slurm)
        wait_until(lambda: "ended with" in out.read_text())
        assert f"ended with {ExitCode.PREEMPTED.value}" in out.read_text(), out.read_text()

    submit()
    (step,) = looping.saved_steps(tmp_path / "run")
    submit()
    assert f"resumed from step {step} of 1000000" in out.read_text()
    assert looping.saved_steps(tmp_path / "run")[-1] > step


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs openmpi-bin")
def test_mpirun_starts_a_run():
    variables = {**environment(), "PYTHONWARNINGS": "error"}
    code, output = run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *JOIN], variables
    )
    assert code == 0, output
    assert "launcher mpi: process 1 of 2, coordinator 127.0.0.1:" in output
    assert said(output)["everybody"] == [0, 1]
