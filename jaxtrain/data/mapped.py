"""What datasets over large or mapped arrays have in common."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import DataError

_HASHED_BYTES = 2**30
_PIECE = 2**20


def hash_contents(digest: Any, array: np.ndarray) -> None:
    """Adds the values of an array [N] to a hash: all below 1 GiB, else 64 evenly spaced pieces."""
    if array.nbytes < _HASHED_BYTES:
        digest.update(np.ascontiguousarray(array))
        return
    for start in np.linspace(0, len(array) - _PIECE, 64).astype(np.int64):
        digest.update(np.ascontiguousarray(array[start : start + _PIECE]))


def is_map(array: np.ndarray) -> bool:
    """Whether an array lies in a file."""
    return _map_of(array) is not None


def file_sizes(arrays: Iterable[np.ndarray]) -> Mapping[str, int]:
    """The files that arrays are maps of, and their sizes in bytes."""
    maps = [_map_of(array) for array in arrays]
    paths = [os.fspath(m.filename) for m in maps if m is not None and m.filename is not None]
    return {path: os.stat(path).st_size for path in paths}


def _map_of(array: Any) -> Any:
    return next((a for a in (array, array.base) if isinstance(a, np.memmap)), None)


def require_size(path: str, size: int) -> None:
    """Refuses a mapped file that has shrunk: reading beyond its end kills the process (SIGBUS).

    Raises:
        DataError: with both sizes; for a file that is gone, too: its disk may be.
    """
    try:
        now = os.stat(path).st_size
    except OSError as error:
        raise DataError(
            f"{path} went away while it was in use: {error.strerror}; bring it back, then the same"
            f" command continues the run"
        ) from error
    if now < size:
        raise DataError(
            f"{path} shrank from {size} to {now} bytes while it was in use; copy it anew, then the"
            f" same command continues the run"
        )
