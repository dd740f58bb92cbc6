"""Which steps of a run are kept, and how the others leave a directory of checkpoints.

No kill at any moment leaves half a step under the name of a whole one: a step loses its name first.
"""

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.checkpoint_files import DELETING, UNFINISHED, is_step
from jaxtrain.output_files import BROKEN, unused

_logger = logging.getLogger("jaxtrain")


def steps_to_delete(steps: Iterable[int], *, keep_last: int, keep_every_steps: int) -> list[int]:
    """Which of a run's whole steps go: all but the newest and the ones kept for good."""
    steps = sorted(steps)
    newest = set(steps[-keep_last:])
    return [
        step
        for step in steps
        if step not in newest and not (keep_every_steps and step % keep_every_steps == 0)
    ]


def mark_for_deletion(directory: Path, step: int) -> Path:
    """Takes a step its name, so that no kill while it is deleted leaves half a step."""
    doomed = directory / f"{step}{DELETING}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(directory / str(step), doomed)
    return doomed


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged step that is in the way; what it holds is left to its owner."""
    target = unused(directory / f"{step}{BROKEN}")
    os.rename(directory / str(step), target)
    return target


def remove_leftovers(directory: Path) -> None:
    """Deletes what interrupted saves and interrupted deletions of steps left behind."""
    for entry in sorted(directory.iterdir()):
        for suffix in (UNFINISHED, DELETING):
            name = entry.name.removesuffix(suffix)
            if entry.name != name and is_step(name) and entry.is_dir():
                _logger.info("deleting %s, left by a run that was interrupted", entry)
                shutil.rmtree(entry, ignore_errors=True)
