"""From a dataset to batches on the devices.

The global batch of a step is the range [position, position + global_batch_size) of the endless
order of `order.py`, over epoch ends, or of the dataset's own order if it has one. Row r of it lives
on the devices to which the batch sharding gives row r, and a process reads exactly the rows of its
own devices. So the batches are the same for any number of processes and devices, and the position
is all that a checkpoint has to hold.

A thread reads, or has workers read, moves to the devices and measures both, ahead of the training
loop.

Legend: A micro-batches, B rows of a global batch, b = B / A rows of a micro-batch, R rows that
this process reads.
"""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.data.batch_placement import BatchPlacement, for_devices
from jaxtrain.data.batch_reader import BatchReader
from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.rows import checked_rows
from jaxtrain.data.sources import (
    Dataset,
    OrderedRows,
    as_dataset,
    dataset_indices,
    name_of,
    require_rows,
)
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
    """Time in the order, in `dataset.read` or the wait for the worker that reads, and in checks."""
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
        num_workers: int | None = 0,
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
            num_workers: processes that read, ahead of the thread; 0: the thread reads; None: as
                many as keep up with the first steps.
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
        order = _Order(dataset, placement, seed, position, shuffle)
        batches = _TrainingBatches(dataset, placement, order, num_workers)
        self._reader = batches.reader
        self._trial = batches.reader.trial
        self._batches = Prefetcher(
            batches,
            ahead=prefetch,
            name=f"the loader of {name_of(dataset)}",
            stop=batches.reader.stop,
        )

    @property
    def num_workers(self) -> int | None:
        """Processes that read; 0: the thread does; None: it is not settled yet."""
        return self._reader.num_workers

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self

    def __next__(self) -> LoadedBatch:
        if self._trial is None:
            return next(self._batches)
        begin = time.perf_counter()
        loaded = next(self._batches)
        self._trial.taken(begin, time.perf_counter())
        if self._trial.is_over:
            self._trial = None
        return loaded

    def refill(self) -> None:
        """Lets the thread load the next batch; else it begins when the next one is asked for."""
        self._batches.refill()

    def close(self) -> None:
        """Ends thread and workers. Waits for a read in the thread, but not for ever."""
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


class _Order:
    """Which samples the training batch of a number holds."""

    def __init__(
        self,
        dataset: Dataset,
        placement: BatchPlacement,
        seed: int,
        position: int,
        shuffle: bool | None,
    ) -> None:
        self.batch_size = placement.accumulate_steps * placement.micro_rows
        self._dataset = dataset
        self._seed = seed
        self._position = position
        self._shuffle = shuffle
        self._rows_R = placement.rows
        self._block = max(1, _ORDER_BLOCK // max(1, len(self._rows_R)))

    def position(self, number: int) -> int:
        """Samples consumed before a batch."""
        return self._position + number * self.batch_size

    def rows(self, number: int) -> OrderedRows:
        """Those that this process reads; asked for once each, the numbers ascending."""
        if number % self._block == 0:
            starts = self.position(number) + np.arange(self._block) * self.batch_size
            positions = starts[:, None] + self._rows_R[None, :]
            self._samples = dataset_indices(
                self._dataset, self._seed, positions.reshape(-1), shuffle=self._shuffle
            ).reshape(positions.shape)
        return OrderedRows(
            self._samples[number % self._block], self._seed, self.position(number) + self._rows_R
        )


class _TrainingBatches:
    """Makes the training batch of a number; called in the thread."""

    def __init__(
        self, dataset: Dataset, placement: BatchPlacement, order: _Order, num_workers: int | None
    ) -> None:
        self._dataset = dataset
        self._placement = placement
        self._order = order
        self.reader = BatchReader(dataset, order.rows, num_workers)

    def __call__(self, number: int) -> LoadedBatch:
        position = self._order.position(number)
        last = position + self._order.batch_size - 1
        with _saying_where(f"samples {position} to {last} of the order", self._dataset):
            trial = self.reader.trial
            started, cpu = time.perf_counter(), time.thread_time()
            arrays = self.reader.read(number)
            cpu = time.thread_time() - cpu
            is_ours = not (self.reader.reuses_memory and self._placement.may_alias)
            arrays = for_devices(arrays, is_ours=is_ours)
            read = time.perf_counter()
            placed = self._placement.place(arrays)
            end = time.perf_counter()
        if trial is not None:
            size = sum(array.nbytes for array in arrays.values())
            trial.loaded(read - started, cpu, end - read, size)
        return LoadedBatch(placed, position, read - started, end - read)


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
        with _saying_where(f"rows {position} to {stop - 1}", self._dataset):
            arrays = _read(self._dataset, np.minimum(samples_R, num_rows - 1))
            if not is_real_R.all():
                mask = arrays["loss_mask"]
                arrays["loss_mask"] = mask * is_real_R.reshape(-1, *[1] * (mask.ndim - 1))
            placed = self._placement.place(arrays)
        return placed, stop - position


@contextlib.contextmanager
def _saying_where(what: str, dataset: Dataset) -> Iterator[None]:
    """Whatever fails in the block says what was being loaded."""
    try:
        yield
    except (JaxtrainError, OSError) as error:
        raise DataError(f"{error} (while loading {what} from {name_of(dataset)})") from error
    except BaseException as error:
        error.add_note(f"while loading {what} from {name_of(dataset)}")
        raise


def _read(dataset: Dataset, samples_R: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a batch as devices take them."""
    return for_devices(checked_rows(dataset.read(samples_R), len(samples_R)))
