"""Mixtures: every prefix has its share of every source, and every source its own whole epochs."""

import collections

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import mesh_of, numbers, take

from jaxtrain.data.load import Loader, eval_batches
from jaxtrain.data.mix import PERIOD, MixedDataset, Mixture, laid_out, normalised, source_seed
from jaxtrain.data.order import sample_indices
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.data.sources import ArrayDataset, Dataset
from jaxtrain.errors import DataError

GOLDEN_MESSAGE = (
    "the order of mixtures has changed: every checkpoint of one would resume on other data. If "
    "that is wanted, raise _VERSION in mix.py and write the new values here."
)
WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)
THREE = {"code": 3, "web": 10, "books": 1}
SCHEDULE = [(0, THREE), (2 * PERIOD, {"code": 1, "web": 1}), (3 * PERIOD, {"books": 2, "code": 1})]


def shares_of(weights):
    """Whole numbers over a period, none of them 0."""
    shares = np.array(weights) * (PERIOD - len(weights)) // sum(weights) + 1
    shares[0] += PERIOD - shares.sum()
    return shares


def prefix_error(source_M, share_MS):
    """Largest distance, over all prefixes, of a source's count from the sum of its shares."""
    counts_MS = np.cumsum(source_M[:, None] == np.arange(share_MS.shape[1]), axis=0)
    return np.abs(counts_MS * PERIOD - np.cumsum(share_MS, axis=0)).max() / PERIOD


# The period


@settings(max_examples=25, deadline=None)
@given(WEIGHTS)
def test_every_prefix_of_several_periods_is_within_tijdemans_bound(weights):
    shares = shares_of(weights)
    sources = np.tile(laid_out(shares), 3)
    bound = 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0
    assert prefix_error(sources, np.tile(shares, (len(sources), 1))) <= bound + 1e-12
    np.testing.assert_array_equal(np.bincount(sources), 3 * shares)


def test_shares_of_nothing_are_nothing_and_a_lone_source_is_everything():
    assert set(laid_out([0, PERIOD, 0])) == {1}
    sources = laid_out([0, 1000, 0, PERIOD - 1000])
    assert collections.Counter(sources.tolist()) == {1: 1000, 3: PERIOD - 1000}


def test_golden():
    first = Mixture(THREE).locate(np.arange(16))
    assert normalised(THREE) == {"code": 878, "web": 2926, "books": 292}, GOLDEN_MESSAGE
    assert first[0].tolist() == [2, 2, 1, 2, 2, 2, 1, 2, 2, 0, 2, 1, 2, 2, 2, 2], GOLDEN_MESSAGE
    rows = mixed().sample_indices(5, np.arange(8)).tolist()
    assert rows == [168, 121, 37, 441, 120, 439, 45, 50], GOLDEN_MESSAGE


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.floats(0.01, 1), min_size=1, max_size=20))
def test_weights_become_whole_shares_by_largest_remainder(weights):
    shares = normalised(weights)
    assert sum(shares.values()) == PERIOD
    total = sum(weights.values())
    rest = {name: weights[name] * PERIOD / total - shares[name] for name in weights}
    assert all(-1 < value < 1 for value in rest.values())
    # Whoever was rounded up had at least the remainder of whoever was rounded down.
    up = [value + 1 for value in rest.values() if value < -1e-9]
    down = [value for value in rest.values() if value > 1e-9]
    assert not up or not down or min(up) >= max(down) - 1e-9


