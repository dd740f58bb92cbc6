"""Text as bytes: windows over documents, split into training and validation.

The documents of a source stand in one stream of bytes, each with SEPARATOR before and after it:

    S document 1 S document 2 S ... S

A row is a window of T + 1 bytes: T tokens and, shifted by one, their T targets. Windows follow
each other without overlap, so that every byte and every separator but the first is a target
exactly once; "loss_mask" is 0 where the last window runs over the end. Windows do not stop at
documents, and attention sees what stands before a separator.

SEPARATOR is 255, a byte that no UTF-8 text contains, so that the vocabulary stays 256.

The stream is held in memory: one byte per byte of text, twice that while it is made. A plain file
of MAPPED_BYTES or more is mapped instead and stays on the disk: 50 GB of text need no memory but
the page cache, and one pass at start (1 GB in about 3 s, or at the speed of the disk) that checks
that it is UTF-8. It has no separators, and must have Unix line ends. Smaller files that together
do not fit into memory are an error before they are read.

Legend: T sequence_length.
"""

import bisect
import codecs
import dataclasses
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxtrain.config import Config, field
from jaxtrain.data.files import Counts, Reader, TextFile, find_files
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.units import nbytes, several

SEPARATOR = 255
VOCAB_SIZE = 256
MAPPED_BYTES = 2**30
_COUNTED_TOKENS = 2**26

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextDataConfig(Config):
    """Which text, and how it is cut."""

    source: str = field(
        "stdlib",
        help="stdlib (the Python standard library's source), or a UTF-8 file, or a folder of them;"
        " .jsonl files hold one document per line",
    )
    sequence_length: int = field(128, unit="tokens", minimum=1, help="length of a row")
    validation_fraction: float = field(
        0.05,
        minimum=0,
        maximum=0.5,
        help="share of the text held out for evaluation, by whole files where they are many and"
        " even enough, else the end of each; 0: none",
    )
    shuffle: bool = field(True, help="take the rows in a new random order in each epoch")
    on_bad_bytes: str = field(
        "error",
        choices=("error", "replace"),
        help="bytes that are not UTF-8: error names file, line and offset; replace counts them",
    )
    json_field: str = field("text", help="field of .jsonl records that holds the text")


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """What `text_datasets` found."""

    source: str
    split: str
    """"files", "ends" or "none": how validation data was held out."""
    train_files: int
    eval_files: int
    train_tokens: int
    """Targets: bytes and separators."""
    eval_tokens: int
    counts: Counts

    vocab_size: int = VOCAB_SIZE
    separator: int = SEPARATOR

    def summary(self) -> str:
        """One line for the log."""
        held_out = {
            "files": f"{several(self.eval_files, 'file')} held out",
            "ends": "the ends of the files held out",
            "none": "nothing held out",
        }[self.split]
        notes = "".join(f"; {note}" for note in self.counts.notes())
        return (
            f"text from {self.source}: {several(self.counts.files, 'file')},"
            f" {several(self.counts.documents, 'document')}; {self.train_tokens:,} training and"
            f" {self.eval_tokens:,} validation tokens ({held_out}){notes}"
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a model whose vocabulary does not hold every token of the text.

        Raises:
            ConfigError: with both sizes.
        """
        if vocab_size < self.vocab_size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is smaller than the {self.vocab_size} tokens of "
                f"the text (bytes); use --model.vocab_size={self.vocab_size} or more."
            )

    def facts(self, held_out: TextDataset | None) -> dict[str, Any]:
        """What a run records about its text; entropies where counting takes seconds at most."""
        facts: dict[str, Any] = {
            "data": self.summary(),
            "vocab_size": self.vocab_size,
            "train_tokens": self.train_tokens,
            "eval_tokens": self.eval_tokens,
        }
        if held_out is not None and 2 < held_out.num_tokens <= _COUNTED_TOKENS:
            facts["validation_entropy_order_1"] = held_out.conditional_entropy(1)
            facts["validation_entropy_order_2"] = held_out.conditional_entropy(2)
        return facts


def encode(text: str) -> np.ndarray:
    """Returns the tokens of a text: its UTF-8 bytes, int32."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Iterable[int]) -> str:
    """Returns the text of tokens; a separator becomes a line end, a broken character U+FFFD."""
    data = bytes(10 if token == SEPARATOR else int(token) for token in tokens)
    return data.decode("utf-8", "replace")


def text_datasets(config: TextDataConfig) -> tuple[TextDataset, TextDataset | None, TextInfo]:
    """Returns (training rows, validation rows or None, what was found) for a configuration.

    Raises:
        DataError: for a source without text, bytes that are not UTF-8, or too little text.
        ConfigError: for an option that nothing in the source would read.
    """
    # Read here, whether or not this source needs them: the run records which options are read.
    length, fraction, shuffle = config.sequence_length, config.validation_fraction, config.shuffle
    replace, json_field = config.on_bad_bytes == "replace", config.json_field
    # A lone file that is no text is a mistake; in a folder, pictures are to be expected.
    skip_binary = not os.path.isfile(config.source)
    reader = Reader(replace=replace, json_field=json_field, skip_binary=skip_binary)
    try:
        files = find_files(config.source)
        if json_field != TextDataConfig.json_field and not any(f.is_json_lines for f in files):
            raise ConfigError(
                f"data.json_field={json_field} is read from .jsonl files only, and"
                f" data.source={config.source} has none; leave it out"
            )
        texts = _read_all(files, reader, config.source)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    reader.raise_problems()
    if not texts:
        notes = "; ".join(reader.counts.notes())
        raise DataError(f"no training data in data.source={config.source}: {notes}")
    split, train, held_out = split_texts(texts, fraction)
    datasets = []
    for kind, part in (("training", train), ("validation", held_out)):
        streams, paths = _streams(part)
        name = f"{kind} text of {config.source}"
        datasets.append(TextDataset(streams, length, name=name, shuffle=shuffle, paths=paths))
    info = TextInfo(
        config.source,
        split,
        len(train),
        len(held_out),
        datasets[0].num_tokens,
        datasets[1].num_tokens,
        reader.counts,
    )
    if info.train_tokens < length:
        raise DataError(
            f"not enough data in data.source={config.source}: {info.train_tokens} training tokens"
            f" (and {info.eval_tokens} held out) are fewer than one row of"
            f" data.sequence_length={length}; use a smaller one, or more text"
        )
    if reader.counts.notes():
        _log.warning("%s", info.summary())
    return datasets[0], datasets[1] if held_out else None, info


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


def _read_all(files: list[TextFile], reader: Reader, source: str) -> list[Text]:
    """Reads or maps every file; leaves out those without text."""
    mapped = {file for file in files if file.size >= MAPPED_BYTES and not file.is_json_lines}
    size = sum(file.size for file in files if file not in mapped)
    available = _available_memory()
    if 2 * size > available:
        raise DataError(
            f"data.source={source} has {nbytes(size)} in files that are read into memory, which"
            f" takes twice as much, and {nbytes(available)} are free; use fewer files, or join"
            f" plain ones into files of {nbytes(MAPPED_BYTES)} or more, which stay on the disk"
        )
    texts = []
    for file in files:
        if file in mapped:
            data = np.asarray(np.memmap(file.path, np.uint8, "r"))
            _log.info("checking %s, %s", file.relative, nbytes(file.size))
            if reader.check(file, data.data):
                start = len(codecs.BOM_UTF8) * data[:3].tobytes().startswith(codecs.BOM_UTF8)
                texts.append(Text(file.relative, [], data[start:], file.path))
        elif documents := reader.read(file):
            texts.append(Text(file.relative, documents))
    return texts


def _available_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not say, no limit."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63


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


def _streams(texts: list[Text]) -> tuple[list[np.ndarray], list[str]]:
    """Returns (streams: all documents in memory as one, each map as its own; paths of maps)."""
    separator = bytes([SEPARATOR])
    pieces = [separator]
    for text in texts:
        for document in text.documents:
            pieces += (document, separator)
    maps = [(text.mapped, text.path) for text in texts if text.mapped is not None]
    streams = [data for data, _ in maps]
    if len(pieces) > 1:
        streams.insert(0, np.frombuffer(b"".join(pieces), np.uint8))
    return streams, [path for _, path in maps]
