"""A training process as its guardian sees it: what it reports, how it ended, where it hangs."""

import contextlib
import fcntl
import functools
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from jaxtrain.child_process import die_with
from jaxtrain.phases import GUARDIAN, STACKS_SIGNAL, Phase

_PIPE_BYTES = 2**20
# Read into the same memory again and again; the last few lines are kept.
_CHUNK_BYTES, _END_BYTES = 2**16, 256
_STACKS_SECONDS = 5.0
# How the stack of the main thread ends, which faulthandler writes last.
_LAST_WORDS = ("in <module>\n", "in _run_module_as_main\n", "  ...\n")


class Child:
    """The child, in a session of its own, so that a terminal's Ctrl-C comes from the guardian only.

    Its reports are read when `read` is called, not as they come: thousands of steps per second
    cost nothing.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user's share of memory for pipes is used up
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._stacks = os.memfd_create("stacks")
        self._process = subprocess.Popen(
            command,
            env={**os.environ, GUARDIAN: f"{os.getpid()}:{writer}:{self._stacks}"},
            pass_fds=(writer, self._stacks),
            start_new_session=True,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        os.close(writer)
        self.pid = self._process.pid
        self.fd = os.pidfd_open(self.pid)
        """Readable when the child has ended."""
        self.step, self.phase, self.count, self.busy_seconds = 0, Phase.START, 0, 0.0
        self.changed = time.monotonic()
        """When it last said something."""
        self.announced: int | None = None
        """The exit code that it is about to end with."""
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY)
        self._buffer = bytearray(_CHUNK_BYTES)
        self._end = b""

    def read(self) -> None:
        """Takes in what the child has said since the last call: the last line of it counts."""
        before = self._end
        with contextlib.suppress(BlockingIOError):
            while count := os.readv(self._reader, [self._buffer]):
                new = bytes(self._buffer[max(0, count - _END_BYTES) : count])
                self._end = (self._end + new)[-_END_BYTES:]
        lines = self._end.split(b"\n")[-3:-1]
        if self._end == before or not lines:
            return
        if lines[-1].startswith(b"exit "):
            self.announced = int(lines.pop().split()[1])
        if lines:
            count, step, busy, phase = lines[-1].decode().split()
            self.count, self.step, self.phase = int(count), int(step), Phase(phase)
            self.busy_seconds = float(busy)
            self.changed = time.monotonic()

    def state(self) -> str:
        """The kernel's letter for what the child does; T: stopped by a signal."""
        try:
            return os.pread(self._stat, 512, 0).rpartition(b")")[2].split()[0].decode()
        except OSError:
            return "X"

    def signal(self, number: int) -> None:
        """Sends a signal to the child alone."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.fd, number)

    def wait(self) -> int:
        """The exit code of the child, negative for a signal; what it has started is killed."""
        self.read()
        # Before the pid is given back: the group may not be anybody else's then.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def end(self) -> None:
        """Kills the child and what it has started."""
        if self._process.returncode is None:
            self.wait()

    def stacks(self) -> str:
        """Where each thread of the child is; also if it was stopped, or holds the lock of Python.

        Waits for them, at most five seconds.
        """
        self.signal(STACKS_SIGNAL)
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + _STACKS_SECONDS
        text = ""
        while not text.endswith(_LAST_WORDS) and time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.fstat(self._stacks).st_size
            text = os.pread(self._stacks, size, 0).decode(errors="replace")
        return text
