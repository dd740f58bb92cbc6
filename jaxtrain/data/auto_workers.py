"""How many input workers keep up with the steps, found out from the first batches.

Whether a thread keeps up shows when the steps run: they wait for its batches, or they do not. So
the thread reads at first, beside the steps, and the number is settled once a few of them have
passed. The batches are the same with any number.
"""

import math
import statistics
from typing import NamedTuple

from jaxtrain.data.workers import SLOTS
from jaxtrain.units import nbytes, seconds

# The first batches were ready before they were asked for, and compilation lies between them.
_SKIPPED = 3
_LEAST, _MOST = 4, 64
_LEAST_SECONDS = 0.25
_WAITING_SHARE = 0.05
# Below it, to hand a batch over from another process takes as long as to read it.
_LEAST_READ_SECONDS = 1e-3
# A read that mostly waits, for a disk or a network, takes no core meanwhile.
_BUSY_SHARE = 0.5
_READS_PER_CORE = 4
_HEADROOM = 1.2


class Choice(NamedTuple):
    """How many workers, and why."""

    count: int
    reason: str


class Trial:
    """What the first batches cost: `taken` is called by the consumer, `loaded` by the thread."""

    def __init__(self) -> None:
        self.is_over = False
        self._taken_at: float | None = None
        self._steps: list[tuple[float, float]] = []
        self._loads: list[tuple[float, float, float]] = []
        self._size = 0

    def taken(self, begin: float, end: float) -> None:
        """A batch was asked for and came, at these times."""
        if self._taken_at is not None:
            self._steps.append((begin - self._taken_at, end - begin))
        self._taken_at = end

    def loaded(self, read: float, cpu: float, h2d: float, size: int) -> None:
        """A batch of so many bytes was read, with so much of the thread's own time, and moved."""
        self._loads.append((read, cpu, h2d))
        self._size = size

    @property
    def is_enough(self) -> bool:
        """Whether enough steps have passed."""
        steps = self._steps[_SKIPPED:]
        total = sum(map(sum, steps))
        return len(steps) >= _MOST or (len(steps) >= _LEAST and total >= _LEAST_SECONDS)

    def choose(self, cores: int, budget: int) -> Choice:
        """The number of workers.

        Args:
            cores: that this process may use; one is kept for the run itself.
            budget: bytes that batches read ahead may take; 0: unknown.
        """
        step, wait = map(statistics.median, zip(*self._steps[_SKIPPED:], strict=True))
        read, cpu, h2d = map(statistics.median, zip(*self._loads[1:], strict=True))
        times = f"a batch is read in {seconds(read)}, a step takes {seconds(step)}"
        if wait < _WAITING_SHARE * (step + wait):
            return Choice(0, f"{times}: the thread keeps up")
        if read < _LEAST_READ_SECONDS:
            return Choice(0, f"{times}: to hand it over would take as long")
        if h2d > read:
            return Choice(0, f"{times}: its way to the devices takes longer, {seconds(h2d)}")
        needed = math.ceil(_HEADROOM * read / max(step, h2d, _LEAST_READ_SECONDS))
        is_busy = cpu >= _BUSY_SHARE * read
        limits = {
            "the cores": max(1, cores - 1) if is_busy else _READS_PER_CORE * cores,
            f"the memory, at {SLOTS} batches of {nbytes(self._size)} each": (
                max(1, budget // max(1, SLOTS * self._size)) if budget else needed
            ),
        }
        name, limit = min(limits.items(), key=lambda item: item[1])
        if limit < needed:
            return Choice(limit, f"{times}; {needed} would keep up, {limit} is the limit of {name}")
        return Choice(needed, times)
