"""Drawing the next token from scores.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError


class DrawSettings(NamedTuple):
    """How tokens are drawn; scalars, which may be traced."""

    temperature: jax.typing.ArrayLike = np.float32(1)
    """Divides the scores; 0 takes the likeliest token."""
    top_k: jax.typing.ArrayLike = np.int32(0)
    """Only the k likeliest tokens can be drawn; 0: all. Ties with the last are kept."""
    top_p: jax.typing.ArrayLike = np.float32(1)
    """Only the likeliest tokens that together reach this probability; 1: all."""


def draw_settings(temperature: float, top_k: int, top_p: float) -> DrawSettings:
    """Settings of plain numbers.

    Raises:
        ConfigError: for values that mean nothing.
    """
    problems = []
    if not temperature >= 0:
        problems.append(f"temperature={temperature} must not be negative")
    if top_k < 0:
        problems.append(f"top_k={top_k} must not be negative")
    if not 0 < top_p <= 1:
        problems.append(f"top_p={top_p} must be above 0 and at most 1")
    if problems:
        raise ConfigError("; ".join(problems) + ".")
    return DrawSettings(np.float32(temperature), np.int32(top_k), np.float32(top_p))


def draw(keys_B: jax.Array, scores_BV: jax.Array, settings: DrawSettings) -> jax.Array:
    """Draws a token for each row.

    What the settings do not ask for is not computed: temperature 0 draws nothing, and without top-k
    and top-p no threshold is looked for.

    Args:
        keys_B: random keys.
        scores_BV: float32.
        settings: for all rows.

    Returns:
        int32 [B].
    """
    temperature, top_k, top_p = map(jnp.asarray, settings)

    def drawn() -> jax.Array:
        scaled_BV = scores_BV / temperature
        scaled_BV = jax.lax.cond(
            (top_k > 0) | (top_p < 1),
            lambda: jax.vmap(keep_likeliest, (0, None, None))(scaled_BV, top_k, top_p),
            lambda: scaled_BV,
        )
        return jax.vmap(jax.random.categorical)(keys_B, scaled_BV)

    likeliest = lambda: jnp.argmax(scores_BV, axis=-1)  # noqa: E731
    return jax.lax.cond(temperature > 0, drawn, likeliest).astype(jnp.int32)


def keep_likeliest(scores_V: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf in the place of tokens that top-k, or top-p among what it left, leaves out.

    A token stays if fewer than k are likelier, and if those that are likelier have together less
    than p. Either is a threshold of the scores.
    """
    most = jnp.where(top_k > 0, top_k, scores_V.size)
    scores_V = _keep(scores_V, lambda is_above_V: jnp.sum(is_above_V), most)
    probabilities_V = jax.nn.softmax(scores_V)
    mass = jnp.where(top_p < 1, top_p, jnp.inf)
    return _keep(scores_V, lambda is_above_V: jnp.sum(probabilities_V, where=is_above_V), mass)


def _keep(
    scores_V: jax.Array, measure: Callable[[jax.Array], jax.Array], limit: jax.Array
) -> jax.Array:
    """-inf in the place of every score for which the larger ones measure `limit` or more.

    The smallest score to stay is found by bisection, which takes a fraction of the time of a sort.
    """
    keys_V = _ordered(scores_V)

    def halve(_, bounds):
        low, high = bounds  # what is above `high` measures less than the limit
        middle = low + (high - low) // 2
        is_less = measure(keys_V > middle) < limit
        return jnp.where(is_less, low, middle + 1), jnp.where(is_less, middle, high)

    smallest, _ = jax.lax.fori_loop(0, 32, halve, (jnp.min(keys_V), jnp.max(keys_V)))
    return jnp.where(keys_V >= smallest, scores_V, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 in the order of float32 numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
