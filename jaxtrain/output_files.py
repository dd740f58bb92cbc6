"""Files of a run beside its checkpoints: whole or not at all, also on a full disk.

Whatever the system refuses becomes one `OutputError`, and leaves no half of anything behind.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxtrain.errors import OutputError

BROKEN = ".broken"
"""Ends the name of a damaged file or checkpoint that was set aside; nothing reads it."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what the system says against writing a file into one sentence."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{os.fspath(path)} could not be written: {error.strerror or error}; make room or mend "
            "the disk, then the same command continues the run"
        ) from error


class AppendFile:
    """A file that grows by whole pieces.

    A piece goes out in one write(), so a kill can tear the last one only, and what a full disk
    took of a piece is cut off again.

    Raises:
        OutputError: from every method, when the system refuses.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a file, made with its directory if absent."""
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self.descriptor = os.open(self.path, flags, 0o644)
            sync_directory(self.path.parent)

    def append(self, data: bytes) -> None:
        """Appends all of `data` or nothing."""
        written = 0
        with writing(self.path):
            try:
                while written < len(data):  # a nearly full disk takes a part
                    written += os.write(self.descriptor, data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    size = os.fstat(self.descriptor).st_size
                    os.ftruncate(self.descriptor, max(size - written, 0))
                raise

    def sync(self) -> None:
        """Waits until everything is on the disk (fsync)."""
        with writing(self.path):
            sync(self.descriptor)

    def close(self) -> None:
        """Syncs and closes, once."""
        if self.descriptor < 0:
            return
        try:
            self.sync()
        finally:
            descriptor, self.descriptor = self.descriptor, -1
            with writing(self.path):
                os.close(descriptor)


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a whole file so that a reader, or a kill, finds the old one or the new one.

    Raises:
        OutputError: when the system refuses; the old file stands then.
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the name `path` at the end of the block, when it is on the disk.

    After an error it is gone and the old one stands.

    Raises:
        OutputError: when the system refuses.
    """
    path = Path(path)
    scratch = scratch_path(path)
    with writing(path):
        try:
            with open(scratch, "wb") as file:
                yield file
                file.flush()
                sync(file.fileno())
            os.replace(scratch, path)
        except Exception:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def scratch_path(path: Path) -> Path:
    """Where the new content of a file is written before it takes the name."""
    return path.with_name(f".{path.name}.new")


def set_aside(path: Path, name: str = "") -> Path:
    """Copies a damaged file to a name that nothing reads, before it is mended or written anew.

    Args:
        path: of the file, which stays.
        name: of the copy, without its ending; empty: that of the file.

    Returns:
        The copy: `NAME.broken`, with a number if there is one already.
    """
    target = unused(path.with_name((name or path.name) + BROKEN))
    with open(path, "rb") as source, replacing(target) as copy:
        shutil.copyfileobj(source, copy)
    return target


def unused(path: Path) -> Path:
    """The path, with a number behind its name if there is something already."""
    target, count = path, 1
    while os.path.lexists(target):
        count += 1
        target = path.with_name(f"{path.name}-{count}")
    return target


def sync(descriptor: int) -> None:
    """Waits until a file is on the disk (fsync), where the file system can do that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of a directory, or none at all.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power loss."""
    directory = os.open(path, os.O_RDONLY)
    try:
        sync(directory)
    finally:
        os.close(directory)
