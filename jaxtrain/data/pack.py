"""Packed rows: documents of any length in rows of one, kept apart by segment ids.

A row holds pieces of documents one after the other, then padding. In every row:

    tokens         int32    the documents' tokens; 0 in padding
    targets        int32    the next token of the same document, also where a row ends inside it
    loss_mask      float32  weight of the target; 0 in padding and at a document's last token, whose
                            target is `end_of_document` if there is such an id
    segment_ids    int32    1, 2, ... for the pieces of a row; 0 in padding
    positions      int32    0, 1, ... from the beginning of each piece; 0 in padding

Attention and loss that respect them (`transformer` and `lm_loss` do) compute for each document what
they would compute for it alone. Over all rows each token of the documents stands in one place, and
each but the first of a document is a target once.

Legend: N tokens of all documents, D documents, R rows asked for, P pieces in them, M tokens in them
without padding, T sequence_length.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.data.entropy import conditional_entropy
from jaxtrain.data.mapped import file_sizes, hash_contents, is_map, require_size
from jaxtrain.data.pack_plan import PackPlan, pack_plan
from jaxtrain.errors import DataError
from jaxtrain.units import several

if TYPE_CHECKING:
    from jaxtrain.data.shard_documents import ShardDocuments

_log = logging.getLogger(__name__)


class Documents:
    """Documents as one flat array of tokens and where each begins; arrays may be maps of files."""

    def __init__(self, tokens: Any, starts: Any, loss_mask: Any = None) -> None:
        """Takes the arrays as they are, without a copy.

        Args:
            tokens: integers [N].
            starts: [D + 1], ascending; document d is tokens[starts[d] : starts[d + 1]].
            loss_mask: [N], weight of each token as a target, e.g. 0 in a prompt and 1 in its
                completion; that of a document's last token is also the weight of its end. None: 1.

        Raises:
            DataError: when they do not fit each other.
        """
        self.tokens, self.starts = np.asanyarray(tokens), np.asarray(starts)
        self.loss_mask = None if loss_mask is None else np.asanyarray(loss_mask)
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens of documents must be integers [N]; got {_describe(self.tokens)}"
            )
        if self.starts.ndim != 1 or self.starts.dtype.kind not in "iu" or not len(self.starts):
            raise DataError(
                f"starts of documents must be integers [D + 1]; got {_describe(self.starts)}"
            )
        self.starts = self.starts.astype(np.int64, copy=False)
        first, last = int(self.starts[0]), int(self.starts[-1])
        if first < 0 or last > len(self.tokens) or (np.diff(self.starts) < 0).any():
            raise DataError(
                f"starts of documents must ascend within 0..{len(self.tokens)}, the number of"
                f" tokens; they run from {first} to {last}"
            )
        if self.loss_mask is not None and self.loss_mask.shape != self.tokens.shape:
            raise DataError(
                f"loss_mask of documents needs one weight for each of {len(self.tokens)} tokens;"
                f" got {_describe(self.loss_mask)}"
            )
        arrays = (self.tokens, *(() if self.loss_mask is None else (self.loss_mask,)))
        self._sizes = file_sizes(arrays)

    @classmethod
    def from_list(cls, documents: Iterable[Any]) -> "Documents":
        """Joins documents in memory: token arrays, or (tokens, loss mask) pairs of such."""
        pairs = [d if isinstance(d, tuple) else (d, None) for d in documents]
        tokens = [np.asarray(t) if len(t) else np.zeros(0, np.int32) for t, _ in pairs]
        has_masks = any(mask is not None for _, mask in pairs)
        masks = [np.ones(len(t)) if mask is None else np.asarray(mask) for t, mask in pairs]
        for number, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
            if token.shape != mask.shape:
                raise DataError(
                    f"document {number} has tokens {list(token.shape)} and a loss mask"
                    f" {list(mask.shape)}; give one weight for each token"
                )
        return cls(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.cumsum([0, *map(len, tokens)]),
            np.concatenate(masks).astype(np.float32) if has_masks else None,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [D]."""
        return np.diff(self.starts)

    @property
    def lengths_key(self) -> str:
        """Stands for the lengths in the name of a kept plan; empty: they do so themselves."""
        return ""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; maps of files need none."""
        arrays = (self.tokens, self.loss_mask, self.starts)
        return sum(a.nbytes for a in arrays if a is not None and not is_map(a))

    @property
    def streams(self) -> list[np.ndarray]:
        """All tokens, in arrays [tokens] of which none goes on in the next."""
        return [self.tokens]

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Returns tokens, integers [M], by positions from the first document's first on."""
        for path, size in self._sizes.items():
            require_size(path, size)
        return self.tokens[positions + self.starts[0]]

    def take_loss_mask(self, positions: np.ndarray) -> np.ndarray | None:
        """Returns the weights of tokens as targets, [M]; None: all are 1."""
        return None if self.loss_mask is None else self.loss_mask[positions + self.starts[0]]

    def end_targets(self, ends: np.ndarray, end_of_document: int) -> np.ndarray | int:
        """Returns the targets of the last tokens of documents that end before `ends`, [E]."""
        return end_of_document

    def add_to(self, digest: Any) -> None:
        """Adds all of it to a hash; of arrays above 1 GiB, 64 pieces."""
        digest.update(np.ascontiguousarray(self.starts, "<i8"))
        for array in (self.tokens, self.loss_mask):
            if array is not None:
                digest.update(f";{array.dtype.str} {len(array)};".encode())
                hash_contents(digest, array)


