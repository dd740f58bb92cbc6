"""One run at a time in a directory: an advisory lock that the kernel releases when its holder dies.

    with hold(config.workdir):
        ...

Two starts in one directory would cut each other's records and delete each other's checkpoints.
What only reads (`--evaluate`, sampling, `jaxtrain checkpoints`) takes no lock.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.checkpoint_files import prepare
from jaxtrain.errors import CheckpointError
from jaxtrain.output_files import writing

LOCK = ".lock"
"""In the directory of a run, where it stays; what it says counts only while it is locked."""

_logger = logging.getLogger("jaxtrain")

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def hold(workdir: str) -> Iterator[None]:
    """Keeps other starts out of a directory for as long as the block lasts.

    One process of a run calls it. Any end of the process ends the lock, SIGKILL included. Where the
    file system has no locks, one line says so.

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
    with writing(directory / LOCK):
        # Not inherited by programs that the run starts: they may outlive it.
        file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(file, directory)
        _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()})
        try:
            yield
        finally:
            _write(file, {})
    finally:
        os.close(file)


def _take(file: int, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise CheckpointError(
                f"workdir={directory} is in use by {_holder(file)}; wait until that run has ended, "
                "or give another --workdir."
            ) from None
        _logger.warning(
            "workdir %s cannot be locked (%s): do not start a second run in it",
            directory,
            error.strerror,
        )


def _holder(file: int) -> str:
    """Who wrote into the lock file; the kernel has said already that somebody holds it."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _write(file: int, content: dict[str, object]) -> None:
    """Says who holds the lock; a full disk is no reason not to run."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(content).encode() if content else b"", 0)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
