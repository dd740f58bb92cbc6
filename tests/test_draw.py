"""Tokens are drawn with the frequencies that temperature, top-k and top-p ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.draw import DrawSettings, draw, draw_settings, keep_likeliest

pytestmark = pytest.mark.usefixtures("compile_cache")

SCORES = np.log(np.array([0.5, 0.25, 0.15, 0.1])).astype(np.float32)


def frequencies(temperature=1.0, top_k=0, top_p=1.0, scores=SCORES):
    keys = jax.random.split(jax.random.key(0), 4000)
    settings = draw_settings(temperature, top_k, top_p)
    drawn = jax.jit(draw)(keys, jnp.broadcast_to(scores[None], (4000, len(scores))), settings)
    assert (drawn.shape, drawn.dtype) == ((4000,), jnp.int32)
    return np.bincount(np.asarray(drawn), minlength=len(scores)) / len(keys)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, np.square([0.5, 0.25, 0.15, 0.1]) / 0.345),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.9}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 0.74}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        # top-p counts what top-k left: 0.5 of 0.75 is two thirds.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_frequencies(settings, expected):
    found = frequencies(**settings)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert ((found > 0) == (np.asarray(expected) > 0)).all()


def test_the_order_of_the_vocabulary_does_not_matter():
    found = frequencies(top_k=2, scores=SCORES[::-1].copy())
    np.testing.assert_allclose(found, [0, 0, 1 / 3, 2 / 3], atol=0.03)


def kept_by_sorting(scores_V, top_k, top_p):
    """Which tokens stay, in float64 and by NumPy's sort."""
    order = np.argsort(-scores_V, kind="stable")
    kth = scores_V[order[min(top_k or len(order), len(order)) - 1]]
    left = scores_V >= kth
    weights = np.where(left, np.exp(np.float64(scores_V) - scores_V.max()), 0)
    weights /= weights.sum()
    likelier = np.array([weights[scores_V > score].sum() for score in scores_V])
    return left & (likelier < top_p if top_p < 1 else True)


@pytest.mark.parametrize("top_k", [0, 1, 7, 300, 301])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.31, 1e-9])
def test_what_stays_is_what_sorting_finds(top_k, top_p):
    rng = np.random.default_rng(top_k)
    # Both signs, zero and ties.
    scores_V = rng.normal(size=301, scale=3).astype(np.float32)
    scores_V[rng.integers(0, 301, 40)] = np.float32(1.5)
    scores_V[:3] = [0.0, 1e-30, -1e-30]
    kept_V = jax.jit(keep_likeliest)(scores_V, jnp.int32(top_k), jnp.float32(top_p))
    expected_V = kept_by_sorting(scores_V, top_k, top_p)
    np.testing.assert_array_equal(np.isfinite(kept_V), expected_V)
    np.testing.assert_array_equal(np.asarray(kept_V)[expected_V], scores_V[expected_V])


def test_rows_have_keys_and_scores_of_their_own():
    scores = jnp.array([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert draw(keys, scores, DrawSettings(temperature=0.0)).tolist() == [1, 0]
    flat = jnp.zeros((64, 50))
    drawn = draw(jax.random.split(jax.random.key(1), 64), flat, DrawSettings())
    assert len(set(drawn.tolist())) > 20


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ((-1.0, 0, 1.0), "temperature=-1.0 must not be negative"),
        ((float("nan"), 0, 1.0), "temperature=nan"),
        ((1.0, -1, 1.0), "top_k=-1"),
        ((1.0, -1, 0.0), r"top_k=-1 must not be negative; top_p=0\.0 must be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        draw_settings(*settings)
