"""Where a run begins: from its own newest checkpoint, from another run's, or from nothing.

    checkpointer, start = begin(config, abstract_state, init=...)

The rules, in this order (`--resume=auto`, the default: the same command again continues):

1. A directory that holds whole checkpoints is continued from the newest one. Fields of the
   configuration that may change are logged with both values; a difference in any other is an error.
   `--resume=never` refuses such a directory, and `--checkpoint.overwrite` turns that refusal, and
   the one for differences, into deleting the old checkpoints and starting anew. The same command
   again does not delete what it has made: a run that was started with both is continued by both,
   or found to be complete.
2. `--checkpoint.restore_step=N` goes back: the newer steps would be written again, so it takes
   `--checkpoint.overwrite` to delete them. The same command again does not go back twice.
3. A newest checkpoint that is damaged is set aside, and the one before it is taken. If there are
   damaged ones only, the run does not start from scratch by itself.
4. An empty directory: `--checkpoint.restore_from=PATH` continues another run's checkpoint, step,
   optimizer and position in the data included; `--checkpoint.partial_restore=PATTERN` leaves what
   it matches at the initial values (`head/`; `^(opt_state|step)` keeps parameters only and begins
   at step 0). PATH may be a model of Hugging Face, or what `jaxtrain import-hf` made of one: the
   run then begins at step 0 with its parameters. Without the flag the run starts from the initial
   values. `--resume=must` refuses both.

A changed number of steps changes the learning rate schedule from here on, not what was trained. A
changed batch size counts from here on: the position in the data is the number of samples seen.

Steps of one directory belong to one run: the keep policy counts and deletes whole steps that this
run (the same identity over all resumes) has written, never the newest one and never anything else.
"""

import dataclasses
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import checkpoint_files as files
from jaxtrain.agreement import from_primary, together
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint_orbax import preload
from jaxtrain.config import (
    Difference,
    RunConfig,
    resume_differences,
    to_dict,
    versions,
)
from jaxtrain.data.order import ORDER_VERSION
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf.configs import is_model_directory
from jaxtrain.hf.keep import pass_on
from jaxtrain.tree import path_str

_logger = logging.getLogger("jaxtrain")

IMPORTED = "imported_from"
"""In the origin of a checkpoint: the directory of the model that it was imported from."""

