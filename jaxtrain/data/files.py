"""Which files a source names: files, folders, globs, and lists of them over several disks.

Nothing is read here but names and sizes; the texts are read by `documents.Reader`.
"""

import dataclasses
import functools
import glob
import os
import re
import sysconfig
from collections.abc import Collection, Iterator

from jaxtrain.data.reading import read_each
from jaxtrain.errors import DataError

_JSON_LINES = (".jsonl", ".ndjson")
_ARRAY_RECORD = (".array_record", ".arrayrecord")
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file found under a source."""

    path: str
    relative: str
    """Path below the source with forward slashes: the name by which the file is sorted, split
    and shown, the same on every machine."""
    size: int

    @property
    def compression(self) -> str:
        """ "gzip", "zstd", or "" of a JSON-lines file; other files are taken as they are."""
        stem, ending = os.path.splitext(self.relative.lower())
        return _COMPRESSED.get(ending, "") if stem.endswith(_JSON_LINES) else ""

    @property
    def is_json_lines(self) -> bool:
        return self.relative.lower().endswith(_JSON_LINES) or bool(self.compression)

    @property
    def is_parquet(self) -> bool:
        return self.relative.lower().endswith(".parquet")

    @property
    def is_array_record(self) -> bool:
        """TensorFlow Datasets puts the number of the file behind: .array_record-00000-of-00016."""
        ending = os.path.splitext(self.relative.lower())[1]
        return re.sub(r"-\d+-of-\d+$", "", ending) in _ARRAY_RECORD

    @property
    def has_records(self) -> bool:
        """Whether its documents are records, or a field of them."""
        return self.is_json_lines or self.is_parquet or self.is_array_record


def find_roots(source: str, flag: str = "data.source=") -> list[str]:
    """The paths that a source names, in the order in which it names them.

    Args:
        source: a path, a glob (`/disk*/text/**/*.jsonl`), or several of them with commas between.
            What exists is taken as it stands, also with a comma or a star in its name.
        flag: how messages call it.

    Raises:
        DataError: for a path that does not exist, and for a glob that nothing matches.
    """
    if source == "stdlib" or os.path.exists(source):
        return [source]
    roots = []
    for part in source.split(","):
        part = part.strip()
        if os.path.exists(part) or part == "stdlib":
            roots.append(part)
        elif found := sorted(glob.glob(part, recursive=True)):
            roots += found
        else:
            where = "matches nothing" if glob.has_magic(part) else "does not exist"
            named = f"{flag}{source}" if part == source else f"{part!r} in {flag}{source}"
            raise DataError(
                f"{named} {where}; give stdlib, or a UTF-8 text file or a folder of them, a glob,"
                f" or several with commas between"
            )
    return list(dict.fromkeys(roots))


def find_files(source: str, flag: str = "data.source=") -> list[TextFile]:
    """Returns the files of a source, root by root as it names them, each sorted by relative path.

    Args:
        source: "stdlib" (the .py files of the Python standard library, without its tests), a
            file, a folder, a glob, or several with commas between. In a folder, names that begin
            with a dot and __pycache__ are left out, and links are followed.
        flag: how messages call the source.

    Raises:
        DataError: if there are none.
    """
    roots = find_roots(source, flag)
    files: dict[str, TextFile] = {}
    for root, found in zip(
        roots, read_each(functools.partial(_files_of, flag=flag), roots), strict=True
    ):
        for file in found:
            if len(roots) > 1 and os.path.isdir(root):
                name = os.path.basename(os.path.normpath(root))
                file = dataclasses.replace(file, relative=f"{name}/{file.relative}")
            # Reached twice (a glob and a name), it is read once.
            files.setdefault(os.path.realpath(file.path), file)
    return list(files.values())


def _files_of(root: str, flag: str) -> list[TextFile]:
    if root == "stdlib":
        folder = sysconfig.get_paths()["stdlib"]
        skipped = {"test", "site-packages", "dist-packages"}
        # Its empty files are package markers; a user's may be a mistake, and are counted.
        found = [
            file for file in walk(folder, skipped) if file.relative.endswith(".py") and file.size
        ]
        missing = (
            f"no training data in {flag}stdlib: this Python has no .py files in {folder};"
            f" give a file or a folder"
        )
    elif os.path.isfile(root):
        found = [TextFile(root, os.path.basename(root), os.stat(root).st_size)]
        missing = ""
    else:
        found = list(walk(root))
        missing = f"no training data in {flag}{root}: the folder holds no files"
    if not found:
        raise DataError(missing)
    return sorted(found, key=lambda file: file.relative)


def walk(root: str, skipped_at_top: Collection[str] = ()) -> Iterator[TextFile]:
    """Yields the files below a folder, in no order: links followed, hidden ones left out.

    Args:
        root: the folder.
        skipped_at_top: names in it that are left out.
    """
    # Folders are told apart by device and inode, so that a link to an ancestor ends, and are
    # visited by name: which of two links to a folder names its files must not depend on the disk.
    seen = set()
    waiting = [("", root)]
    while waiting:
        prefix, folder = waiting.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name, reverse=True)
        for entry in entries:
            name = entry.name
            if name.startswith(".") or name == "__pycache__":
                continue
            if entry.is_dir():
                if prefix or name not in skipped_at_top:
                    waiting.append((f"{prefix}{name}/", entry.path))
            elif entry.is_file():
                yield TextFile(entry.path, prefix + name, entry.stat().st_size)
