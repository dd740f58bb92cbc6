"""Arrays that take long to make, kept on the disk: one process makes them, all of them map them.

A file is a header of HEADER_BYTES and the arrays one behind the other, each from a multiple of 64
bytes on. The header is its own checksum (CRC-32), a space, JSON that says what the arrays are and
their checksums, and spaces. All checksums are compared at every start, and a damaged file is made
again.
"""

import contextlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxtrain.errors import DataError, OutputError
from jaxtrain.file_lock import lock_file, when_free
from jaxtrain.output_files import sync

HEADER_BYTES = 4096
_CHECKSUM_DIGITS = 8
_ALIGNMENT = 64
_PIECE = 2**24
_NOT_KEPT = "%s is not kept: %s; the next start makes it again"

_log = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]


class _BeingMadeError(Exception):
    """Another process makes the file."""


def kept_arrays(path: Path, make: Callable[[], Arrays]) -> Arrays:
    """Returns one-dimensional arrays, as maps of the file `path`, which is made if it is not there.

    Processes that start together wait for the one that makes it. Where the file cannot be kept, a
    line says so, and the arrays are in memory.

    Args:
        path: its name tells these arrays from all others.
        make: makes them.
    """
    lock = path.with_name(f".{path.name}.lock")

    def attempt() -> Arrays:
        if (arrays := _map(path)) is not None:
            return arrays
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(lock, _BeingMadeError):
            try:
                return _map(path) or _make(path, make)
            finally:
                # Who still waits for this lock looks for the arrays when he has it.
                lock.unlink(missing_ok=True)

    try:
        return when_free(
            attempt,
            _BeingMadeError,
            lambda holder: _log.info("waiting for %s, which %s makes", path, holder),
        )
    except (OSError, OutputError) as error:
        _log.warning(_NOT_KEPT, path, error)
        return make()


def _make(path: Path, make: Callable[[], Arrays]) -> Arrays:
    started = time.perf_counter()
    made = make()
    try:
        _write(path, made)
    except OSError as error:
        _log.warning(_NOT_KEPT, path, error)
        return made
    _log.info("made in %.1f s, kept as %s", time.perf_counter() - started, path)
    return _map(path) or made


def _map(path: Path) -> Arrays | None:
    """The arrays of a file; None if there is none, or none that is whole."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            checksum, _, text = file.read(HEADER_BYTES).partition(b" ")
            if checksum != _header_checksum(text):
                raise DataError("bad checksum of its header")
            arrays = {}
            for name, (dtype, count, offset, checksum) in json.loads(text).items():
                if offset + count * np.dtype(dtype).itemsize > size:
                    raise DataError(f"{name} is cut off")
                arrays[name] = _array(path, np.dtype(dtype), count, offset)
                if _checksum(arrays[name]) != checksum:
                    raise DataError(f"bad checksum of {name}")
        return arrays
    except FileNotFoundError:
        return None
    except (OSError, DataError) as error:
        _log.warning("%s is damaged (%s) and is made again", path, error)
    return None


def _array(path: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def _write(path: Path, arrays: Arrays) -> None:
    """Writes the file whole, or not at all.

    Raises:
        OSError: when the system refuses.
    """
    header, offset = {}, HEADER_BYTES
    for name, array in arrays.items():
        header[name] = (array.dtype.str, len(array), offset, _checksum(array))
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    scratch = None
    try:
        # A name of its own: where a file system has no locks, others may write the same file.
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.stem}-", suffix=".new", delete=False
        ) as file:
            scratch = file.name
            text = json.dumps(header).encode().ljust(HEADER_BYTES - _CHECKSUM_DIGITS - 1)
            file.write(_header_checksum(text) + b" " + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
                file.write(bytes(-array.nbytes % _ALIGNMENT))
            file.flush()
            sync(file.fileno())
        os.chmod(scratch, 0o644)  # made for its owner alone
        os.replace(scratch, path)
    except OSError:
        if scratch is not None:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
        raise


def _header_checksum(text: bytes) -> bytes:
    return b"%0*x" % (_CHECKSUM_DIGITS, zlib.crc32(text))


def _checksum(array: np.ndarray) -> int:
    checksum = 0
    for start in range(0, len(array), _PIECE):
        checksum = zlib.crc32(np.ascontiguousarray(array[start : start + _PIECE]).data, checksum)
    return checksum
