"""A real Slurm of two nodes on this machine, and what scripts/cluster/train.sbatch does in it.

Skipped where there is none. `.ci/run` installs it from Debian, and lets the names node01 and node02
mean this machine.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import looping
import pytest
from clusters import TOY, finished
from experimenting import ROOT
from processes import TESTS, environment, wait_until

from jaxtrain import ExitCode

SECONDS = 120
JOIN = [sys.executable, str(TESTS / "multiprocess" / "join_run.py")]
DOCTOR = [sys.executable, str(TESTS / "multiprocess" / "doctor_run.py")]
TEMPLATE = str(ROOT / "scripts" / "cluster" / "train.sbatch")

# A requeued job waits until the credentials of its first life have expired (AuthInfo).
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SchedulerParameters=sched_interval=1
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


def test_the_doctor_marks_the_odd_node(slurm, tmp_path):
    words = ["srun", "-N2", "--ntasks-per-node=1", *DOCTOR, f"--workdir={tmp_path}"]
    code, output = run(words, slurm)
    assert code == 0, output
    rows = [line.split()[:2] for line in output.splitlines() if line.startswith("node0")]
    assert rows == [["node01", "0"], ["node02", "1"]]
    assert "launcher slurm: process 0 of 2, coordinator node01:" in output
    assert "*" not in output
    assert output.endswith("nothing is wrong\n")
    odd = " ".join(["[ $SLURMD_NODENAME = node02 ] && export TOY_AT=odd; exec", *DOCTOR])
    code, output = run([*words[:3], "bash", "-c", f"{odd} {words[-1]}"], slurm)
    assert code == ExitCode.CONFIG, output
    (row,) = [line for line in output.splitlines() if line.startswith("node02 ")]
    assert "jax 0.9.1*" in row
    assert "8.00 GiB*" in row


# scripts/cluster/train.sbatch


def submit(slurm, tmp_path, script, *words, options=(), **variables):
    """(id of a job of the template on two nodes, its log)"""
    log = tmp_path / "job.log"
    log.touch()
    variables = {**slurm, "PYTHON": sys.executable, **variables}
    options = ["--parsable", "--nodes=2", f"--output={log}", *options]
    command = ["sbatch", *options, TEMPLATE, str(tmp_path / "run"), str(script), *words]
    return call(command, variables).strip(), log


def ended(slurm, job):
    """(state, exit code, how often it was requeued) of a job when it has ended."""
    shown = ""

    def has_ended():
        nonlocal shown
        shown = call(["scontrol", "show", "job", job], slurm)
        return re.search("JobState=(COMPLETED|FAILED|CANCELLED)", shown)

    wait_until(has_ended)
    state, code, restarts = (
        re.search(rf"\b{name}=(\w+)", shown)[1] for name in ("JobState", "ExitCode", "Restarts")
    )
    return state, int(code), int(restarts)


PLAYER = """\
import os, signal, sys
lives = os.environ["CODES"].split()
life = int(os.environ.get("SLURM_RESTART_COUNT", 0))
code = int(lives[life].split(",")[int(os.environ["SLURM_PROCID"])])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""An experiment whose processes end with the codes that CODES has for this life of the job."""


CODES = {
    "76,76 124,124 75,75 0,0": ("COMPLETED", 0, 3),
    # One is killed, the other says that it lost it.
    "-9,76 0,0": ("COMPLETED", 0, 1),
    # MAX_RESTARTS=2.
    "75,75 75,75 75,75 0,0": ("FAILED", 75, 2),
    **{f"{code},{code} 0,0": ("FAILED", code, 0) for code in (1, 2, 3, 4)},
    # One met what the same command would meet again, the other lost it.
    "3,76 0,0": ("FAILED", 3, 0),
}


def test_only_codes_after_which_the_same_command_helps_are_requeued(slurm, tmp_path):
    script = tmp_path / "player.py"
    script.write_text(PLAYER)
    jobs = {}
    for codes in CODES:
        most = "2" if codes.startswith("75") else "20"
        at = tmp_path / codes
        at.mkdir()
        jobs[codes], _ = submit(slurm, at, script, CODES=codes, MAX_RESTARTS=most)
    assert {codes: ended(slurm, job) for codes, job in jobs.items()} == CODES


STEPS = 12
TOY_WORDS = [
    *("--mesh=data:-1", "--num_cpu_devices=1", f"--num_steps={STEPS}", "--eval_every_steps=0"),
]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of the run that nobody disturbs, on two processes as well."""
    workdir = tmp_path_factory.mktemp("whole")
    codes, outputs = finished(workdir, *TOY_WORDS, num_processes=2, script=TOY)
    assert codes == [0, 0], "\n".join(outputs)
    return [record["loss"] for record in looping.train_records(workdir)]


