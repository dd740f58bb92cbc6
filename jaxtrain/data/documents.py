"""Documents as they really are in files.

A document is the text of a plain file, or of one record of a JSON-lines file (.jsonl, .ndjson,
also with .gz or .zst behind it), a Parquet or an ArrayRecord file, as UTF-8 bytes. A byte-order
mark is removed and Windows line ends become \\n. Bytes that are not UTF-8 are an error that names
file, line and byte offset, or are replaced and counted. Nothing is left out without being counted
in `Counts`.
"""

import codecs
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence

from jaxtrain.data import array_records, parquet_files
from jaxtrain.data.counts import Counts
from jaxtrain.data.files import TextFile
from jaxtrain.data.streams import blocks, lines_before, plain_part
from jaxtrain.errors import DataError

_BYTE_ORDER_MARK = codecs.BOM_UTF8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
# A text file has no NUL at its beginning; git, grep and file(1) take the same sign.
_SNIFFED_BYTES = 8192
_DECODED_BYTES = 2**24
_NAMED_PROBLEMS = 5


class Reader:
    """Reads documents; collects the problems of all files before it complains."""

    def __init__(
        self,
        *,
        replace: bool,
        json_field: str,
        skip_binary: bool,
        skip_bad: bool = False,
        flags: str = "--data.",
    ) -> None:
        """Starts with nothing counted.

        Args:
            replace: replace bytes that are not UTF-8; False makes them an error.
            json_field: of the records of JSON-lines, Parquet and ArrayRecord files that holds the
                text.
            skip_binary: skip files that are no text; False makes them an error.
            skip_bad: leave out and count what would be an error.
            flags: what stands before the names of flags in messages.
        """
        self._replace = replace
        self._json_field = json_field
        self._skip_binary = skip_binary
        self._skip_bad = skip_bad
        self._flags = flags
        self.counts = Counts()
        self.problems: list[str] = []
        """What is wrong; with `skip_bad` the first few of what was left out."""

    def read(self, file: TextFile) -> list[bytes]:
        """Returns the documents of a file that hold text; none for an empty or binary file."""
        return [document for documents in self.documents(file) for document in documents]

    def documents(
        self, file: TextFile, start: int = 0, stop: int | None = None
    ) -> Iterator[list[bytes]]:
        """Yields the documents of a part of a file, some at a time.

        Args:
            file: to read.
            start, stop: a `prepare_plan.Part`: bytes, row groups of a Parquet or records of an
                ArrayRecord file; None: all.
        """
        is_first = start == 0
        self.counts.files += is_first
        if not file.size:
            self.counts.empty_files.append(file.relative)
            return
        problems = len(self.problems)
        for texts in self._texts(file, start, file.size if stop is None else stop, is_first):
            documents = [text for text in texts if text]
            self.counts.documents += len(documents) if is_first or file.has_records else 0
            self.counts.empty_documents += len(texts) - len(documents)
            yield documents
            if len(self.problems) > problems and not self._skip_bad:
                return  # one problem for each file is enough to go by

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
                message = (
                    f"{file.relative} has Windows line ends and is too large to be read into"
                    f" memory, where they would be replaced; convert it (sed -i 's/\\r$//')"
                )
                self._problem(functools.partial(str, message))
                return False
            if piece.isascii():
                start += len(piece) - before
                continue
            is_last = start - before + len(piece) == len(data)
            try:
                start += codecs.utf_8_decode(memoryview(piece)[before:], "strict", is_last)[1]
            except UnicodeDecodeError as error:
                at = start + error.start
                self._problem(functools.partial(self._bad_byte, file, 0, data, at))
                return False
        return True

    def raise_problems(self) -> None:
        """Raises one DataError for all problems met so far, if there were any."""
        if not self.problems:
            return
        shown = self.problems[:_NAMED_PROBLEMS]
        more = len(self.problems) - len(shown)
        raise DataError("; ".join([*shown, *([f"and {more} more files"] if more else [])]))

    def _texts(
        self, file: TextFile, start: int, stop: int, is_first: bool
    ) -> Iterator[list[bytes]]:
        if file.is_parquet:
            yield from self._parquet(file, start, stop)
            return
        if file.is_array_record:
            yield from self._array_record(file, start, stop)
            return
        if not file.compression:
            with open(file.path, "rb", buffering=0) as stream:
                head = stream.read(_SNIFFED_BYTES)
            if not self._is_text(file, head, is_first):
                return
        if not file.is_json_lines:
            data = plain_part(file, start, stop)
            yield [self._clean(file, start, data)] if data else []
            return
        try:
            for offset, block in blocks(file, start, stop):
                yield self._records(file, offset, block)
        except (EOFError, OSError, zlib.error) as error:
            if not file.compression:
                raise
            message = f"{file.relative} cannot be decompressed ({error}); make or fetch it anew"
            self._problem(lambda: message)

    def _problem(self, message: Callable[[], str]) -> None:
        """Notes a problem; making its message may cost another pass over the file."""
        if self._skip_bad:
            self.counts.skipped_documents += 1
            if len(self.problems) >= _NAMED_PROBLEMS:
                return
        self.problems.append(message())

    def _is_text(self, file: TextFile, head: bytes | memoryview, is_first: bool = True) -> bool:
        if b"\0" not in bytes(head):
            return True
        if is_first and self._skip_binary:
            self.counts.binary_files.append(file.relative)
        elif is_first:
            self._problem(
                lambda: (
                    f"{file.relative} holds NUL bytes: it is no UTF-8 text (UTF-16, or no text at"
                    f" all); convert it (iconv -f utf-16 -t utf-8)"
                )
            )
        return False

    def _clean(self, file: TextFile, start: int, data: bytes) -> bytes:
        # isascii is many times faster than decoding, and most files pass.
        if not data.isascii():
            data = self._decodable(data, lambda at: self._bad_byte(file, start, data, at))
            data = data if start else data.removeprefix(_BYTE_ORDER_MARK)
        return data.replace(b"\r\n", b"\n") if b"\r\n" in data else data

    def _decodable(self, data: bytes, describe: Callable[[int], str]) -> bytes:
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
                self._problem(functools.partial(describe, start + error.start))
                return b""
            if self._replace:
                pieces.append(text.encode())
            start += used
        if not self._replace:
            return data
        replaced = b"".join(pieces)
        self.counts.replaced_bytes += replaced.count(_REPLACEMENT) - data.count(_REPLACEMENT)
        return replaced

    def _records(self, file: TextFile, start: int, data: bytes) -> list[bytes]:
        # Where bad records are left out one by one, json.loads meets the bytes that are not UTF-8.
        if not self._skip_bad or self._replace:
            data = self._clean(file, start, data)
        elif not start:
            data = data.removeprefix(_BYTE_ORDER_MARK)
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
                self._problem(functools.partial(_bad_record, file, start, number, text))
                if not self._skip_bad:
                    break
        return texts

    def _record(self, line: bytes) -> bytes | str:
        """Returns the text of a record, or what is wrong with it."""
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            return f"is not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
        except (ValueError, RecursionError) as error:
            return f"is not JSON ({error})"
        if not isinstance(record, dict) or self._json_field not in record:
            have = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            return (
                f"has no field {self._json_field!r} (it has: {have}); name the field with"
                f" {self._flags}json_field"
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
                    f"escapes half a surrogate pair, which is no character; {self._flags}"
                    "on_bad_bytes=replace replaces and counts them"
                )
            data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            self.counts.replaced_bytes += 1
        return data.replace(b"\r\n", b"\n")

    def _parquet(self, file: TextFile, start: int, stop: int) -> Iterator[list[bytes]]:
        name = file.relative
        try:
            for row, texts in parquet_files.read_column(file.path, self._json_field, start, stop):
                yield self._cells(f"{name}: row", row, texts)
        except KeyError as error:
            have = f"has no column {self._json_field!r} (it has: {error.args[0]})"
            message = f"{name} {have}; name the column with {self._flags}json_field"
            self._problem(lambda: message)
        except DataError as error:
            message = f"{name} cannot be read as Parquet ({error})"
            self._problem(lambda: message)

    def _array_record(self, file: TextFile, start: int, stop: int) -> Iterator[list[bytes]]:
        name = file.relative
        try:
            parts = array_records.read_texts(file.path, self._json_field, start, stop)
            for first, texts in parts:
                yield self._cells(f"{name}: record", first, texts)
        except DataError as error:
            message = f"{name} cannot be read as ArrayRecord ({error})"
            self._problem(lambda: message)

    def _cells(self, kind: str, first: int, texts: Sequence[bytes | str | None]) -> list[bytes]:
        """The documents of records, which are `kind` number first, first + 1, ..."""
        cells = []
        problems = len(self.problems)
        for number, text in enumerate(texts, first):
            cells.append(self._cell(f"{kind} {number}", text))
            if len(self.problems) > problems and not self._skip_bad:
                break
        return cells

    def _cell(self, place: str, text: bytes | str | None) -> bytes:
        """The document of a record; a str says what is wrong with it."""
        if not text:
            return b""
        if isinstance(text, str):
            more = f"; name the field with {self._flags}json_field" if "(it has" in text else ""
            self._problem(lambda: f"{place} {text}{more}")
            return b""
        if not text.isascii():
            rule = "is not UTF-8; convert it, or set"
            flag = f"{self._flags}on_bad_bytes=replace, which replaces and counts"
            text = self._decodable(
                text, lambda at: f"{place} (byte {at} of its text) {rule} {flag}"
            )
        return text.replace(b"\r\n", b"\n")

    def _bad_byte(self, file: TextFile, start: int, data: bytes | memoryview, offset: int) -> str:
        line, step = 1 + lines_before(file, start), 2**24
        for at in range(0, offset, step):
            line += bytes(data[at : min(at + step, offset)]).count(b"\n")
        return (
            f"{file.relative}:{line} (byte offset {start + offset}) is not UTF-8: byte"
            f" 0x{data[offset]:02x}; convert the file (iconv), or set {self._flags}on_bad_bytes="
            f"replace, which replaces and counts"
        )


def _bad_record(file: TextFile, start: int, number: int, rule: str) -> str:
    return f"{file.relative}:{lines_before(file, start) + number} {rule}"
