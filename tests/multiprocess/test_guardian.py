"""Guardians and what they do when a process dies, hangs, or is told to end.

The processes import no JAX (`guarded_run.py`): each test takes a second or two. What the guardians
do for real runs is in tests/faults.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from clusters import flags_of, started
from processes import TESTS, assert_gone, environment, state_of

from jaxtrain import ExitCode
from jaxtrain.launch import guardian, meeting, verdict
from jaxtrain.stop_signals import SAME_SIGNAL_SECONDS, STOP_SIGNALS

SCRIPT = "multiprocess/guarded_run.py"
PEER_LOST, STALLED = ExitCode.PEER_LOST, ExitCode.STALLED


def run(*flags, num_processes=2, **options):
    return started("", *flags, num_processes=num_processes, script=SCRIPT, **options)


def child_of(run):
    """The pid of the process under the guardian, when it is ready."""
    run.wait_for("ready ")
    pid = int(re.findall(r"ready (\d+)", run.output)[-1])
    assert pid != run.process.pid
    return pid


def tell(run, line, *, is_done=True):
    """Lets the process execute a line of Python."""
    assert run.process.stdin is not None
    run.process.stdin.write(line + "\n")
    run.process.stdin.flush()
    if is_done:
        run.wait_for("done")


def train(runs, step=7, phase="TRAIN_STEP"):
    """Lets the processes say where they are, and waits until the guardians know; their pids."""
    pids = [child_of(run) for run in runs]
    for run in runs:
        tell(run, f"report(Phase.{phase}, {step})")
    time.sleep(guardian.TICK_SECONDS + 2.5)
    return pids


def assert_end(runs, codes, *words):
    """All end with the codes and one error line that has the words; at most 10 s may pass."""
    begin = time.monotonic()
    assert [run.end() for run in runs] == codes, "\n".join(run.output for run in runs)
    assert time.monotonic() - begin < 10
    for run in runs:
        (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
        for word in words:
            assert word in line
        for noise in ("Traceback", "Exception ignored", "Warning"):
            assert noise not in run.output, run.output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named_by_all(victim):
    with run() as runs:
        pids = train(runs)
        os.kill(pids[victim], signal.SIGKILL)
        name = f"process {victim} ({socket.gethostname()}, pid {pids[victim]})"
        words = [f"{name} was killed by signal 9 at step 7 in train_step; the others are stopped"]
        assert_end(runs, [PEER_LOST] * 2, *words)
    assert_gone(*pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_guardian_that_is_killed_takes_its_child_along_and_is_named(victim):
    with run(num_processes=3) as runs:
        pids = train(runs)
        runs[victim].process.kill()
        assert_gone(pids[victim])
        others = [run for run in runs if run is not runs[victim]]
        words = [f"process {victim} (", f"pid {pids[victim]}) was lost at step 7 in train_step"]
        assert_end(others, [PEER_LOST] * 2, *words, "the connection to its guardian broke")
    assert_gone(*pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_guardian_that_says_nothing_is_lost(victim):
    with run() as runs:
        train(runs)
        runs[victim].signal(signal.SIGSTOP)
        begin = time.monotonic()
        words = [f"process {victim} (", "its guardian was silent for 7 s"]
        assert_end([runs[1 - victim]], [PEER_LOST], *words)
        assert time.monotonic() - begin > verdict.LOST_SECONDS - 2.5
        # It goes on some day, and finds the others gone.
        runs[victim].signal(signal.SIGCONT)
        assert_end([runs[victim]], [PEER_LOST], " was lost at step 7 in train_step")


def test_guardians_that_were_asleep_take_nobody_for_lost():
    with run() as runs:
        pids = train(runs)
        for process in runs:
            process.signal(signal.SIGSTOP)
        time.sleep(verdict.LOST_SECONDS + 2.5)
        for process in runs:
            process.signal(signal.SIGCONT)
        time.sleep(3)
        assert [process.process.poll() for process in runs] == [None, None]
        assert [state_of(pid) for pid in pids] == ["S", "S"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_a_stall_and_its_stacks_are_shown(victim):
    with run("--stall_timeout_seconds=2") as runs:
        pids = [child_of(run) for run in runs]
        for process in runs:
            tell(process, "report(Phase.TRAIN_STEP, 7)")
        os.kill(pids[victim], signal.SIGSTOP)
        words = [f"process {victim} (", "stands still at step 7 in train_step, stopped by a signal"]
        words += ["stall_timeout_seconds=2 allows 2 s"]
        assert_end(runs, [STALLED] * 2, *words)
        assert "guarded_run.py" in runs[victim].output.partition("stacks of process")[2]
        assert "stacks of process" not in runs[1 - victim].output
    assert_gone(*pids)


def test_a_held_interpreter_lock_is_a_stall_and_its_place_is_shown():
    with run("--stall_timeout_seconds=2") as runs:
        pids = [child_of(run) for run in runs]
        tell(runs[0], "report(Phase.TRAIN_STEP, 7)")
        tell(runs[1], "report(Phase.TRAIN_STEP, 7); report(Phase.INPUT)")
        tell(runs[0], "import ctypes; ctypes.PyDLL(None).sleep(60)", is_done=False)
        assert_end(runs, [STALLED] * 2, "process 0 (", "stands still at step 7 in train_step")
        assert "most recent call first" in runs[0].output
    assert_gone(*pids)


def test_a_compilation_may_take_longer_than_a_step():
    with run("--stall_timeout_seconds=1") as runs:
        for process in runs:
            child_of(process)
            tell(process, "report(Phase.COMPILE, 0)")
        begin = time.monotonic()
        assert [run.end() for run in runs] == [STALLED] * 2
        assert 5 < time.monotonic() - begin < 12
        assert "processes 0-1 stand still at step 0 in compile" in runs[0].output


def test_no_limit_is_no_stall():
    with run("--stall_timeout_seconds=0") as runs:
        pids = train(runs)
        assert [state_of(pid) for pid in pids] == ["S", "S"]


@pytest.mark.parametrize(
    ("code", "codes"), [(0, [1, PEER_LOST]), (17, [17, PEER_LOST]), (75, [1, PEER_LOST])]
)
def test_an_exit_in_the_middle_of_a_run(code, codes):
    with run() as runs:
        train(runs)
        tell(runs[0], f"os._exit({code})", is_done=False)
        words = ["process 0 (", f"ended with exit code {code} at step 7 in train_step"]
        assert_end(runs, codes, *words)


def test_an_error_that_lasts_is_that_of_all():
    with run() as runs:
        train(runs)
        tell(runs[1], "report_exit(4); time.sleep(60)", is_done=False)
        assert_end(runs, [4, 4], "process 1 (", "ended with exit code 4 at step 7")


def test_who_fails_together_speaks_for_itself():
    with run() as runs:
        train(runs)
        for process in runs:
            tell(process, "print('error: no room'); report_exit(2); os._exit(2)", is_done=False)
        assert_end(runs, [2, 2], "no room")


def test_all_leave_in_order():
    with run() as runs:
        train(runs)
        tell(runs[0], "report(Phase.LEAVE); os._exit(0)", is_done=False)
        tell(runs[1], "report(Phase.LEAVE)")
        # That of process 0 waits for the other.
        assert runs[0].process.poll() is None
        tell(runs[1], "os._exit(0)", is_done=False)
        assert [run.end() for run in runs] == [0, 0]
        assert "error" not in runs[0].output + runs[1].output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_before_there_is_a_handler_ends_all_with_75(victim):
    with run() as runs:
        pids = [child_of(run) for run in runs]
        runs[victim].signal(signal.SIGTERM)
        words = [f"process {victim} (", "was told to end at step 0 in start; all leave"]
        assert_end(runs, [ExitCode.PREEMPTED] * 2, *words)
    assert_gone(*pids)


HANDLER = "signal.signal(signal.SIGTERM, lambda *_: print('TERM', flush=True))"


@pytest.mark.parametrize("victim", [0, 1])
def test_the_first_signal_is_the_child_s_and_the_second_ends_it(victim):
    with run() as runs:
        pids = train(runs)
        told = runs[victim]
        tell(told, HANDLER)
        # A batch system may send it to each process, and once more to all.
        told.signal(signal.SIGTERM)
        told.signal(signal.SIGTERM)
        told.wait_for("TERM")
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        assert told.process.poll() is None
        told.signal(signal.SIGTERM)
        codes: list[int] = [PEER_LOST] * 2
        codes[victim] = 128 + signal.SIGTERM
        words = [f"process {victim} (", "was told twice to end, and was ended at step 7"]
        assert_end(runs, codes, *words)
        assert "SIGTERM again: the process is ended at once" in told.output
        assert told.output.count("TERM\n") == 1
    assert_gone(*pids)


def test_what_the_child_has_started_ends_with_it():
    with run() as runs:
        train(runs)
        tell(runs[1], "import subprocess; sleeping = subprocess.Popen(['sleep', '99'])")
        tell(runs[1], "print('sleeps', sleeping.pid)")
        pid = int(re.findall(r"sleeps (\d+)", runs[1].output)[0])
        tell(runs[0], "os._exit(3)", is_done=False)
        assert_end(runs, [3, 3], "process 0 (")
    assert_gone(pid)


def test_a_signal_while_the_guardians_meet():
    with run(num_processes=1, places=[flags_of(2)[0]]) as (alone,):
        wait_for_listener(alone)
        alone.signal(signal.SIGINT)
        assert alone.end() == ExitCode.PREEMPTED
        assert "SIGINT to process 0 (" in alone.output
        assert ") before all have met: all leave" in alone.output


@pytest.fixture
def own_handlers():
    """For a guardian in this process: it sets handlers, as the last that its process does."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_who_waits_for_process_0_says_so(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "REPORT_SECONDS", 0.1)
    settings = guardian.Settings(
        process_id=1,
        num_processes=2,
        coordinator=flags_of(2)[0][0].partition("=")[2],
        init_timeout_seconds=0.5,
        stall_timeout_seconds=0,
    )
    monkeypatch.setattr(sys, "argv", ["", json.dumps(dataclasses.asdict(settings)), "true"])
    with caplog.at_level(logging.INFO, "jaxtrain"), pytest.raises(SystemExit) as ended:
        guardian.main()
    assert ended.value.code == ExitCode.PEER_LOST
    assert "process 1 waits for process 0 at 127.0.0.1 port" in caplog.text