def said(tmp_path):
    """What each process of the job that is `held` has said."""
    return [path.read_text() for path in sorted(tmp_path.glob("*.err"))]


def wait_for_saving(tmp_path):
    wait_until(lambda: all("finishing the step, then saving" in text for text in said(tmp_path)))


def assert_went_on(tmp_path, losses):
    """The second life began with a checkpoint of the first, and the run is the undisturbed one."""
    resumed = re.search(rf"resumed from step (\d+) of {STEPS}", said(tmp_path)[0])
    assert resumed, said(tmp_path)
    assert 5 <= int(resumed[1]) < STEPS
    records = looping.train_records(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in records] == losses


@pytest.fixture
def held(slurm, tmp_path):
    """(id, log, release) of a job of the toy whose processes wait in the eighth batch.

    What they say on standard error goes into `said(tmp_path)`, because an srun that Slurm ends
    together with the job drops what it has not yet passed on.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" 2>>{tmp_path}/$SLURM_PROCID.err\n')
    python.chmod(0o755)
    variables = {"TOY_AT": "read 8 hold", "TOY_FIFO": str(fifo), "PYTHONUNBUFFERED": "1"}
    variables["PYTHON"] = str(python)
    job, log = submit(slurm, tmp_path, TESTS / TOY, *TOY_WORDS, **variables)
    wait_until(lambda: log.read_text().count("at read 8") == 2)

    def release():
        # Opened for writing, it ends the wait of all who have opened it for reading.
        os.close(os.open(fifo, os.O_WRONLY))

    return job, log, release


@pytest.mark.parametrize("how", ["scancel", "requeue"])
def test_a_job_that_is_stopped_goes_on(slurm, tmp_path, losses, held, how):
    job, log, release = held
    if how == "scancel":
        call(["scancel", "--signal=TERM", f"{job}.0"], slurm)
    else:
        call(["scontrol", "requeue", job], slurm)
    wait_for_saving(tmp_path)
    release()
    assert ended(slurm, job) == ("COMPLETED", 0, 1), log.read_text()
    assert ("code 75, requeued (time 1)" in log.read_text()) == (how == "scancel")
    assert_went_on(tmp_path, losses)


def test_a_job_that_is_cancelled_is_not_requeued(slurm, tmp_path, held):
    job, log, release = held
    call(["scancel", job], slurm)
    wait_for_saving(tmp_path)
    release()
    assert ended(slurm, job)[::2] == ("CANCELLED", 0), log.read_text()
    assert "requeued" not in log.read_text()


@pytest.mark.long
def test_a_job_at_its_time_limit_goes_on(slurm, tmp_path):
    """Slurm counts limits in minutes, so this takes one."""
    words = [word for word in TOY_WORDS if "num_steps" not in word]
    words += ["--num_steps=1000000", "--checkpoint.every_steps=0", "--log_every_steps=1000"]
    options = ["--time=1", "--signal=TERM@5"]
    job, log = submit(slurm, tmp_path, TESTS / TOY, *words, options=options)
    wait_until(lambda: "resumed from step" in log.read_text())
    assert "code 75, requeued (time 1)" in log.read_text()
    assert "TIME LIMIT" not in log.read_text()
    call(["scancel", job], slurm)
    assert ended(slurm, job)[0] == "CANCELLED"
