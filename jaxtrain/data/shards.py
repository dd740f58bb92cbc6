"""Token shards as datasets: any row of text that `jaxtrain prepare` made, at the price of a copy.

The files are described in `manifest.py`. Windows do not run from one shard into the next.

Legend: T sequence_length.
"""

import dataclasses
import glob
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.files import find_roots
from jaxtrain.data.manifest import FORMAT, MANIFEST, UNFINISHED, Manifest
from jaxtrain.data.pack import PackedDataset
from jaxtrain.data.reading import read_each
from jaxtrain.data.shard_documents import split_documents
from jaxtrain.data.token_info import TokenInfo
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.units import several

PLANS = ".plans"
"""Directory beside the shards that keeps the plans of packed rows; it may be deleted."""

_SPARE_DESCRIPTORS = 256


def shard_roots(source: str) -> list[str]:
    """The directories of shards that a source names; none if it names text.

    Raises:
        DataError: for a preparation that has not come to its end.
        ConfigError: for a source of both shards and text.
    """
    roots = find_roots(source)
    found = []
    for root in roots:
        if root == "stdlib":
            continue
        is_unfinished = os.path.isdir(os.path.join(root, UNFINISHED))
        if is_unfinished and not os.path.exists(os.path.join(root, MANIFEST)):
            raise DataError(
                f"the preparation of {root} has not come to its end; run the same jaxtrain prepare"
                f" again, it goes on where it stopped"
            )
        if _is_shards(root):
            found.append(root)
    if found and len(found) < len(roots):
        other = next(root for root in roots if root not in found)
        raise ConfigError(
            f"data.source={source} names token shards ({found[0]}) and other files ({other}); give"
            f" one kind"
        )
    return found


def _is_shards(root: str) -> bool:
    path = os.path.join(root, MANIFEST)
    if not os.path.isfile(path):
        return False
    if glob.glob(os.path.join(glob.escape(root), "shard-*.bin")):
        return True
    try:
        return json.loads(Path(path).read_bytes())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardInfo(TokenInfo):
    """What `shard_datasets` found."""

    manifests: tuple[Manifest, ...]
    packing: str = ""
    """How full the rows are, and what a token sees; empty: not packed."""

    @property
    def tokenizer_id(self) -> tuple[str, int]:
        return self.manifests[0].tokenizer_hash, self.manifests[0].end_of_document

    def summary(self) -> str:
        documents = sum(manifest.documents for manifest in self.manifests)
        shards = sum(len(manifest.shards) for manifest in self.manifests)
        held_out = "the ends of the shards" if self.eval_tokens else "nothing"
        return (
            f"token shards of {self.source}: {several(shards, 'shard')},"
            f" {several(documents, 'document')}; {self.train_tokens:,} training and"
            f" {self.eval_tokens:,} validation tokens ({held_out} held out); tokenizer"
            f" {self.tokenizer}{'; ' if self.packing else ''}{self.packing}"
        )

    def facts(self, held_out: Any) -> dict[str, Any]:
        return {**super().facts(held_out), "tokenizer_hash": self.manifests[0].tokenizer_hash}


