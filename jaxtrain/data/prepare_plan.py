"""What `jaxtrain prepare` will do: the files, cut into units by their size.

A unit becomes a shard. Units depend on the names and sizes of the files and on `shard_bytes`, never
on the number of workers, so that any number of them makes the same shards.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtrain.data import array_records, parquet_files
from jaxtrain.data.documents import Reader
from jaxtrain.data.files import TextFile
from jaxtrain.errors import DataError

_MIN_SHARD_BYTES, _MAX_SHARD_BYTES = 2**20, 2**29
_NUM_SHARDS = 64
_EXPANSION = 4
"""Of compressed text, about: so many times its size are in a unit."""


class Part(NamedTuple):
    """A part of a file: bytes start..stop, row groups of Parquet, or records of ArrayRecord."""

    file: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the shards depend on."""

    files: list[list[Any]]
    """[path, relative, size, time of the last change in nanoseconds] of each."""
    units: list[list[Part]]
    tokenizer: str
    """Its hash, or bpe:SIZE."""
    end_of_document: str
    json_field: str
    replace: bool
    skip_binary: bool
    flags: str = "--"
    """What stands before the names of flags in messages; nothing depends on it."""

    @classmethod
    def from_json(cls, data: bytes) -> "Plan":
        values = json.loads(data)
        units = [[Part(*part) for part in unit] for unit in values.pop("units")]
        return cls(units=units, **values)

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=0).encode()

    def file(self, number: int) -> TextFile:
        path, relative, size, _ = self.files[number]
        return TextFile(path, relative, size)

    def reader(self, *, skip_bad: bool) -> Reader:
        """What reads documents as this plan has it."""
        return Reader(
            replace=self.replace,
            json_field=self.json_field,
            skip_binary=self.skip_binary,
            skip_bad=skip_bad,
            flags=self.flags,
        )

    def weight(self, number: int) -> int:
        """Bytes of input of a unit, for the progress display.

        A file whose parts are not of bytes counts as a whole.
        """
        return sum(
            file.size if file.is_parquet or file.is_array_record else part.stop - part.start
            for part in self.units[number]
            for file in (self.file(part.file),)
        )

    @property
    def text_bytes(self) -> int:
        """Of all the text, about: what is compressed is known when it has been read."""
        return sum(file.size * _expansion(file) for file in map(self.file, range(len(self.files))))

    @property
    def identity(self) -> str:
        """Hash of all but where the files lie and when they were written."""
        files = [[relative, size] for _, relative, size, _ in self.files]
        values = {**dataclasses.asdict(self), "files": files}
        del values["flags"]
        return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()

    def difference(self, other: "Plan") -> str:
        """What `other` has differently, in words; "" for nothing."""
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours == theirs or field.name == "flags":
                continue
            if field.name == "files":
                if len(ours) != len(theirs):
                    return f"there were {len(ours)} files and are {len(theirs)}"
                changed = next(b for a, b in zip(ours, theirs, strict=True) if a != b)
                return f"{changed[1]} has changed"
            if field.name == "units":
                return "shard_bytes was another"
            return f"{field.name} was {ours} and is {theirs}"
        return ""

    def require_unchanged_files(self) -> None:
        """Refuses files that are not what they were when the plan was made."""
        for path, relative, size, changed in self.files:
            try:
                status = os.stat(path)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            if (status.st_size, status.st_mtime_ns) != (size, changed):
                raise DataError(
                    f"{relative} changed while it was prepared; delete the output, and run this"
                    f" again"
                )


def describe(files: Sequence[TextFile]) -> list[list[Any]]:
    """The files as a plan holds them."""
    return [
        [os.path.abspath(file.path), file.relative, file.size, os.stat(file.path).st_mtime_ns]
        for file in files
    ]


def cut(files: Sequence[TextFile], shard_bytes: int, *, cut_plain: bool) -> list[list[Part]]:
    """Cuts files into units.

    Args:
        files: in their order.
        shard_bytes: of text in a unit, about; 0: a 64th of all, between 1 MiB and 512 MiB.
        cut_plain: whether a plain file may be cut, which the tokenizer has to allow.
    """
    if not shard_bytes:
        total = sum(file.size * _expansion(file) for file in files)
        shard_bytes = min(max(-(-total // _NUM_SHARDS), _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
    units: list[list[Part]] = [[]]
    filled = 0
    for number, file in enumerate(files):
        for start, stop, weight in _pieces(file, shard_bytes, cut_plain):
            if filled >= shard_bytes:
                units.append([])
                filled = 0
            unit = units[-1]
            if unit and unit[-1].file == number:
                unit[-1] = Part(number, unit[-1].start, stop)
            else:
                unit.append(Part(number, start, stop))
            filled += weight
    return units


def _expansion(file: TextFile) -> int:
    return _EXPANSION if file.compression or file.is_parquet or file.is_array_record else 1


def _pieces(file: TextFile, shard_bytes: int, cut_plain: bool) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, bytes of text) of the parts that a file may be cut into."""
    if file.is_parquet and file.size:
        yield from _row_groups(file)
    elif file.is_array_record and file.size:
        yield from _records(file, shard_bytes)
    elif file.compression or not (file.is_json_lines or cut_plain):
        yield 0, file.size, file.size * _expansion(file)
    else:
        count = max(1, file.size // shard_bytes)
        edges = [file.size * number // count for number in range(count + 1)]
        for start, stop in itertools.pairwise(edges):
            yield start, stop, stop - start


def _row_groups(file: TextFile) -> Iterator[tuple[int, int, int]]:
    try:
        sizes = parquet_files.row_group_bytes(file.path)
    except DataError:
        yield 0, 1, file.size  # whoever reads it says what is wrong
        return
    for group, size in enumerate(sizes):
        yield group, group + 1, size


def _records(file: TextFile, shard_bytes: int) -> Iterator[tuple[int, int, int]]:
    try:
        records = array_records.num_records(file.path)
    except DataError:
        yield 0, 1, file.size  # as above
        return
    size = file.size * _EXPANSION
    count = max(1, min(size // shard_bytes, records))
    for start, stop in itertools.pairwise(records * at // count for at in range(count + 1)):
        yield start, stop, size // count
