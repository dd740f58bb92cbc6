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

from jaxtrain import checkpoint_files as files
from jaxtrain.agreement import from_primary, together
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint_orbax import preload
from jaxtrain.config import (
    Difference,
    RunConfig,
    resume_differences,
    to_dict,
)
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.restore_from import absolute_source, begin_elsewhere
from jaxtrain.start import Start, list_steps, newest_record, restore_newest, start_at

_logger = logging.getLogger("jaxtrain")

_MARK_SECONDS = 10.0
_WAYS_OUT = (
    "continue it with --resume=auto, give another --workdir, or delete its checkpoints and start "
    "anew with --checkpoint.overwrite"
)


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
        return NoCheckpoints(), begin_elsewhere(config, abstract, init)
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
            list_steps(steps),
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
    start = begin_elsewhere(config, abstract, init)
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
    step, state, host = restore_newest(checkpointer, steps, abstract, subset=True)
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
    newest, host = newest_record(checkpointer, steps)
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
    elif options.restore_from and absolute_source(options.restore_from) != source:
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


def _continue(
    config: RunConfig, checkpointer: Checkpointer, steps: Sequence[int], abstract: Any
) -> Start:
    """Restores the run's own checkpoint: the newest, or the one to go back to."""
    options = config.checkpoint
    newest, wanted = max(steps), options.restore_step
    newer: list[int] = []
    goes_back = False
    if wanted >= 0 and not options.restore_from:
        _, host = from_primary(lambda: newest_record(checkpointer, steps))
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
            f"{list_steps(newer)}, which would be written again; delete them with "
            "--checkpoint.overwrite, or give another --workdir and --checkpoint.restore_from."
        )
    step, state, host = restore_newest(checkpointer, steps, abstract)
    origin = dict(host.get("origin", {}))
    if newer:
        _logger.warning("checkpoint.overwrite: deleting the newer steps %s", list_steps(newer))
        checkpointer.delete(newer)
    if goes_back:  # also if an earlier start has deleted them and saved nothing
        origin["went_back_to"] = step
    _, free = resume_differences(host.get("config", to_dict(config)), config)
    for difference in free:
        _logger.info("changed since step %d: %s", step, difference)
    end = config.num_steps
    done = f"{step} of {end}" if step <= end else f"{step}, already past num_steps={end}"
    _logger.info("resumed from step %s", done)
    return start_at(config, step, state, host, origin)
