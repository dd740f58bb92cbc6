"""Checksums of the files of a checkpoint, and their way to the disk.

A size does not show that bytes have changed: a disk, a copy or a power loss can leave a file of
zeros of the right length. So the manifest of a step holds the CRC-32 of every file (zlib's: 4 GB/s
on one core here, blake2b 0.5 GB/s; it is to find accidents, not forgers).

Files are read in a few threads, since checksums, reading and fsync all release Python's lock.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.output_files import sync as sync_file
from jaxtrain.output_files import sync_directory

_CHUNK_BYTES = 8 * 2**20
_MAX_THREADS = 8


def checksum(path: Path, *, sync: bool = False) -> int:
    """The CRC-32 of a file's bytes.

    Args:
        path: of the file.
        sync: wait until the file is on the disk (fsync).
    """
    value, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, max(path.stat().st_size, 1))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
        if sync:
            sync_file(file.fileno())
    return value


def sync_files(directory: Path, names: Iterable[str]) -> dict[str, int]:
    """Puts files on the disk, and the names of all below a directory.

    Args:
        directory: of a step.
        names: of its files, relative to it.

    Returns:
        The checksum of every file.
    """
    sums = _of_each(directory, names, lambda path: checksum(path, sync=True))
    for place in [*directory.rglob("*/"), directory]:
        sync_directory(place)
    return sums


def first_damaged(directory: Path, sums: Mapping[str, int], *, part: int, parts: int) -> str:
    """A file whose bytes are not those that were written; "" if there is none.

    Args:
        directory: of a step.
        sums: the checksums of its files.
        part: which of the files are read: of all, ordered by size, each `parts`-th from here.
        parts: how many processes share the work.
    """
    names = sorted(sums, key=lambda name: (-(directory / name).stat().st_size, name))[part::parts]
    found = _of_each(directory, names, checksum)
    return next((name for name in names if found[name] != sums[name]), "")


def _of_each(
    directory: Path, names: Iterable[str], compute: Callable[[Path], int]
) -> dict[str, int]:
    names = list(names)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "checksum") as threads:
        return dict(zip(names, threads.map(compute, [directory / n for n in names]), strict=True))
