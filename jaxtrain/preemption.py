"""SIGTERM and SIGINT: finish the step, save, leave; a second signal leaves at once.

Python runs signal handlers in the main thread between bytecodes, so not while that thread is
inside XLA (a compilation takes minutes). The interpreter's C handler, however, writes the signal's
number to a file descriptor at once (`signal.set_wakeup_fd`), and a thread that waits on it acts
whatever the main thread is doing.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from jaxtrain.errors import ExitCode

__all__ = ["Preemption"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Whether the run was asked to end; see `watch`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._has_progress = False
        self.signal_name = ""

    @property
    def requested(self) -> bool:
        """True from the first signal on; the loop looks at it between steps and batches."""
        return self._event.is_set()

    def progress_begins(self) -> None:
        """From now on there is something to save: the first signal no longer ends the process."""
        self._has_progress = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Takes over SIGTERM and SIGINT in the block; a no-op outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        old_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            # The handler itself has nothing to do; without one the C handler would not run.
            signal.signal(number, lambda *_: None)
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            writer.close()
            thread.join()
            reader.close()

    def _wait(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            number = received[0]
            if number in _SIGNALS:
                self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        if self.requested:
            # The checkpoint that is being written stays a temporary directory, which the next
            # start ignores; the last committed one is untouched.
            _say(f"{number.name} again: leaving at once; the last committed checkpoint stands")
            os._exit(128 + number)
        self.signal_name = number.name
        self._event.set()
        if not self._has_progress:
            _say(f"{number.name} before the first step: nothing to save, leaving")
            os._exit(ExitCode.PREEMPTED)
        _say(f"{number.name}: finishing the step, then saving; once more to leave at once")


def _say(text: str) -> None:
    print(f"\njaxtrain: {text}", file=sys.stderr, flush=True)
