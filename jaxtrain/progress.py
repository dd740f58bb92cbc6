"""What a person sees of a run: a progress bar on a terminal, one line per record elsewhere.

The loop calls this at logged steps only. rich is imported when the bar is shown, and not at all
without a terminal (CI, Slurm, a notebook), where every record becomes one line of the logger
`jaxtrain`. Log lines, prints and warnings come out above the bar, whole.
"""

import collections
import dataclasses
import logging
import numbers
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from jaxtrain import units
from jaxtrain.throughput import input_advice, limiting

_logger = logging.getLogger("jaxtrain")

# Keys of a record that are not metrics of the model.
_BOOKKEEPING = {
    *("step", "eval", "loss", "grad_norm", "param_norm", "learning_rate", "mfu"),
    *("weight", "rows", "tokens", "samples", "tokens_per_second", "samples_per_second"),
    *("step_seconds", "input_wait_seconds", "host_seconds", "read_seconds", "h2d_seconds"),
    *("eval_seconds", "checkpoint_seconds"),
}

# Records in a row: one may be an accident.
_STARVED = 3


class _Formatter(logging.Formatter):
    """Plain text; the level only where it matters, the time only where nobody is watching."""

    def format(self, record: logging.LogRecord) -> str:
        is_terminal = sys.stderr.isatty()
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            word = "error:" if record.levelno >= logging.ERROR else "warning:"
            if is_terminal and not os.environ.get("NO_COLOR"):
                word = f"\x1b[{31 if record.levelno >= logging.ERROR else 33}m{word}\x1b[0m"
            text = f"{word} {text}"
        return text if is_terminal else f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"


