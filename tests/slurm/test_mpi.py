"""A real Open MPI on this machine, and what scripts/cluster/mpirun.sh does with it."""

import os
import shutil
import signal
import subprocess
import sys

import looping
import pytest
from clusters import TOY, finished, said
from experimenting import ROOT
from processes import TESTS, environment

from jaxtrain import ExitCode

pytestmark = pytest.mark.skipif(not shutil.which("mpirun"), reason="needs openmpi-bin")

SECONDS = 120
JOIN = [sys.executable, str(TESTS / "multiprocess" / "join_run.py")]
TEMPLATE = ["bash", str(ROOT / "scripts" / "cluster" / "mpirun.sh")]
# As root, and with more processes than cores.
OPTIONS = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
VARIABLES = {**environment(), "PYTHONWARNINGS": "error", "PYTHON": sys.executable}

PLAYER = """\
import os, sys
path, codes = os.environ["LIFE"], os.environ["CODES"].split()
rank = os.environ["OMPI_COMM_WORLD_RANK"]
life = os.path.getsize(path + rank) if os.path.exists(path + rank) else 0
with open(path + rank, "a") as file:
    file.write("x")
code = int(codes[life].split(",")[int(rank)])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""An experiment whose processes end with the codes that CODES has for this life of the run."""


def run(command, **variables):
    """(exit code, output) of a command that ends by itself."""
    ended = subprocess.run(
        command,
        env={**VARIABLES, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_mpirun_starts_a_run():
    code, output = run(["mpirun", *OPTIONS, *JOIN])
    assert code == 0, output
    assert "launcher mpi: process 1 of 2, coordinator 127.0.0.1:" in output
    assert said(output)["everybody"] == [0, 1]


@pytest.mark.parametrize(
    ("codes", "expected", "lives"),
    [
        ("76,76 124,124 75,75 0,0", 0, 4),
        # One is killed, the other says that it lost it.
        ("-9,76 0,0", 0, 2),
        ("75,75 75,75 75,75 0,0", 75, 3),
        *((f"{code},{code} 0,0", code, 1) for code in (1, 2, 3, 4)),
        # One met what the same command would meet again, the other lost it.
        ("76,3 0,0", 3, 1),
    ],
)
def test_only_codes_after_which_the_same_command_helps_start_it_again(
    tmp_path, codes, expected, lives
):
    script = tmp_path / "player.py"
    script.write_text(PLAYER)
    most = "2" if codes.startswith("75") else "20"
    variables = {"CODES": codes, "LIFE": f"{tmp_path}/life", "MAX_RESTARTS": most}
    command = [*TEMPLATE, *OPTIONS, "--", str(tmp_path / "run"), str(script)]
    code, output = run(command, **variables)
    assert code == expected, output
    assert (tmp_path / "life0").stat().st_size == lives


def test_a_signal_between_two_lives_ends_the_wait(tmp_path):
    script = tmp_path / "player.py"
    script.write_text(PLAYER)
    variables = {"CODES": " ".join(["76,76"] * 9), "LIFE": f"{tmp_path}/life"}
    with subprocess.Popen(
        [*TEMPLATE, *OPTIONS, "--", str(tmp_path / "run"), str(script)],
        env={**VARIABLES, **variables},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "again in 4 s" in line:
                process.send_signal(signal.SIGTERM)
    assert process.returncode == ExitCode.PREEMPTED
    assert (tmp_path / "life0").stat().st_size == 3


@pytest.mark.parametrize("end", ["exec sleep 99", "sleep 0.1; kill -USR1 $$"])
def test_a_signal_before_mpirun_knows_signals_ends_all_with_75(tmp_path, end):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\nkill -TERM $PPID\n{end}\n")
    mpirun.chmod(0o755)
    # Slow enough that the second ends between the signal and the look whether it still runs.
    slow = tmp_path / "slow.sh"
    slow.write_text('kill() { sleep 0.3; builtin kill "$@"; }\n')
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASH_ENV": str(slow)}
    code, output = run([*TEMPLATE, *OPTIONS, "--", str(tmp_path), "x.py"], **variables)
    assert code == ExitCode.PREEMPTED, output


def test_what_mpirun_refuses_is_an_error(tmp_path):
    code, output = run([*TEMPLATE, "--no-such-option", "--", str(tmp_path), "x.py"])
    assert code not in (0, 75, 76, 124), output
    code, output = run([*TEMPLATE, "-n", "2", str(tmp_path), "x.py"])
    assert code == ExitCode.CONFIG
    assert "usage: mpirun.sh" in output


def test_a_run_that_is_asked_to_stop_saves_once_and_goes_on(tmp_path):
    words = ["--mesh=data:-1", "--num_cpu_devices=1", "--num_steps=12", "--eval_every_steps=0"]
    codes, outputs = finished(tmp_path / "whole", *words, num_processes=2, script=TOY)
    assert codes == [0, 0], "\n".join(outputs)
    fifo, workdir = tmp_path / "fifo", tmp_path / "run"
    os.mkfifo(fifo)
    command = [*TEMPLATE, *OPTIONS, "--", str(workdir), str(TESTS / TOY), *words]
    variables = {"TOY_AT": "read 8 hold", "TOY_FIFO": str(fifo)}
    output = ""
    with subprocess.Popen(
        command,
        env={**VARIABLES, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if output.count("at read 8") == 2 and "at read 8" in line:
                # As Ctrl-C does: to the script, to mpirun, to everything.
                os.killpg(process.pid, signal.SIGINT)
            if output.count("finishing the step") == 2 and "finishing the step" in line:
                os.close(os.open(fifo, os.O_WRONLY))
    assert process.returncode == ExitCode.PREEMPTED, output
    assert ", again in" not in output
    (*_, step) = looping.saved_steps(workdir)
    assert step >= 5
    code, output = run(command)
    assert code == 0, output
    assert f"resumed from step {step} of 12" in output
    both = [
        [r["loss"] for r in looping.train_records(tmp_path / name)] for name in ("whole", "run")
    ]
    assert both[0] == both[1]
