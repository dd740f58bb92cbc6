"""`jaxtrain launch`: several processes of a run on this machine.

    jaxtrain launch --processes=4 --devices_per_process=2 -- python experiments/train_lm.py ...

Each process that it starts becomes a guardian with a child (`guardian`), as under any launcher, so
there is one way in which processes are watched. What is left for the launcher: to say which process
each is, to merge what they print, to forward signals, to start again where that helps, and to end
with everything that it has started.
"""

import contextlib
import dataclasses
import functools
import math
import os
import random
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from jaxtrain import flags
from jaxtrain.child_process import die_with
from jaxtrain.config import Config, field
from jaxtrain.errors import ConfigError, ExitCode
from jaxtrain.host import outgoing_ports
from jaxtrain.launch.sources import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from jaxtrain.standard_streams import silence
from jaxtrain.stop_signals import SAME_SIGNAL_SECONDS, heard_signals

_ARGUMENTS = "--processes=N [--devices_per_process=N] [--restarts=N] -- COMMAND ..."

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0
_FIRST_PORT = 20000  # many services have one below
REST_SECONDS = 30.0
"""How long the others may take to end after one has ended badly; guardians need a few seconds."""
_SIGNALS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,  # the terminal was closed
}
"""What is forwarded for what has come."""
# What the same command does about it: nothing, so there is no second try. A preemption (75) was
# asked for by somebody, who decides when to go on.
_FINAL = (ExitCode.CONFIG, ExitCode.NONFINITE, ExitCode.UNUSABLE, ExitCode.PREEMPTED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig(Config):
    """What stands before the command."""

    processes: int = field(0, minimum=0, help="how many are started")
    devices_per_process: int = field(
        0, minimum=0, help="simulated devices of each, on CPU; 0: as JAX finds them"
    )
    restarts: int = field(
        0,
        minimum=0,
        help="start again, at most so often, after a process was lost, stalled, killed, or met an "
        "unexpected error: after every exit code but 0, 2, 3, 4, 75, 130 and 143",
    )


def launch(words: Sequence[str]) -> int:
    """Runs a command in several processes; returns the exit code that says most about the run.

    Raises:
        ConfigError: for words that cannot work, and inside of another launch.
    """
    config, command = parse(words)
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    if found := [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]:
        raise ConfigError(
            f"jaxtrain launch starts all processes of a run, and {' '.join(found)} says that this"
            f" is one of them already; leave jaxtrain launch out of the command that is launched,"
            f" or unset these variables"
        )
    with _Stopping() as stopping:
        for attempt in range(config.restarts + 1):
            code, codes = _Group(config, command, stopping).run()
            if not helps(code) or stopping.requested or attempt == config.restarts:
                break
            pause = min(FIRST_PAUSE_SECONDS * 2**attempt, LAST_PAUSE_SECONDS)
            _say(
                f"the processes ended with {_list(codes)}; again in {pause:g} s"
                f" (restart {attempt + 1} of {config.restarts})"
            )
            if stopping.wait(pause):
                return ExitCode.PREEMPTED
    if code:
        _say(f"the processes ended with {_list(codes)}")
    return code


def parse(words: Sequence[str]) -> tuple[LaunchConfig, Sequence[str]]:
    """(what stands before --, the command behind it)"""
    if "--" not in words and (start := _first_of_command(words)):
        again = shlex.join(["jaxtrain", "launch", *words[:start], "--", *words[start:]])
        raise ConfigError(f"jaxtrain launch needs -- before the command: {again}")
    end = words.index("--") if "--" in words else len(words)
    config = flags.parse(["jaxtrain launch", *words[:end]], LaunchConfig, description=_ARGUMENTS)
    if not words[end + 1 :]:
        raise ConfigError(f"jaxtrain launch needs a command after --: {_ARGUMENTS}")
    if not config.processes:
        raise ConfigError(f"jaxtrain launch needs --processes: {_ARGUMENTS}")
    return config, words[end + 1 :]


def _first_of_command(words: Sequence[str]) -> int:
    """Index of the first word that is neither a flag nor the value of one before it; 0: none."""
    for i in range(1, len(words)):
        is_value = words[i - 1].startswith("-") and "=" not in words[i - 1]
        if not words[i].startswith("-") and not is_value:
            return i
    return 0


def summarise(codes: Sequence[int]) -> int:
    """The exit code of the process that the others ended for; 0 where all are 0.

    76 says only that another one ended; what cannot be mended by a restart comes first, and then
    what comes first in `codes`.
    """
    codes = [128 - code if code < 0 else code for code in codes]
    order = (*_FINAL, ExitCode.STALLED, *(code for code in codes if code != ExitCode.PEER_LOST))
    bad = [code for code in codes if code]
    return int(next((code for code in order if code in bad), bad[0] if bad else 0))


def helps(code: int) -> bool:
    """Whether the same command may get further.

    Lost, killed and stalled processes: yes. An unexpected error, of whatever code: perhaps, and the
    number of restarts is bounded. Not after success, after errors that last, or after SIGTERM and
    SIGINT, which somebody has sent.
    """
    by_signal = [128 + number for number in _SIGNALS.values()]
    return code != ExitCode.OK and code not in (*_FINAL, *by_signal)


class _Stopping:
    """Signals to end the launcher: noted, and handed to the processes by `_Group`."""

    def __enter__(self) -> "_Stopping":
        self.reader, self._writer = socket.socketpair()
        for end in (self.reader, self._writer):
            end.setblocking(False)
        self.requested = False
        self._handlers = {number: signal.signal(number, self._note) for number in heard_signals()}
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.reader.close()
        self._writer.close()

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        self.requested = True

    def wait(self, seconds: float) -> bool:
        """Waits; True as soon as there is a signal."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.reader, selectors.EVENT_READ)
            return bool(selector.select(seconds)) or self.requested


class _Group:
    """The processes of one attempt, each with a session of its own.

    The command may be a shell around the process that trains, and so signals go to all of a
    session. (The child of a guardian is in another one, and hears of them from its guardian.) The
    first process of a session is not waited for before the end: its pid, which is the number of the
    session, is not given to another one until then.
    """

    def __init__(self, config: LaunchConfig, command: Sequence[str], stopping: _Stopping) -> None:
        self._stopping = stopping
        self._selector = selectors.DefaultSelector()
        coordinator = f"127.0.0.1:{_free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rests: dict[int, bytes] = {}
        self._ended: dict[int, int] = {}
        """Exit codes of those that have ended by themselves, the first one first."""
        self._ends_at = math.inf
        self._told_at = 0.0
        for process_id in range(config.processes):
            variables = {
                COORDINATOR: coordinator,
                NUM_PROCESSES: str(config.processes),
                PROCESS_ID: str(process_id),
                "PYTHONUNBUFFERED": "1",  # or lines come late, and out of order
            }
            if config.devices_per_process:
                variables["JAX_NUM_CPU_DEVICES"] = str(config.devices_per_process)
            try:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a terminal's Ctrl-C reaches the launcher only
                    preexec_fn=functools.partial(die_with, os.getpid()),
                )
            except OSError as error:
                self._kill()
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from error
            self._processes.append(process)
            self._rests[process_id] = b""
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._listen(process.stdout, functools.partial(self._pass_on, process_id))
            fd = os.pidfd_open(process.pid)
            self._listen(fd, functools.partial(self._note_end, process_id, fd))

    def _listen(self, source: int | IO[bytes] | socket.socket, act: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def run(self) -> tuple[int, list[int]]:
        """Passes on what the processes print until all have ended.

        Returns:
            (the exit code that counts, those of all)
        """
        self._listen(self._stopping.reader, self._forward)
        try:
            while not self._is_over() and time.monotonic() < self._ends_at:
                for key, _ in self._selector.select(1.0):
                    key.data()
        finally:
            self._kill()
        for process_id in self._rests:
            self._pass_on(process_id)
        self._selector.close()
        codes = [process.wait() for process in self._processes]
        return summarise([*self._ended.values()]) or summarise(codes), codes

    def _is_over(self) -> bool:
        if len(self._ended) < len(self._processes):
            return False
        # A signal ends a shell at once, and not what it has started, which is saving.
        return not self._told_at or not _living(self._processes)

    def _note_end(self, process_id: int, fd: int) -> None:
        self._selector.unregister(fd)
        result = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        os.close(fd)
        assert result is not None
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._ended[process_id] = code
        is_told = self._told_at and -code in _SIGNALS.values()
        if code not in (ExitCode.OK, ExitCode.PREEMPTED) and not is_told:
            self._end_within_rest()

    def _end_within_rest(self) -> None:
        self._ends_at = min(self._ends_at, time.monotonic() + REST_SECONDS)

    def _forward(self) -> None:
        for number in self._stopping.reader.recv(64):
            now = time.monotonic()
            if self._told_at and now - self._told_at >= SAME_SIGNAL_SECONDS:
                self._end_within_rest()  # asked for twice, and so not to wait for ever
            self._told_at = self._told_at or now
            for pid in _living(self._processes):
                _send(pid, _SIGNALS[signal.Signals(number)])

    def _pass_on(self, process_id: int) -> None:
        stream = self._processes[process_id].stdout
        assert stream is not None
        if stream.closed:
            return
        received = stream.read()
        is_over = received == b""
        *lines, rest = (self._rests[process_id] + (received or b"")).split(b"\n")
        if is_over and rest:
            lines, rest = [*lines, rest], b""
        self._rests[process_id] = rest
        try:
            for line in lines:
                sys.stdout.buffer.write(b"[%d] %s\n" % (process_id, line))
            sys.stdout.buffer.flush()
        except OSError as error:
            silence(sys.stdout.fileno())
            _say(f"standard output is gone ({error.strerror}); the processes go on unheard")
        if is_over:
            self._selector.unregister(stream)
            stream.close()

    def _kill(self) -> None:
        """Kills whatever is left in the sessions."""
        killed: set[int] = set()
        while new := set(_living(self._processes)) - killed:
            for pid in new:
                _send(pid, signal.SIGKILL)
            killed |= new


def _living(leaders: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Pids of all that run in the sessions of these processes."""
    sessions = {leader.pid for leader in leaders}
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            if int(session) in sessions and state not in (b"Z", b"X"):
                found.append(int(name))
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    """A free port, if possible none of those that the system may give to any connection."""
    first, *_, last = outgoing_ports() or [0, 0]
    ports = [port for port in range(_FIRST_PORT, 2**16) if not first <= port <= last]
    random.SystemRandom().shuffle(ports)
    for port in (*ports, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise ConfigError("no port is free on this machine; end what listens on them")


def _list(codes: Sequence[int]) -> str:
    return f"exit codes {', '.join(map(str, codes))}"


def _say(text: str) -> None:
    try:
        print(f"[launch] {text}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr.fileno())
