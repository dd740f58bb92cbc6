"""A run whose data two workers read, as a script; its dataset does something at a chosen batch.

    WORKERS_AT="kill" python tests/faults/workers_run.py --workdir=runs/toy

The worker that reads the batch from row 40 on, the sixth, prints "at row 40, PID" and

    exit   ends with exit code 3
    kill   kills itself with SIGKILL
    hang   does not return

What runs at import is run once, by the run itself: the workers do not import this script.
"""

import dataclasses
import os
import signal
import threading

import numpy as np

from jaxtrain.config import CheckpointConfig, RunConfig, field
from jaxtrain.data.config import DataConfig
from jaxtrain.main import Experiment, main

print(f"imported by {os.getpid()}", flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersConfig(RunConfig):
    num_steps: int = field(10, help="steps", on_resume="free")
    global_batch_size: int = field(8, help="rows")
    log_every_steps: int = field(1, help="cadence", on_resume="free")
    eval_every_steps: int = field(0, help="cadence", on_resume="free")
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every_steps=0))
    data: DataConfig = field(default_factory=lambda: DataConfig(num_workers="2"))


class Rows:
    """The toy's rows, in order."""

    name, fingerprint, shuffle = "rows", "rows", False

    def __init__(self, arrays, action):
        self._arrays, self._action = arrays, action

    def __len__(self):
        return len(self._arrays["x"])

    def read(self, indices):
        if indices[0] in (0, 8):
            print(f"reader {os.getpid()}", flush=True)
        if indices[0] == 40 and self._action:
            print(f"at row 40, {os.getpid()}", flush=True)
            if self._action == "exit":
                os._exit(3)
            if self._action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._action == "hang":
                threading.Event().wait()
        return {name: np.asarray(array[indices]) for name, array in self._arrays.items()}


def build(config):
    del config
    import looping

    return Experiment(
        model=looping.MODEL,
        loss_fn=looping.loss_fn,
        train_data=Rows(looping.TRAIN, os.environ.get("WORKERS_AT", "")),
    )


main(WorkersConfig, build)  # without a guard: D3's script that initialises at import
