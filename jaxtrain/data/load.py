"""From a dataset to batches on the devices.

The global batch of a step is the range [position, position + global_batch_size) of the endless
order of `order.py`, over epoch ends. Row r of it lives on the devices to which the batch sharding
gives row r, and a process reads exactly the rows of its own devices. So the batches are the same
for any number of processes and devices, and the position is all that a checkpoint has to hold.

A thread reads, moves to the devices and measures both, ahead of the training loop.

Legend: A micro-batches, B rows of a global batch, b = B / A rows of a micro-batch, R rows that
this process reads.
"""

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.data.batch_placement import BatchPlacement
from jaxtrain.data.order import sample_indices
from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.sources import Dataset, as_dataset, name_of, require_rows
from jaxtrain.errors import DataError, JaxtrainError
from jaxtrain.sharding import DEFAULT_RULES, ShardingRules, batch_sharding, check_batch_size

_log = logging.getLogger(__name__)

# The order is computed for several batches at once: per call it costs the time of a hundred NumPy
# operations, whatever their size.
_ORDER_BLOCK = 4096


class LoadedBatch(NamedTuple):
    """A batch on the devices, and how it got there."""

    arrays: dict[str, jax.Array]
    """Global arrays [B, ...], or [A, b, ...] with accumulate_steps > 1."""
    position: int
    """Samples consumed before this batch."""
    read_seconds: float
    """Time in the order, in `dataset.read` and in the checks of what it returned."""
    h2d_seconds: float
    """Time until the arrays were on the devices, waited for."""


