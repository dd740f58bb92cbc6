"""Datasets: random access to rows by their index, many rows at a time.

A dataset is anything with `__len__`, `read(indices)` and `fingerprint`; the order of the rows,
batches, epochs, processes and devices are not its concern. `read` works on the whole batch at
once, since a Python object per row is what costs (see docs of `RecordDataset`).

Legend: N rows of a dataset, R rows asked for.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxtrain.data.order import sample_indices
from jaxtrain.errors import DataError

_HASHED_BYTES = 2**30


@runtime_checkable
class Dataset(Protocol):
    """Rows with random access.

    More attributes are used where a dataset has them: `name` in messages; `shuffle` (False:
    training takes the rows in their own order); `sample_indices(seed, positions, *, shuffle)`,
    which replaces the order of `order.py` (a mixture has one of its own): a pure function to int64
    rows [M], where shuffle is what the loader was asked for, or None; `read_training(indices, seed,
    positions)`, which training calls instead of `read`, with the positions of these rows in the
    endless order: random changes of rows (augmentation) that are a pure function of seed and
    position are then the same after a restart, and on any number of processes; and `parts` with
    `shares`, by which an evaluation tells them apart (`held_out.HeldOut`).
    """

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows `indices` (int64 [R], in this order) as arrays [R, ...].

        Called in a thread of the loader, one call at a time, or in worker processes that each have
        a pickled copy of the dataset: it must depend on the indices alone. The caller keeps the
        arrays: they must not be written to later.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Differs if any row differs; the same in every process and on every machine."""
        ...


def name_of(dataset: Dataset) -> str:
    """What messages call a dataset."""
    return getattr(dataset, "name", None) or type(dataset).__name__


def parts_of(dataset: Dataset) -> Mapping[str, Dataset]:
    """The parts of a dataset by their names; of one without parts itself, without a name."""
    return getattr(dataset, "parts", {"": dataset})


def require_rows(dataset: Dataset, what: str) -> None:
    """Refuses a dataset without rows.

    Args:
        dataset: any.
        what: "training" or "evaluation", for the message.

    Raises:
        DataError: naming the dataset.
    """
    if len(dataset) == 0:
        way_out = "give data, or none" if what == "evaluation" else "give data"
        raise DataError(f"no {what} data in {name_of(dataset)}: it has 0 samples; {way_out}")


def dataset_indices(
    dataset: Dataset, seed: int, positions: np.ndarray, *, shuffle: bool | None = None
) -> np.ndarray:
    """Returns the rows of a dataset at `positions` of its endless order, int64 [M].

    Args:
        dataset: with rows.
        seed: of the order.
        positions: int64 [M], from 0.
        shuffle: False takes the rows in their own order; None asks the dataset's attribute of this
            name, and shuffles if it has none.

    Raises:
        DataError: when the dataset has an order of its own that gives no rows.
    """
    own = getattr(dataset, "sample_indices", None)
    if own is None:
        shuffle = bool(getattr(dataset, "shuffle", True)) if shuffle is None else shuffle
        return sample_indices(seed, len(dataset), positions, shuffle=shuffle)
    rows = np.asarray(own(seed, positions, shuffle=shuffle))
    is_right = rows.dtype.kind in "iu" and rows.shape == np.shape(positions)
    if not is_right or (rows.size and not 0 <= rows.min() <= rows.max() < len(dataset)):
        raise DataError(
            f"{name_of(dataset)}: sample_indices must return one row, 0..{len(dataset) - 1}, for"
            f" each of {np.size(positions)} positions; got {rows.dtype}{list(rows.shape)}"
        )
    return rows


class OrderedRows(NamedTuple):
    """Rows that training reads, and where they stand in the endless order."""

    indices: np.ndarray
    """int64 [R]."""
    seed: int
    """Of the order."""
    positions: np.ndarray
    """int64 [R]."""


