"""Reads the rows of numbered batches: in the thread that asks, or ahead of it in input workers."""

import logging
from collections.abc import Callable

import numpy as np

from jaxtrain.data.auto_workers import Trial
from jaxtrain.data.rows import checked_rows
from jaxtrain.data.sources import Dataset, OrderedRows, name_of, read_training
from jaxtrain.data.workers import Workers, memory_budget
from jaxtrain.errors import DataError
from jaxtrain.host import cores_at_hand

_log = logging.getLogger(__name__)


class BatchReader:
    """Reads batches 0, 1, 2, ..., each once and in order."""

    def __init__(
        self,
        dataset: Dataset,
        rows_of: Callable[[int], OrderedRows],
        num_workers: int | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            dataset: to read.
            rows_of: number of a batch -> its R rows; called once for each, in order.
            num_workers: processes; 0: none; None: found out from the first batches.
        """
        self._dataset = dataset
        self._rows_of = rows_of
        self._workers: Workers | None = None
        self._asked = 0
        self._failed: Exception | None = None
        self.trial = Trial() if num_workers is None else None
        """What is measured until the number of workers is settled."""
        self.num_workers = num_workers
        """None until it is settled."""
        if num_workers:
            self._workers = Workers(dataset, num_workers, name=name_of(dataset))

    @property
    def reuses_memory(self) -> bool:
        """Whether the arrays of a batch are overwritten when a later one is read."""
        return self._workers is not None

    def read(self, number: int) -> dict[str, np.ndarray]:
        """Returns the rows of a batch, name -> [R, ...].

        Raises:
            DataError: when a worker has died, or `read` returned what is no batch.
            Exception: that the dataset has raised.
        """
        if self.trial is not None and self.trial.is_enough:
            self._settle(self.trial)
        if self._workers is None:
            self._asked = number + 1
            rows = self._rows_of(number)
            return checked_rows(read_training(self._dataset, *rows), len(rows.indices))
        if not self._workers.is_started:
            self._workers.start()
        while self._failed is None and self._asked < number + self._workers.ahead:
            try:
                rows = self._rows_of(self._asked)
            except Exception as error:  # raised when the turn of its batch comes
                self._failed = error
                break
            self._workers.submit(self._asked, rows)
            self._asked += 1
        if self._failed is not None and number == self._asked:
            raise self._failed
        return self._workers.take(number)

    def stop(self) -> None:
        """Ends the workers, and a wait for them; may be called in any thread, twice."""
        if self._workers is not None:
            self._workers.stop()

    def _settle(self, trial: Trial) -> None:
        self.trial = None
        trial.is_over = True
        choice = trial.choose(cores_at_hand(), memory_budget())
        count, reason = choice
        if count:
            workers = Workers(self._dataset, count, name=name_of(self._dataset))
            self._workers = workers  # for `stop`
            try:
                workers.start()
            except DataError as error:
                workers.stop()
                self._workers, count, reason = None, 0, f"{reason}; {error}"
        self.num_workers = count
        _log.info("data.num_workers=auto: %d; %s", count, reason)
