"""Processes that read batches ahead, for datasets that one thread cannot read fast enough.

Batch n is read by worker n % count, whatever the others do, and given out in order: what a batch
holds does not depend on how many there are. Each worker has two slots of shared memory, so that it
reads one batch while the other is on its way to the devices.

Own processes with pipes rather than `multiprocessing`: that one would import the script of the run
anew, and leaves its workers behind when their parent is killed. Theirs end with the thread that
started them, whatever ends it.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from jaxtrain.child_process import how_it_ended
from jaxtrain.data.handover import Slot
from jaxtrain.data.sources import OrderedRows
from jaxtrain.errors import DataError
from jaxtrain.host import memory_bytes, num_local_processes
from jaxtrain.stop_signals import STOP_SIGNALS
from jaxtrain.units import nbytes

SLOTS = 2
MEMORY_SHARE = 1 / 8
"""Share of the host's memory that batches read ahead may take, all workers of a run together."""

_log = logging.getLogger(__name__)
_PROGRAM = "import sys; sys.path[:] = {path!r}; from jaxtrain.data.worker import main; main()"
# No accelerator is taken, even by a dataset's module that asks JAX or another library for one; and
# the cores are shared out among processes, not among the threads of each.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class StoppedError(RuntimeError):
    """The workers were stopped while somebody waited for them."""


class Workers:
    """Reads numbered batches in other processes. `start`, `submit` and `take` share a thread."""

    def __init__(self, dataset: Any, count: int, *, name: str) -> None:
        """Starts nothing yet.

        Args:
            dataset: what the workers read.
            count: how many, at least 1.
            name: of the dataset, in messages.
        """
        self.count = count
        self.ahead = count
        """Batches that may be under way: one for each worker until the size of a batch is known."""
        self._dataset = dataset
        self._name = name
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._slots: list[list[Slot]] = []
        self._answers: dict[int, tuple[Any, bytes | None]] = {}
        self._ends: dict[int, str] = {}
        self._wakened, self._wake = Pipe(duplex=False)
        self._lock = threading.Lock()
        self.is_started = False
        self._stopping = self._is_limited = False

    def start(self) -> None:
        """Starts the processes and waits until they hold the dataset.

        Raises:
            DataError: when the dataset cannot be sent, or does not arrive.
        """
        self.is_started = True
        from jaxtrain.data.sending import send  # its cloudpickle is for runs with workers only

        try:
            shared = send(self._dataset)
        except Exception as error:
            raise DataError(
                f"{self._name} cannot be sent to input workers, because it cannot be pickled"
                f" ({type(error).__name__}: {error}); let it open files and connections in read(),"
                f" or use --data.num_workers=0"
            ) from error
        try:
            self._check_size(os.fstat(shared).st_size)
            for worker in range(self.count):
                self._start_one(worker, shared)
        finally:
            os.close(shared)
        for worker in range(self.count):
            _, error = self._answer_of(_ready(worker))
            if error is not None:
                raised = pickle.loads(error)
                raise DataError(
                    f"{self._name} did not arrive in an input worker"
                    f" ({type(raised).__name__}: {raised}); use --data.num_workers=0"
                ) from raised

    def submit(self, number: int, rows: OrderedRows) -> None:
        """Has a batch read; at most `ahead` may be under way.

        Args:
            number: of the batch: 0, 1, 2, ...
            rows: R of them.
        """
        worker, slot = number % self.count, number // self.count % SLOTS
        # One that has just died is found when its answer is waited for.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connections[worker].send((number, slot, rows))

    def take(self, number: int) -> dict[str, np.ndarray]:
        """Waits for a batch: name -> [R, ...], in memory that batch number + SLOTS x count reuses.

        Raises:
            DataError: when the worker that was to read it has died.
            StoppedError: when `stop` was called.
            Exception: that `read` has raised.
        """
        layout, error = self._answer_of(number)
        if error is not None:
            raise pickle.loads(error)
        arrays = self._slots[number % self.count][number // self.count % SLOTS].arrays(layout)
        if not self._is_limited:
            self._limit(sum(array.nbytes for array in arrays.values()))
        return arrays

    def stop(self) -> None:
        """Kills the workers and ends every wait for them; may be called in any thread, twice."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._wake.close()
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.wait()

    def _start_one(self, worker: int, shared: int) -> None:
        ours, theirs = Pipe()
        slots = [Slot() for _ in range(SLOTS)]
        descriptors = [slot.descriptor for slot in slots]
        start = {
            "parent": os.getpid(),
            "processes": self.count * num_local_processes(),
            "ready": _ready(worker),
            "connection": theirs.fileno(),
            "dataset": shared,
            "slots": descriptors,
        }
        command = [sys.executable, "-c", _PROGRAM.format(path=sys.path), json.dumps(start)]
        # They stay in the process group of the run, which its guardian kills as a whole; the
        # signals of a terminal or a batch system are the run's to handle.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with self._lock:
                if self._stopping:
                    raise StoppedError(f"the input workers of {self._name} were stopped")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), shared, *descriptors),
                    env={**os.environ, **_ENVIRONMENT},
                )
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            theirs.close()
        self._connections.append(ours)
        self._slots.append(slots)

    def _check_size(self, size: int) -> None:
        """Refuses a dataset that lies in memory, and would fill it as a copy."""
        if 0 < memory_bytes() < 4 * size:
            raise DataError(
                f"{self._name} holds {nbytes(size)} in memory, which input workers would hold once"
                f" more, and that is over a quarter of it; read the data from files, or use"
                f" --data.num_workers=0"
            )

    def _answer_of(self, number: int) -> tuple[Any, bytes | None]:
        worker = number % self.count if number >= 0 else _ready(number)
        while number not in self._answers:
            # In the turn of its batch, which is the one to name.
            if worker in self._ends:
                raise DataError(self._ends[worker])
            listening = {c: w for w, c in enumerate(self._connections) if w not in self._ends}
            found = wait([self._wakened, *listening])
            if self._stopping:
                raise StoppedError(f"the input workers of {self._name} were stopped")
            for connection in listening.keys() & found:
                self._receive(listening[connection])
        return self._answers.pop(number)

    def _receive(self, worker: int) -> None:
        try:
            number, layout, error = self._connections[worker].recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[worker]
            how = how_it_ended(process.wait())
            self._ends[worker] = (
                f"an input worker (process {process.pid}, {worker + 1} of {self.count}) {how};"
                f" with --data.num_workers=0 the run reads by itself"
            )
            return
        self._answers[number] = layout, error

    def _limit(self, size: int) -> None:
        """Sets how many batches, of so many bytes, may be under way."""
        self._is_limited = True
        budget = memory_budget()
        wanted = SLOTS * self.count
        self.ahead = max(1, min(wanted, budget // max(1, size))) if budget else wanted
        _log.info(
            "input workers: %d processes, which read up to %d batches of %s ahead",
            self.count,
            self.ahead,
            nbytes(size),
        )
        if self.ahead < self.count:
            _log.warning(
                "data.num_workers=%d: only %d of them are busy at once, because batches of %s that"
                " are read ahead may take %s; use smaller rows or batches",
                self.count,
                self.ahead,
                nbytes(size),
                nbytes(budget),
            )


def memory_budget() -> int:
    """Bytes that this process may use for batches that are read ahead; 0: unknown."""
    return int(memory_bytes() * MEMORY_SHARE) // num_local_processes()


def _ready(worker: int) -> int:
    """Number of the answer by which a worker says that it holds the dataset; and back."""
    return -1 - worker
