"""Which piece of which document goes into which row: a plan, made once from lengths alone.

Two policies:

- `split` (concatenate and split): the documents follow each other, and every T tokens are a row.
  Nothing but the last row has padding; documents are cut wherever a row ends.
- `best_fit`: only documents longer than a row are cut, into whole rows and a rest. Rests and whole
  documents go, longest first, each into the fullest row that has room for it (best-fit
  decreasing), as in Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024
  (arXiv:2404.10830). What no piece fits is padding.

Pieces of one length and rows with one number of free tokens are handled together: at most T open
groups of rows, at most one step per piece, NumPy inside a step. Ten million documents take seconds.

Legend: D documents, P pieces (a piece is a run of tokens of one document in one row), R rows,
B bins (rows in the order in which they were opened), T sequence_length.
"""

import bisect
import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxtrain.data.kept_arrays import kept_arrays
from jaxtrain.errors import DataError

POLICIES = ("split", "best_fit")

# Part of the name under which a plan is cached: raise it when a policy places a piece elsewhere.
_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class PackPlan:
    """Rows as lists of pieces: those of row r are rows_R1[r] to rows_R1[r + 1] - 1, in order."""

    sequence_length: int
    starts_P: np.ndarray
    """int64: first token of a piece, counted from the first document's first."""
    lengths_P: np.ndarray
    """int32"""
    ends_document_P: np.ndarray
    """bool: whether the piece holds the last token of its document."""
    rows_R1: np.ndarray
    """int64 [R + 1]"""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of them by name."""
        return {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray)}

    @property
    def num_rows(self) -> int:
        return len(self.rows_R1) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows without padding: those of the documents."""
        return int(self.lengths_P.sum(dtype=np.int64))

    @property
    def utilisation(self) -> float:
        """Share of the rows that is not padding."""
        return self.num_tokens / max(1, self.num_rows * self.sequence_length)


def pack_plan(
    lengths_D: np.ndarray | Callable[[], np.ndarray],
    sequence_length: int,
    policy: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    key: str = "",
) -> PackPlan:
    """Returns the plan for documents of these lengths, from the cache if it is there.

    A plan out of the cache is a map of its file: it needs no memory but the page cache, which all
    processes of a machine share. Making one takes about 100 bytes for each piece.

    Args:
        lengths_D: tokens of each document; those of 0 tokens get no piece. A function is called
            only if the plan has to be made, and needs a `key`.
        sequence_length: T.
        policy: one of POLICIES.
        cache_dir: keeps plans; None: none are kept. A damaged one is made again. Of several
            processes that start together one makes it, and the others wait.
        key: stands for the lengths in the name of the kept plan; empty: their hash.

    Raises:
        DataError: for arguments that cannot be packed.
    """
    if policy not in POLICIES:
        raise DataError(f"packing policy {policy!r} does not exist; use {' or '.join(POLICIES)}")
    if not 1 <= sequence_length < 2**31:
        raise DataError(f"sequence_length={sequence_length} must lie in 1..2**31 - 1")
    if not callable(lengths_D):
        lengths_D = _checked(lengths_D)
    if cache_dir is None:
        return _make(lengths_D, sequence_length, policy)
    digest = hashlib.blake2b(f"{_VERSION} {policy} {sequence_length};".encode(), digest_size=16)
    if key:
        digest.update(f"key {key}".encode())
    else:
        assert not callable(lengths_D)
        digest.update(np.ascontiguousarray(lengths_D, "<i8"))
    arrays = kept_arrays(
        Path(cache_dir) / f"pack-{digest.hexdigest()}.plan",
        lambda: _make(lengths_D, sequence_length, policy).arrays,
    )
    return PackPlan(sequence_length, **arrays)


def _checked(lengths_D: np.ndarray) -> np.ndarray:
    lengths_D = np.asarray(lengths_D, np.int64)
    if lengths_D.size and lengths_D.min() < 0:
        raise DataError(
            f"document {lengths_D.argmin()} has {lengths_D.min()} tokens; give 0 or more"
        )
    return lengths_D


