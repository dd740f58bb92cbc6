"""Text as bytes: windows over documents, split into training and validation.

The documents of a source stand in one stream of bytes, each with SEPARATOR before and after it:

    S document 1 S document 2 S ... S

A row is a window of T + 1 bytes: T tokens and, shifted by one, their T targets. Windows follow
each other without overlap, so that every byte and every separator but the first is a target
exactly once; "loss_mask" is 0 where the last window runs over the end. Windows do not stop at
documents, and attention sees what stands before a separator.

With packing, rows hold documents that do not see each other (`pack.py`): a document is its
separator and its bytes, and its last target is the next separator. Targets are the same as without.

SEPARATOR is 255, a byte that no UTF-8 text contains, so that the vocabulary stays 256.

The stream is held in memory: one byte per byte of text, twice that while it is made. A plain file
of MAPPED_BYTES or more is mapped instead and stays on the disk: 50 GB of text need no memory but
the page cache, and one pass at start (1 GB in about 3 s, or at the speed of the disk) that checks
that it is UTF-8. It has no separators, and must have Unix line ends. Smaller files that together
do not fit into memory are an error before they are read.

Legend: T sequence_length.
"""

import codecs
import dataclasses
import functools
import logging
import os
from collections.abc import Callable

import numpy as np

from jaxtrain.data.counts import Counts, parse_on_error
from jaxtrain.data.documents import Reader
from jaxtrain.data.files import TextFile, find_files
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.mixture_flag import parse_mixture
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.data.reading import read_each
from jaxtrain.data.shards import ShardInfo, shard_datasets, shard_roots
from jaxtrain.data.text_cache import cached_shards
from jaxtrain.data.text_config import TextDataConfig, refuse_unread_options
from jaxtrain.data.text_split import Text, split_texts
from jaxtrain.data.token_info import TokenInfo
from jaxtrain.data.tokenizing import SEPARATOR, ByteTokenizer, Tokenizer
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.units import nbytes, several

MAPPED_BYTES = 2**30
_NAMED_PROBLEMS = 5

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInfo(TokenInfo):
    """What `text_datasets` found in text; its targets are bytes and separators."""

    split: str
    """"files", "ends" or "none": how validation data was held out."""
    train_files: int
    eval_files: int
    counts: Counts
    packing: str = ""
    """How full the rows are, and what a token sees; empty: not packed."""

    def summary(self) -> str:
        held_out = {
            "files": f"{several(self.eval_files, 'file')} held out",
            "ends": "the ends of the files held out",
            "none": "nothing held out",
        }[self.split]
        packing = [self.packing] if self.packing else []
        notes = "".join(f"; {note}" for note in [*packing, *self.counts.notes()])
        return (
            f"text from {self.source}: {several(self.counts.files, 'file')},"
            f" {several(self.counts.documents, 'document')}; {self.train_tokens:,} training and"
            f" {self.eval_tokens:,} validation tokens ({held_out}){notes}"
        )


def text_datasets(
    config: TextDataConfig, *, is_alone: bool = True
) -> tuple[TextDataset | PackedDataset, TextDataset | PackedDataset | None, TextInfo | ShardInfo]:
    """Returns (training rows, validation rows or None, what was found) for `config.source`.

    A source of token shards gives rows of its tokens, any other one of bytes. For a mixture see
    `text_mixture.lm_datasets`.

    Args:
        config: without a mixture.
        is_alone: whether options that nothing in the source reads are refused.

    Raises:
        DataError: for a source without text, bytes that are not UTF-8, or too little text.
        ConfigError: for an option that nothing in the source would read.
    """
    if config.mixture:
        raise ConfigError(f"data.mixture={config.mixture} is for lm_datasets, not text_datasets")
    # Read here, whether or not this source needs them: the run records which options are read.
    length, fraction, shuffle = config.sequence_length, config.validation_fraction, config.shuffle
    limit, max_bytes = parse_on_error(config.on_error), int(config.cache_gib * 2**30)
    options = {"json_field": config.json_field, "on_bad_bytes": config.on_bad_bytes}
    if is_alone:
        refuse_unread_options(config, [config.source])
    shards = config.source if shard_roots(config.source) else ""
    if config.cache_dir and not shards:
        shards = cached_shards(
            config.source,
            config.cache_dir,
            max_bytes=max_bytes,
            on_error=config.on_error,
            **options,
        )
    if shards:
        return shard_datasets(
            shards,
            length,
            validation_fraction=fraction,
            shuffle=shuffle,
            packing=config.packing,
            cross_document_attention=config.cross_document_attention,
        )
    # A lone file that is no text is a mistake; in a folder, pictures are to be expected.
    skip_binary = not os.path.isfile(config.source)
    reader = functools.partial(
        Reader,
        replace=config.on_bad_bytes == "replace",
        json_field=config.json_field,
        skip_binary=skip_binary,
        skip_bad=limit is not None,
    )
    counts = Counts()
    try:
        files = find_files(config.source)
        texts = _read_all(files, reader, counts, config.source, limit)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    if not texts:
        notes = "; ".join(counts.notes())
        raise DataError(f"no training data in data.source={config.source}: {notes}")
    split, train, held_out = split_texts(texts, fraction)
    datasets = []
    for kind, part in (("training", train), ("validation", held_out)):
        streams, paths = _streams(part)
        name = f"{kind} text of {config.source}"
        if config.packing == "none":
            data = TextDataset(streams, length, name=name, shuffle=shuffle, paths=paths)
        else:
            data = _packed(streams, paths, config, name)
        datasets.append(data)
    info = TextInfo(
        source=config.source,
        split=split,
        train_files=len(train),
        eval_files=len(held_out),
        train_tokens=datasets[0].num_tokens,
        eval_tokens=datasets[1].num_tokens,
        counts=counts,
        packing="" if config.packing == "none" else datasets[0].summary(),
    )
    if info.train_tokens < length:
        raise DataError(
            f"not enough data in data.source={config.source}: {info.train_tokens} training tokens"
            f" (and {info.eval_tokens} held out) are fewer than one row of"
            f" data.sequence_length={length}; use a smaller one, or more text"
        )
    if counts.notes():
        _log.warning("%s", info.summary())
    return datasets[0], datasets[1] if held_out else None, info


