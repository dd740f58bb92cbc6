"""What input workers and the run hand each other: the dataset, once, and batches in shared memory.

`sending` is the other half: only a run that starts workers needs it.

Shared memory is anonymous (`memfd_create`): it has no name in /dev/shm that a kill could leave
there, is not bound by that file system's size, which containers keep at 64 MiB, and is gone with
the last process that holds it.
"""

import functools
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import DataError

ALIGNMENT = 64

Layout = Sequence[tuple[str, np.dtype, tuple[int, ...], int]]
"""(name, dtype, shape, offset in bytes) of each array in a `Slot`."""


class Slot:
    """Memory for one batch, shared by the process that writes it and the one that reads it."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Makes one, or takes the one that a parent has made.

        Args:
            descriptor: of the parent's memory; None: new memory.
        """
        self.descriptor = os.memfd_create("jaxtrain-batch") if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor)
        self._map: mmap.mmap | None = None

    def write(self, arrays: Mapping[str, np.ndarray]) -> Layout:
        """Copies arrays into it, over those before; returns where they are."""
        layout, size = [], 0
        for name, array in arrays.items():
            layout.append((name, array.dtype, array.shape, size))
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)
        for name, view in self.arrays(layout).items():
            np.copyto(view, arrays[name])
        return layout

    def arrays(self, layout: Layout) -> dict[str, np.ndarray]:
        """Views of the arrays, valid until the next batch is written."""
        size = os.fstat(self.descriptor).st_size
        if size and (self._map is None or len(self._map) < size):
            # The old map lives as long as views of it do.
            self._map = mmap.mmap(self.descriptor, size)
        buffer = self._map or b""
        return {
            name: np.ndarray(shape, dtype, buffer if np.prod(shape) else None, offset)
            for name, dtype, shape, offset in layout
        }


def receive(descriptor: int) -> Any:
    """Returns what `sending.send` has sent.

    Its arrays can be written to, unseen by the other processes.
    """
    contents = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    size = len(contents) - 8
    ends = pickle.loads(contents[size - int.from_bytes(contents[size:]) : size])
    starts = [0] + [-(-end // ALIGNMENT) * ALIGNMENT for end in ends[:-1]]
    whole = memoryview(contents)
    pickled, *buffers = (whole[start:end] for start, end in zip(starts, ends, strict=True))
    thing, flags = pickle.loads(pickled, buffers=buffers)
    _set_flags(flags)
    return thing


def view(
    root: np.ndarray, offset: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Returns a view of a contiguous array, from an offset in bytes on."""
    return np.ndarray(shape, dtype, root, offset, strides)


def view_of_map(path: str, size: int, *place: Any) -> np.ndarray:
    """Returns a `view` of the bytes of a file, which is mapped, read-only, once in a process.

    Raises:
        DataError: unless it has so many bytes.
    """
    return view(_mapped(path, size), *place)


@functools.cache
def _mapped(path: str, size: int) -> np.ndarray:
    found = np.memmap(path, np.uint8, "r")
    if len(found) != size:
        raise DataError(f"{path} had {size} bytes when it was opened, and has {len(found)} now")
    return found


def _set_flags(values: Mapping[str, Any]) -> None:
    """Gives absl's flags the values that they have in the run; no command line is parsed."""
    if "absl.flags" in sys.modules:
        flags = sys.modules["absl.flags"].FLAGS
        for name in values.keys() & set(flags):
            flags[name].value = values[name]
        flags.mark_as_parsed()


def flags_of_the_run(values: Mapping[str, Any]) -> Any:
    """absl's flags, those among them that the script of the run has defined."""
    from absl import flags

    for name in values.keys() - set(flags.FLAGS):
        flags.FLAGS[name] = flags.Flag(flags.ArgumentParser(), None, name, None, "")
    _set_flags(values)
    return flags.FLAGS
