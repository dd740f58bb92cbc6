"""Where the time of the steps goes, averaged over the steps between two records."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["StepClock"]


class StepClock:
    """Adds up times between two records; `read` gives the means per step and starts anew.

    Evaluations and saves are no part of a step: they go into `other` and `saving`.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        """Seconds of all steps done, from the start on, that went into neither devices nor others:
        waiting for data, and Python."""
        self._restart()

    def _restart(self) -> None:
        self._begin = time.perf_counter()
        self.checkpoint_seconds = 0.0
        """How long saves have held the loop up since the last `read`."""
        self._steps = 0
        self._input_wait = self._device = self._read = self._h2d = self._other = 0.0
        self._counted = 0.0  # of the busy seconds since then

    def batch(self, wait: float, read: float, h2d: float) -> None:
        """A batch was taken: seconds waited for it, seconds its thread spent reading and moving."""
        self._input_wait += wait
        self._read += read
        self._h2d += h2d

    def dispatched(self, seconds: float) -> None:
        """A step was dispatched, in a call of so many seconds."""
        self._device += seconds

    def done(self, seconds: float) -> None:
        """A step is done: its metrics are here, after waiting for so many seconds.

        This is what counts a step. Its metrics arrive one dispatch later, but before an
        evaluation or a save at once: only from done to done is it one step's time.
        """
        self._steps += 1
        self._device += seconds
        busy = time.perf_counter() - self._begin - self._other - self._device
        self.busy_seconds += busy - self._counted
        self._counted = busy

    @contextmanager
    def other(self) -> Iterator[None]:
        """Time in the block does not belong to the steps."""
        begin = time.perf_counter()
        yield
        self._other += time.perf_counter() - begin

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time in the block is that of a save; it does not belong to the steps either."""
        begin = time.perf_counter()
        with self.other():
            yield
        self.checkpoint_seconds += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """Mean seconds per step since the last call; empty if no step was done.

        `step_seconds` is the whole step, `host_seconds` what remains of it after waiting for
        input and devices: Python around the step. `read_seconds` and `h2d_seconds` (host to
        device) pass in the loader's thread, beside the step. `checkpoint_seconds`, where there was
        a save, is no mean but the sum.
        """
        steps, saves = self._steps, self.checkpoint_seconds
        total = time.perf_counter() - self._begin - self._other
        times = {
            "step_seconds": total,
            "input_wait_seconds": self._input_wait,
            "host_seconds": max(0.0, total - self._input_wait - self._device),
            "read_seconds": self._read,
            "h2d_seconds": self._h2d,
        }
        self._restart()
        if not steps:
            return {}
        means = {name: seconds / steps for name, seconds in times.items()}
        return means | ({"checkpoint_seconds": saves} if saves else {})
