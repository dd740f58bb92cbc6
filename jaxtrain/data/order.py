"""The order of the samples: a pure function of the seed and the position.

`order(seed, epoch, n, positions)` is, for each (seed, epoch), a permutation of range(n) that is
evaluated where it is asked, in O(1) memory: nothing is shuffled, stored or restored. `inverse`
goes back. `sample_indices` strings the epochs together: position p of the endless order is
entry p % n of epoch p // n.

The permutation is the generalised Feistel cipher of J. Black and P. Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002, on the domain Z_a x Z_b with a = ceil(sqrt(n)) and
b = ceil(n / a), with their cycle walking back into range(n): the domain has fewer than
n + sqrt(n) + 1 points, so walking is rare. Its round function is the 64-bit finaliser of
D. Stafford ("Better Bit Mixing", variant 13), known from SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", OOPSLA 2014). It is a shuffle, not encryption.

All of it is integer arithmetic modulo 2^64 without any library's random generator, so that a
checkpoint meets the same samples on any machine and with any version of NumPy or JAX. The golden
values in tests/test_order.py pin it. Whoever changes a value must raise ORDER_VERSION, which is
stored in every checkpoint.

Legend: M positions asked for at once.
"""

import math

import numpy as np

ORDER_VERSION = 1
"""Version of the map from (seed, epoch, n, position) to a sample; stored in every checkpoint."""

MAX_SAMPLES = 2**62
"""Largest n: a position fits int64, and the sum of two halves stays below 2^64."""

# NIST SP 800-38G takes 8 or 10 rounds, for ciphers, from a million points on. Small domains mix
# less per round: with 24, all n! permutations of up to 8 samples are equally likely over seeds.
_NUM_ROUNDS = 8
_NUM_ROUNDS_SMALL = 24
_SMALL = 1024

_GAMMA = 0x9E3779B97F4A7C15  # odd, next to 2^64 / golden ratio (SplitMix64)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_1, _27, _30, _31 = (np.uint64(bits) for bits in (1, 27, 30, 31))


def order(seed: int, epoch: int | np.ndarray, n: int, positions: np.ndarray) -> np.ndarray:
    """Returns the samples at `positions` of one epoch's shuffled order.

    Args:
        seed: non-negative, below 2^64.
        epoch: one number, or int64 [M], one for each position.
        n: number of samples of an epoch.
        positions: int64 [M], each in range(n).

    Returns:
        int64 [M], each in range(n); over all positions of an epoch each sample exactly once.
    """
    positions_M, keys, swap = _prepare(seed, epoch, n, positions)
    samples_M = _walk(positions_M, keys, n, _encrypt)
    return _transpose(samples_M, swap, n).astype(np.int64)


def inverse(seed: int, epoch: int | np.ndarray, n: int, samples: np.ndarray) -> np.ndarray:
    """Returns the positions at which `samples` stand: `inverse(..., order(..., p)) == p`."""
    samples_M, keys, swap = _prepare(seed, epoch, n, samples)
    positions_M = _walk(_transpose(samples_M, swap, n), keys, n, _decrypt)
    return positions_M.astype(np.int64)


def sample_indices(seed: int, n: int, positions: np.ndarray, *, shuffle: bool = True) -> np.ndarray:
    """Returns the samples at `positions` (int64 [M], from 0) of the endless order over all epochs.

    Each epoch has its own permutation; with shuffle=False each is 0, 1, ..., n - 1.
    """
    epoch_M, offset_M = np.divmod(np.asarray(positions, np.int64), n)
    return order(seed, epoch_M, n, offset_M) if shuffle else offset_M


def random_bits(seed: int, draw: int, positions: np.ndarray) -> np.ndarray:
    """Returns uint64 [M], evenly distributed: a pure function of its arguments, element by element.

    Args:
        seed: non-negative, below 2^64.
        draw: which of several independent numbers, from 0.
        positions: int64 [M], of the endless order.
    """
    start = _mix(np.asarray([seed], np.uint64)) + np.uint64(_GAMMA * (draw + 1) % 2**64)
    return _mix(_mix(start) ^ _mix(np.asarray(positions, np.int64).astype(np.uint64)))