_ALL_BUT_PARAMS = "^(opt_state|ema_params|step$|key$)|/lora_[ab]$"
_MARK_SECONDS = 10.0
_WAYS_OUT = (
    "continue it with --resume=auto, give another --workdir, or delete its checkpoints and start "
    "anew with --checkpoint.overwrite"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with."""

    step: int = 0
    """Optimizer steps done."""
    state: Any = None
    """The restored state, on the devices; None: the initial values."""
    batch_sizes: tuple[tuple[int, int], ...]
    """(first step, rows of a step) of every stretch, the one that begins now included."""
    host: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The record saved with the state; empty for the initial values."""
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How this run began: `restore_from`, the step it `went_back_to`, whether it `overwrote`."""

    @property
    def samples_seen(self) -> int:
        """Rows consumed so far: the position in the data."""
        return samples_at(self.step, self.batch_sizes)

    def record(self, config: RunConfig, step: int, **extra: Any) -> dict[str, Any]:
        """What is saved beside the state of a later step, as JSON.

        Args:
            config: of the run.
            step: of the checkpoint.
            **extra: further values, e.g. `nonfinite`.
        """
        return {
            "samples_seen": samples_at(step, self.batch_sizes),
            "batch_sizes": [list(stretch) for stretch in self.batch_sizes],
            "order_version": ORDER_VERSION,
            "origin": dict(self.origin),
            "config": to_dict(config),
            "versions": versions(),
            **extra,
        }


class NoCheckpoints:
    """Stands for a `Checkpointer` in a run without a directory: nothing is written."""

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> bool:
        """Saves nothing."""
        del step, state, host
        return False

    def check(self) -> None:
        """Nothing can fail."""

    def newly_committed(self) -> list[int]:
        """Nothing is committed."""
        return []

    def wait(self) -> None:
        """Nothing is in flight."""

    def leave(self, kind: Any, error: BaseException | None, stack: Any) -> None:
        """Nothing is open."""


def samples_at(step: int, batch_sizes: Sequence[Sequence[int]]) -> int:
    """Rows consumed after `step` steps: a Python int, so it never overflows.

    Args:
        step: optimizer steps done.
        batch_sizes: (first step, rows of a step) of every stretch, the first from step 0.
    """
    ends = [first for first, _ in batch_sizes[1:]] + [step]
    return sum(
        size * (min(end, step) - first)
        for (first, size), end in zip(batch_sizes, ends, strict=True)
        if first < step
    )


def begin(
    config: RunConfig,
    abstract: Any,
    *,
    init: Callable[[], Any] | None = None,
    data_fingerprint: str = "",
) -> tuple[Checkpointer | NoCheckpoints, Start]:
    """Decides where a run begins, and restores the state if it begins from a checkpoint.

    Args:
        config: of the run.
        abstract: the train state as `jax.ShapeDtypeStruct` with shardings.
        init: makes the state with its initial values; called only for a partial restore.
        data_fingerprint: of the training data, as `Start.record` saved it: a position means
            nothing in other data.

    Raises:
        ConfigError: when the directory and the flags contradict each other.
        CheckpointError: when a checkpoint is absent, damaged or of another model.
    """
    options = config.checkpoint
    if options.partial_restore and not options.restore_from:
        raise ConfigError(
            "checkpoint.partial_restore goes with checkpoint.restore_from; a run's own checkpoints "
            "are restored whole."
        )
    if not config.workdir:
        if config.resume == "must":
            raise ConfigError("resume=must needs a workdir; there is nothing to resume from.")
        return NoCheckpoints(), _start_elsewhere(config, abstract, init)
    directory = _prepare(config.workdir) / "checkpoints"
    _logger.info("workdir %s", directory.parent)
    checkpointer = Checkpointer(
        directory,
        keep_last=options.keep_last,
        keep_every_steps=options.keep_every_steps,
        grace_seconds=config.preemption_grace_seconds,
    )
    found = from_primary(checkpointer.scan)
    steps = list(found.whole)
    if steps and not from_primary(
        lambda: _is_to_be_replaced(config, checkpointer, steps, data_fingerprint)
    ):
        return checkpointer, _continue(config, checkpointer, steps, abstract)
    if steps:
        _logger.warning(
            "checkpoint.overwrite: deleting the checkpoints of the earlier run in %s, steps %s",
            directory,
            _list(steps),
        )
        checkpointer.delete(steps)
    elif not options.overwrite and found.broken:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in found.broken.items())
        raise CheckpointError(
            f"{directory} holds damaged checkpoints only ({reasons}); give another --workdir, or "
            "start anew with --checkpoint.overwrite."
        )
    if config.resume == "must":
        raise CheckpointError(
            f"resume=must, but {directory} holds no checkpoint; give the --workdir of a run that "
            "has some, or leave --resume=must out to start from the initial values."
        )
    start = _start_elsewhere(config, abstract, init)
    if options.overwrite and config.resume == "never":
        start = dataclasses.replace(start, origin={**start.origin, "overwrote": True})
    preload()
    return checkpointer, start


def load(
    path: str | Path, abstract: Any, *, step: int = -1, option: str = "workdir"
) -> tuple[Any, dict[str, Any], int]:
    """Reads a checkpoint to look at or evaluate it; writes no file and needs no right to.

    Args:
        path: a run's directory, its `checkpoints`, or one step in there.
        abstract: what is wanted, e.g. a `TrainState` with `opt_state=None`; the checkpoint may
            hold more.
        step: which one; -1: the newest that can be read.
        option: the flag that holds the path, for errors.

    Returns:
        (state, the record saved with it, step).
    """
    directory, named_step = files.locate(path, option)
    checkpointer = Checkpointer(directory, read_only=True)
    if step < 0 and named_step is not None:
        step = named_step
    steps = [step] if step >= 0 else from_primary(checkpointer.committed_steps)
    step, state, host = _restore(checkpointer, steps, abstract, subset=True)
    _logger.info("restored step %d from %s", step, directory)
    return state, host, step


# Inside


def _prepare(workdir: str) -> Path:
    """Makes the directory of the run, which must be the same one on every process."""
    with together():
        directory = files.prepare(workdir, "workdir")
    if jax.process_count() == 1:
        return directory
    mark = directory / from_primary(lambda: f".processes-{uuid.uuid4().hex}")
    try:
        from_primary(mark.touch)
        with together():
            _wait_for_mark(mark)
    finally:
        if jax.process_index() == 0:
            mark.unlink(missing_ok=True)
    return directory


def _wait_for_mark(mark: Path) -> None:
    deadline = time.monotonic() + _MARK_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"workdir={mark.parent} on {socket.gethostname()} is not the directory that process"
                f" 0 writes to; give a directory on a file system that all processes share."
            )
        time.sleep(0.1)
        os.listdir(mark.parent)  # a network file system may remember that it was not there


def _is_to_be_replaced(
    config: RunConfig, checkpointer: Checkpointer, steps: Sequence[int], data_fingerprint: str
) -> bool:
    """Whether the whole checkpoints make way for a new run; an error if they stand in its way."""
    options = config.checkpoint
    newest, host = _newest_record(checkpointer, steps)
    place = f"{checkpointer.directory} holds checkpoints up to step {newest}"
    fixed, _ = resume_differences(host.get("config", to_dict(config)), config)
    trained_on = host.get("data_fingerprint", data_fingerprint)
    if trained_on != data_fingerprint:
        fixed.append(Difference("the training data's fingerprint", trained_on, data_fingerprint))
    source = host.get("origin", {}).get("restore_from", "")
    began_so = host.get("origin", {}).get("overwrote", False)
    if config.resume == "never" and options.overwrite and began_so and not fixed:
        is_complete = newest >= config.num_steps
        _logger.warning(
            "the run in %s began with --resume=never --checkpoint.overwrite and %s step %d; to "
            "start over once more, delete that directory or give another --workdir",
            checkpointer.directory,
            "is complete: nothing is deleted, it ended at" if is_complete else "continues from",
            newest,
        )
        return False
    if config.resume == "never":
        refusal = f"resume=never, but {place}; {_WAYS_OUT}."
    elif not host:
        return options.overwrite and config.resume != "must"
    elif fixed:
        refusal = (
            f"{place} of a run with another configuration ({'; '.join(map(str, fixed))}); give "
            "the old values, another --workdir, or delete its checkpoints and start anew with "
            "--checkpoint.overwrite."
        )
    elif options.restore_from and _source(options.restore_from) != source:
        refusal = (
            f"checkpoint.restore_from={options.restore_from}, but {place} of a run that started "
            f"from {source or 'its initial values'}; leave the flag out to continue that run, "
            "give another --workdir, or start anew with --checkpoint.overwrite."
        )
    else:
        return False
    if not options.overwrite or config.resume == "must":
        raise ConfigError(refusal)
    return True


def _newest_record(checkpointer: Checkpointer, steps: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """(step, what was saved beside it) of the newest step that has a record which can be read.

    Where none has, the newest step and {}: the restore will say what is wrong.
    """
    for step in sorted(steps, reverse=True):
        try:
            return step, checkpointer.read_host(step)
        except files.BrokenCheckpointError:
            continue
    return max(steps), {}


def _continue(
    config: RunConfig, checkpointer: Checkpointer, steps: Sequence[int], abstract: Any
) -> Start:
    """Restores the run's own checkpoint: the newest, or the one to go back to."""
    options = config.checkpoint
    newest, wanted = max(steps), options.restore_step
    newer: list[int] = []
    goes_back = False
    if wanted >= 0 and not options.restore_from:
        _, host = from_primary(lambda: _newest_record(checkpointer, steps))
        origin = host.get("origin", {})
        if newest > wanted and origin.get("went_back_to") == wanted:
            _logger.info("this run went back to step %d already; it continues", wanted)
        else:
            from_primary(lambda: checkpointer.manifest(wanted))  # an error if it is not there
            newer = [step for step in steps if step > wanted]
            goes_back = options.overwrite
            steps = [wanted]
    if newer and not options.overwrite:
        raise ConfigError(
            f"checkpoint.restore_step={wanted}, but {checkpointer.directory} holds the newer steps "
            f"{_list(newer)}, which would be written again; delete them with "
            "--checkpoint.overwrite, or give another --workdir and --checkpoint.restore_from."
        )
    step, state, host = _restore(checkpointer, steps, abstract)
    origin = dict(host.get("origin", {}))
    if newer:
        _logger.warning("checkpoint.overwrite: deleting the newer steps %s", _list(newer))
        checkpointer.delete(newer)
    if goes_back:  # also if an earlier start has deleted them and saved nothing
        origin["went_back_to"] = step
    _, free = resume_differences(host.get("config", to_dict(config)), config)
    for difference in free:
        _logger.info("changed since step %d: %s", step, difference)
    end = config.num_steps
    done = f"{step} of {end}" if step <= end else f"{step}, already past num_steps={end}"
    _logger.info("resumed from step %s", done)
    return _start(config, step, state, host, origin)


def _start_elsewhere(config: RunConfig, abstract: Any, init: Callable[[], Any] | None) -> Start:
    """Begins from another run's checkpoint if the flags name one, else from nothing."""
    options = config.checkpoint
    if not options.restore_from:
        if options.restore_step >= 0:
            raise CheckpointError(
                f"checkpoint.restore_step={options.restore_step}, but there is no checkpoint in "
                f"{config.workdir or 'a run without workdir'}; give --checkpoint.restore_from, or "
                "the --workdir of a run that has some."
            )
        _logger.info("no checkpoint yet: starting from the initial values")
        return Start(batch_sizes=((0, config.global_batch_size),))
    path = files.absolute(options.restore_from, "checkpoint.restore_from")
    if from_primary(lambda: is_model_directory(path)):
        from jaxtrain.hf import importing  # brings the transformer, which not every run has

        state = importing.begin_from(path, config, abstract, init)
        origin = {"restore_from": _source(options.restore_from)}
        return _start(config, 0, state, {}, origin)
    directory, named_step = files.locate(options.restore_from, "checkpoint.restore_from")
    source = Checkpointer(directory, read_only=True)
    step = options.restore_step if options.restore_step >= 0 else named_step
    steps = from_primary(source.committed_steps) if step is None else [step]
    partial = options.partial_restore
    is_imported = from_primary(lambda: _is_imported(source, steps))
    if is_imported and not partial:
        partial = _ALL_BUT_PARAMS
    # A base of LoRA may be kept in fewer bits than the checkpoint has.
    found = from_primary(lambda: _dtypes(source, steps))
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _as_found(leaf, found.get(f"params/{path_str(path)}", "")),
        abstract.params,
    )
    step, state, host = _restore(
        source, steps, abstract.replace(params=wanted), partial=partial, initial=init
    )
    params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), state.params, abstract.params)
    state = state.replace(params=params)
    if is_imported and state.ema_params is not None:
        state = state.replace(ema_params=jax.tree.map(jnp.copy, state.params))
    from_primary(lambda: pass_on(directory.parent, config.workdir))
    begins_at = int(np.asarray(state.step))
    _logger.info("restored step %d from %s; the run begins at step %d", step, directory, begins_at)
    origin = {"restore_from": _source(options.restore_from)}
    return _start(config, begins_at, state, host if begins_at == step else {}, origin)


