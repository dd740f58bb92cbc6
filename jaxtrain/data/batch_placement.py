"""Which rows of a global batch a process reads, and how they become global arrays.

Legend: A micro-batches, B rows of a global batch, b = B / A rows of a micro-batch, R rows that
this process reads.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlacement:
    """Which rows of a global batch live on some devices, and how host arrays get there."""

    sharding: NamedSharding
    accumulate_steps: int
    micro_rows: int
    columns: np.ndarray
    """The rows of each micro-batch that live on the devices: int64, ascending."""

    @classmethod
    def make(
        cls,
        sharding: NamedSharding,
        num_rows: int,
        accumulate_steps: int,
        devices: Collection[Any] | None = None,
    ) -> "BatchPlacement":
        """The placement of a batch of `num_rows` rows.

        Args:
            sharding: of the batch.
            num_rows: global rows.
            accumulate_steps: micro-batches.
            devices: those to feed; None: the devices of this process.
        """
        micro_rows = num_rows // accumulate_steps
        row_dim = int(accumulate_steps > 1)
        # Dims after the rows do not matter here, and a spec must not be longer than the shape.
        rows_only = NamedSharding(
            sharding.mesh, PartitionSpec(*tuple(sharding.spec)[: row_dim + 1])
        )
        shape = (accumulate_steps, micro_rows)[1 - row_dim :]
        indices = rows_only.devices_indices_map(shape)
        mine = sharding.addressable_devices if devices is None else devices
        ranges = {indices[device][row_dim].indices(micro_rows)[:2] for device in mine}
        columns = sorted({row for start, stop in ranges for row in range(start, stop)})
        return cls(sharding, accumulate_steps, micro_rows, np.array(columns, np.int64))

    @property
    def may_alias(self) -> bool:
        """Whether placed arrays may lie in the memory of the arrays they were made from."""
        return any(device.platform == "cpu" for device in self.sharding.device_set)

    @property
    def rows(self) -> np.ndarray:
        """The rows of the global batch to read, int64 [R], in the order `place` takes them."""
        starts = np.arange(self.accumulate_steps, dtype=np.int64) * self.micro_rows
        return (starts[:, None] + self.columns[None, :]).reshape(-1)

    def place(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Assembles global arrays from this process's rows [R, ...]; waits for the transfer."""
        placed = {name: self._place(array) for name, array in arrays.items()}
        return jax.block_until_ready(placed)

    def shard(self, array: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part `index` of the global array, out of this process's rows [R, ...]."""
        row_dim = int(self.accumulate_steps > 1)
        if row_dim:
            array = array.reshape(self.accumulate_steps, len(self.columns), *array.shape[1:])
        start, stop, _ = index[row_dim].indices(self.micro_rows)
        first = int(np.searchsorted(self.columns, start))
        return array[(*index[:row_dim], slice(first, first + stop - start), *index[row_dim + 1 :])]

    def _place(self, array: np.ndarray) -> jax.Array:
        shape: tuple[int, ...] = (self.micro_rows, *array.shape[1:])
        if self.accumulate_steps > 1:
            shape = (self.accumulate_steps, *shape)

        def shard(index: Any) -> np.ndarray:
            return self.shard(array, index)

        return jax.make_array_from_callback(shape, self.sharding, shard, dtype=array.dtype)


def for_devices(arrays: Mapping[str, np.ndarray], *, is_ours: bool = True) -> dict[str, Any]:
    """Arrays of dtypes that JAX holds, "loss_mask" always among them.

    Args:
        arrays: name -> [R, ...].
        is_ours: their memory is not used again; otherwise they are copied.
    """
    found = {}
    for name, array in arrays.items():
        narrowed = _as_device_dtype(name, array)
        found[name] = narrowed if is_ours or narrowed is not array else array.copy()
    if "loss_mask" not in found:
        num_rows = len(next(iter(found.values())))
        found["loss_mask"] = np.ones(num_rows, np.float32)
    return found


def _as_device_dtype(name: str, array: np.ndarray) -> np.ndarray:
    """Narrows 64-bit numbers as JAX would, but never lets an integer change its value."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise DataError(
                f"{name!r} holds {array.min()} to {array.max()}, beyond {dtype.name}, in which"
                f" devices hold it"
            )
    return array.astype(dtype)
