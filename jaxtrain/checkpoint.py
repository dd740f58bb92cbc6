"""Saving and restoring a train state.

    checkpointer = Checkpointer("runs/first/checkpoints", keep_last=3)
    checkpointer.save(100, state, {"samples_seen": 3200})   # returns when the arrays are safe
    checkpointer.check()                                    # every step: did a save fail?
    state = checkpointer.restore(100, abstract_state)       # on any mesh
    checkpointer.close()                                    # waits for the last save

`save` blocks for the copy from device to host; writing goes on in the background. On CPU nothing is
copied: JAX does not donate a buffer that a save still reads, so the next step writes to new memory.

What is safe against what: a step gets its name by one rename when it is complete and on the disk
(fsync), so a process killed at any moment (SIGKILL, out of memory) and a power loss leave whole
steps only, and an old step goes after the name of the new one is on the disk. Files that change
later are noticed by size when a step is looked for, by checksum when it is read; the run then
resumes from an older step.

Old steps are deleted when a newer one is known to be whole, by this module and not by orbax, whose
deletion leaves half a step when it is killed.
"""

import contextlib
import json
import logging
import math
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxtrain import checkpoint_files as files
from jaxtrain import checkpoint_keep as keep
from jaxtrain import checkpoint_orbax
from jaxtrain.agreement import first_failure, largest, together
from jaxtrain.checkpoint_sums import first_damaged
from jaxtrain.checkpoint_tree import (
    describe,
    initial_values,
    require_match,
    stay_initial,
)
from jaxtrain.errors import CheckpointError
from jaxtrain.output_files import sync_directory
from jaxtrain.tree import named_leaves

_logger = logging.getLogger("jaxtrain")

# A save as the processes tell each other of it, and how often they do when they wait for it.
_WRITTEN, _WRITING, _FAILED = range(3)
_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 60.0