def _dtypes(source: Checkpointer, steps: Sequence[int]) -> dict[str, str]:
    """Path -> dtype of the arrays of the newest step that can be read."""
    for step in sorted(steps, reverse=True):
        try:
            return {name: array.dtype for name, array in source.manifest(step).arrays.items()}
        except files.BrokenCheckpointError:
            continue
    return {}


def _as_found(leaf: jax.ShapeDtypeStruct, dtype: str) -> jax.ShapeDtypeStruct:
    """A parameter as it is read: in float32 if the checkpoint has more bits than the run keeps."""
    is_longer = dtype == "float32" and leaf.dtype == jnp.bfloat16
    return leaf.update(dtype=jnp.float32) if is_longer else leaf


def _is_imported(source: Checkpointer, steps: Sequence[int]) -> bool:
    """Whether a checkpoint is what `jaxtrain import-hf` wrote: parameters and nothing else."""
    _, host = _newest_record(source, steps) if steps else (0, {})
    return IMPORTED in host.get("origin", {})


def _restore(
    checkpointer: Checkpointer, steps: Sequence[int], abstract: Any, **options: Any
) -> tuple[int, Any, dict[str, Any]]:
    """Restores the newest of `steps` that all processes can read; says which not, and why."""
    unreadable: list[int] = []
    for step in sorted(steps, reverse=True):
        host, state = {}, None
        try:
            with together():
                host = checkpointer.read_host(step)
                state = checkpointer.restore(step, abstract, **options)
        except files.BrokenCheckpointError as error:
            if len(steps) == 1:
                raise
            _logger.warning("%s The step before it is taken.", error)
            unreadable.append(step)
            continue
        # Only now: as long as nothing else is found they stay where they are, or the next start
        # would find an empty directory and begin from scratch.
        for other in unreadable if not checkpointer.read_only else ():
            checkpointer.set_aside(other)
        return step, state, host
    raise CheckpointError(
        f"{checkpointer.directory} holds no checkpoint that can be read; damaged: "
        f"{_list([*unreadable, *checkpointer.scan().broken]) or 'none'}."
    )


def _start(
    config: RunConfig, step: int, state: Any, host: Mapping[str, Any], origin: Mapping[str, Any]
) -> Start:
    """Puts the batch size of this run behind those of the checkpoint."""
    version = host.get("order_version", ORDER_VERSION)
    if version != ORDER_VERSION:
        raise CheckpointError(
            f"checkpoint step {step} was trained on samples in order {version}, this version of "
            f"jaxtrain has order {ORDER_VERSION}; resume with the version that wrote it "
            f"({host.get('versions', {}).get('jaxtrain', 'unknown')})."
        )
    history = [(first, size) for first, size in host.get("batch_sizes", [])]
    if not history or history[-1][1] != config.global_batch_size:
        history.append((step if history else 0, config.global_batch_size))
    return Start(step=step, state=state, batch_sizes=tuple(history), host=host, origin=origin)


def _source(path: str) -> str:
    return str(files.absolute(path, "checkpoint.restore_from"))


def _list(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in sorted(steps))
