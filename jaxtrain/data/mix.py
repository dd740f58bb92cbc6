"""Mixtures: several datasets in fixed proportions, one pure order.

Proportions are whole numbers over PERIOD = 4,096 samples. One period is laid out once, so that no
prefix of it (and so of the endless order) has a sample more or less of any source than its share:
"The chairman assignment problem", R. Tijdeman, Discrete Mathematics 32 (1980), 323-330. At every
position the sources that may be served are those whose share is ahead of what they got by
1 / (2k - 2) at least (k sources), and the one that must be served first is: earliest deadline
first. No source is then ever off by more than 1 - 1 / (2k - 2), the best possible bound.

Which source a position belongs to, and how many samples of that source come before it (its rank),
are table look-ups. The rank is a position in the source's own endless order, in epochs that are
each shuffled anew (`order.py`), with a seed of its own: however unequal the sources, each of their
epochs holds every row once. Nothing is remembered from sample to sample.

Proportions may change at multiples of PERIOD, where every source has had exactly its share.

Legend: M positions asked for, S sources, R rows.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxtrain.data.order import MAX_SAMPLES
from jaxtrain.data.sources import as_dataset, dataset_indices, name_of, read_training, require_rows
from jaxtrain.errors import DataError

PERIOD = 4096
"""Samples in which every source has exactly its share."""

# Part of the fingerprint: raise it when a period is laid out otherwise.
_VERSION = 1

Weights = Mapping[str, float]
"""Source -> weight, in any unit."""


def normalised(weights: Mapping[str, float]) -> dict[str, int]:
    """Brings weights to whole numbers that sum to PERIOD, by largest remainder.

    Raises:
        DataError: when one is negative or not finite, all are 0, or a share is too small to get a
            sample of a period.
    """
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise DataError(f"weight {name}={weight} must be finite and not negative")
    total = sum(Fraction(weight) for weight in weights.values())
    if not total:
        raise DataError(f"all weights are 0 ({', '.join(weights) or 'no source'}); give some share")
    exact = {name: Fraction(weight) * PERIOD / total for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    # Of equal remainders the first name gets the sample, whatever the order they were given in.
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: PERIOD - sum(shares.values())]:
        shares[name] += 1
    lost = [name for name in shares if weights[name] > 0 and shares[name] == 0]
    if lost:
        raise DataError(
            f"weight {lost[0]}={weights[lost[0]]} is less than one of {PERIOD} samples beside the"
            " others; give it more, or 0"
        )
    return shares


def laid_out(shares_S: Sequence[int]) -> np.ndarray:
    """Returns which source each position of a period belongs to, int64 [PERIOD].

    Args:
        shares_S: whole numbers that sum to PERIOD.
    """
    active = np.flatnonzero(np.asarray(shares_S) > 0)
    share = np.asarray(shares_S, np.int64)[active]
    if len(active) == 1:
        return np.full(PERIOD, active[0], np.int64)
    # All times 2k - 2 and PERIOD, to stay in whole numbers.
    scale = 2 * len(active) - 2
    served = np.zeros(len(active), np.int64)
    sources = np.empty(PERIOD, np.int64)
    for position in range(PERIOD):
        ahead = scale * ((position + 1) * share - served * PERIOD)
        # The first number of samples at which it would be ahead by more than 1 - 1 / (2k - 2).
        deadline = (scale * (served + 1) * PERIOD - PERIOD) // (scale * share) + 1
        chosen = int(np.argmin(np.where(ahead >= PERIOD, deadline, np.iinfo(np.int64).max)))
        served[chosen] += 1
        sources[position] = active[chosen]
    return sources


class Mixture:
    """Which source every position of an endless order belongs to: weights, and their schedule."""

    def __init__(self, weights: Weights | Sequence[tuple[int, Weights]]) -> None:
        """Lays out a period for each set of weights.

        Args:
            weights: of the sources, or [(first position, weights), ...] for weights that change;
                the first begins at 0, the others at multiples of PERIOD. A source that is left out
                or has weight 0 gets nothing meanwhile.

        Raises:
            DataError: for weights or positions that cannot work.
        """
        schedule = _as_schedule(weights)
        self.names = tuple(sorted({name for _, part in schedule for name in part}))
        self.starts = np.array([start for start, _ in schedule], np.int64)
        self.shares = [
            normalised({name: part.get(name, 0) for name in self.names}) for _, part in schedule
        ]
        for name in self.names:
            if not any(shares[name] for shares in self.shares):
                raise DataError(f"source {name!r} has weight 0 all the time; leave it out")
        self._shares = np.array([[part[name] for name in self.names] for part in self.shares])
        self._sources = np.stack([laid_out(shares) for shares in self._shares])
        self._ranks = np.empty_like(self._sources)
        self._positions: list[list[np.ndarray]] = []
        for sources, ranks in zip(self._sources, self._ranks, strict=True):
            self._positions.append([np.flatnonzero(sources == s) for s in range(len(self.names))])
            for positions in self._positions[-1]:
                ranks[positions] = np.arange(len(positions))
        periods = np.diff(self.starts) // PERIOD
        before = np.cumsum(periods[:, None] * self._shares[:-1], axis=0)
        self._before = np.concatenate([np.zeros((1, len(self.names)), np.int64), before])

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (number of the source in `names`, rank inside it), each int64 [M].

        Args:
            positions: int64 [M], from 0.
        """
        positions_M = np.asarray(positions, np.int64)
        part_M = np.searchsorted(self.starts, positions_M, side="right") - 1
        periods_M, offset_M = np.divmod(positions_M - self.starts[part_M], PERIOD)
        source_M = self._sources[part_M, offset_M]
        before_M = self._before[part_M, source_M] + periods_M * self._shares[part_M, source_M]
        return source_M, before_M + self._ranks[part_M, offset_M]

    def position(self, source: int, ranks: np.ndarray) -> np.ndarray:
        """Returns where samples of a source stand: `position(s, r)` is located at (s, r).

        Raises:
            DataError: for a rank that the source never reaches.
        """
        ranks_M = np.asarray(ranks, np.int64)
        # Where a source pauses, the part before it begins at the same rank: the last one counts
        # that gives the source anything.
        gives = np.flatnonzero(self._shares[:, source] > 0)
        before = self._before[gives, source]
        part_M = gives[np.searchsorted(before, ranks_M, side="right") - 1]
        rank_M = ranks_M - self._before[part_M, source]
        periods_M, offset_M = np.divmod(rank_M, self._shares[part_M, source])
        offsets = np.array(
            [self._positions[p][source][o] for p, o in zip(part_M, offset_M, strict=True)], np.int64
        )
        positions_M = self.starts[part_M] + periods_M * PERIOD + offsets
        found, found_ranks = self.locate(positions_M)
        if ((found != source) | (found_ranks != ranks_M)).any():
            raise DataError(f"source {self.names[source]!r} ends before rank {ranks_M.max()}")
        return positions_M

    def summary(self) -> str:
        """One line: the shares in percent, and when they change."""
        parts = []
        for start, shares in zip(self.starts.tolist(), self.shares, strict=True):
            text = ", ".join(f"{name} {100 * n / PERIOD:.2f} %" for name, n in shares.items())
            parts.append(f"from sample {start:,}: {text}" if len(self.starts) > 1 else text)
        return "; ".join(parts)