class Loader:
    """Endless training batches; see the module's docstring for which samples they hold.

    A dataset with fewer rows than a batch is repeated within the batch (and said so once), an
    empty one is an error. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        dataset: Any,
        mesh: Mesh,
        *,
        rules: ShardingRules = DEFAULT_RULES,
        global_batch_size: int,
        accumulate_steps: int = 1,
        seed: int = 0,
        position: int = 0,
        shuffle: bool | None = None,
        prefetch: int = 2,
    ) -> None:
        """Starts the thread.

        Args:
            dataset: a Dataset, or what `as_dataset` makes one of.
            mesh: where the batches go, split by the rule of the logical axis "batch".
            rules: of the layout.
            global_batch_size: rows over all devices of all processes.
            accumulate_steps: micro-batches; more than 1 adds a leading dim to every array.
            seed: of the order.
            position: samples consumed so far.
            shuffle: False takes the rows in their own order; None asks the dataset's attribute of
                this name, and shuffles if it has none.
            prefetch: batches that wait ready on the devices.
        """
        dataset = as_dataset(dataset)
        check_batch_size(global_batch_size, accumulate_steps, mesh, rules)
        if position < 0:
            raise DataError(f"position={position} must not be negative")
        require_rows(dataset, "training")
        if len(dataset) < global_batch_size:
            _log.warning(
                "%s has %d samples, fewer than global_batch_size=%d: samples repeat within each"
                " batch (epoch after epoch, each epoch every sample once)",
                name_of(dataset),
                len(dataset),
                global_batch_size,
            )
        placement = BatchPlacement.make(
            batch_sharding(mesh, rules, accumulate_steps=accumulate_steps),
            global_batch_size,
            accumulate_steps,
        )
        self._batches = Prefetcher(
            _TrainingBatches(
                dataset,
                placement,
                seed,
                position,
                bool(getattr(dataset, "shuffle", True)) if shuffle is None else shuffle,
            ),
            ahead=prefetch,
            name=f"the loader of {name_of(dataset)}",
        )

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self

    def __next__(self) -> LoadedBatch:
        return next(self._batches)

    def refill(self) -> None:
        """Lets the thread load the next batch; else it begins when the next one is asked for."""
        self._batches.refill()

    def close(self) -> None:
        """Ends the thread. Waits for a read in progress, but not for ever."""
        self._batches.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def abstract_batch(
    dataset: Any,
    mesh: Mesh,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    global_batch_size: int,
    accumulate_steps: int = 1,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the batches that a `Loader` with these arguments makes.

    One row is read, whatever the size of a batch; no device is needed.
    """
    dataset = as_dataset(dataset)
    require_rows(dataset, "training")
    sharding = batch_sharding(mesh, rules, accumulate_steps=accumulate_steps)
    rows: tuple[int, ...] = (global_batch_size // accumulate_steps,)
    if accumulate_steps > 1:
        rows = (accumulate_steps, *rows)
    return {
        name: jax.ShapeDtypeStruct((*rows, *array.shape[1:]), array.dtype, sharding=sharding)
        for name, array in _read(dataset, np.zeros(1, np.int64)).items()
    }


def eval_batches(
    dataset: Any,
    mesh: Mesh,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    batch_size: int,
    max_batches: int = 0,
) -> Generator[tuple[dict[str, jax.Array], int]]:
    """Yields (arrays [batch_size, ...], number of rows that count), each row once and in order.

    The last batch is filled with copies of the last row whose "loss_mask" is 0: every array keeps
    its shape, and no invented value reaches the model. A dataset without "loss_mask" gets one
    [batch_size]. The same batches come out of any mesh and any number of processes.

    Args:
        dataset: a Dataset, or what `as_dataset` makes one of.
        mesh: where the batches go.
        rules: of the layout.
        batch_size: rows over all devices of all processes.
        max_batches: stop after so many (the first rows then stand for all); 0: the whole dataset.

    Raises:
        DataError: if there are no rows.
    """
    dataset = as_dataset(dataset)
    check_batch_size(batch_size, 1, mesh, rules)
    num_rows = len(dataset)
    require_rows(dataset, "evaluation")
    count = -(-num_rows // batch_size)
    if max_batches > 0:
        count = min(count, max_batches)
    placement = BatchPlacement.make(batch_sharding(mesh, rules), batch_size, 1)
    # Checks come before this point, so that they are not put off to the first `next`.
    return _evaluate_all(dataset, placement, batch_size, count)


def _evaluate_all(
    dataset: Dataset, placement: "BatchPlacement", batch_size: int, count: int
) -> Generator[tuple[dict[str, jax.Array], int]]:
    with Prefetcher(
        _EvaluationBatches(dataset, placement, batch_size),
        count=count,
        name=f"the loader of {name_of(dataset)}",
    ) as batches:
        yield from batches


class _TrainingBatches:
    """Makes the training batch of a number; called in the thread."""

    def __init__(
        self, dataset: Dataset, placement: BatchPlacement, seed: int, position: int, shuffle: bool
    ) -> None:
        self._dataset = dataset
        self._placement = placement
        self._seed = seed
        self._position = position
        self._shuffle = shuffle
        self._batch_size = placement.accumulate_steps * placement.micro_rows
        self._rows_R = placement.rows
        self._block = max(1, _ORDER_BLOCK // max(1, len(self._rows_R)))

    def __call__(self, number: int) -> LoadedBatch:
        started = time.perf_counter()
        position = self._position + number * self._batch_size
        if number % self._block == 0:
            starts = position + np.arange(self._block, dtype=np.int64) * self._batch_size
            positions = starts[:, None] + self._rows_R[None, :]
            self._samples = sample_indices(
                self._seed, len(self._dataset), positions.reshape(-1), shuffle=self._shuffle
            ).reshape(positions.shape)
        samples_R = self._samples[number % self._block]
        what = f"samples {position} to {position + self._batch_size - 1} of the order"
        return _load(self._dataset, samples_R, None, self._placement, what, position, started)


class _EvaluationBatches:
    """Makes the evaluation batch of a number; called in the thread."""

    def __init__(self, dataset: Dataset, placement: BatchPlacement, batch_size: int) -> None:
        self._dataset = dataset
        self._placement = placement
        self._batch_size = batch_size

    def __call__(self, number: int) -> tuple[dict[str, jax.Array], int]:
        num_rows = len(self._dataset)
        position = number * self._batch_size
        samples_R = position + self._placement.rows
        is_real_R = samples_R < num_rows
        stop = min(position + self._batch_size, num_rows)
        batch = _load(
            self._dataset,
            np.minimum(samples_R, num_rows - 1),
            None if is_real_R.all() else is_real_R,
            self._placement,
            f"rows {position} to {stop - 1}",
            position,
            time.perf_counter(),
        )
        return batch.arrays, stop - position


def _load(
    dataset: Dataset,
    samples_R: np.ndarray,
    is_real_R: np.ndarray | None,
    placement: BatchPlacement,
    what: str,
    position: int,
    started: float,
) -> LoadedBatch:
    """Reads samples and moves them to the devices; whatever fails says where."""
    try:
        arrays = _read(dataset, samples_R)
        if is_real_R is not None:
            mask = arrays["loss_mask"]
            arrays["loss_mask"] = mask * is_real_R.reshape(-1, *[1] * (mask.ndim - 1))
        read = time.perf_counter()
        placed = placement.place(arrays)
        return LoadedBatch(placed, position, read - started, time.perf_counter() - read)
    except (JaxtrainError, OSError) as error:
        raise DataError(f"{error} (while loading {what} from {name_of(dataset)})") from error
    except BaseException as error:
        error.add_note(f"while loading {what} from {name_of(dataset)}")
        raise


def _read(dataset: Dataset, samples_R: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a batch as devices take them, "loss_mask" always among them."""
    arrays = _checked(dataset.read(samples_R), len(samples_R))
    if "loss_mask" not in arrays:
        arrays["loss_mask"] = np.ones(len(samples_R), np.float32)
    return arrays


def _checked(arrays: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Checks what a dataset returned, and brings it to the types that JAX holds."""
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
        if not (array.dtype == bool or jax.numpy.issubdtype(array.dtype, np.number)):
            raise DataError(
                f"{name!r} has dtype {array.dtype}, which devices cannot hold; give numbers, or"
                f" leave it out of the batch"
            )
        checked[name] = _as_device_dtype(name, array)
    return checked


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