class Checkpointer(files.CheckpointDirectory):
    """The checkpoints of one run in one directory.

    With several processes each makes one, and all call `save`, `restore`, `wait` and `close`; the
    first process alone names and deletes directories.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every_steps: int = 0,
        grace_seconds: float = math.inf,
        read_only: bool = False,
    ) -> None:
        """Opens a directory; it is made at the first save.

        Args:
            directory: of the checkpoints; relative to the working directory, `~` is expanded.
            keep_last: how many of this run's newest steps are kept.
            keep_every_steps: this run's steps divisible by it are kept for good; 0: none.
            grace_seconds: a save that takes longer, or took before it is restored, is warned of.
            read_only: write and delete nothing, whatever is called.
        """
        super().__init__(directory)
        self.read_only = read_only
        self._keep = {"keep_last": max(keep_last, 1), "keep_every_steps": keep_every_steps}
        self._grace_seconds = grace_seconds
        self._run = uuid.uuid4().hex
        self._own: list[int] = []
        self._writer: Any = None
        self._writing: tuple[int, dict[str, files.Array], float] | None = None
        self._thread: threading.Thread | None = None
        self._committed: int | None = None
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failure: CheckpointError | None = None
        self._is_reported = False

    # Writing

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> bool:
        """Begins to save; waits for the previous save, which should long be done, first.

        Args:
            step: names the checkpoint.
            state: tree of `jax.Array` and NumPy arrays; typed random keys are fine.
            host: JSON values; read before this returns.

        Returns:
            False if this run has saved this step already.

        Raises:
            CheckpointError: when this save cannot begin, or the previous one failed.
        """
        with together():
            self.wait()
            if self.read_only:
                raise CheckpointError(f"checkpoints in {self.directory} were opened to read only.")
            if step not in self._own:
                try:
                    self._make_way(step)
                except OSError as error:
                    self._failure = self._failed(step, error)
                    self.check()
        if step in self._own:
            return False
        began = time.monotonic()
        arrays, leaves = describe(state)
        self._writing = step, arrays, began
        try:
            record = json.loads(json.dumps(dict(host), allow_nan=False))
            checkpoint_orbax.begin_save(self._open(), self.directory / str(step), leaves, record)
        except CheckpointError:
            raise
        except Exception as error:
            # Alone: the others may wait for this process inside of orbax, and not for this error.
            self._failure = self._failed(step, error)
            self.check()
        self._thread = threading.Thread(
            target=self._finish, args=(step,), name=f"checkpoint-{step}"
        )
        self._thread.start()
        _save_started(step)
        return True

    def check(self) -> None:
        """Raises the error of a save that failed in the background; costs nothing otherwise."""
        if self._failure is not None:
            self._is_reported = True
            raise self._failure

    def newly_committed(self) -> list[int]:
        """The steps whose saves were committed since the last call: each is named once."""
        # Only the loop takes from the queue, so what it counts is there.
        return [self._news.get() for _ in range(self._news.qsize())]

    def wait(self) -> None:
        """Waits until the save in flight is committed, and sees that it is there."""
        if self._thread is not None:
            self._join(self._thread)
            self._thread = None
        self.check()
        if self._committed is not None and _is_primary():
            try:
                files.read_manifest(self.directory / str(self._committed))
            except files.NotWholeError as error:
                self._failure = self._failed(self._committed, error)
            self.check()

    def close(self) -> None:
        """Waits for the last save; a failure that nobody was told of is raised."""
        try:
            if not self._is_reported:
                self.wait()
        finally:
            if self._writer is not None:
                # The first tells of a save that failed, of which we have told already.
                for end in (self._writer.wait_until_finished, self._writer.close):
                    with contextlib.suppress(Exception):
                        end()
                self._writer = None

    def leave(self, kind: Any, error: BaseException | None, stack: Any) -> None:
        """Closes at the end of a `with` block, where the last save may have failed elsewhere."""
        del kind, stack
        if error is None or jax.process_count() == 1:
            self.close()
        elif self._thread is not None and not isinstance(error, CheckpointError):
            # The others write their parts of it, if they are there; what ends this process waits.
            end = time.monotonic() + _LEAVE_SECONDS
            while self._thread.is_alive() and not self._failure and time.monotonic() < end:
                self._thread.join(_POLL_SECONDS)

    def delete(self, steps: Iterable[int]) -> None:
        """Deletes whole steps of this directory, whichever run wrote them."""
        steps = list(steps)
        self._own = [step for step in self._own if step not in steps]
        if self.read_only or not _is_primary():
            return
        for step in steps:
            try:
                doomed = keep.mark_for_deletion(self.directory, step)
                _delete_started(step)
                shutil.rmtree(doomed)
            except FileNotFoundError:
                continue  # somebody else was faster, which is as well
            except OSError as error:
                _logger.warning(
                    "checkpoint step %d could not be deleted: %s", step, files.cause(error)
                )

    def set_aside(self, step: int) -> None:
        """Renames a damaged step, so that it is neither believed nor in the way, nor lost."""
        if _is_primary():
            target = keep.set_aside(self.directory, step)
            _logger.warning("the damaged checkpoint step %d is now %s", step, target.name)

    # Reading

    def restore(
        self,
        step: int,
        abstract: Any,
        *,
        subset: bool = False,
        partial: str = "",
        initial: Callable[[], Any] | None = None,
    ) -> Any:
        """Reads a state straight into the shardings that are asked for.

        Args:
            step: a whole step.
            abstract: tree of `jax.ShapeDtypeStruct` with shardings, of any mesh; `jax.Array` and
                NumPy arrays serve too (the latter are read into NumPy arrays).
            subset: whether the checkpoint may hold more than `abstract`, say optimizer state.
            partial: pattern of what is not read but stays as in `initial`; "" for nothing.
            initial: makes the whole state with its initial values; called only for `partial`.

        Returns:
            A tree like `abstract`, bit for bit what was saved.

        Raises:
            CheckpointError: when the step is absent or does not fit, listing every parameter.
            BrokenCheckpointError: when its files cannot be read.
        """
        self.wait()
        manifest = self.manifest(step)
        wanted = dict(named_leaves(abstract))
        found = dict(manifest.arrays)
        values: dict[str, Any] = {}
        if partial:
            kept = stay_initial(partial, found, wanted)
            found = {name: array for name, array in found.items() if name not in kept}
            values = initial_values(initial, [name for name in wanted if name in kept], wanted)
        reading = {name: leaf for name, leaf in wanted.items() if name not in values}
        require_match(f"checkpoint step {step}", found, reading, subset=subset)
        self._require_undamaged(manifest)
        _restore_started(step)
        values |= checkpoint_orbax.read(self.directory / str(step), reading, found)
        _restore_finished(step)
        if not self.read_only:
            if _is_primary():
                self._warn_if_slow(manifest)
            self._run = manifest.run
            whole = files.scan(self.directory).whole
            self._own = [s for s in whole if whole[s].run == manifest.run and s <= step]
        return jax.tree.unflatten(jax.tree.structure(abstract), [values[n] for n in wanted])

    # Inside

    def _require_undamaged(self, manifest: files.Manifest) -> None:
        """Reads every file once; with several processes each its share of them."""
        path = self.directory / str(manifest.step)
        part, parts = jax.process_index(), jax.process_count()
        try:
            name = first_damaged(path, manifest.sums, part=part, parts=parts)
            reason = files.CHANGED if name else ""
        except OSError as error:
            name, reason = "", files.cause(error)
        if reason:
            raise files.BrokenCheckpointError(
                f"checkpoint step {manifest.step} in {self.directory} cannot be read: "
                f"{f'file {name}: ' if name else ''}{reason}."
            )

    def _join(self, thread: threading.Thread) -> None:
        """Waits until the save in flight ends on all processes, or fails on one."""
        if jax.process_count() == 1:
            thread.join()
            return
        worst = _WRITING
        while worst == _WRITING:
            thread.join(_POLL_SECONDS)
            state = _WRITING if thread.is_alive() else _WRITTEN
            worst = largest(state if self._failure is None else _FAILED)
        if worst == _FAILED:
            self._is_reported = True
            failure = first_failure(self._failure)
            assert failure is not None
            raise failure

    def _make_way(self, step: int) -> None:
        """Moves a damaged directory out of the way of a save; a whole step is not written over."""
        if not _is_primary() or not os.path.lexists(self.directory / str(step)):
            return
        try:
            files.read_manifest(self.directory / str(step))
        except files.NotWholeError:
            self.set_aside(step)
            return
        raise CheckpointError(
            f"checkpoint step {step} in {self.directory} exists and was written by another run; "
            "give this run a directory of its own."
        )

    def _open(self) -> Any:
        """Made at the first save, when what a killed run left is cleared away too."""
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if _is_primary():
                sync_directory(self.directory.parent)
                keep.remove_leftovers(self.directory)
            self._writer = checkpoint_orbax.open_writer(self._describe_files)
        return self._writer

    def _describe_files(self) -> None:
        assert self._writing is not None
        step, arrays, began = self._writing
        path = self.directory / f"{step}{files.UNFINISHED}"
        files.write_manifest(path, step=step, run=self._run, arrays=arrays, began=began)
        _commit_started(step)

    def _finish(self, step: int) -> None:
        """Follows a save to its end, in a thread of its own."""
        try:
            self._writer.wait_until_finished()
            if _is_primary():
                manifest = files.read_manifest(self.directory / str(step))
                sync_directory(self.directory)
                self._warn_if_slow(manifest)
            self._own.append(step)
            self._committed = step
            self._news.put(step)
            _commit_finished(step)
            self.delete(keep.steps_to_delete(self._own, **self._keep))
        except BaseException as error:
            self._failure = self._failed(step, error)

    def _warn_if_slow(self, manifest: files.Manifest) -> None:
        """Says once what a save means that a preempted run has not the time for."""
        if manifest.save_seconds > self._grace_seconds:
            _logger.warning(
                "the save of step %d took %.3g s, longer than preemption_grace_seconds=%g: what "
                "kills the run so soon after SIGTERM costs the steps since the last checkpoint; "
                "save more often (--checkpoint.every_steps), or ask for more time",
                manifest.step,
                manifest.save_seconds,
                self._grace_seconds,
            )
            self._grace_seconds = math.inf

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        if _is_primary():
            shutil.rmtree(self.directory / f"{step}{files.UNFINISHED}", ignore_errors=True)
        last = None
        with contextlib.suppress(CheckpointError):
            last = max(files.scan(self.directory).whole, default=None)
        # Not chained: the frames would keep alive what the failed save was about to write.
        _logger.debug("checkpoint step %d failed", step, exc_info=error)
        return CheckpointError(
            f"checkpoint step {step} could not be written to {self.directory}: "
            f"{files.cause(error)}; the newest whole checkpoint is "
            f"{'none' if last is None else f'step {last}'}. Mend the cause and give the same "
            "command again."
        )


def _is_primary() -> bool:
    return jax.process_index() == 0


# Named moments of a save and a restore. They do nothing; the tests of what a kill leaves behind put
# their own functions in their place.


def _save_started(step: int) -> None:
    """The arrays are safe and being written in the background."""


def _commit_started(step: int) -> None:
    """All files are complete, the step has no name yet. In a background thread."""


def _commit_finished(step: int) -> None:
    """The step has its name; older ones are not deleted yet. In a background thread."""


def _delete_started(step: int) -> None:
    """An old step has lost its name, not its files. Usually in a background thread."""


def _restore_started(step: int) -> None:
    """The step fits; no array has been read."""


def _restore_finished(step: int) -> None:
    """All arrays have been read; nobody has got them yet."""
