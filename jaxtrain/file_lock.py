"""An advisory lock on a file that the kernel releases when its holder dies, SIGKILL included."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain import phases
from jaxtrain.output_files import writing

_logger = logging.getLogger("jaxtrain")

_POLL_SECONDS = 0.2
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def lock_file(path: Path, refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Holds the lock for as long as the block lasts; it is not waited for.

    Where the file system has no locks, one line says so.

    Args:
        path: of the file; made if absent, and left there. What it says counts only while it is
            locked.
        refuse: who holds it -> the error to raise.

    Raises:
        OutputError: when the file cannot be made.
    """
    with writing(path):
        # Not inherited by programs that the holder starts: they may outlive it.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(file, path, refuse)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        try:
            yield
        finally:
            _write(file, {})
    finally:
        os.close(file)


def when_free[T](
    attempt: Callable[[], T], held: type[Exception], say: Callable[[Exception], None]
) -> T:
    """What `attempt` returns, which is called again as long as it raises `held`.

    Args:
        attempt: takes a lock.
        held: says that another process has it.
        say: called with the first of these errors.
    """
    is_said = False
    while True:
        try:
            return attempt()
        except held as error:
            if not is_said:
                say(error)
                is_said = True
        # Whoever waits is not stuck, as long as the one who holds the lock is not.
        phases.report(phases.Phase.START)
        time.sleep(_POLL_SECONDS)


def _take(file: int, path: Path, refuse: Callable[[str], Exception]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise refuse(_holder(file)) from None
        _logger.warning(
            "%s cannot be locked (%s): do not start a second run in its directory",
            path,
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
