"""The documents of token shards, to be packed: where they are, without their tokens in memory.

All shards of a directory, one behind the other, are its stream. A document is the end of the
document before it (or the E at the beginning of a shard) and its tokens, as in packed text: its
last target is the E that ends it. It belongs to the shard in which it begins, also where it goes
on in the next ones: the documents of a shard are one run of the stream, and the end of each run is
held out (`split_documents`). An E before which a document ends, and none begins, is a target only.

What stays in memory is a few numbers for each shard. The files of the indices, 8 bytes for each
document, are read one by one, and all lengths are together only while a plan is made.

Legend: N tokens of all documents of one side, D documents, M positions asked for, S segments (runs
of tokens in one shard).
"""

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxtrain.data.manifest import Manifest
from jaxtrain.data.mapped import require_size
from jaxtrain.errors import DataError

Cut = Callable[[np.ndarray, int, float], int]
"""(where documents begin and the last one ends, tokens, fraction) -> where to hold out from."""


class _Stream:
    """The shards of a directory, mapped, as one stream of tokens."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tokens = [manifest.tokens_of(shard) for shard in manifest.shards]
        self.paths = [os.path.join(manifest.root, shard.file) for shard in manifest.shards]
        self.firsts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        """Position of each shard's first token, and the end: int64 [shards + 1]."""

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (number of a shard, start, stop inside of it) of a range of the stream."""
        number = int(np.searchsorted(self.firsts, start, side="right")) - 1
        while start < min(stop, self.firsts[-1]):
            first, end = int(self.firsts[number]), min(stop, int(self.firsts[number + 1]))
            if end > start:
                yield number, start - first, end - first
            start, number = end, number + 1

    def token_at(self, position: int) -> int:
        """The token at a position; E at the end."""
        for number, start, _ in self.segments(position, position + 1):
            return int(self.tokens[number][start])
        return self.manifest.end_of_document

    def begins(self, number: int, count: int = -1) -> np.ndarray:
        """Where the first `count` documents of a shard begin, each with the E before it, int64."""
        shard = self.manifest.shards[number]
        count = shard.documents if count < 0 else min(count, shard.documents)
        index = self.manifest.index_of(shard, count)
        return np.maximum(index - 1, 0) + self.firsts[number]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Documents of one shard that stand on one side: a range of its directory's stream."""

    stream: _Stream
    number: int
    """Of the shard in which they begin."""
    start: int
    stop: int
    documents: int

    def starts(self) -> np.ndarray:
        """Where they begin and the last one ends, in the stream: int64 [documents + 1]."""
        begins = self.stream.begins(self.number)
        inside = begins[(begins > self.start) & (begins < self.stop)]
        return np.concatenate([[self.start], inside, [self.stop]]).astype(np.int64)


