"""A toy experiment with hooks at named moments, run as a script by the tests of faults.

    TOY_AT="commit_started 2 kill" python tests/faults/toy_run.py --workdir=runs/toy

TOY_AT is a list of MOMENT PASS ACTION, separated by semicolons. When the moment comes for the
PASS-th time in this process, it is printed ("at commit_started 2, 10") and

    kill   the process kills itself with SIGKILL
    ask    the thread goes on when a line comes on standard input
    hold   the thread goes on when somebody opens the FIFO at TOY_FIFO for writing
    hang   the thread does not come back from C code, like a compiler that takes an hour
    fail   the system says that the disk is full
    fill   the disk of the directory TOY_DISK is full, in earnest
    protect  that disk becomes read-only
    slow   the thread goes on after three seconds, as if a disk had been slow
    stop   the process stops itself with SIGSTOP
    raise  an error that nobody foresaw
    exit   the process ends at once with exit code 17

With TOY_SAMPLES every process notes which samples it read for which batch (`clusters.samples`).
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from jaxtrain.config import CheckpointConfig, RunConfig, field
from jaxtrain.main import Experiment, main


class Moments:
    """Counts the moments as they pass, and acts at the ones of TOY_AT."""

    def __init__(self, text: str):
        self._lock = threading.Lock()
        self._passes: dict[str, int] = {}
        self._actions = {}
        for part in filter(None, text.split(";")):
            name, number, action = part.split()
            self._actions[name, int(number)] = getattr(self, f"_{action}")

    def __call__(self, name: str, detail: object = "", *, before=lambda: None) -> None:
        """The moment is here; `before` is called first if something is to happen at it, and the
        thread may not come back.
        """
        with self._lock:
            number = self._passes[name] = self._passes.get(name, 0) + 1
        action = self._actions.get((name, number))
        if action is not None:
            if action != self._slow:
                before()
            print(f"at {name} {number}, {detail}", flush=True)
            action()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raise(self) -> None:
        raise RuntimeError("a bug")

    def _exit(self) -> None:
        os._exit(17)

    def _slow(self) -> None:
        time.sleep(3)

    def _protect(self) -> None:
        disk = os.environ["TOY_DISK"]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)

    def _ask(self) -> None:
        sys.stdin.readline()

    def _hold(self) -> None:
        with open(os.environ["TOY_FIFO"]):
            pass

    def _hang(self) -> None:
        # A mutex that is locked twice: unlike a sleep, a signal does not end the call.
        mutex = ctypes.create_string_buffer(256)
        library = ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    def _fail(self) -> None:
        raise OSError(28, "No space left on device")

    def _fill(self) -> None:
        with open(Path(os.environ["TOY_DISK"], "filler"), "wb", buffering=0) as file:
            for size in (65536, 4096, 512, 64, 8, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass


def begin(config: RunConfig) -> Moments:
    """Puts the moments of TOY_AT where they belong in the package."""
    moments = Moments(os.environ.get("TOY_AT", ""))
    moments("build", Path(config.workdir).name)
    _install(moments)
    if os.environ.get("TOY_SAMPLES"):
        import clusters

        clusters.note_samples(config.workdir)
    return moments


def watched(experiment: Experiment, config: RunConfig, moments: Moments) -> Experiment:
    """The experiment with the moment `step`, and with its last parameters kept in a file."""

    def keep(result):
        import jax

        from jaxtrain.tree import named_leaves

        if jax.process_index():
            return
        arrays = dict(named_leaves({"params": result.state.params, "ema": result.state.ema_params}))
        np.savez(Path(config.workdir, "final.npz"), step=result.step, **arrays)

    return dataclasses.replace(
        experiment, on_step=lambda step, metrics: moments("step", step), on_end=keep
    )


def _install(moments: Moments) -> None:
    from jaxtrain import checkpoint, checkpoint_orbax, evaluation, metrics, program

    for name in (
        *("save_started", "commit_started", "commit_finished", "delete_started"),
        *("restore_started", "restore_finished"),
    ):
        assert hasattr(checkpoint, f"_{name}")
        setattr(checkpoint, f"_{name}", lambda step, name=name: moments(name, step))

    compile_step, eval_batches = program.compile_step, evaluation.eval_batches
    read = checkpoint_orbax.read
    write, replace = metrics.JsonlWriter.write, os.replace

    def compiling(fn, args, **options):
        moments("compile", fn.__name__)
        compiled = compile_step(fn, args, **options)
        moments("compiled", fn.__name__)
        return compiled

    class Part:
        """What this process writes of an item of a checkpoint, with the moment `part`."""

        def __init__(self, future):
            self.future = future

        def result(self, timeout=None):
            moments("part")
            return self.future.result(timeout)

    handler = checkpoint_orbax._handler

    def handling():
        made = handler()
        save = made.async_save

        async def saving(*args, **kwargs):
            return list(map(Part, await save(*args, **kwargs)))

        made.async_save = saving
        return made

    def reading(*args):
        try:
            moments("restore_read")
        except OSError as error:
            raise checkpoint.files.BrokenCheckpointError(f"cannot be read: {error}") from error
        return read(*args)

    def evaluating(*args, **kwargs):
        for item in eval_batches(*args, **kwargs):
            moments("evaluate", "a batch")
            yield item

    def writing(self, record):
        def half():
            line = metrics.encode(record)
            with open(self.path, "ab", buffering=0) as file:
                file.write(line[: len(line) // 2])

        moments("write", record["step"], before=half)
        write(self, record)

    def replacing(source, target, **kwargs):
        name = {"metrics.jsonl": "cut", "config.json": "config"}.get(Path(target).name)
        if name:
            moments(name, Path(target).name)
        replace(source, target, **kwargs)
        if name:
            moments(f"{name}_done", Path(target).name)

    program.compile_step, evaluation.eval_batches = compiling, evaluating
    checkpoint_orbax.read, checkpoint_orbax._handler = reading, handling
    metrics.JsonlWriter.write, os.replace = writing, replacing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(RunConfig):
    num_steps: int = field(10, help="steps", on_resume="free")
    global_batch_size: int = field(8, help="rows")
    log_every_steps: int = field(1, help="cadence", on_resume="free")
    eval_every_steps: int = field(5, help="cadence", on_resume="free")
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every_steps=5))
    spoil: int = field(0, help="batch with a value that is not finite; 0: none")


def build(config: ToyConfig) -> Experiment:
    moments = begin(config)

    import looping

    from jaxtrain.data.order import sample_indices
    from jaxtrain.data.sources import ArrayDataset

    train_data = {name: array.copy() for name, array in looping.TRAIN.items()}
    if config.spoil:
        first = (config.spoil - 1) * config.global_batch_size
        row = sample_indices(config.seed, looping.NUM_ROWS, np.array([first]))
        train_data["x"][row, 0] = np.nan

    class Watched(ArrayDataset):
        """The rows, with the moment `read`."""

        def read(self, indices):
            moments("read", len(indices))
            return super().read(indices)

    experiment = Experiment(
        model=looping.NOISY,
        loss_fn=looping.loss_fn,
        train_data=Watched(train_data),
        eval_data=looping.EVAL,
    )
    return watched(experiment, config, moments)


if __name__ == "__main__":
    main(ToyConfig, build)
