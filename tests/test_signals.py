"""SIGTERM and SIGINT (case G2), and the exit codes, on real processes.

The moments are chosen by what a process prints; nothing here sleeps.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import looping
import numpy as np
import pytest
from processes import TESTS, TIMEOUT, environment, finished, started

from jaxtrain import ExitCode, program
from jaxtrain.data import prefetch
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.preemption import Preemption
from jaxtrain.run_lock import LOCK
from jaxtrain.stop_signals import STOP_SIGNALS

RARELY = "--checkpoint.every_steps=1000"
NOTICED = "finishing the step, then saving; once more to leave at once"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    code, output = finished(workdir, RARELY)
    assert code == ExitCode.OK, output
    return workdir


def assert_same_result(workdir, whole):
    assert looping.records(workdir) == looping.records(whole)
    found, expected = (np.load(directory / "final.npz") for directory in (workdir, whole))
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


def test_sigterm_in_a_step_saves_leaves_and_goes_on(tmp_path, whole):
    with started(tmp_path, RARELY, at="step 7 ask") as run:
        run.wait_for("at step 7, 7")
        run.signal(signal.SIGTERM)
        run.wait_for(f"SIGTERM: {NOTICED}")
        begin = time.monotonic()
        run.answer()
        assert run.end() == ExitCode.PREEMPTED == 75
        # Seconds are milliseconds on an idle machine; without a save at once it would be a step
        # of an hour that is waited for.
        assert time.monotonic() - begin < 60
    # Step 8 was on its way when the metrics of step 7 arrived.
    assert looping.saved_steps(tmp_path) == [8]
    code, output = finished(tmp_path, RARELY)
    assert code == 0
    assert "resumed from step 8 of 10" in output
    assert_same_result(tmp_path, whole)


def test_sigterm_while_a_step_waits_for_data_that_does_not_come(tmp_path, whole):
    with started(tmp_path, RARELY, at="read 8 hang") as run:
        run.wait_for("at read 8")
        # Step 7 is on its way, and there is no batch for step 8. The loader may be the faster one.
        if "step  6/10" not in run.output:
            run.wait_for("step  6/10")
        run.signal(signal.SIGTERM)
        begin = time.monotonic()
        assert run.end() == 75
        assert time.monotonic() - begin < 60
    assert looping.saved_steps(tmp_path) == [7]
    assert finished(tmp_path, RARELY)[0] == 0
    assert_same_result(tmp_path, whole)


def test_sigint_in_an_evaluation_gives_it_up_and_does_it_later(tmp_path, whole):
    # Each of the evaluations after steps 5 and 10 has three batches.
    with started(tmp_path, RARELY, at="evaluate 2 ask") as run:
        run.wait_for("at evaluate 2")
        run.signal(signal.SIGINT)
        run.wait_for(f"SIGINT: {NOTICED}")
        run.answer()
        assert run.end() == 75
    assert looping.saved_steps(tmp_path) == [5]
    assert looping.eval_records(tmp_path) == []
    assert finished(tmp_path, RARELY)[0] == 0
    assert_same_result(tmp_path, whole)


def test_sigterm_in_a_compilation_leaves_at_once_and_keeps_the_checkpoint(tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = looping.records(tmp_path)
    with started(tmp_path, "--num_steps=12", at="compile 1 hang") as run:
        run.wait_for("at compile 1")
        run.signal(signal.SIGTERM)
        assert run.end() == 75
        assert "SIGTERM before the first step: nothing to save, leaving" in run.output
    assert looping.saved_steps(tmp_path) == [10]
    assert looping.records(tmp_path) == before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_experiment_is_built(tmp_path, number):
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from jaxtrain.config import RunConfig\n"
        "from jaxtrain.main import main\n"
        "def build(config):\n"
        "    print('building', flush=True)\n"
        "    sys.stdin.readline()\n"
        "main(RunConfig, build)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), "--huge_pages=off"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "building\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PREEMPTED
    assert f"{number.name} outside of training: nothing to save, leaving" in errors


def test_a_second_signal_leaves_at_once_and_spoils_nothing(tmp_path, whole):
    """The first one begins a save; the second comes while its files are complete but nameless."""
    with started(
        tmp_path, "--checkpoint.every_steps=4", at="step 6 ask;commit_started 2 ask"
    ) as run:
        run.wait_for("at step 6")
        run.signal(signal.SIGTERM)
        run.wait_for(NOTICED)
        run.answer()
        run.wait_for("at commit_started 2, 7")
        run.signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
        assert "SIGTERM again: leaving at once" in run.output
    assert looping.saved_steps(tmp_path) == [4]
    code, output = finished(tmp_path, RARELY)
    assert code == 0
    assert "resumed from step 4 of 10" in output
    assert_same_result(tmp_path, whole)


def test_a_complete_run_ends_with_0_and_rewrites_nothing(tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)

    def files():
        return {
            path: path.stat().st_mtime_ns
            for path in tmp_path.rglob("*")
            if path.is_file() and path.name not in ("final.npz", LOCK)
        }

    before = files()
    code, output = finished(tmp_path, RARELY)
    assert code == 0
    assert "the run is complete: 10 of 10 steps" in output
    assert files() == before
    assert_same_result(tmp_path, whole)


def test_a_bad_value_ends_with_3(tmp_path):
    code, output = finished(tmp_path, "--spoil=6", "--checkpoint.every_steps=2")
    assert code == ExitCode.NONFINITE == 3
    last = output.splitlines()[-1]
    assert last.startswith(
        "error: loss and grad_norm not finite at step 6 (samples 40 to 47 of the order); the "
    )
    assert looping.saved_steps(tmp_path) == [2, 4]


def test_a_save_that_fails_ends_with_4(tmp_path):
    code, output = finished(tmp_path, at="commit_started 2 fail")
    assert code == ExitCode.UNUSABLE == 4
    last = output.splitlines()[-1]
    assert last.startswith("error: checkpoint step 10 could not be written")
    assert "No space left on device" in last
    assert "the newest whole checkpoint is step 5" in last
    assert looping.saved_steps(tmp_path) == [5]


def test_a_terminal_that_is_closed_costs_nothing(tmp_path, whole):
    terminal, slave = os.openpty()
    own = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0);"
    own += " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with subprocess.Popen(
        [sys.executable, "-c", own, str(TESTS / "faults/toy_run.py"), f"--workdir={tmp_path}"]
        + [RARELY],
        env=environment("step 7 ask"),
        stdin=subprocess.PIPE,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as process:
        os.close(slave)
        said = b""
        while b"at step 7" not in said:
            said += os.read(terminal, 4096)
        os.close(terminal)
        process.communicate(b"\n", timeout=TIMEOUT)
    assert process.returncode == ExitCode.PREEMPTED
    (step,) = looping.saved_steps(tmp_path)
    assert step in (8, 9)  # the kernel's SIGHUP and the answer race for the end of step 8
    assert finished(tmp_path, RARELY)[0] == 0
    assert_same_result(tmp_path, whole)


def test_nohup_is_respected(tmp_path):
    with started(tmp_path, at="step 3 ask", prefix=["nohup"]) as run:
        run.wait_for("at step 3")
        run.signal(signal.SIGHUP)
        run.answer()
        assert run.end() == 0, run.output


# In this process: a session that must survive


@pytest.fixture
def interactive(monkeypatch):
    """As at a prompt or in a notebook."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == handlers
    assert exits == []


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_in_a_session_ends_the_run_with_a_checkpoint(tmp_path, interactive, capsys):
    run = looping.config(tmp_path, every_steps=1000)
    result = looping.fit(run, on_step=lambda step, _: interrupt() if step == 3 else None)
    assert (result.status, result.step) == ("preempted", 4)
    assert looping.saved_steps(tmp_path) == [4]
    assert f"SIGINT: {NOTICED}" in capsys.readouterr().err
    assert looping.fit(run).status == "finished"
    assert [record["step"] for record in looping.train_records(tmp_path)] == list(range(1, 11))


