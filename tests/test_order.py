"""The order of the samples: a bijection, pinned, and as good as a shuffle."""

import itertools
import math

import numpy as np
import pytest

from jaxtrain.data import order as order_lib
from jaxtrain.data.order import MAX_SAMPLES, ORDER_VERSION, inverse, order, sample_indices

GOLDEN_MESSAGE = (
    "the order of the samples has changed: every checkpoint written so far would resume on other "
    "data. If that is wanted, raise ORDER_VERSION and write the new values here."
)


def all_of(seed, epoch, n):
    return order(seed, epoch, n, np.arange(n))


def chi_square_z(counts, expected):
    """Deviations from the expected counts, in standard deviations of a chi-square variable."""
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def test_golden():
    assert ORDER_VERSION == 1, GOLDEN_MESSAGE
    assert all_of(0, 0, 10).tolist() == [7, 6, 1, 0, 4, 8, 2, 9, 3, 5], GOLDEN_MESSAGE
    assert all_of(7, 3, 10).tolist() == [0, 7, 6, 5, 3, 1, 4, 2, 9, 8], GOLDEN_MESSAGE
    first = [0, 1, 2, 10**6]
    assert order(0, 0, 1025, np.array([0, 1, 2, 1024])).tolist() == [299, 246, 981, 497], (
        GOLDEN_MESSAGE
    )
    assert order(2**32 - 1, 12, 10**9 + 7, np.array(first)).tolist() == [
        326661991,
        249338038,
        304535441,
        269083493,
    ], GOLDEN_MESSAGE
    assert order(0, 1, MAX_SAMPLES, np.array(first)).tolist() == [
        3555501633561835028,
        2890763082247050401,
        3252398775705196750,
        976164230357520207,
    ], GOLDEN_MESSAGE
    assert sample_indices(0, 3, np.arange(12)).tolist() == [0, 2, 1, 2, 1, 0, 1, 2, 0, 2, 1, 0], (
        GOLDEN_MESSAGE
    )


SIZES = sorted(
    {*range(1, 130), 997, 1009, 1023, 1024, 1025, 2500, 2501, 4999, 10007}
    | {2**k + d for k in range(7, 15) for d in (-1, 0, 1)}
)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_each_epoch_holds_every_sample_once(seed):
    for n in SIZES:
        samples = all_of(seed, 5, n)
        assert samples.dtype == np.int64
        np.testing.assert_array_equal(np.sort(samples), np.arange(n), err_msg=f"n={n}")
        np.testing.assert_array_equal(inverse(seed, 5, n, samples), np.arange(n), err_msg=f"n={n}")


@pytest.mark.long
def test_each_epoch_holds_every_sample_once_up_to_5000():
    for n in range(1, 5001):
        samples = all_of(n, n % 7, n)
        np.testing.assert_array_equal(np.sort(samples), np.arange(n), err_msg=f"n={n}")


@pytest.mark.parametrize("n", [10**6, 10**9 + 7, 2**32, 2**40 + 1, 10**12, MAX_SAMPLES])
def test_inverse_of_large_orders(n):
    # Positions from both ends and from a stride through the middle; no generator needed.
    step = n // 1000
    positions = np.concatenate([np.arange(500), n - 1 - np.arange(500), np.arange(1000) * step])
    positions = np.unique(positions)
    samples = order(11, 2, n, positions)
    assert samples.min() >= 0
    assert samples.max() < n
    assert len(np.unique(samples)) == len(positions)
    np.testing.assert_array_equal(inverse(11, 2, n, samples), positions)
    # The other way round too: order is onto.
    np.testing.assert_array_equal(order(11, 2, n, inverse(11, 2, n, positions)), positions)


def test_one_call_over_epochs_equals_one_call_per_epoch():
    n, epochs = 37, np.arange(20)
    together = order(4, np.repeat(epochs, n), n, np.tile(np.arange(n), len(epochs)))
    apart = np.concatenate([all_of(4, int(epoch), n) for epoch in epochs])
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_array_equal(sample_indices(4, n, np.arange(n * len(epochs))), apart)


def test_any_split_of_the_positions_gives_the_same_samples():
    n, total = 23, 200
    whole = sample_indices(9, n, np.arange(total))
    for batch in (1, 7, 24, 64):
        pieces = [
            sample_indices(9, n, np.arange(start, min(start + batch, total)))
            for start in range(0, total, batch)
        ]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(sample_indices(9, n, np.arange(total)[::-1]), whole[::-1])


def test_without_shuffle_epochs_are_in_order():
    np.testing.assert_array_equal(
        sample_indices(9, 5, np.arange(3, 13), shuffle=False), np.arange(3, 13) % 5
    )


def test_no_positions_give_no_samples():
    assert order(0, 0, 5, np.array([], np.int64)).tolist() == []
    assert sample_indices(0, 5, np.array([], np.int64)).tolist() == []


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(all_of(seed, epoch, 1000)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_small_permutations_are_uniform(n):
    # Every one of the n! permutations is as likely as the others, over epochs of one seed.
    each = 200 if n < 7 else 20
    total = math.factorial(n) * each
    epochs = np.repeat(np.arange(total), n)
    samples = order(1, epochs, n, np.tile(np.arange(n), total)).reshape(total, n)
    codes = samples @ (n ** np.arange(n))
    expected = [sum(v * n**i for i, v in enumerate(p)) for p in itertools.permutations(range(n))]
    values, counts = np.unique(codes, return_counts=True)
    np.testing.assert_array_equal(values, np.sort(expected))
    assert abs(chi_square_z(counts, each)) < 5


@pytest.mark.parametrize("n", [1025, 4096, 100_003])
def test_large_orders_look_shuffled(n):
    # First positions over seeds: uniform, and independent of each other and of the seed.
    seeds, bins = 20_000, 256
    first, second = (
        np.concatenate([order(s, np.arange(500), n, np.full(500, i)) for s in range(seeds // 500)])
        for i in (0, 1)
    )
    expected = np.bincount(np.arange(n) * bins // n, minlength=bins) * seeds / n
    across_epochs = (first[1:] - first[:-1]) % n
    for values in (first, second, (second - first) % n, across_epochs):
        counts = np.bincount(values * bins // n, minlength=bins)
        assert abs(chi_square_z(counts, expected * len(values) / seeds)) < 5
    # Neighbours that stay neighbours, and samples that stay in place: one each, in expectation.
    orders = [all_of(3, epoch, n) for epoch in range(100 if n < 10_000 else 10)]
    neighbours = np.mean([(np.diff(samples) == 1).sum() for samples in orders])
    in_place = np.mean([(samples == np.arange(n)).sum() for samples in orders])
    assert 0.2 < neighbours < 2.5
    assert 0.2 < in_place < 2.5


def test_memory_does_not_grow_with_n():
    # An order of 10^12 samples that were held anywhere would not fit.
    assert order_lib.order(0, 0, 10**12, np.array([123])).shape == (1,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0, [0]), "n=0 samples"),
        ((0, 0, MAX_SAMPLES + 1, [0]), r"n must lie in 1\.\.2\*\*62"),
        ((-1, 0, 5, [0]), "seed=-1 must be non-negative"),
        ((2**64, 0, 5, [0]), "below 2"),
        ((0, 0, 5, [3, 5]), r"positions 3\.\.5 lie outside an epoch of n=5"),
        ((0, 0, 5, [-1, 2]), r"positions -1\.\.2 lie outside"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    seed, epoch, n, positions = arguments
    with pytest.raises(ValueError, match=message):
        order(seed, epoch, n, np.array(positions))