def _prepare(
    seed: int, epoch: int | np.ndarray, n: int, values: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Checks the arguments; returns (values as uint64 [M], round keys, one last key)."""
    if not 0 < n <= MAX_SAMPLES:
        raise ValueError(f"n={n} samples cannot be ordered; n must lie in 1..2**62")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} must be non-negative and below 2**64")
    values_M = np.asarray(values, np.int64)
    if values_M.size and (values_M.min() < 0 or values_M.max() >= n):
        raise ValueError(
            f"positions {values_M.min()}..{values_M.max()} lie outside an epoch of n={n} samples"
        )
    # One key per round and position, or, where all positions share the epoch, one per round. The
    # keys are a SplitMix64 stream that starts at a mix of seed and epoch.
    num_rounds = _NUM_ROUNDS_SMALL if n <= _SMALL else _NUM_ROUNDS
    epoch_1M = np.atleast_1d(np.asarray(epoch, np.int64))
    if epoch_1M.size and (epoch_1M == epoch_1M[0]).all():
        epoch_1M = epoch_1M[:1]
    start = _mix(np.asarray([seed], np.uint64)) + epoch_1M.astype(np.uint64)
    start = _mix(start ^ np.uint64(_GAMMA))
    keys = [_mix(start + np.uint64(_GAMMA * j % 2**64)) for j in range(1, num_rounds + 2)]
    return values_M.astype(np.uint64), keys[:-1], keys[-1]


def _mix(x_M: np.ndarray) -> np.ndarray:
    """Stafford's variant 13: a bijection of uint64 that flips half the bits for each input bit."""
    x_M = x_M ^ (x_M >> _30)
    x_M *= _MIX_1
    x_M ^= x_M >> _27
    x_M *= _MIX_2
    x_M ^= x_M >> _31
    return x_M


def _halves(n: int) -> tuple[np.uint64, np.uint64]:
    """The sizes (a, b) of the two halves: n <= a * b < n + a."""
    a = math.isqrt(n - 1) + 1
    return np.uint64(a), np.uint64(-(-n // a))


def _encrypt(x_M: np.ndarray, keys: list[np.ndarray], n: int) -> np.ndarray:
    a, b = _halves(n)
    left_M, right_M = x_M % a, x_M // a
    for size, key in zip((a, b) * (len(keys) // 2), keys, strict=True):
        # The top bit is dropped so that the sum cannot wrap around 2^64, which would break the
        # bijection.
        left_M, right_M = right_M, (left_M + (_mix(right_M ^ key) >> _1)) % size
    return right_M * a + left_M


def _decrypt(y_M: np.ndarray, keys: list[np.ndarray], n: int) -> np.ndarray:
    a, b = _halves(n)
    left_M, right_M = y_M % a, y_M // a
    for size, key in zip((b, a) * (len(keys) // 2), reversed(keys), strict=True):
        noise_M = (_mix(left_M ^ key) >> _1) % size
        left_M, right_M = (right_M + (size - noise_M)) % size, left_M
    return right_M * a + left_M


def _walk(x_M: np.ndarray, keys: list[np.ndarray], n: int, network) -> np.ndarray:
    """Applies `network`, and again to what fell outside range(n), until nothing is outside.

    It ends: the walk follows a cycle of the permutation of the whole domain, and the cycle comes
    back to its starting point, which is inside.
    """
    x_M = network(x_M, keys, n)
    outside = np.flatnonzero(x_M >= n)
    while outside.size:
        outside_keys = [key if key.size == 1 else key[outside] for key in keys]
        x_M[outside] = network(x_M[outside], outside_keys, n)
        outside = outside[x_M[outside] >= n]
    return x_M


def _transpose(x_M: np.ndarray, swap: np.ndarray, n: int) -> np.ndarray:
    """Exchanges samples 0 and 1, where there are two, for half of the keys.

    Many square domains admit only even permutations through a Feistel network; with this one step
    odd ones are as likely.
    """
    return x_M ^ ((x_M < 2) & (swap & _1).astype(bool)) if n > 1 else x_M