def _make(lengths: np.ndarray | Callable[[], np.ndarray], length: int, policy: str) -> PackPlan:
    lengths_D = _checked(lengths()) if callable(lengths) else lengths
    return _split(lengths_D, length) if policy == "split" else _pack_best_fit(lengths_D, length)


def _split(lengths_D: np.ndarray, length: int) -> PackPlan:
    ends_D = np.cumsum(lengths_D)
    total = int(ends_D[-1]) if len(ends_D) else 0
    row_starts_R = np.arange(0, total, length, dtype=np.int64)
    # A piece ends where a document or a row does.
    ends_P = np.union1d(ends_D, row_starts_R[1:])
    ends_P = ends_P[ends_P > 0]
    starts_P = np.concatenate([np.zeros(min(1, len(ends_P)), np.int64), ends_P[:-1]])
    return PackPlan(
        length,
        starts_P,
        (ends_P - starts_P).astype(np.int32),
        ends_D[np.searchsorted(ends_D, ends_P)] == ends_P,
        np.append(np.searchsorted(starts_P, row_starts_R), len(starts_P)).astype(np.int64),
    )


def _pack_best_fit(lengths_D: np.ndarray, length: int) -> PackPlan:
    # Pieces in the order of the documents: whole rows first, then the rest.
    pieces_D = -(-lengths_D // length)
    document_P = np.repeat(np.arange(len(lengths_D)), pieces_D)
    number_P = np.arange(len(document_P)) - (np.cumsum(pieces_D) - pieces_D)[document_P]
    starts_P = (np.cumsum(lengths_D) - lengths_D)[document_P] + number_P * length
    lengths_P = np.minimum(lengths_D[document_P] - number_P * length, length)
    bin_P, num_bins = _best_fit_decreasing(lengths_P, length)
    # Rows stand in the order of their first piece, pieces in that of the documents: who does not
    # shuffle reads roughly in order. Of equal indices the last assignment stays.
    first_B = np.empty(num_bins, np.int64)
    first_B[bin_P[::-1]] = np.arange(len(bin_P))[::-1]
    row_B = np.empty(num_bins, np.int64)
    row_B[np.argsort(first_B)] = np.arange(num_bins)
    row_P = row_B[bin_P]
    order_P = np.argsort(row_P, kind="stable")
    counts_R = np.bincount(row_P, minlength=num_bins)
    return PackPlan(
        length,
        starts_P[order_P],
        lengths_P[order_P].astype(np.int32),
        (number_P == pieces_D[document_P] - 1)[order_P],
        np.concatenate([[0], np.cumsum(counts_R)]).astype(np.int64),
    )


def _best_fit_decreasing(lengths_P: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Returns (bin of each piece, number of bins).

    As one piece after the other would be placed: the bin with the least room that suffices stays
    the best one for the next piece of the same length until it has no more room for it.
    """
    order_P = np.argsort(-lengths_P, kind="stable")
    distinct, counts = np.unique(lengths_P, return_counts=True)
    bin_P = np.empty(len(lengths_P), np.int64)
    bins_by_room: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []  # the keys, ascending

    def put_back(room: int, bins: np.ndarray) -> None:
        if room == 0 or len(bins) == 0:
            return
        if room not in bins_by_room:
            bisect.insort(rooms, room)
            bins_by_room[room] = []
        bins_by_room[room].append(bins)

    num_bins = done = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        stop = done + count
        while done < stop:
            at = bisect.bisect_left(rooms, length)
            if at == len(rooms):
                opened = -(-(stop - done) // (capacity // length))
                put_back(capacity, np.arange(num_bins, num_bins + opened))
                num_bins += opened
                continue
            room = rooms.pop(at)
            bins = np.concatenate(bins_by_room.pop(room))
            per_bin = room // length
            num_full, rest = divmod(min(stop - done, len(bins) * per_bin), per_bin)
            used = num_full + (rest > 0)
            chosen = np.repeat(bins[:used], per_bin)[: num_full * per_bin + rest]
            bin_P[order_P[done : done + len(chosen)]] = chosen
            done += len(chosen)
            put_back(room - per_bin * length, bins[:num_full])
            put_back(room - rest * length, bins[num_full:used])
            put_back(room, bins[used:])
    return bin_P, num_bins