def read_training(
    dataset: Dataset, indices: np.ndarray, seed: int, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns rows as training gets them: changed at random, where the dataset does that.

    Args:
        dataset: any.
        indices: rows, int64 [R].
        seed: of the order, and of the changes.
        positions: int64 [R], of these rows in the endless order.
    """
    own = getattr(dataset, "read_training", None)
    return dataset.read(indices) if own is None else own(indices, seed, positions)


class ArrayDataset:
    """Rows of arrays in memory (or mapped into it): {"image": [N, ...], "label": [N]}."""

    def __init__(self, arrays: Mapping[str, Any], *, name: str = "arrays") -> None:
        """Takes the arrays as they are, without a copy.

        Args:
            arrays: name -> array with rows in dim 0, as many in each.
            name: in messages.

        Raises:
            DataError: when there is no array, or they differ in their number of rows.
        """
        self.arrays = {key: np.asarray(value) for key, value in arrays.items()}
        self.name = name
        lengths = {key: value.shape[0] if value.ndim else 0 for key, value in self.arrays.items()}
        if not lengths or any(value.ndim == 0 for value in self.arrays.values()):
            raise DataError(
                f"{name}: a dataset of arrays needs at least one, each with rows in dim 0;"
                f" got { {key: value.shape for key, value in self.arrays.items()} }"
            )
        if len(set(lengths.values())) > 1:
            raise DataError(f"{name}: all arrays need the same number of rows; got {lengths}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; arrays that are maps of files need none."""
        return sum(a.nbytes for a in self.arrays.values() if not isinstance(a.base, np.memmap))

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies the rows `indices` (int64 [R], in this order): name -> [R, ...]."""
        return {key: value[indices] for key, value in self.arrays.items()}

    @property
    def fingerprint(self) -> str:
        """Hash of names, types, shapes and contents; above 1 GiB of evenly spaced rows only."""
        size = sum(value.nbytes for value in self.arrays.values())
        stride = -(-size // _HASHED_BYTES) or 1
        digest = hashlib.blake2b(digest_size=16)
        for key, value in sorted(self.arrays.items()):
            digest.update(f"{key} {value.dtype.str} {value.shape};".encode())
            digest.update(np.ascontiguousarray(value[::stride]))
        return digest.hexdigest()


class RecordDataset:
    """Rows of a sequence of dicts: a list, a grain data source or MapDataset, a torch dataset.

    Convenient, and slow: every row passes through Python (a few thousand rows per second and
    core). Arrays are a hundred times faster where the data fits.
    """

    def __init__(self, records: Any, *, name: str = "records", fingerprint: str = "") -> None:
        self.records = records
        self.name = name
        # A sequence of unknown kind cannot be hashed without reading all of it.
        self.fingerprint = fingerprint or f"{type(records).__name__}:{len(records)}"

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = [self.records[int(index)] for index in indices]
        keys = [sorted(row) if isinstance(row, Mapping) else type(row).__name__ for row in rows]
        for index, have in zip(indices, keys, strict=True):
            if not isinstance(have, list) or have != keys[0]:
                raise DataError(
                    f"{self.name}: each record must be a dict with the keys of the others; record"
                    f" {indices[0]} is {keys[0]}, record {index} is {have}"
                )
        arrays = {}
        for key in rows[0]:
            values = [np.asarray(row[key]) for row in rows]
            shapes = {value.shape for value in values}
            if len(shapes) > 1:
                raise DataError(
                    f"{self.name}: {key!r} must have one shape in all records, to form a batch;"
                    f" got {sorted(shapes)}; pad or cut the records"
                )
            arrays[key] = np.stack(values)
        return arrays


def as_dataset(data: Any) -> Dataset:
    """Returns a dataset made from what users have.

    Args:
        data: a Dataset; a dict of arrays with rows in dim 0; or a sequence of dicts (anything with
            `__len__` and `__getitem__`).
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Mapping):
        return ArrayDataset(data)
    if isinstance(data, tuple | list):
        has_arrays = any(hasattr(item, "shape") for item in data)
    else:
        has_arrays = isinstance(data, np.ndarray) or hasattr(data, "addressable_shards")
    if has_arrays:
        raise DataError(
            f"{type(data).__name__} is no dataset, its arrays have no names by which model and "
            'loss find them; give {"x": array, "y": array}'
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str):
        return RecordDataset(data)
    raise DataError(
        f"{type(data).__name__} is no dataset; give a dict of arrays, a sequence of dicts, or an"
        f" object with __len__, read(indices) and fingerprint"
    )