def tokenizer_of(config: TextDataConfig) -> Tokenizer:
    """The tokenizer of what `text_datasets` returns: that of the shards, or bytes.

    Raises:
        DataError: if the shards, beside which it lies, are no longer there.
    """
    sources = [source for _, source in parse_mixture(config.mixture).values()]
    roots = shard_roots(sources[0] if sources else config.source)
    return Manifest.read(roots[0]).open_tokenizer() if roots else ByteTokenizer()


def _packed(
    streams: list[np.ndarray], paths: list[str], config: TextDataConfig, name: str
) -> PackedDataset:
    mapped = [path for path in paths if path]
    if mapped:
        raise ConfigError(
            f"data.packing={config.packing} packs documents, and {mapped[0]} is used as it lies on"
            f" the disk, as a single one, because it has {nbytes(MAPPED_BYTES)} or more; leave"
            " data.packing=none, or make it a file for each document, or .jsonl records"
        )
    stream = streams[0] if streams else np.array([SEPARATOR], np.uint8)
    return PackedDataset(
        Documents(stream, np.flatnonzero(stream == SEPARATOR)),
        config.sequence_length,
        policy=config.packing,
        end_of_document=SEPARATOR,
        cross_document_attention=config.cross_document_attention,
        name=name,
        shuffle=config.shuffle,
    )


def _read_all(
    files: list[TextFile],
    make_reader: Callable[[], Reader],
    counts: Counts,
    source: str,
    limit: int | None,
) -> list[Text]:
    """Reads or maps every file, several at once; leaves out those without text.

    Args:
        files: to read.
        make_reader: makes one for each file.
        counts: gets what they counted.
        source: in messages.
        limit: how many documents may be left out because something is wrong with them.
    """
    mapped = {file for file in files if file.size >= MAPPED_BYTES and not file.has_records}
    size = sum(file.size for file in files if file not in mapped)
    available = _available_memory()
    if 2 * size > available:
        raise DataError(
            f"data.source={source} has {nbytes(size)} in files that are read into memory, which"
            f" takes twice as much, and {nbytes(available)} are free; use fewer files, or join"
            f" plain ones into files of {nbytes(MAPPED_BYTES)} or more, which stay on the disk"
        )

    def read(file: TextFile) -> tuple[Reader, Text | None]:
        reader = make_reader()
        if file in mapped:
            return reader, _map(file, reader)
        documents = reader.read(file)
        return reader, Text(file.relative, documents) if documents else None

    texts, all_of_them = [], make_reader()
    for reader, text in read_each(read, files):
        counts.add(dataclasses.asdict(reader.counts))
        all_of_them.problems += reader.problems
        if text is not None:
            texts.append(text)
    if limit is None:
        all_of_them.raise_problems()
    elif counts.skipped_documents:
        first = "; ".join(all_of_them.problems[:_NAMED_PROBLEMS])
        skipped = several(counts.skipped_documents, "bad document")
        if counts.skipped_documents > limit:
            raise DataError(f"{skipped}, and data.on_error=skip:{limit}; the first ones: {first}")
        _log.warning("left out %s: %s", skipped, first)
    return texts


def _map(file: TextFile, reader: Reader) -> Text | None:
    """A plain file where it lies; None if it is no text."""
    data = np.asarray(np.memmap(file.path, np.uint8, "r"))
    _log.info("checking %s, %s", file.relative, nbytes(file.size))
    if not reader.check(file, data.data):
        return None
    start = len(codecs.BOM_UTF8) * data[:3].tobytes().startswith(codecs.BOM_UTF8)
    return Text(file.relative, [], data[start:], file.path)


def _available_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not say, no limit."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63


def _streams(texts: list[Text]) -> tuple[list[np.ndarray], list[str]]:
    """Returns (streams: all documents in memory as one, each map as its own; paths of the maps)."""
    separator = bytes([SEPARATOR])
    pieces = [separator]
    for text in texts:
        for document in text.documents:
            pieces += (document, separator)
    maps = [(text.mapped, text.path) for text in texts if text.mapped is not None]
    if len(pieces) > 1:
        maps.insert(0, (np.frombuffer(b"".join(pieces), np.uint8), ""))
    return [data for data, _ in maps], [path for _, path in maps]
