"""Writers of metrics: JSON lines, TensorBoard, and the protocol for any other.

A record is one flat mapping of plain values. The loop writes one per logged step, with at least
`step` and `loss`; an evaluation's record carries `"eval": True`. Times are seconds per step,
averaged over the steps since the record before:

    step_seconds         wall time, without evaluations and saves
    input_wait_seconds   of it, waiting for the next batch
    host_seconds         of it, Python around the step: logging, hooks (may be absent)
    read_seconds         reading a batch, in the input thread, beside the compute (may be absent)
    h2d_seconds          moving a batch to the device, in the input thread, beside the compute

and sums: `eval_seconds` in an evaluation's record, `checkpoint_seconds` in a training record (how
long saves held the loop up since the record before; may be absent).
"""

import importlib
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import JaxtrainError

_logger = logging.getLogger(__name__)

NONFINITE = "nonfinite"
"""Key under which a stored record spells out the values that JSON cannot hold."""


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
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _mend_tail(self._file)
        _sync_directory(self.path.parent)

    def write(self, record: Mapping[str, Any]) -> None:
        line = encode(record)
        try:
            written = os.write(self._file, line)
            while written < len(line):  # a nearly full disk takes a part
                written += os.write(self._file, line[written:])
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def flush(self) -> None:
        """Waits until every record is on the disk (fsync)."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1


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


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a file, non-finite floats restored; none if there is no such file.

    A torn last line (a run that is writing, or was killed) is left out; any other line that is
    not a record is left out with a warning that names it.
    """
    if not Path(path).exists():
        return []
    with open(path, "rb") as file:
        return [record for _, record in _whole_lines(file, path) if record is not None]


def cut_after(path: str | os.PathLike[str], step: int) -> int:
    """Drops the records of steps later than `step`, and a torn last line.

    The file is replaced atomically: a kill at any moment leaves the old file or the new one.

    Args:
        path: file of a `JsonlWriter` that is not open; may be absent.
        step: last step whose records stay; -1 drops all of them.

    Returns:
        Number of lines dropped.
    """
    path = Path(path)
    scratch = _scratch_path(path)
    scratch.unlink(missing_ok=True)  # left by a kill
    if not path.exists():
        return 0
    dropped, kept = 0, 0
    with open(path, "rb") as source, open(scratch, "wb") as target:
        for line, record in _whole_lines(source, path):
            if record is not None and record["step"] <= step:
                kept += target.write(line)
            else:
                dropped += 1
        if kept == path.stat().st_size:
            scratch.unlink()
            return 0
        _sync_and_rename(target, scratch, path)
    return dropped


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a whole file so that a reader, or a kill, finds the old one or the new one."""
    path = Path(path)
    scratch = _scratch_path(path)
    with open(scratch, "wb") as target:
        target.write(data)
        _sync_and_rename(target, scratch, path)


class TensorBoardWriter:
    """Writes the numbers of every record as TensorBoard scalars, `train/NAME` and `eval/NAME`.

    TensorBoard itself need not be installed to write; tensorboardX is imported with the first
    record. One event holds all scalars of a record.

    Args:
        directory: log directory; made if absent.
        purge_step: points of this step and later that an earlier process wrote are removed from
            the event files, so that no point appears twice after a resume; None keeps all.
    """

    def __init__(self, directory: str | os.PathLike[str], purge_step: int | None = None) -> None:
        self._directory = Path(directory)
        self._purge_step = purge_step
        self._writer: Any = None
        if purge_step is not None and self._directory.is_dir():
            for path in sorted(self._directory.glob("*tfevents*")):
                _cut_events(path, purge_step)

    def write(self, record: Mapping[str, Any]) -> None:
        event_pb2, summary_pb2 = _protos()
        prefix = "eval/" if record.get("eval") else "train/"
        values = [
            summary_pb2.Summary.Value(tag=prefix + name, simple_value=float(value))
            for name, value in record.items()
            if name != "step"
            and isinstance(value, int | float | np.number)
            and not isinstance(value, bool)
        ]
        event = event_pb2.Event(
            wall_time=time.time(),
            step=int(record["step"]),
            summary=summary_pb2.Summary(value=values),
        )
        self._open().write(event.SerializeToString())

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()  # fsync included

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        """The event file of this process, made with the first record.

        tensorboardX's SummaryWriter sends every point through a multiprocessing queue and its
        flush() does not wait for that queue; its RecordWriter writes where we stand.
        """
        if self._writer is None:
            from tensorboardX import RecordWriter

            event_pb2, _ = _protos()

            self._directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files in the order of their names. The nanoseconds keep two
            # starts within one second in order, and the second from emptying the first one's file.
            now = time.time_ns()
            name = f"events.out.tfevents.{now // 10**9:010d}.{now:020d}.{socket.gethostname()}"
            self._writer = RecordWriter(str(self._directory / name))
            events = [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")]
            if self._purge_step is not None:
                # For a TensorBoard that is already showing the points cut from the files.
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                events.append(event_pb2.Event(step=self._purge_step, session_log=start))
            for event in events:
                self._writer.write(event.SerializeToString())
        return self._writer


def _protos() -> tuple[Any, Any]:
    """TensorBoard's message types; protobuf makes their attributes when it is imported."""
    names = ("event_pb2", "summary_pb2")
    event, summary = (importlib.import_module(f"tensorboardX.proto.{name}") for name in names)
    return event, summary


def _cut_events(path: Path, purge_step: int) -> None:
    """Removes events from `purge_step` on from one event file, and a torn tail."""
    from tensorboardX.record_writer import masked_crc32c

    event_pb2, _ = _protos()

    # On disk: length (8 bytes), its checksum (4), the event, its checksum (4).
    data = path.read_bytes()
    kept, is_empty, at = [], True, 0
    while at + 12 <= len(data):
        length, checksum = struct.unpack_from("<QI", data, at)
        end = at + 16 + length
        if end > len(data) or checksum != masked_crc32c(data[at : at + 8]):
            break
        event = event_pb2.Event.FromString(data[at + 12 : end - 4])
        if event.step < purge_step or event.HasField("file_version"):
            kept.append(data[at:end])
            is_empty = is_empty and not event.HasField("summary")
        at = end
    if is_empty:
        path.unlink()
    elif sum(map(len, kept)) < len(data):
        replace_file(path, b"".join(kept))


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
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return record


def _whole_lines(file: Any, path: Any) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, record) for each line; the record is None where the line is torn or not one."""
    for number, line in enumerate(file, start=1):
        record = _decode(line)
        if record is None and line.endswith(b"\n"):
            _logger.warning("%s, line %d: not a record; left out", path, number)
        # No part of an object is an object: a last line that reads well has lost only its newline.
        yield (line if line.endswith(b"\n") else line + b"\n"), record


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


def _scratch_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _sync_and_rename(target: Any, scratch: Path, path: Path) -> None:
    target.flush()
    os.fsync(target.fileno())
    os.replace(scratch, path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Makes a new name in the directory survive a power loss."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _unwritable(path: Path, error: OSError) -> JaxtrainError:
    return JaxtrainError(
        f"{path} could not be written: {error.strerror}; make room or mend the disk, "
        "then the same command continues the run"
    )