def test_the_order_of_names_and_the_unit_of_weights_do_not_matter():
    expected = Mixture(THREE).locate(np.arange(PERIOD))
    for weights in (
        {"web": 1.0, "books": 0.1, "code": 0.3},
        {"code": 30, "web": 100, "books": 10},
    ):
        for ours, theirs in zip(Mixture(weights).locate(np.arange(PERIOD)), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


# Positions


def test_a_schedule_keeps_the_bound_over_its_changes():
    mixture = Mixture(SCHEDULE)
    positions = np.arange(6 * PERIOD)
    source_M, rank_M = mixture.locate(positions)
    share_MS = np.zeros((len(positions), 3))
    for (start, _), shares in zip(SCHEDULE, mixture.shares, strict=True):
        share_MS[start:] = [shares[name] for name in mixture.names]
    assert mixture.names == ("books", "code", "web")
    assert prefix_error(source_M, share_MS) <= 0.75
    # Ranks count the samples of each source, over all changes.
    for source in range(3):
        ranks = rank_M[source_M == source]
        np.testing.assert_array_equal(ranks, np.arange(len(ranks)))
        np.testing.assert_array_equal(
            mixture.position(source, ranks), positions[source_M == source]
        )
    # A pause is a pause.
    paused = source_M[2 * PERIOD : 3 * PERIOD]
    assert 0 not in paused
    assert 2 not in source_M[3 * PERIOD :]
    with pytest.raises(DataError, match="'web' ends before rank 999999"):
        mixture.position(2, np.array([999_999]))


def test_far_positions_take_no_time_and_no_memory():
    mixture = Mixture(SCHEDULE)
    positions = 10**15 + np.arange(1000)
    source_M, rank_M = mixture.locate(positions)
    for source in (0, 1):
        at = source_M == source
        np.testing.assert_array_equal(mixture.position(source, rank_M[at]), positions[at])


# Datasets


def mixed(weights=THREE, sizes=None):
    sizes = sizes or {"code": 37, "web": 500, "books": 11}
    first = {"books": 0, "code": 1000, "web": 2000}
    return MixedDataset(
        {
            name: ArrayDataset({"id": first[name] + np.arange(size, dtype=np.int32)})
            for name, size in sizes.items()
        },
        weights,
    )


def test_every_source_has_its_own_shuffled_epochs():
    data = mixed()
    positions = np.arange(2000)
    ids = data.read(data.sample_indices(5, positions))["id"]
    for name, size in (("books", 11), ("code", 37), ("web", 500)):
        first = {"books": 0, "code": 1000, "web": 2000}[name]
        own = ids[ids // 1000 == first // 1000] - first
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) >= 2
        np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(size), (len(epochs), 1)))
        assert (epochs[0] != epochs[1]).any()
        expected = sample_indices(source_seed(5, name), size, np.arange(len(own)))
        np.testing.assert_array_equal(own, expected)
    # A pure function of the position, whatever is asked for together.
    for batch in (1, 7, 24):
        pieces = [data.sample_indices(5, positions[i : i + batch]) for i in range(0, 240, batch)]
        found = data.read(np.concatenate(pieces))["id"]
        np.testing.assert_array_equal(found, ids[: len(found)])
    assert (data.sample_indices(6, positions) != data.sample_indices(5, positions)).any()


