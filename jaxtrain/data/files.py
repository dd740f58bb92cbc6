"""Text files as they really are: which there are, and the documents in them.

A document is the text of a plain file, or of one record of a JSON-lines file (.jsonl, .ndjson),
as UTF-8 bytes. A byte-order mark is removed and Windows line ends become \\n. Bytes that are not
UTF-8 are an error that names file, line and byte offset, or are replaced and counted. Nothing is
left out without being counted in `Counts`.
"""

import codecs
import dataclasses
import json
import os
import sysconfig
from collections.abc import Iterator

from jaxtrain.errors import DataError
from jaxtrain.units import several

_BYTE_ORDER_MARK = codecs.BOM_UTF8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
_JSON_LINES = (".jsonl", ".ndjson")
# A text file has no NUL at its beginning; git, grep and file(1) take the same sign.
_SNIFFED_BYTES = 8192
_DECODED_BYTES = 2**24
_NAMED_PROBLEMS = 5


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file found under a source."""

    path: str
    relative: str
    """Path below the source with forward slashes: the name by which the file is sorted, split
    and shown, the same on every machine."""
    size: int

    @property
    def is_json_lines(self) -> bool:
        return self.relative.lower().endswith(_JSON_LINES)


@dataclasses.dataclass
class Counts:
    """What was met while reading; everything that did not become a document as it stood."""

    files: int = 0
    documents: int = 0
    empty_files: list[str] = dataclasses.field(default_factory=list)
    binary_files: list[str] = dataclasses.field(default_factory=list)
    empty_documents: int = 0
    replaced_bytes: int = 0
    """Runs of bytes that were not UTF-8; each became one U+FFFD."""
    dropped_records: int = 0
    """Records that were no JSON once their bad bytes had been replaced."""

    def notes(self) -> list[str]:
        """One phrase for each thing worth a warning."""
        empty, binary = _name_some(self.empty_files), _name_some(self.binary_files)
        return [
            f"{several(number, noun)} {what}"
            for number, noun, what in (
                (len(self.empty_files), "empty file", f"skipped ({empty})"),
                (len(self.binary_files), "binary file", f"skipped ({binary})"),
                (self.empty_documents, "document", "without text"),
                (self.replaced_bytes, "bad byte", "replaced"),
                (self.dropped_records, "broken record", "dropped"),
            )
            if number
        ]


def find_files(source: str) -> list[TextFile]:
    """Returns the files of a source, sorted by relative path.

    Args:
        source: "stdlib" (the .py files of the Python standard library, without its tests), a
            file, or a folder. In a folder, names that begin with a dot and __pycache__ are left
            out, and links are followed.

    Raises:
        DataError: if there are none.
    """
    if source == "stdlib":
        root = sysconfig.get_paths()["stdlib"]
        skipped = {"test", "site-packages", "dist-packages"}
        # Its empty files are package markers; a user's may be a mistake, and are counted.
        found = [
            file for file in _walk(root, skipped) if file.relative.endswith(".py") and file.size
        ]
        missing = (
            f"no training data in data.source=stdlib: this Python has no .py files in {root};"
            f" give a file or a folder"
        )
    elif os.path.isfile(source):
        found = [TextFile(source, os.path.basename(source), os.stat(source).st_size)]
        missing = ""
    elif os.path.isdir(source):
        found = list(_walk(source, set()))
        missing = f"no training data in data.source={source}: the folder holds no files"
    else:
        found = []
        missing = (
            f"data.source={source} does not exist; give stdlib, or a UTF-8 text file or a folder"
            f" of them"
        )
    if not found:
        raise DataError(missing)
    return sorted(found, key=lambda file: file.relative)


def _walk(root: str, skipped_at_top: set[str]) -> Iterator[TextFile]:
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


class Reader:
    """Reads documents; collects the problems of all files before it complains."""

    def __init__(self, *, replace: bool, json_field: str, skip_binary: bool) -> None:
        """Starts with nothing counted.

        Args:
            replace: replace bytes that are not UTF-8; False makes them an error.
            json_field: of the records of JSON-lines files that holds the text.
            skip_binary: skip files that are no text; False makes them an error.
        """
        self._replace = replace
        self._json_field = json_field
        self._skip_binary = skip_binary
        self._problems: list[str] = []
        self.counts = Counts()

    def read(self, file: TextFile) -> list[bytes]:
        """Returns the documents of a file that hold text; none for an empty or binary file."""
        self.counts.files += 1
        with open(file.path, "rb", buffering=0) as stream:
            data = stream.read()
        if not data:
            self.counts.empty_files.append(file.relative)
            return []
        if not self._is_text(file, data[:_SNIFFED_BYTES]):
            return []
        data = self._clean(file, data)
        texts = self._records(file, data) if file.is_json_lines else [data]
        documents = [text for text in texts if text]
        self.counts.documents += len(documents)
        self.counts.empty_documents += len(texts) - len(documents)
        return documents

    def check(self, file: TextFile, data: memoryview) -> bool:
        """Checks a plain file that is used as it is, without reading it into memory at once.

        Returns:
            Whether it is text; what is wrong with it otherwise is kept for `raise_problems`.
        """
        self.counts.files += 1
        if not self._is_text(file, data[:_SNIFFED_BYTES]):
            return False
        self.counts.documents += 1
        start = 0
        while start < len(data):
            # With one byte before it: a line end may lie across two pieces.
            before = min(start, 1)
            piece = bytes(data[start - before : start + _DECODED_BYTES])
            if b"\r\n" in piece:
                self._problems.append(
                    f"{file.relative} has Windows line ends and is too large to be read into"
                    f" memory, where they would be replaced; convert it (sed -i 's/\\r$//')"
                )
                return False
            if piece.isascii():
                start += len(piece) - before
                continue
            is_last = start - before + len(piece) == len(data)
            try:
                start += codecs.utf_8_decode(memoryview(piece)[before:], "strict", is_last)[1]
            except UnicodeDecodeError as error:
                self._problems.append(_bad_byte(file, data, start + error.start))
                return False
        return True

    def raise_problems(self) -> None:
        """Raises one DataError for all problems met so far, if there were any."""
        if not self._problems:
            return
        shown = self._problems[:_NAMED_PROBLEMS]
        more = len(self._problems) - len(shown)
        raise DataError("; ".join([*shown, *([f"and {more} more files"] if more else [])]))

    def _is_text(self, file: TextFile, head: bytes | memoryview) -> bool:
        if b"\0" not in bytes(head):
            return True
        if self._skip_binary:
            self.counts.binary_files.append(file.relative)
        else:
            self._problems.append(
                f"{file.relative} holds NUL bytes: it is no UTF-8 text (UTF-16, or no text at all);"
                f" convert it (iconv -f utf-16 -t utf-8)"
            )
        return False

    def _clean(self, file: TextFile, data: bytes) -> bytes:
        # isascii is many times faster than decoding, and most files pass.
        if not data.isascii():
            data = self._decodable(file, data).removeprefix(_BYTE_ORDER_MARK)
        return data.replace(b"\r\n", b"\n") if b"\r\n" in data else data

    def _decodable(self, file: TextFile, data: bytes) -> bytes:
        """Returns the data with what is not UTF-8 replaced; notes it as a problem otherwise."""
        view = memoryview(data)
        pieces = []
        start = 0
        errors = "replace" if self._replace else "strict"
        while start < len(data):
            piece = view[start : start + _DECODED_BYTES]
            try:
                text, used = codecs.utf_8_decode(piece, errors, start + len(piece) == len(data))
            except UnicodeDecodeError as error:
                self._problems.append(_bad_byte(file, view, start + error.start))
                return b""
            if self._replace:
                pieces.append(text.encode())
            start += used
        if not self._replace:
            return data
        replaced = b"".join(pieces)
        self.counts.replaced_bytes += replaced.count(_REPLACEMENT) - data.count(_REPLACEMENT)
        return replaced

    def _records(self, file: TextFile, data: bytes) -> list[bytes]:
        texts = []
        for number, line in enumerate(data.split(b"\n"), start=1):
            if not line.strip():
                continue
            text = self._record(line)
            if isinstance(text, bytes):
                texts.append(text)
            elif self._replace and _REPLACEMENT in line:
                self.counts.dropped_records += 1
            else:
                self._problems.append(f"{file.relative}:{number} {text}")
                break
        return texts

    def _record(self, line: bytes) -> bytes | str:
        """Returns the text of a record, or what is wrong with it."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"is not JSON ({error})"
        if not isinstance(record, dict) or self._json_field not in record:
            have = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            return (
                f"has no field {self._json_field!r} (it has: {have}); name the field with"
                f" --data.json_field"
            )
        text = record[self._json_field]
        if not isinstance(text, str):
            return f"has {type(text).__name__}, not text, in field {self._json_field!r}"
        try:
            data = text.encode()
        except UnicodeEncodeError:
            # JSON can escape half of a surrogate pair, which is no character.
            if not self._replace:
                return (
                    "escapes half a surrogate pair, which is no character; --data.on_bad_bytes="
                    "replace replaces and counts them"
                )
            data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            self.counts.replaced_bytes += 1
        return data.replace(b"\r\n", b"\n")


def _bad_byte(file: TextFile, data: memoryview, offset: int) -> str:
    line, step = 1, 2**24
    for start in range(0, offset, step):
        line += bytes(data[start : min(start + step, offset)]).count(b"\n")
    return (
        f"{file.relative}:{line} (byte offset {offset}) is not UTF-8: byte 0x{data[offset]:02x};"
        f" convert the file (iconv), or set --data.on_bad_bytes=replace, which replaces and counts"
    )


def _name_some(names: list[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