def wait_for_listener(run):
    port = int(re.findall(r"--coordinator=\S+:(\d+)", " ".join(run.process.args))[0])
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        assert run.process.poll() is None
        time.sleep(0.05)


def test_all_have_a_guardian_or_none():
    zero, one = flags_of(2)
    with run("--noguardian", num_processes=2) as runs:
        for process in runs:
            process.wait_for(f"ready {process.process.pid} False")
    with run(num_processes=2, places=[zero, one]) as runs:
        pids = [child_of(run) for run in runs]
        assert all(state_of(pid) for pid in pids)


def test_who_has_no_guardian_is_refused_by_those_that_have():
    with pytest.raises(guardian.ConfigError, match="process 1 on node1 has no guardian"):
        guardian.check_guarded(
            [
                {"process_id": 0, "host": "node0", "is_guardian": True},
                {"process_id": 1, "host": "node1"},
            ]
        )


def test_a_program_that_the_child_starts_is_not_taken_for_it():
    with run() as runs:
        child_of(runs[0])
        program = "from jaxtrain import phases; print('guarded', phases.is_guarded())"
        tell(
            runs[0], f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
        )
        assert "guarded False" in runs[0].output
        child_of(runs[1])


class Relay:
    """Stands between a guardian and that of process 0, and counts bytes."""

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with contextlib.suppress(OSError):
                    far = socket.create_connection(("127.0.0.1", self._port))
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=self._pass, args=ends, daemon=True).start()
                    continue
                near.close()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while received := source.recv(2**16):
                self.num_bytes += len(received)
                target.sendall(received)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