class ShardDocuments:
    """What `PackedDataset` packs; see the methods of the same names of `pack.Documents`."""

    def __init__(self, runs: list[_Run]) -> None:
        """Takes runs that `split_documents` made."""
        self._runs = [run for run in runs if run.stop > run.start]
        self._tokens: list[np.ndarray] = []
        self._paths: list[str] = []
        starts, offsets, digests, cuts = [0], [], [], []
        for run in self._runs:
            for number, start, stop in run.stream.segments(run.start, run.stop):
                self._tokens.append(run.stream.tokens[number])
                self._paths.append(run.stream.paths[number])
                checksum = run.stream.manifest.shards[number].checksum
                digests.append(f"{checksum}:{start}:{stop}")
                offsets.append(start - starts[-1])
                starts.append(starts[-1] + stop - start)
            # Of a document that is cut the target is what follows there.
            cuts.append((starts[-1], run.stream.token_at(run.stop)))
        self._starts, self._offsets = np.array(starts, np.int64), np.array(offsets, np.int64)
        self._digests = digests
        self._sizes = [os.stat(path).st_size for path in self._paths]
        self._cuts = np.array(cuts, np.int64).reshape(-1, 2)
        self._vocab_size = min((r.stream.manifest.vocab_size for r in self._runs), default=2**32)

    def __len__(self) -> int:
        return sum(run.documents for run in self._runs)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [D]; read from the indices each time."""
        pieces = [np.diff(run.starts()) for run in self._runs]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    @property
    def lengths_key(self) -> str:
        """Hash of all that the lengths depend on."""
        digest = hashlib.blake2b(digest_size=16)
        for run in self._runs:
            shard, first = run.stream.manifest.shards[run.number], run.stream.firsts[run.number]
            place = f"{shard.tokens} {run.start - first} {run.stop - first}"
            digest.update(f"{shard.index_checksum} {place};".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory: none, as the tokens are maps of files."""
        return 0

    @property
    def streams(self) -> list[np.ndarray]:
        """Every run with the E that ends it, in arrays [tokens]."""
        streams = []
        for run in self._runs:
            segments = run.stream.segments(run.start, run.stop + 1)
            streams.append(np.concatenate([run.stream.tokens[n][a:b] for n, a, b in segments]))
        return streams

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens at positions 0..N - 1, uint32 [M].

        Raises:
            DataError: for a shard that shrank, or holds a token outside its vocabulary.
        """
        found = np.empty(len(positions), np.uint32)
        if not len(positions):
            return found
        segment_M = np.searchsorted(self._starts, positions, side="right") - 1
        order_M = np.argsort(segment_M, kind="stable")
        segments, firsts = np.unique(segment_M[order_M], return_index=True)
        for number, chosen in zip(segments, np.split(order_M, firsts[1:]), strict=True):
            path = self._paths[number]
            require_size(path, self._sizes[number])
            tokens = self._tokens[number][positions[chosen] + self._offsets[number]]
            if (largest := int(tokens.max())) >= self._vocab_size:
                raise DataError(
                    f"{path} holds the token {largest}, outside its vocabulary of"
                    f" {self._vocab_size}; it is damaged, or its manifest is of other shards"
                )
            found[chosen] = tokens
        return found

    def take_loss_mask(self, positions: np.ndarray) -> None:
        return None

    def end_targets(self, ends: np.ndarray, end_of_document: int) -> np.ndarray:
        targets = np.full(len(ends), end_of_document, np.int64)
        at = np.searchsorted(self._cuts[:, 0], ends)
        is_cut = self._cuts[np.minimum(at, len(self._cuts) - 1), 0] == ends
        targets[is_cut] = self._cuts[at[is_cut], 1]
        return targets

    def add_to(self, digest: Any) -> None:
        digest.update(" ".join([self.lengths_key, *self._digests]).encode())


def split_documents(
    manifests: tuple[Manifest, ...], fraction: float, cut: Cut
) -> tuple[ShardDocuments, ShardDocuments]:
    """Returns the documents to train on, and those that are held out.

    Args:
        manifests: of the directories.
        fraction: of the documents of each shard that is held out; 0: none.
        cut: says from where on. Where that is inside of a document, both sides get a part of it.
    """
    train, held_out = [], []
    for run in itertools.chain(*(map(_runs, map(_Stream, manifests)))):
        first, last = run, dataclasses.replace(run, start=run.stop, documents=0)
        if fraction:
            starts, size = run.starts(), run.stop + 1 - run.start
            # As the index of a shard counts: the E before a document is not its own.
            at = run.start + max(cut(starts + 1 - run.start, size, fraction), 1) - 1
            at = min(at, run.stop)
            num_before = int(np.searchsorted(starts[:-1], at))
            first = dataclasses.replace(run, stop=at, documents=num_before)
            num_after = run.documents - int(np.searchsorted(starts[1:-1], at, side="right"))
            last = dataclasses.replace(run, start=at, documents=num_after)
        train.append(first)
        held_out.append(last)
    return ShardDocuments(train), ShardDocuments(held_out)


def _runs(stream: _Stream) -> Iterator[_Run]:
    """Yields for each shard the run of the documents that begin in it, if there are any."""
    run: _Run | None = None
    is_ended = True
    for number, shard in enumerate(stream.manifest.shards):
        begins = stream.begins(number, 2).tolist()
        continued = run if shard.continues and not is_ended else None
        stop = int(stream.firsts[number + 1])
        if shard.tokens:
            is_ended = stream.tokens[number][-1] == stream.manifest.end_of_document
            stop -= int(is_ended)
        if continued is not None:
            # The document before ends where the next one begins, or where the shard does.
            run = dataclasses.replace(continued, stop=begins[1] if len(begins) > 1 else stop)
            begins = begins[1:]
        if begins:
            if run is not None:
                yield run
            documents = shard.documents - (continued is not None)
            run = _Run(stream, number, begins[0], stop, documents)
    if run is not None:
        yield run
