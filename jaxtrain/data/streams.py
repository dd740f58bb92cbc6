"""Files as streams: decompressed, in blocks of whole lines, in parts that begin where lines do.

A large file is read in parts, by several processes. A part is a range of bytes that says nothing
of lines; these functions decide which lines, or which text, belong to it, from the file alone.
"""

import gzip
import io
import re
from collections.abc import Iterator
from typing import IO, cast

from jaxtrain.data.files import TextFile

_BLOCK_BYTES = 2**24
_SEARCHED_BYTES = 2**20
_BREAK = re.compile(rb"[!-~]\r?\n(?=[!-~])")


def open_stream(file: TextFile) -> IO[bytes]:
    """The bytes of a file, decompressed."""
    if file.compression == "gzip":
        return cast(IO[bytes], gzip.open(file.path, "rb"))
    if file.compression == "zstd":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(file.path, compression="zstd"), 2**20)
    return open(file.path, "rb")


def blocks(file: TextFile, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, whole lines): the lines that begin in start..stop; all if compressed."""
    with open_stream(file) as stream:
        offset = start
        if start:
            # A line that begins before `start` is read with the part before.
            stream.seek(start - 1)
            offset = start - 1 + len(stream.readline())
        while file.compression or offset < stop:
            size = _BLOCK_BYTES if file.compression else min(_BLOCK_BYTES, stop - offset)
            data = stream.read(size)
            if not data:
                return
            if not data.endswith(b"\n"):
                data += stream.readline()
            yield offset, data
            offset += len(data)


def lines_before(file: TextFile, offset: int) -> int:
    """Line ends before an offset of the decompressed file."""
    lines = 0
    with open_stream(file) as stream:
        while offset > 0 and (data := stream.read(min(offset, _BLOCK_BYTES))):
            lines += data.count(b"\n")
            offset -= len(data)
    return lines


def plain_part(file: TextFile, start: int, stop: int) -> bytes:
    with open(file.path, "rb", buffering=0) as stream:
        first, last = (_next_cut(stream, at, file.size) for at in (start, stop))
        stream.seek(first)
        pieces = []
        while first < last and (piece := stream.read(last - first)):
            pieces.append(piece)
            first += len(piece)
    return b"".join(pieces)


def _next_cut(stream: IO[bytes], at: int, size: int) -> int:
    """Where the part of a plain file that begins at about `at` begins."""
    if at <= 0 or at >= size:
        return min(max(at, 0), size)
    stream.seek(at)
    return at + _next_break(stream.read(_SEARCHED_BYTES))


def exact_break(data: bytes, start: int = 0) -> int:
    """Offset after the first line with no blank at either side of its end; -1 if there is none.

    There the usual pre-tokenizers begin a new piece whatever stands before, so that the tokens of
    the two halves are those of the whole.
    """
    found = _BREAK.search(data, start)
    return found.end() if found else -1


def _next_break(data: bytes) -> int:
    """An exact break if there is one, else after a line, else at a character."""
    if (exact := exact_break(data)) >= 0:
        return exact
    if b"\n" in data:
        return data.index(b"\n") + 1
    # Bytes 10xxxxxx continue a character.
    return next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