def test_the_guardians_meet_soon():
    """Joining two processes may cost 2 seconds: this is what guardians add to it."""

    def seconds(*flags):
        begin = time.monotonic()
        with run(*flags) as runs:
            for process in runs:
                process.wait_for("ready ")
            return time.monotonic() - begin

    added = [seconds() - seconds("--noguardian") for _ in range(3)]
    print(f"{min(added):.2f} s")
    assert min(added) < 2


def cpu_seconds(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def test_what_a_guardian_costs():
    """Under 1 ms of CPU per second, 1 kB/s and 40 MB, beside 1000 steps per second.

    And what the processes say of their steps is logged.
    """
    seconds = 20
    place = flags_of(2)
    relay = Relay(int(place[0][0].rpartition(":")[2]))
    with (
        contextlib.closing(relay),
        run(places=[place[0], [f"--coordinator=127.0.0.1:{relay.port}", *place[1][1:]]]) as runs,
    ):
        for process in runs:
            child_of(process)
            busy = 5e-4 if process is runs[1] else 2e-4
            steps = f"[(report(Phase.TRAIN_STEP, n, n * {busy}), report(Phase.INPUT), nap())"
            tell(process, "nap = lambda: time.sleep(1e-3)")
            tell(process, f"{steps} for n in range(100000)]", is_done=False)
        time.sleep(2)
        pids = [process.process.pid for process in runs]
        before, begin = [cpu_seconds(pid) for pid in pids], time.monotonic()
        bytes_before = relay.num_bytes
        time.sleep(seconds)
        passed = time.monotonic() - begin
        used = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
        rate = (relay.num_bytes - bytes_before) / passed
        memory = [
            int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024
            for pid in pids
        ]
        milliseconds = [seconds / passed * 1e3 for seconds in used]
        print(f"CPU {milliseconds} ms per second, {rate:.0f} bytes per second, {memory} MB")
        assert max(milliseconds) < 1
        assert rate < 1000
        assert max(memory) < 40
        runs[0].wait_for("ms in data and Python on each process: 0: 0.2, 1: 0.5")


def test_reports_are_cheap():
    program = (
        "import os, time\n"
        "reader, writer = os.pipe2(os.O_NONBLOCK)\n"
        "stacks = os.memfd_create('stacks')\n"
        "os.environ['JAXTRAIN_GUARDIAN'] = f'{os.getppid()}:{writer}:{stacks}'\n"
        "from jaxtrain.phases import Phase, report\n"
        "times = []\n"
        "for _ in range(20):\n"
        "    begin = time.perf_counter()\n"
        "    for step in range(100): report(Phase.INPUT, step)\n"
        "    times.append((time.perf_counter() - begin) / 100)\n"
        "    os.read(reader, 2**16)\n"
        "print(min(times))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        env=environment(),
        text=True,
    )
    print(f"{float(found.stdout) * 1e6:.2f} us")
    assert float(found.stdout) < 5e-6


def test_the_guardian_is_small():
    """Under 500 lines of code, and nothing heavy is imported."""
    root = Path(guardian.__file__).parent
    lines = 0
    for name in ("guardian", "child", "verdict"):
        source = (root / f"{name}.py").read_text()
        source = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
        lines += sum(bool(line.split("#")[0].strip()) for line in source.splitlines())
    print(f"{lines} lines")
    assert lines < 500
    program = "import sys, jaxtrain.launch.guardian; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert not {"jax", "numpy", "absl"} & set(found.stdout.split())


@pytest.mark.long
def test_a_process_that_keeps_the_others_waiting_is_named():
    """Half of each step goes into the data of process 1; after half a minute that is said."""
    with run() as runs:
        for number, process in enumerate(runs):
            child_of(process)
            steps = f"[(report(Phase.TRAIN_STEP, n, {number} * n / 20), time.sleep(0.1))"
            tell(process, f"{steps} for n in range(1000)]", is_done=False)
        runs[0].wait_for(" keeps the others waiting: ")
        line = runs[0].output.splitlines()[-1]
        assert re.search(r"process 1 \(\S+, pid \d+\) keeps", line)
        busy, step, others = map(float, re.findall(r"([\d.e-]+) ms", line))
        assert 0.3 < busy / step < 0.7
        assert others < 0.1 * busy