class MixedDataset:
    """Rows of several datasets, in the order of a `Mixture`; row numbers count through them."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        name: str = "mixture",
    ) -> None:
        """Joins datasets. One row of each is read, to see that they fit each other.

        Args:
            sources: name -> Dataset, or what `as_dataset` makes one of. A source's order depends
                on its name and the run's seed, not on the other sources.
            weights: as for `Mixture`; every source has one.
            name: in messages.

        Raises:
            DataError: for sources without rows or weight, or whose rows differ in kind.
        """
        self.name = name
        self.mixture = Mixture(weights)
        if set(sources) != set(self.mixture.names):
            raise DataError(
                f"{name}: weights are for {', '.join(self.mixture.names)}, sources are"
                f" {', '.join(sorted(sources)) or 'none'}; give each source a weight"
            )
        self.sources = [as_dataset(sources[key]) for key in self.mixture.names]
        for source in self.sources:
            require_rows(source, "training")
        self._ends = np.cumsum([len(source) for source in self.sources])
        self._kinds = [_kinds(source.read(np.zeros(1, np.int64))) for source in self.sources]
        for key, kinds in zip(self.mixture.names, self._kinds, strict=True):
            if kinds != self._kinds[0]:
                raise DataError(
                    f"{name}: rows of all sources need the same arrays; {self.mixture.names[0]!r}"
                    f" has {_show(self._kinds[0])}, {key!r} has {_show(kinds)}"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sample_indices(
        self, seed: int, positions: np.ndarray, *, shuffle: bool | None = None
    ) -> np.ndarray:
        """Returns the rows at `positions` of the endless order, int64 [M].

        Args:
            seed: of the run.
            positions: int64 [M], from 0.
            shuffle: of every source; None: as each source has it.
        """
        source_M, rank_M = self.mixture.locate(positions)
        rows_M = np.empty_like(source_M)
        for number, source in enumerate(self.sources):
            chosen = np.flatnonzero(source_M == number)
            own_seed = source_seed(seed, self.mixture.names[number])
            own = dataset_indices(source, own_seed, rank_M[chosen], shuffle=shuffle)
            rows_M[chosen] = own + (self._ends[number] - len(source))
        return rows_M

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns rows by their numbers: those of the first source come first (int64 [R])."""
        return self._read(indices, lambda number, rows, chosen: self.sources[number].read(rows))

    def read_training(
        self, indices: np.ndarray, seed: int, positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        """As `read`; each source changes its rows by its own seed and the sample's rank in it."""
        rank_R = self.mixture.locate(positions)[1]

        def read(number: int, rows: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
            own_seed = source_seed(seed, self.mixture.names[number])
            return read_training(self.sources[number], rows, own_seed, rank_R[chosen])

        return self._read(indices, read)

    def _read(
        self,
        indices: np.ndarray,
        read: Callable[[int, np.ndarray, np.ndarray], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        """Joins what `read(source, its rows, where in indices they stand)` gives."""
        source_R = np.searchsorted(self._ends, indices, side="right")
        arrays = {
            key: np.empty((len(indices), *shape), dtype)
            for key, (dtype, shape) in self._kinds[0].items()
        }
        for number in np.unique(source_R):
            source, chosen = self.sources[number], np.flatnonzero(source_R == number)
            own = np.asarray(indices)[chosen] - (self._ends[number] - len(source))
            rows = read(int(number), own, chosen)
            if _kinds(rows) != self._kinds[0]:
                raise DataError(
                    f"{name_of(source)}: rows must be of one kind, {_show(self._kinds[0])}; got"
                    f" {_show(_kinds(rows))}"
                )
            for key, values in rows.items():
                arrays[key][chosen] = values
        return arrays

    @property
    def fingerprint(self) -> str:
        """Hash of the sources' fingerprints, names, shares and schedule."""
        order = (self.mixture.starts.tolist(), [list(part.items()) for part in self.mixture.shares])
        digest = hashlib.blake2b(f"mixture {_VERSION} {order}".encode(), digest_size=16)
        for source in self.sources:
            digest.update(f";{len(source)} {source.fingerprint}".encode())
        return digest.hexdigest()


def source_seed(seed: int, name: str) -> int:
    """The seed of a source's own order: other sources may come and go."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8)
    return int.from_bytes(digest.digest())


def _as_schedule(weights: Any) -> list[tuple[int, Weights]]:
    """[(first position, weights), ...]; one part for weights that stay."""
    if isinstance(weights, Mapping):
        return [(0, weights)]
    parts = list(weights)
    starts = [start for start, _ in parts]
    for start in starts:
        if start < 0 or start % PERIOD or start > MAX_SAMPLES:
            near = max(0, start) // PERIOD * PERIOD
            raise DataError(
                f"weights can change at multiples of {PERIOD} samples; {start} is none, use {near}"
                f" or {near + PERIOD}"
            )
    if starts[:1] != [0] or sorted(set(starts)) != starts:
        raise DataError(f"a schedule of weights begins at 0 and ascends; got {starts}")
    return parts


def _kinds(rows: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape of a row)."""
    arrays = {name: np.asarray(array) for name, array in rows.items()}
    return {name: (arrays[name].dtype.str, arrays[name].shape[1:]) for name in sorted(arrays)}


def _show(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {np.dtype(d)}{list(shape)}" for name, (d, shape) in kinds.items())