def test_a_source_keeps_its_order_when_others_come_and_go():
    orders = []
    for weights in (THREE, {"code": 1, "web": 7}):
        sizes = {"code": 37, "web": 500, "books": 11}
        data = mixed(weights, {name: sizes[name] for name in weights})
        ids = data.read(data.sample_indices(5, np.arange(500)))["id"]
        orders.append(ids[ids // 1000 == 1][:50].tolist())
    assert orders[0] == orders[1]


@pytest.mark.parametrize("layout", [("data:1", 1), ("data:2,fsdp:2,tensor:2", 8)])
def test_the_loader_takes_the_order_of_a_mixture(layout):
    data = mixed()
    assert isinstance(data, Dataset)
    expected = data.read(data.sample_indices(3, np.arange(240)))["id"].reshape(10, 24)
    with Loader(data, mesh_of(*layout), global_batch_size=24, seed=3) as loader:
        for batch, ids in zip(take(loader, 6), expected, strict=False):
            np.testing.assert_array_equal(batch.arrays["id"], ids)
    with Loader(data, mesh_of(*layout), global_batch_size=24, seed=3, position=192) as loader:
        np.testing.assert_array_equal(next(loader).arrays["id"], expected[8])
    rows = [jax.device_get(b["id"]) for b, _ in eval_batches(data, mesh_of(*layout), batch_size=8)]
    assert sorted(set(np.concatenate(rows).tolist())) == sorted(data.read(np.arange(548))["id"])


def test_sources_may_stay_in_order_each_or_all():
    data = mixed()
    data.sources[0].shuffle = False
    ids = data.read(data.sample_indices(5, np.arange(2000)))["id"]
    books, code = ids[ids < 1000], ids[ids // 1000 == 1] - 1000
    np.testing.assert_array_equal(books, np.arange(len(books)) % 11)
    assert (code != np.arange(len(code)) % 37).any()
    ids = data.read(data.sample_indices(5, np.arange(2000), shuffle=False))["id"]
    code = ids[ids // 1000 == 1] - 1000
    np.testing.assert_array_equal(code, np.arange(len(code)) % 37)


def test_packed_sources_and_mixtures_of_mixtures_mix():
    def packed(first):
        documents = [np.arange(first, first + n) for n in (5, 3, 8, 9, 2)]
        return PackedDataset(Documents.from_list(documents), 8)

    inner = MixedDataset({"a": packed(100), "b": packed(200)}, {"a": 1, "b": 1})
    data = MixedDataset({"in": inner, "c": packed(300)}, {"in": 2, "c": 2})
    rows = data.read(data.sample_indices(0, np.arange(PERIOD)))
    assert set(rows) == {"tokens", "targets", "loss_mask", "segment_ids", "positions"}
    counts = np.bincount(rows["tokens"][:, 0] // 100)
    assert counts.tolist() == [0, PERIOD // 4, PERIOD // 4, PERIOD // 2]


def test_the_fingerprint_depends_on_sources_shares_and_schedule():
    prints = [
        mixed().fingerprint,
        mixed({"code": 3, "web": 10, "books": 2}).fingerprint,
        mixed(SCHEDULE).fingerprint,
        mixed(SCHEDULE[:2] + [(4 * PERIOD, SCHEDULE[2][1])]).fingerprint,
        mixed(sizes={"code": 36, "web": 500, "books": 11}).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert mixed({"code": 30, "web": 100, "books": 10}).fingerprint == prints[0]


# What cannot be mixed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture({"a": -1, "b": 1}), "weight a=-1 must be finite and not negative"),
        (lambda: Mixture({"a": float("inf")}), "weight a=inf must be finite"),
        (lambda: Mixture({"a": 0, "b": 0.0}), r"all weights are 0 \(a, b\)"),
        (lambda: Mixture({}), r"all weights are 0 \(no source\)"),
        (lambda: Mixture([]), r"begins at 0 and ascends; got \[\]"),
        (lambda: Mixture({"a": 1, "b": 1e-5}), "weight b=1e-05 is less than one of 4096 samples"),
        (lambda: Mixture({"a": 1, "b": 0}), "'b' has weight 0 all the time; leave it out"),
        (lambda: Mixture([(0, {"a": 1}), (5000, {"a": 1})]), "5000 is none, use 4096 or 8192"),
        (lambda: Mixture([(4096, {"a": 1})]), r"begins at 0 and ascends; got \[4096\]"),
        (lambda: mixed({"code": 1, "web": 1}), "weights are for code, web, sources are books, co"),
        (lambda: MixedDataset({"a": numbers(0)}, {"a": 1}), "no training data in numbers"),
        (
            lambda: MixedDataset(
                {"a": numbers(4), "b": numbers(4, x=np.zeros((4, 2)))}, {"a": 1, "b": 1}
            ),
            r"'a' has id int32\[\], 'b' has id int32\[\], x float64\[2\]",
        ),
    ],
)
def test_bad_mixtures_are_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize("answer", [lambda p: p[:-1], lambda p: p + 10**6, lambda p: p * 0.5])
def test_an_order_that_is_none_is_refused(answer):
    data = numbers(16)
    data.sample_indices = lambda seed, positions, *, shuffle: answer(positions)
    with Loader(data, mesh_of("data:1", 1), global_batch_size=16) as loader:
        with pytest.raises(DataError, match=r"sample_indices must return one row, 0\.\.15, for"):
            next(loader)
