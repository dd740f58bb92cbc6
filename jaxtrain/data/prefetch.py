"""A thread that makes things ahead of their use, a bounded number of them."""

import atexit
import contextlib
import functools
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
"""How long `close` waits for a call in progress, e.g. a read from a file system that hangs."""


class Interrupted(Exception):
    """There is no item yet, and `interrupt` was called: whoever waits may have to stop."""


def interrupt() -> None:
    """Ends every wait for an item: the consumer gets `Interrupted`, once.

    A consumer that does not wait gets it after the items that are ready. No item is lost. May be
    called in any thread and in a signal handler.
    """
    for thread in tuple(_running):
        thread.ready.put((None, Interrupted()))


class Prefetcher:
    """Iterates over make(0), make(1), ..., which a thread calls ahead of the consumer.

    The thread makes the next item when the consumer calls `refill`, or asks for another: a consumer
    that starts work elsewhere with its item does that first, undisturbed by the thread.
    An exception in the thread is raised where the consumer asks for the item that failed, and
    again on each later call; `Interrupted` is raised once. `close` (or the end of a `with` block,
    garbage collection, or the end of the interpreter) ends the thread.

    `make` must not hold a reference to the Prefetcher's owner, or garbage collection cannot help.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        count: int | None = None,
        ahead: int = 2,
        name: str,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            make: called with 0, 1, 2, ... in the thread.
            count: how many times; None: without end.
            ahead: how many finished items may wait for the consumer.
            name: of the thread, and in messages.
            stop: called when the thread is to end and when it has ended, in any thread: it ends a
                wait inside of `make`, and what `make` has started.
        """
        if ahead < 1:
            raise ValueError(f"ahead={ahead} must be at least 1")
        self._thread = _Thread(make, count, ahead, name, stop)
        self._ended: BaseException | None = None
        self._is_to_refill = False
        self._finalizer = weakref.finalize(self, self._thread.stop)
        # At the end of the interpreter the thread must be gone before JAX takes its backends
        # down: exit functions run in reverse order, and JAX's were registered before this one.
        self._finalizer.atexit = False
        _register_exit()
        _running.add(self._thread)
        self._thread.start()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Any:
        if self._ended is not None:
            raise self._ended
        self.refill()
        item, error = self._thread.ready.get()
        if error is not None:
            if not isinstance(error, Interrupted):
                self._ended = error
            raise error
        self._is_to_refill = True
        return item

    def refill(self) -> None:
        """Lets the thread make an item in place of the one that was taken last."""
        if self._is_to_refill:
            self._is_to_refill = False
            self._thread.free.put(None)

    def close(self) -> None:
        """Ends the thread; waits for its call in progress, at most JOIN_SECONDS."""
        if self._ended is None:
            self._ended = RuntimeError(f"{self._thread.name} is closed")
        self._thread.stop()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Thread(threading.Thread):
    """The producing side. Items are (item, None), or last (None, exception)."""

    def __init__(
        self,
        make: Callable[[int], Any],
        count: int | None,
        ahead: int,
        name: str,
        on_stop: Callable[[], None],
    ) -> None:
        # Not a daemon in spirit: `stop` is registered for the end of the interpreter, which
        # would wait for a plain thread before it runs exit functions.
        super().__init__(name=name, daemon=True)
        self.ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self.free.put(None)
        self._make = make
        self._on_stop = on_stop
        self._numbers = itertools.count() if count is None else iter(range(count))
        self._stopping = False

    def run(self) -> None:
        try:
            for number in self._numbers:
                self.free.get()
                if self._stopping:
                    return
                self.ready.put((self._make(number), None))
            self.ready.put((None, StopIteration()))
        except BaseException as error:  # whatever it is, the consumer must not wait for ever
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                # Raised as it is, it would end the consumer's loop or process without a word.
                wrapped = RuntimeError(f"{self.name} met {error!r}")
                wrapped.__cause__ = error
                error = wrapped
            self.ready.put((None, error))
        finally:
            self._on_stop()
            del self._make

    def stop(self) -> None:
        self._stopping = True
        self._on_stop()
        self.free.put(None)
        if self.is_alive() and self is not threading.current_thread():
            self.join(JOIN_SECONDS)
            if self.is_alive():
                _log.warning(
                    "%s did not end within %g s: its read is still in progress; it is left behind",
                    self.name,
                    JOIN_SECONDS,
                )
        _running.discard(self)
        # What waits here holds device memory.
        with contextlib.suppress(queue.Empty):
            while True:
                self.ready.get_nowait()
        # A consumer in another thread may still be waiting.
        self.ready.put((None, RuntimeError(f"{self.name} is closed")))


_running: set[_Thread] = set()


@functools.cache
def _register_exit() -> None:
    atexit.register(_stop_all)


def _stop_all() -> None:
    for thread in tuple(_running):
        thread.stop()
