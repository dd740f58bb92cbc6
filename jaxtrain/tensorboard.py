"""The writer of TensorBoard event files.

Everything in them stands in `metrics.jsonl` too, so nothing about them is worth a run: what is
damaged is set aside, what cannot be written is said once.
"""

import importlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import OutputError
from jaxtrain.output_files import AppendFile, replace_file, set_aside

_logger = logging.getLogger(__name__)

_EVENTS = "tfevents"
"""What TensorBoard knows its files by."""


class TensorBoardWriter:
    """Writes the numbers of every record as TensorBoard scalars.

    Their names are `train/NAME`, `eval/NAME` and, of tasks of lm-eval, `eval/TASK/NAME`.

    TensorBoard itself need not be installed to write; tensorboardX, which has its messages, is
    imported with the first record. One event holds all scalars of a record. A disk that is full
    costs the points that it does not take, and one warning.

    Args:
        directory: log directory; made if absent.
        purge_step: points of this step and later that an earlier process wrote are removed from
            the event files, so that no point appears twice after a resume; None keeps all.
    """

    def __init__(self, directory: str | os.PathLike[str], purge_step: int | None = None) -> None:
        self._directory = Path(directory)
        self._purge_step = purge_step
        self._file: AppendFile | None = None
        self._is_warned = False
        if purge_step is not None and self._directory.is_dir():
            for path in sorted(self._directory.glob(f"*{_EVENTS}*")):
                try:
                    _cut_events(path, purge_step)
                except (OSError, OutputError) as error:
                    _logger.warning("%s is left as it is: %s", path, error)

    def write(self, record: Mapping[str, Any]) -> None:
        event_pb2, summary_pb2 = _protos()
        prefix = "eval/" if record.get("eval") else "train/"
        prefix += f"{record['task']}/" if "task" in record else ""
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
        self._attempt(lambda: self._open().append(_framed(event)))

    def flush(self) -> None:
        if self._file is not None:
            self._attempt(self._file.sync)

    def close(self) -> None:
        if self._file is not None:
            self._attempt(self._file.close)
            self._file = None

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OutputError as error:
            if not self._is_warned:
                self._is_warned = True
                _logger.warning("TensorBoard lacks points that metrics.jsonl has: %s", error)

    def _open(self) -> AppendFile:
        """The event file of this process, made with the first record.

        tensorboardX's SummaryWriter sends every point through a multiprocessing queue and its
        flush() does not wait for that queue; its RecordWriter dumps a stack when the process ends
        on a full disk.
        """
        if self._file is None:
            event_pb2, _ = _protos()
            # TensorBoard reads the files in the order of their names. The nanoseconds keep two
            # starts within one second in order.
            now = time.time_ns()
            name = f"events.out.{_EVENTS}.{now // 10**9:010d}.{now:020d}.{socket.gethostname()}"
            file = AppendFile(self._directory / name)
            events = [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")]
            if self._purge_step is not None:
                # For a TensorBoard that is already showing the points cut from the files.
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                events.append(event_pb2.Event(step=self._purge_step, session_log=start))
            try:
                file.append(b"".join(map(_framed, events)))
            except OutputError:
                os.close(file.descriptor)
                file.path.unlink(missing_ok=True)
                raise
            self._file = file
        return self._file


def _framed(event: Any) -> bytes:
    """An event as it stands in a file: length (8 bytes), its checksum (4), event, checksum (4)."""
    from tensorboardX.record_writer import masked_crc32c

    body = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, body)]
    return b"".join((length, checksums[0], body, checksums[1]))


def _protos() -> tuple[Any, Any]:
    """TensorBoard's message types; protobuf makes their attributes when it is imported."""
    names = ("event_pb2", "summary_pb2")
    event, summary = (importlib.import_module(f"tensorboardX.proto.{name}") for name in names)
    return event, summary


def _cut_events(path: Path, purge_step: int) -> None:
    """Removes events from `purge_step` on from one event file, a torn tail, and what is damaged.

    The checksums of the events are not compared, which would take seconds for a long run.
    """
    from google.protobuf.message import DecodeError
    from tensorboardX.record_writer import masked_crc32c

    event_pb2, _ = _protos()
    data = path.read_bytes()
    kept, is_empty, is_damaged, at = [], True, False, 0
    while at + 12 <= len(data):
        length, checksum = struct.unpack_from("<QI", data, at)
        if checksum != masked_crc32c(data[at : at + 8]):
            is_damaged = True  # where the next event begins is not known
            break
        end = at + 16 + length
        if end > len(data):
            break  # torn by a kill
        try:
            event = event_pb2.Event.FromString(data[at + 12 : end - 4])
        except DecodeError:
            is_damaged = True
        else:
            if event.step < purge_step or event.HasField("file_version"):
                kept.append(data[at:end])
                is_empty = is_empty and not event.HasField("summary")
        at = end
    if is_damaged:
        copy = set_aside(path, path.name.replace(_EVENTS, "events"))
        _logger.warning("%s is damaged; what can be read is kept, all of it is in %s", path, copy)
    if is_empty:
        path.unlink()
    elif sum(map(len, kept)) < len(data):
        replace_file(path, b"".join(kept))