class Stalled(ArrayDataset):
    """Interrupts the process in one of its reads, which ends when the run has."""

    def __init__(self, arrays, number):
        super().__init__(arrays)
        self.number, self.reads = number, 0
        self.interrupts, self.has_ended = threading.Event(), threading.Event()

    def read(self, indices):
        self.reads += 1
        if self.reads == self.number:
            assert self.interrupts.wait(60)
            interrupt()
            assert self.has_ended.wait(60)
        return super().read(indices)


def test_an_interrupt_ends_the_wait_for_data(tmp_path, interactive, monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_SECONDS", 0.1)
    data = Stalled(looping.TRAIN, 5)
    run = looping.config(tmp_path, every_steps=1000)

    def on_step(step, metrics):
        del metrics
        if step == 3:  # step 4 is on its way, and there is no batch for step 5
            data.interrupts.set()

    result = looping.fit(run, data, on_step=on_step)
    data.has_ended.set()
    assert (result.status, result.step) == ("preempted", 4)
    assert looping.saved_steps(tmp_path) == [4]
    assert looping.fit(run, data).status == "finished"
    assert [record["step"] for record in looping.train_records(tmp_path)] == list(range(1, 11))


def test_an_interrupt_ends_the_wait_for_evaluation_data(tmp_path, interactive, monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_SECONDS", 0.1)
    data = Stalled(looping.EVAL, 2)
    data.interrupts.set()
    run = looping.config(tmp_path, every_steps=1000, eval_every_steps=3)
    result = looping.fit(run, eval_data=data)
    data.has_ended.set()
    assert (result.status, result.step) == ("preempted", 3)
    assert looping.saved_steps(tmp_path) == [3]
    assert looping.fit(run, eval_data=data).status == "finished"
    assert [record["step"] for record in looping.eval_records(tmp_path)] == [3, 6, 9, 10]


def test_an_interrupt_before_the_first_step_is_an_exception_in_a_session(
    tmp_path, interactive, monkeypatch
):
    compile_step = program.compile_step

    def interrupted(*args, **options):
        interrupt()
        return compile_step(*args, **options)

    monkeypatch.setattr(program, "compile_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        looping.fit(looping.config(tmp_path))
    monkeypatch.undo()
    assert looping.fit(looping.config(tmp_path)).status == "finished"


def test_a_second_interrupt_is_an_exception_in_a_session(tmp_path, interactive):
    def on_step(step, metrics):
        del metrics
        if step == 6:
            interrupt()
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        looping.fit(looping.config(tmp_path), on_step=on_step)
    assert looping.saved_steps(tmp_path) == [5]


def test_outside_the_main_thread_signals_are_left_alone(interactive):
    handler = signal.getsignal(signal.SIGTERM)
    seen = []

    def watch():
        with Preemption().watch():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [handler]
