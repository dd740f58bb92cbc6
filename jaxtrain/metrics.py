"""Records of metrics: the protocol of a writer, and JSON lines.

A record is one flat mapping of plain values. The loop writes one per logged step, with at least
`step` and `loss`; an evaluation's record carries `"eval": True`. So does that of a task of lm-eval
(`jaxtrain eval`), with the name under `task` and facts of `TASK_FACTS` beside the metrics and their
standard errors, `NAME_stderr`. Times are seconds per step, averaged over the steps since the record
before:

    step_seconds         wall time, without evaluations and saves
    input_wait_seconds   of it, waiting for the next batch
    host_seconds         of it, Python around the step: logging, hooks (may be absent)
    read_seconds         reading a batch, in the input thread, beside the compute (may be absent);
                         with input workers the thread's wait for them
    h2d_seconds          moving a batch to the device, in the input thread, beside the compute

and sums: `eval_seconds` in an evaluation's record, `checkpoint_seconds` in a training record (how
long saves held the loop up since the record before; may be absent).
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.output_files import AppendFile, replacing, scratch_path, set_aside, writing

_logger = logging.getLogger(__name__)

NONFINITE = "nonfinite"
"""Key under which a stored record spells out the values that JSON cannot hold."""

TASK_FACTS = (
    *("step", "eval", "task", "task_version", "num_fewshot", "samples"),
    *("ema", "limit", "apply_chat_template"),
)
"""What the record of a task holds besides its metrics."""


class Writer(Protocol):
    """Takes every record of a run; give your own to `fit(..., writers=[...])` (docs/writers.md)."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes one record. Called at logged steps only, by the primary process only."""
        ...

    def flush(self) -> None:
        """Makes what was written durable. Called before a checkpoint is committed."""
        ...

    def close(self) -> None:
        """Flushes and lets go. Called once, at the end, after an error too."""
        ...


class JsonlWriter:
    """Appends records to a file, one JSON object per line.

    A line is valid JSON whatever the values are: a non-finite float is stored as null and spelled
    out under "nonfinite", `{"step": 7, "loss": null, "nonfinite": {"loss": "nan"}}`;
    `read_records` gives the float back.

    The process may be killed at any moment. A record goes out in one write() with its newline, so
    only the last line can be torn, and whoever opens the file next removes it.

    Raises:
        OutputError: from every method, when the disk refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)
        self.path = self._file.path
        with writing(self.path):
            _mend_tail(self._file.descriptor)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.append(encode(record))

    def flush(self) -> None:
        """Waits until every record is on the disk (fsync)."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as a line of JSON, newline included.

    Raises:
        ValueError: the record has no integer `step`, or holds what is not a plain value.
    """
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int | np.integer):
        raise ValueError(f"a record needs an integer 'step'; got step={step!r}")
    if NONFINITE in record:
        raise ValueError(f"{NONFINITE!r} is kept for values that JSON cannot hold; rename it")
    nonfinite: dict[str, str] = {}
    plain = {name: _plain(value, name, nonfinite) for name, value in record.items()}
    if nonfinite:
        plain[NONFINITE] = nonfinite
    return (json.dumps(plain, allow_nan=False) + "\n").encode()


def read_records(path: str | os.PathLike[str], *, is_quiet: bool = False) -> list[dict[str, Any]]:
    """All records of a file, non-finite floats restored; none if there is no such file.

    A torn last line (a run that is writing, or was killed) is left out; so is any other line that
    is not a record, with one warning for all of them unless `is_quiet`.
    """
    if not Path(path).exists():
        return []
    damaged: list[int] = []
    with open(path, "rb") as file:
        records = [record for _, record in _whole_lines(file, damaged) if record is not None]
    if damaged and not is_quiet:
        _logger.warning("%s, %s: not a record; left out", path, _say_lines(damaged))
    return records


def is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a record is of the run's evaluation data: of no step, and of no task."""
    return bool(record.get("eval")) and "task" not in record


def task_metrics(record: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """(name, value, standard error if it is known) of each metric in the record of a task."""
    return [
        (name, value, record.get(f"{name}_stderr"))
        for name, value in record.items()
        if name not in TASK_FACTS
        and not name.endswith("_stderr")
        and isinstance(value, int | float)
    ]


def cut_after(path: str | os.PathLike[str], step: int) -> int:
    """Drops the records of steps later than `step`, and a torn last line.

    The file is replaced atomically: a kill at any moment leaves the old file or the new one. If
    there are lines that are not records, they are dropped and the file as it was is set aside.

    Args:
        path: file of a `JsonlWriter` that is not open; may be absent.
        step: last step whose records stay; -1 drops all of them.

    Returns:
        Number of lines dropped.
    """
    path = Path(path)
    with writing(path):
        scratch_path(path).unlink(missing_ok=True)  # left by a kill
    if not path.exists():
        return 0
    kept: list[bytes] = []
    dropped, damaged = 0, []
    with writing(path):
        with open(path, "rb") as source:
            for line, record in _whole_lines(source, damaged):
                if record is not None and record["step"] <= step:
                    kept.append(line)
                else:
                    dropped += 1
        is_as_it_was = sum(map(len, kept)) == path.stat().st_size
    if damaged:
        copy = set_aside(path)
        _logger.warning(
            "%s, %s: not a record; left out, the file as it was is %s",
            path,
            _say_lines(damaged),
            copy,
        )
    if not is_as_it_was:
        with replacing(path) as target:
            target.writelines(kept)
    return dropped


def _plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """A value as JSON can hold it; what it cannot hold goes into `nonfinite`."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[name] = str(value)
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"record value {name}={value!r} is a {type(value).__name__}; "
        "give a Python or NumPy number, a string, a boolean or None"
    )


def _decode(line: bytes) -> dict[str, Any] | None:
    """The record in a line, or None if the line is not one."""
    try:
        record = json.loads(line)
        record["step"] = int(record["step"])
        record |= {name: float(text) for name, text in record.pop(NONFINITE, {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return record


def _whole_lines(file: Any, damaged: list[int]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, record) for each line; the record is None where the line is torn or not one.

    The numbers of those that are not torn, and yet no records, are added to `damaged`.
    """
    for number, line in enumerate(file, start=1):
        record = _decode(line)
        if record is None and line.endswith(b"\n"):
            damaged.append(number)
        # No part of an object is an object: a last line that reads well has lost only its newline.
        yield (line if line.endswith(b"\n") else line + b"\n"), record


def _say_lines(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"line {numbers[0]}{more}"


def _mend_tail(file: int) -> None:
    """Removes a torn last line, so that the next record begins a line of its own."""
    size = os.fstat(file).st_size
    tail = b""
    while len(tail) < size and b"\n" not in tail:
        length = min(len(tail) + 65536, size)
        tail = os.pread(file, length, size - length)
    torn = tail[tail.rfind(b"\n") + 1 :]
    if torn and _decode(torn) is not None:
        os.write(file, b"\n")
    elif torn:
        os.ftruncate(file, size - len(torn))