class PackedDataset:
    """Rows of packed documents; see the module's docstring for what is in them."""

    def __init__(
        self,
        documents: "Documents | ShardDocuments",
        sequence_length: int,
        *,
        policy: str = "best_fit",
        end_of_document: int | None = None,
        cross_document_attention: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str = "packed documents",
        shuffle: bool = True,
    ) -> None:
        """Makes the plan, or takes it from the cache.

        Args:
            documents: what is packed.
            sequence_length: T.
            policy: `best_fit` or `split`; see `pack_plan`.
            end_of_document: id that is the target of a document's last token; None: it has none.
            cross_document_attention: leave segment_ids and positions out of the rows, so that a
                token sees all before it in its row, also of other documents, and the fastest
                attention can be used. Targets do not cross documents either way.
            cache_dir: for plans, which depend on lengths only; see `pack_plan`. None: made at every
                start.
            name: in messages.
            shuffle: False: training takes the rows in order.
        """
        if end_of_document is not None and not 0 <= end_of_document < 2**31:
            raise DataError(f"end_of_document={end_of_document} must be a token id, 0..2**31 - 1")
        self.documents = documents
        self.name = name
        self.shuffle = shuffle
        self.end_of_document = end_of_document
        self.cross_document_attention = cross_document_attention
        self.policy = policy
        self.plan: PackPlan = pack_plan(
            # The lengths of shards are read only if they are needed.
            (lambda: documents.lengths) if documents.lengths_key else documents.lengths,
            sequence_length,
            policy,
            cache_dir=cache_dir,
            key=documents.lengths_key,
        )
        self._plan_sizes = file_sizes(self.plan.arrays.values())
        _log.info("%s: %s", name, self.summary())

    def __len__(self) -> int:
        return self.plan.num_rows

    @property
    def num_tokens(self) -> int:
        """Number of targets, whatever their weight."""
        num_ends = int(self.plan.ends_document_P.sum())
        return self.plan.num_tokens - (num_ends if self.end_of_document is None else 0)

    @property
    def utilisation(self) -> float:
        """Share of the rows that is not padding."""
        return self.plan.utilisation

    @property
    def num_bytes(self) -> int:
        """Bytes of memory; what is a map of a file, also of a kept plan, needs none."""
        plan = sum(array.nbytes for array in self.plan.arrays.values() if not is_map(array))
        return plan + self.documents.num_bytes

    def summary(self) -> str:
        """One line: how full the rows are, and what attention sees."""
        documents, rows = several(len(self.documents), "document"), several(len(self), "row")
        sees = "the whole row" if self.cross_document_attention else "its own document"
        length = self.plan.sequence_length
        return (
            f"{documents} packed by {self.policy} into {rows} of {length} tokens,"
            f" {100 * self.utilisation:.2f} % full; a token attends to {sees}"
        )

    @property
    def fingerprint(self) -> str:
        """Hash of all that the rows depend on; of arrays above 1 GiB, of 64 pieces."""
        options = (
            self.policy,
            self.plan.sequence_length,
            self.end_of_document,
            self.cross_document_attention,
        )
        digest = hashlib.blake2b(f"packed {options}".encode(), digest_size=16)
        self.documents.add_to(digest)
        return digest.hexdigest()

    def conditional_entropy(self, order: int) -> float:
        """Entropy of a byte given the `order` bytes before it, in nats, over all documents."""
        return conditional_entropy(self.documents.streams, order)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies the rows `indices` (int64 [R], in this order) out of the documents."""
        for path, size in self._plan_sizes.items():
            require_size(path, size)
        plan = self.plan
        num_rows, length = len(indices), plan.sequence_length
        first_R = plan.rows_R1[indices]
        count_R = plan.rows_R1[np.asarray(indices) + 1] - first_R
        number_P = _count_up(count_R)
        piece_P = np.repeat(first_R, count_R) + number_P
        size_P = plan.lengths_P[piece_P].astype(np.int64)
        source_P = plan.starts_P[piece_P]
        before_P = np.cumsum(size_P) - size_P
        position_M = _count_up(size_P)
        # Where a token lies in the batch: pieces of a row follow each other from its beginning.
        slot_M = None
        if position_M.size < num_rows * length:
            row_start_R = before_P[np.cumsum(count_R) - count_R]
            row_P = np.repeat(np.arange(num_rows), count_R)
            slot_M = position_M + np.repeat(row_P * length + before_P - row_start_R[row_P], size_P)

        def rows(values_M: np.ndarray, dtype: type) -> np.ndarray:
            if slot_M is None:
                return values_M.astype(dtype, copy=False).reshape(num_rows, length)
            filled = np.zeros(num_rows * length, dtype)
            filled[slot_M] = values_M
            return filled.reshape(num_rows, length)

        source_M = position_M + np.repeat(source_P, size_P)
        tokens_M = self.documents.take(source_M).astype(np.int32)
        targets_M, weights_M = self._targets(
            piece_P, source_P + size_P, before_P + size_P - 1, source_M, tokens_M
        )
        fields = {
            "tokens": rows(tokens_M, np.int32),
            "targets": rows(targets_M, np.int32),
            "loss_mask": rows(weights_M, np.float32),
        }
        if not self.cross_document_attention:
            fields["segment_ids"] = rows(np.repeat(number_P + 1, size_P), np.int32)
            fields["positions"] = rows(position_M, np.int32)
        return fields

    def _targets(
        self,
        piece_P: np.ndarray,
        next_P: np.ndarray,
        last_P: np.ndarray,
        source_M: np.ndarray,
        tokens_M: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (targets_M int32, their weights float32): each token's successor.

        Args:
            piece_P: numbers in the plan.
            next_P: position in the documents that follows a piece.
            last_P: where in M a piece's last token is.
            source_M: positions in the documents.
            tokens_M: the tokens there.
        """
        documents = self.documents
        ends_P = self.plan.ends_document_P[piece_P]
        has_end = self.end_of_document is not None
        # Within a piece the successor is the next token at hand; after its last one it is looked up
        # where the document goes on in another row.
        beyond_P = next_P[~ends_P]
        targets_M = np.empty_like(tokens_M)
        targets_M[:-1] = tokens_M[1:]
        targets_M[last_P[~ends_P]] = documents.take(beyond_P)
        targets_M[last_P[ends_P]] = documents.end_targets(next_P[ends_P], self.end_of_document or 0)
        weights_M = np.ones(len(tokens_M), np.float32)
        own_M = documents.take_loss_mask(source_M)
        if own_M is not None:
            weights_M[:-1] = own_M[1:]
            weights_M[last_P[~ends_P]] = documents.take_loss_mask(beyond_P)
            weights_M[last_P[ends_P]] = own_M[last_P[ends_P]]
        if not has_end:
            weights_M[last_P[ends_P]] = 0
        return targets_M, weights_M


def _count_up(counts: np.ndarray) -> np.ndarray:
    """[3, 2] -> [0, 1, 2, 0, 1], int64."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _describe(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
