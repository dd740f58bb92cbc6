"""Sends an object to input workers: pickled, with its arrays beside it in shared memory."""

import os
import pickle
import sys
from collections.abc import Iterable
from typing import Any

import cloudpickle
import numpy as np

from jaxtrain.data.handover import ALIGNMENT, flags_of_the_run, view, view_of_map


def send(thing: Any) -> int:
    """Pickles an object into shared memory, for any number of processes; returns its descriptor.

    absl's flags have the values there that they have here.
    What the script of the run defines (module `__main__`) goes by value: no process has to import
    the script. Arrays lie beside the pickle, once for all processes; maps of files are opened
    again where they arrive.

    Raises:
        Exception: of many kinds, where something cannot be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    descriptor = os.memfd_create("jaxtrain-dataset")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            _Pickler(file, protocol=5, buffer_callback=buffers.append).dump((thing, _flag_values()))
            ends = [file.tell()]
            for buffer in buffers:
                file.seek(-(-ends[-1] // ALIGNMENT) * ALIGNMENT)
                file.write(buffer.raw())
                ends.append(file.tell())
            file.write(pickle.dumps(ends))
            file.write((file.tell() - ends[-1]).to_bytes(8))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _Pickler(cloudpickle.CloudPickler):
    """Sends maps of files as their names, views of an array with the array, and absl's flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._roots: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            reduced = _reduce_view(obj, self._roots)
            if reduced is not None:
                return reduced
        if (values := _flag_values()) and obj is sys.modules["absl.flags"].FLAGS:
            return flags_of_the_run, (values,)
        return super().reducer_override(obj)


def _reduce_view(array: np.ndarray, sent: set[int]) -> Any:
    """How to make a view of a map, or of another array, anew; None for an array of its own.

    Args:
        array: to send.
        sent: ids of the arrays that views were sent with; this one's is added.
    """
    start = array.__array_interface__["data"][0]
    rest = (array.dtype, array.shape, array.strides)
    bases = list(_bases(array))
    for root in reversed([array, *bases]):
        offset = start - root.__array_interface__["data"][0]
        if isinstance(root, np.memmap) and root.filename is not None and root.mode != "c":
            path = os.path.abspath(root.filename)
            return view_of_map, (path, os.stat(path).st_size, root.offset + offset, *rest)
        # A small part of a large array goes alone, unless that goes anyway.
        is_small = root.nbytes <= 2 * array.nbytes or id(root) in sent
        if root is not array and root.flags.c_contiguous and is_small:
            sent.add(id(root))
            return view, (root, offset, *rest)
    return None


def _bases(array: np.ndarray) -> Iterable[np.ndarray]:
    base: Any = array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            yield base
        elif not isinstance(getattr(base, "base", None), np.ndarray):  # as_strided puts one between
            return
        base = base.base


def _flag_values() -> dict[str, Any]:
    """Values of absl's flags, if the run has any."""
    if "absl.flags" not in sys.modules:
        return {}
    values = sys.modules["absl.flags"].FLAGS
    return {name: values[name].value for name in values}
