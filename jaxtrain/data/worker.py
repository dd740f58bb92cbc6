"""An input worker: a process that reads the rows it is told to, into memory shared with the run.

`workers.py` starts it, in a fresh interpreter, and talks to it. It starts no JAX backend (and
imports JAX only where a dataset's own module does), never runs the script of the run, leaves
signals to the run, and ends with it.

It reads (number, slot, rows) and answers (number, layout, error): one of the two is None. Its
first answer says whether the dataset has arrived.
"""

import json
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from jaxtrain.child_process import die_with
from jaxtrain.data.handover import Slot, receive
from jaxtrain.data.rows import checked_rows
from jaxtrain.data.sources import read_training
from jaxtrain.errors import JaxtrainError
from jaxtrain.host import note_local_processes
from jaxtrain.progress import setup_logging
from jaxtrain.stop_signals import STOP_SIGNALS


def main() -> None:
    """Answers until the run closes the connection."""
    start = json.loads(sys.argv[1])
    die_with(start["parent"])
    # The run ends its workers. Blocked until now, so that none is lost before this line; handlers
    # rather than SIG_IGN, which the programs that a dataset starts would inherit.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for descriptor in (start["connection"], start["dataset"], *start["slots"]):
        os.set_inheritable(descriptor, False)
    note_local_processes(start["processes"])
    setup_logging()
    connection = Connection(start["connection"])
    slots = [Slot(descriptor) for descriptor in start["slots"]]
    try:
        dataset = receive(start["dataset"])
        connection.send((start["ready"], None, None))
    except BaseException as error:
        connection.send((start["ready"], None, portable(error)))
        return
    while True:
        try:
            number, slot, rows = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            found = checked_rows(read_training(dataset, *rows), len(rows.indices))
            answer = number, slots[slot].write(found), None
        except BaseException as error:
            answer = number, None, portable(error)
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def portable(error: BaseException) -> bytes:
    """An exception as bytes from which `pickle.loads` makes it, or one that says the same."""
    if not isinstance(error, JaxtrainError):
        lines = "".join(traceback.format_exception(error)).rstrip()
        error.add_note(f"in an input worker (process {os.getpid()}):\n{lines}")
    import cloudpickle  # a reader without errors does not need it

    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        same: Any = RuntimeError(f"{type(error).__qualname__}: {error}")
        for note in getattr(error, "__notes__", ()):
            same.add_note(note)
        return pickle.dumps(same)
    return pickled