def shard_datasets(
    source: str,
    sequence_length: int,
    *,
    validation_fraction: float = 0.0,
    shuffle: bool = True,
    packing: str = "none",
    cross_document_attention: bool = False,
) -> tuple[TextDataset | PackedDataset, TextDataset | PackedDataset | None, ShardInfo]:
    """Returns (training rows, validation rows or None, what was found) of token shards.

    The last documents of each shard are held out, about `validation_fraction` of its tokens; where
    documents are few, the end of its last one. So a shard keeps its split when others come or go.

    Args:
        source: directories, globs, or several with commas between, all of one tokenizer.
        sequence_length: T.
        validation_fraction: share of the tokens that is held out; 0: none.
        shuffle: False: training takes the rows in order.
        packing: a policy of `pack_plan`, or "none". The plans are kept in PLANS of the first
            directory.
        cross_document_attention: of `PackedDataset`.

    Raises:
        DataError: for missing or damaged files, shards of different tokenizers, too few tokens.
    """
    roots = shard_roots(source)
    if not roots:
        raise DataError(f"data.source={source} is no directory of token shards")
    manifests = tuple(read_each(Manifest.read, roots))
    _check_agreement(manifests)
    _allow_descriptors(sum(len(manifest.shards) for manifest in manifests))
    names = [f"{kind} shards of {source}" for kind in ("training", "validation")]
    if packing == "none":
        train, held_out = _windows(manifests, sequence_length, validation_fraction, names, shuffle)
    else:
        train, held_out = (
            PackedDataset(
                documents,
                sequence_length,
                policy=packing,
                end_of_document=manifests[0].end_of_document,
                cross_document_attention=cross_document_attention,
                cache_dir=os.path.join(roots[0], PLANS) if len(documents) else None,
                name=name,
                shuffle=shuffle,
            )
            for name, documents in zip(
                names, split_documents(manifests, validation_fraction, _cut), strict=True
            )
        )
    info = ShardInfo(
        source=source,
        train_tokens=train.num_tokens,
        eval_tokens=held_out.num_tokens,
        vocab_size=manifests[0].vocab_size,
        tokenizer=manifests[0].tokenizer,
        manifests=manifests,
        packing=train.summary() if isinstance(train, PackedDataset) else "",
    )
    if train.num_tokens < sequence_length:
        raise DataError(
            f"not enough data in data.source={source}: {train.num_tokens} training tokens are fewer"
            f" than one row of data.sequence_length={sequence_length}; use a smaller one, or more"
            f" text"
        )
    return train, held_out if held_out.num_tokens else None, info


def _windows(
    manifests: tuple[Manifest, ...],
    sequence_length: int,
    fraction: float,
    names: list[str],
    shuffle: bool,
) -> list[TextDataset]:
    """Rows of the stream of each shard: those to train on, and those that are held out."""
    parts: list[list[tuple[np.ndarray, str, str]]] = [[], []]
    for manifest in manifests:
        for shard in manifest.shards:
            tokens, path = manifest.tokens_of(shard), os.path.join(manifest.root, shard.file)
            cut = len(tokens)
            if fraction:
                cut = _cut(manifest.index_of(shard), len(tokens), fraction)
            parts[0].append((tokens[:cut], path, f"{shard.checksum}:0:{cut}"))
            if cut < len(tokens):
                # From the end of the document before, so that its first token is a target.
                first = max(0, cut - 1)
                piece = (tokens[first:], path, f"{shard.checksum}:{first}:{len(tokens)}")
                parts[1].append(piece)
    return [
        TextDataset(
            [tokens for tokens, _, _ in pieces],
            sequence_length,
            name=name,
            shuffle=shuffle,
            paths=[path if tokens.size else "" for tokens, path, _ in pieces],
            digests=[digest for _, _, digest in pieces],
            vocab_size=manifests[0].vocab_size,
        )
        for name, pieces in zip(names, parts, strict=True)
    ]


def _cut(index: np.ndarray, num_tokens: int, fraction: float) -> int:
    """Where the held-out end of a shard begins: a document's beginning, if one is near enough."""
    target = num_tokens - round(num_tokens * fraction)
    nearest = int(index[np.abs(index - target).argmin()])
    is_near = fraction / 4 <= (num_tokens - nearest) / max(num_tokens, 1) <= fraction * 4
    return nearest if is_near and nearest > 1 else target


def _check_agreement(manifests: tuple[Manifest, ...]) -> None:
    first = manifests[0]
    for other in manifests[1:]:
        for name in ("tokenizer_hash", "vocab_size", "end_of_document", "dtype"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise DataError(
                    f"{first.root} and {other.root} are not of one tokenizer: {name} is {ours} and"
                    f" {theirs}; prepare both with the same one"
                )


def _allow_descriptors(needed: int) -> None:
    """Every map keeps its file open: raises this process's limit where they are many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed + _SPARE_DESCRIPTORS <= soft:
        return
    wanted = needed + 4 * _SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise DataError(
            f"{several(needed, 'shard')} are mapped at once, and this process may open {hard}"
            f" files; raise that (ulimit -n {wanted}), or prepare larger shards (--shard_bytes)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