class _StderrHandler(logging.StreamHandler):
    """Writes to what `sys.stderr` is at that moment: the bar, while shown, puts itself there."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        del stream  # StreamHandler's constructor assigns the stderr of that moment


def setup_logging() -> None:
    """Lets the logger `jaxtrain` speak, at level INFO, on standard error. Harmless if repeated.

    A program that has configured logging already (a handler on the root logger) keeps its own.
    """
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.handlers and not logging.root.handlers:
        _logger.addHandler(_StderrHandler())
        # A library that configures the root logger later must not double every line.
        _logger.propagate = False


@dataclasses.dataclass
class View:
    """What the bar shows; `Progress` changes it, the renderer reads it."""

    num_steps: int
    step: int
    started: float
    record: Mapping[str, Any]
    status: str = ""
    ends: float | None = None  # time at which the last step will be done

    def fields(self) -> list[tuple[int, str]]:
        """(importance, text) of the record, in the order of display; 0 is never dropped."""
        record = self.record
        rate = rate_name(record)
        pace = record.get("step_seconds")
        fields = [(0, "loss " + units.number(record.get("loss")))]
        fields += [(3, f"{name} {units.number(record[name])}") for name in extra_metrics(record)]
        if record.get("grad_norm") is not None:
            fields.append((6, "grad " + units.number(record["grad_norm"])))
        if record.get("learning_rate") is not None:
            fields.append((7, "lr " + units.number(record["learning_rate"])))
        if rate:
            fields.append((1, f"{units.count(record[rate])} {rate.removesuffix('_per_second')}/s"))
        if pace is not None:
            fields.append((4, units.seconds(pace) + "/step"))
        if record.get("mfu") is not None:
            fields.append((5, f"mfu {record['mfu']:.1%}"))
        if pace is not None:
            fields.append((2, "limit: " + limiting(record)))
        return fields

    def count(self) -> str:
        """Steps done and steps in all, of the same width for the whole run."""
        return f"{self.step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def left(self) -> float | None:
        return None if self.ends is None else max(0.0, self.ends - time.monotonic())


class Progress:
    """Shows a run: call `update` with every logged record, `close` in a finally block.

    Args:
        num_steps: steps of the whole run.
        start_step: steps done before (a resumed run).
        enabled: False for the processes that do not speak.
        terminal: show a bar (True) or log lines (False); by default a bar if standard error is a
            terminal.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        enabled: bool = True,
        terminal: bool | None = None,
    ) -> None:
        setup_logging()
        self._enabled = enabled
        self._view = View(num_steps, start_step, time.monotonic(), {})
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=20)
        self._num_starved, self._is_advised = 0, False
        self._bar: Any = None
        if terminal is None:
            terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        if enabled and terminal:
            from jaxtrain.progress_bar import Bar

            self._bar = Bar(self._view)

    def update(
        self,
        record: Mapping[str, Any],
        *,
        step: int | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Shows a training record; where input is the limit for long, says once what would help.

        Args:
            record: to show.
            step: number of steps done, by default the record's.
            num_workers: processes that read the data; None: not known (yet).
        """
        if not self._enabled:
            return
        now, view = time.monotonic(), self._view
        view.step = int(record["step"]) if step is None else step
        view.record, view.status = record, ""
        self._recent.append((now, view.step))
        view.ends = self._estimate(now)
        if self._bar is not None:
            self._bar.refresh()
        else:
            parts = [f"step {view.count()}", *(text for _, text in view.fields())]
            if view.ends is not None:
                parts.append(f"{units.clock(view.ends - now)} left")
            _logger.info("  ".join(parts))
        self._advise(record, num_workers)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Notes the result of an evaluation."""
        parts = [f"step {record['step']}", f"loss {units.number(record.get('loss'))}"]
        parts += [f"{name} {units.number(record[name])}" for name in extra_metrics(record)]
        if record.get("eval_seconds") is not None:
            parts.append(f"({units.seconds(record['eval_seconds'])})")
        self.note("evaluation  " + "  ".join(parts))

    def committed(self, steps: Iterable[int]) -> None:
        """Notes that checkpoints are whole: from now on a kill loses no step before them."""
        for step in steps:
            self.note(f"checkpoint {step} committed")

    def note(self, text: str) -> None:
        """Logs a line: above the bar, or between the records."""
        if self._enabled:
            self._view.status = ""
            _logger.info(text)

    def status(self, text: str) -> None:
        """Says below the bar what the run is busy with ("compiling the step"), until it goes on.

        Only on a terminal: without one it would be a line of its own for each.
        """
        self._view.status = text
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
        if self._bar is not None:
            self._view.status, self._view.ends = "", None
            self._bar.close()
            self._bar = None

    def _advise(self, record: Mapping[str, Any], num_workers: int | None) -> None:
        """After `_STARVED` records in a row that are limited by input, says what would help."""
        is_starved = num_workers is not None and limiting(record) == "input"
        self._num_starved = self._num_starved + 1 if is_starved else 0
        if num_workers is not None and self._num_starved == _STARVED and not self._is_advised:
            self._is_advised = True
            self.note(input_advice(record, num_workers))

    def _estimate(self, now: float) -> float | None:
        """When the last step will be done, at the pace of the last 20 records, evaluations and
        saves included; from the first record alone, at its own pace."""
        (time_0, step_0), (time_1, step_1) = self._recent[0], self._recent[-1]
        pace = self._view.record.get("step_seconds")
        if step_1 > step_0:
            pace = (time_1 - time_0) / (step_1 - step_0)
        return None if pace is None else now + pace * (self._view.num_steps - self._view.step)


def extra_metrics(record: Mapping[str, Any]) -> list[str]:
    """Names of the metrics in a record that the model's loss function made, besides the loss."""
    return [
        name
        for name, value in record.items()
        if name not in _BOOKKEEPING and isinstance(value, numbers.Real)
    ]


def rate_name(record: Mapping[str, Any]) -> str:
    """Which speed of a record to show: tokens per second where there are tokens; "" for none."""
    names = ("tokens_per_second", *(name for name in record if name.endswith("_per_second")), "")
    return next(name for name in names if name in record or not name)
