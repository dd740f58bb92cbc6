"""Holding out a part of texts for validation: whole files, or the end of each."""

import bisect
import dataclasses
import hashlib
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The documents of a file: in memory, or as a map of the whole file."""

    relative: str
    documents: list[bytes]
    mapped: np.ndarray | None = None
    path: str = ""
    """Of the file that is mapped."""

    @property
    def size(self) -> int:
        return sum(map(len, self.documents)) if self.mapped is None else len(self.mapped)


def split_texts(texts: list[Text], fraction: float) -> tuple[str, list[Text], list[Text]]:
    """Holds out about `fraction` of the bytes; returns (how, training, held out).

    By whole files ("files"): those whose name hashes below `fraction`, so that a file stays on
    its side when others come or go. Where that holds out less than a quarter or more than four
    times of what was asked for, because the files are few or uneven, the end of each ("ends").
    """
    if fraction == 0:
        return "none", texts, []
    train, held_out = [], []
    for text in texts:
        (held_out if _hash(text.relative) < fraction * 2**64 else train).append(text)
    share = sum(text.size for text in held_out) / sum(text.size for text in texts)
    if fraction / 4 <= share <= fraction * 4 and train:
        return "files", train, held_out
    halves = [_cut(text, fraction) for text in texts]
    train = [first for first, _ in halves if first.size]
    held_out = [last for _, last in halves if last.size]
    return "ends" if held_out else "none", train, held_out


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _cut(text: Text, fraction: float) -> tuple[Text, Text]:
    """Cuts off the end of a text: between documents, or else after a line, or a character."""
    target = text.size - round(text.size * fraction)
    if text.mapped is not None:
        cut = target + _next_break(bytes(text.mapped[target : target + 2**16]))
        first, last = text.mapped[:cut], text.mapped[cut:]
        return (
            Text(text.relative, [], first, text.path),
            Text(text.relative, [], last, text.path),
        )
    # The document that the cut falls into goes to training whole, if enough is left after it.
    ends = list(itertools.accumulate(map(len, text.documents)))
    number = min(bisect.bisect_right(ends, target), len(ends) - 1)
    document = text.documents[number]
    left = (text.size - ends[number]) / text.size
    cut = len(document)
    if left < fraction / 4:
        cut = target - (ends[number] - len(document))
        cut += _next_break(document[cut:])
    first = [*text.documents[:number], document[:cut]]
    last = [document[cut:], *text.documents[number + 1 :]]
    return (
        Text(text.relative, [document for document in first if document]),
        Text(text.relative, [document for document in last if document]),
    )


def _next_break(data: bytes) -> int:
    """Offset after the first line in the first half of `data`, else of the next character."""
    end = data.find(b"\n", 0, len(data) // 2)
    if end >= 0:
        return end + 1
    # Bytes 10xxxxxx continue a character.
    return next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
