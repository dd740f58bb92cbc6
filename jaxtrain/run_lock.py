"""One run at a time in a directory.

    with hold(config.workdir):
        ...

Two starts in one directory would cut each other's records and delete each other's checkpoints.
What only reads (`--evaluate`, sampling, `jaxtrain checkpoints`) takes no lock.
"""

import contextlib
from collections.abc import Iterator

from jaxtrain.checkpoint_files import prepare
from jaxtrain.errors import CheckpointError
from jaxtrain.file_lock import lock_file

LOCK = ".lock"
"""In the directory of a run, where it stays."""


@contextlib.contextmanager
def hold(workdir: str) -> Iterator[None]:
    """Keeps other starts out of a directory for as long as the block lasts.

    One process of a run calls it.

    Args:
        workdir: made if absent; "" locks nothing.

    Raises:
        ConfigError, OutputError: when the directory cannot be written to.
        CheckpointError: when another process holds the lock, naming it.
    """
    if not workdir:
        yield
        return
    directory = prepare(workdir, "workdir")

    def refuse(holder: str) -> CheckpointError:
        return CheckpointError(
            f"workdir={directory} is in use by {holder}; wait until that run has ended, or give "
            "another --workdir."
        )

    with lock_file(directory / LOCK, refuse):
        yield
