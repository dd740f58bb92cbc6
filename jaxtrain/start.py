"""What a run begins with: a restored state, and the position in the data."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import checkpoint_files as files
from jaxtrain.agreement import together
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import RunConfig, to_dict, versions
from jaxtrain.data.order import ORDER_VERSION
from jaxtrain.errors import CheckpointError

_logger = logging.getLogger("jaxtrain")


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


def newest_record(checkpointer: Checkpointer, steps: Sequence[int]) -> tuple[int, dict[str, Any]]:
    """(step, what was saved beside it) of the newest step that has a record which can be read.

    Where none has, the newest step and {}: the restore will say what is wrong.
    """
    for step in sorted(steps, reverse=True):
        try:
            return step, checkpointer.read_host(step)
        except files.BrokenCheckpointError:
            continue
    return max(steps), {}


def restore_newest(
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
        f"{list_steps([*unreadable, *checkpointer.scan().broken]) or 'none'}."
    )


def start_at(
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


def list_steps(steps: Sequence[int]) -> str:
    """1, 2, 3"""
    return ", ".join(str(step) for step in sorted(steps))
