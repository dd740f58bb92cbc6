"""SIGTERM, SIGINT and SIGHUP: finish the step, save, leave; a second signal leaves at once.

Python runs signal handlers in the main thread between bytecodes, so not while that thread is
inside XLA (a compilation takes minutes). The interpreter's C handler, however, writes the signal's
number to a file descriptor at once (`signal.set_wakeup_fd`), and a thread that waits on it acts
whatever the main thread is doing.

A process may leave; an interactive session (a notebook, a prompt) must survive. There a SIGINT that
comes before the first step, and a second one, is a KeyboardInterrupt in the main thread, as soon as
that thread is back in Python.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxtrain import phases
from jaxtrain.errors import ExitCode
from jaxtrain.standard_streams import silence_lost_terminal
from jaxtrain.stop_signals import SAME_SIGNAL_SECONDS, STOP_SIGNALS, heard_signals

__all__ = ["Preemption", "leaving", "note_signals"]

_noted = threading.Event()
_first_at = 0.0


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """A signal to stop in the block ends the process with exit code 75, as in `Preemption`.

    For what comes before a run and after it (imports, data, the report): there is nothing to save,
    and the same command does what is left. A no-op outside the main thread.
    """

    def leave(number: int, frame: object) -> None:
        del frame
        _say(f"{signal.Signals(number).name} outside of training: nothing to save, leaving")
        os._exit(ExitCode.PREEMPTED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, leave) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def note_signals() -> None:
    """From now on a first signal to stop is only noted, for the `Preemption` that is made next.

    A process that others wait for must not leave alone, also before there is anything to save.
    """

    def note(number: int, frame: object) -> None:
        del frame
        if _noted.is_set():
            if not _is_the_same():
                os._exit(128 + number)
            return
        _noted.set()
        _is_the_same()
        _say(f"{signal.Signals(number).name}: the processes stop together, after the first step")

    if threading.current_thread() is threading.main_thread():
        for number in heard_signals():
            signal.signal(number, note)


class Preemption:
    """Whether the run was asked to end; see `watch`."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """Watches nothing yet.

        Args:
            wake: called at the first signal, for a main thread that may be waiting for something;
                in another thread or in a signal handler.
        """
        self._wake = wake
        self._is_interactive = hasattr(sys, "ps1")
        self._event = threading.Event()
        if _noted.is_set():
            self._event.set()
        self._has_progress = False

    @property
    def requested(self) -> bool:
        """True from the first signal on; the loop looks at it between steps and batches."""
        return self._event.is_set()

    def progress_begins(self) -> None:
        """From now on there is something to save: the first signal no longer ends the process."""
        self._has_progress = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Takes over SIGTERM, SIGINT and SIGHUP in the block; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        old_handlers = {number: signal.getsignal(number) for number in heard_signals()}
        for number in old_handlers:
            signal.signal(number, self._handle)
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old_handlers.items():
                # None: C code had put one there, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            writer.close()
            thread.join()
            reader.close()

    def _wait(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            number = received[0]
            if number in STOP_SIGNALS and not self._is_for_main_thread(number):
                self._receive(signal.Signals(number))

    def _is_for_main_thread(self, number: int) -> bool:
        return self._is_interactive and number == signal.SIGINT

    def _handle(self, number: int, frame: object) -> None:
        """Python's handler, in the main thread. Without one the C handler would not run."""
        del frame
        if self._is_for_main_thread(number):
            if self.requested or not self._has_progress:
                raise KeyboardInterrupt
            # A stream refuses a print that comes in the middle of another one.
            with contextlib.suppress(RuntimeError):
                self._request(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        """What a signal does to a process, whatever its main thread is doing."""
        if self.requested:
            if _is_the_same():
                return
            # The checkpoint that is being written stays a temporary directory, which the next
            # start ignores; the last committed one is untouched.
            _say(f"{number.name} again: leaving at once; the last committed checkpoint stands")
            os._exit(128 + number)
        if not self._has_progress:
            _say(f"{number.name} before the first step: nothing to save, leaving")
            os._exit(ExitCode.PREEMPTED)
        self._request(number)

    def _request(self, number: signal.Signals) -> None:
        _is_the_same()
        self._event.set()
        self._wake()
        _say(f"{number.name}: finishing the step, then saving; once more to leave at once")


def _is_the_same() -> bool:
    """Whether a signal is one more copy of the first: its sender's own, and the guardian's."""
    global _first_at
    now = time.monotonic()
    _first_at = _first_at or now
    return phases.is_guarded() and now - _first_at < SAME_SIGNAL_SECONDS


def _say(text: str) -> None:
    silence_lost_terminal()
    print(f"\njaxtrain: {text}", file=sys.stderr, flush=True)
