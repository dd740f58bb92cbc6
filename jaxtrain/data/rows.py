"""What a dataset's `read` may return: a dict of arrays of numbers, with as many rows as asked for.

Without JAX, for the processes that only read.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import DataError


def checked_rows(arrays: Any, num_rows: int) -> dict[str, np.ndarray]:
    """Returns what `read` returned, name -> array [num_rows, ...].

    Args:
        arrays: whatever it was.
        num_rows: rows that it was asked for.

    Raises:
        DataError: unless it is a dict of arrays of numbers with so many rows.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise DataError(f"read() must return a dict of arrays; got {type(arrays).__name__}")
    checked = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.shape[:1] != (num_rows,):
            raise DataError(
                f"read() must return {num_rows} rows, as many as it was asked for; {name!r} has"
                f" shape {array.shape}"
            )
        if not _is_numeric(array.dtype):
            raise DataError(
                f"{name!r} has dtype {array.dtype}, which devices cannot hold; give numbers, or"
                f" leave it out of the batch"
            )
        checked[name] = array
    return checked


def _is_numeric(dtype: np.dtype) -> bool:
    # The dtypes that JAX adds, such as bfloat16, are of NumPy's kind V, and of a type of their own.
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)
