"""Which process keeps the others waiting, from the times that do not go into waiting for devices.

All processes wait for the slowest at the exchanges of every step, so the step takes equally long on
all. What differs is the time in which a process waits for nobody: for its data, and in Python. A
device that is slower than the others cannot be seen from the host.
"""

import logging
import statistics
from collections.abc import Iterator, Sequence

from jaxtrain.launch.verdict import Member
from jaxtrain.phases import Phase

WINDOW_SECONDS = 10.0
REPORT_SECONDS = 60.0
NUM_WINDOWS = 3
"""In so many windows in a row a process has to be the slowest before it is named."""
SHARE = 0.1
"""Of the time of a step: what a straggler costs, at least."""
REPEAT_SECONDS = 600.0
_MAX_LISTED = 8
_STEPPING = (Phase.INPUT, Phase.TRAIN_STEP)


class Stragglers:
    """Compares the processes over windows of time; asked at every tick, about 100 ns if too early.

    A window counts where every process was between its steps at both ends, and has done one.
    """

    def __init__(self) -> None:
        self._began = self._reported = 0.0
        self._before: list[tuple[int, float]] = []
        self._late: tuple[int, int] = (-1, 0)
        self._named = -REPEAT_SECONDS

    def look(self, members: Sequence[Member], now: float) -> Iterator[tuple[int, str]]:
        """Yields (level, line) of what is to be logged."""
        if now - self._began < WINDOW_SECONDS:
            return
        seconds, self._began = now - self._began, now
        before = self._before
        is_training = all(member.phase in _STEPPING for member in members)
        self._before = [(m.step, m.busy_seconds) for m in members] if is_training else []
        # Empty at the first window of a stretch of steps.
        steps = [now[0] - then[0] for now, then in zip(self._before, before, strict=False)]
        if not steps or min(steps) < 1:
            return
        busy = [
            (now[1] - then[1]) / num_steps
            for now, then, num_steps in zip(self._before, before, steps, strict=True)
        ]
        step_seconds = seconds / min(steps)
        slowest = max(range(len(busy)), key=busy.__getitem__)
        median = statistics.median(busy[:slowest] + busy[slowest + 1 :])
        is_late = busy[slowest] - median > SHARE * step_seconds
        times = self._late[1] if self._late[0] == slowest else 0
        self._late = (slowest, times + 1) if is_late else (-1, 0)
        if self._late[1] >= NUM_WINDOWS and now - self._named >= REPEAT_SECONDS:
            self._named = now
            yield (
                logging.WARNING,
                f"{members[slowest]} keeps the others waiting: {busy[slowest] * 1e3:.3g} ms of"
                f" each step of {step_seconds * 1e3:.3g} ms go into its data and Python, on the"
                f" others {median * 1e3:.3g} ms",
            )
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            order = sorted(range(len(busy)), key=busy.__getitem__, reverse=True)[:_MAX_LISTED]
            listed = ", ".join(f"{i}: {busy[i] * 1e3:.3g}" for i in sorted(order))
            which = "each process" if len(order) == len(busy) else f"the slowest {len(order)}"
            yield (
                logging.INFO,
                f"ms of a step of {step_seconds * 1e3:.3g} ms in data and Python on {which}:"
                f" {listed}",
            )
