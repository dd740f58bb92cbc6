"""Generating from a language model, token by token, with a key/value cache.

Shapes: B rows, P prompt length, S slots of the cache, V true vocabulary.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import Model, Params, logits

# Prompts are padded to multiples of this: few programs for prompts of all lengths.
_PROMPT_MULTIPLE = 64


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[np.typing.ArrayLike] | np.ndarray,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Continues each prompt by `num_tokens` tokens.

    One program serves all prompts, seeds and settings of the same `num_tokens`, number of prompts
    and (rounded up) longest prompt: calling again does not compile again. A row's tokens depend on
    its prompt, its index and the seed, not on the other rows.

    Args:
      model: has `decode` and `init_cache`.
      params: its parameters.
      prompts: token ids of each row, at least one; lengths may differ.
      num_tokens: how many to generate.
      temperature: divides the scores; 0 takes the likeliest token.
      top_k: only the k likeliest tokens can be drawn; 0: all. Ties with the last are kept.
      top_p: only the likeliest tokens that together reach this probability; 1: all.
      seed: of the draws.

    Returns:
      int32 tokens [B, num_tokens].
    """
    if model.decode is None or model.init_cache is None or model.vocab_size is None:
        raise ConfigError("generate() needs a language model: one with `decode`, `init_cache`.")
    _check_settings(num_tokens, temperature, top_k, top_p)
    rows = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    lengths_B = np.array([len(row) for row in rows], np.int32)
    if not len(rows) or lengths_B.min() < 1:
        raise ConfigError("every prompt needs at least one token.")
    outside = [int(t) for row in rows for t in row if not 0 <= t < model.vocab_size]
    if outside:
        raise ConfigError(
            f"tokens {outside[:5]} of the prompts are outside the vocabulary of {model.vocab_size}."
        )
    padded = -(-int(lengths_B.max()) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    try:
        jax.eval_shape(lambda: model.init_cache(1, padded + num_tokens))  # pyright: ignore
    except ConfigError:
        # A table of learned positions that the rounding does not fit may fit the prompts.
        padded = int(lengths_B.max())
    prompts_BP = np.stack([np.pad(row, (0, padded - len(row))) for row in rows])
    tokens = _generate(
        model, num_tokens, params, prompts_BP, lengths_B,
        np.float32(temperature), np.int32(top_k or model.vocab_size), np.float32(top_p),
        jax.random.key(seed),
    )  # fmt: skip
    return np.asarray(tokens)


def greedy_answer(
    model: Model, params: Params, prompt: Sequence[int], *, num_tokens: int, end: int
) -> list[int]:
    """The likeliest tokens after a prompt, up to `num_tokens` or the token `end`, without it."""
    (row,) = generate(model, params, [prompt], num_tokens=num_tokens, temperature=0)
    tokens = row.tolist()
    return tokens[: tokens.index(end)] if end in tokens else tokens


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
    model: Model, num_tokens: int, params, prompts_BP, lengths_B, temperature, top_k, top_p, key
):
    """Reads the prompts in one pass, then draws token after token."""
    decode, init_cache = model.decode, model.init_cache
    assert decode is not None
    assert init_cache is not None
    num_rows, padded = prompts_BP.shape
    cache = init_cache(num_rows, padded + num_tokens)
    positions_BP = jnp.broadcast_to(jnp.arange(padded)[None], prompts_BP.shape)
    # Slots of the padding lie after a row's positions, so they are written before they are read.
    hidden_BPD, cache = decode(params, cache, prompts_BP, positions_BP)
    last_B1D = jnp.take_along_axis(hidden_BPD, (lengths_B - 1)[:, None, None], axis=1)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))

    def draw(hidden_B1D, step):
        scores_BV = logits(model, params, hidden_B1D)[:, 0]
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, step)
        return jax.vmap(sample, (0, 0, None, None, None))(
            keys, scores_BV, temperature, top_k, top_p
        )

    def next_token(carry, step):
        token_B, cache = carry
        positions_B1 = (lengths_B + step)[:, None]
        hidden_B1D, cache = decode(params, cache, token_B[:, None], positions_B1)
        return (draw(hidden_B1D, step + 1), cache), token_B

    first_B = draw(last_B1D, jnp.int32(0))
    (last_B, _), tokens = jax.lax.scan(next_token, (first_B, cache), jnp.arange(num_tokens - 1))
    return jnp.concatenate([tokens.T, last_B[:, None]], axis=1)


def sample(
    key: jax.Array,
    scores_V: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    """Draws one token; temperature 0 takes the likeliest. Settings may be traced."""
    scaled_V = scores_V / jnp.where(temperature > 0, temperature, 1.0)
    sorted_V = jnp.sort(scaled_V, descending=True)
    kth = sorted_V[jnp.minimum(top_k, scores_V.shape[0]) - 1]
    # top-p among what top-k left; the token that crosses top_p is kept, so one always is.
    left_V = jax.nn.softmax(jnp.where(sorted_V >= kth, sorted_V, -jnp.inf))
    before_V = jnp.cumsum(left_V) - left_V
    threshold = jnp.min(jnp.where((before_V < top_p) & (sorted_V >= kth), sorted_V, jnp.inf))
    drawn = jax.random.categorical(key, jnp.where(scaled_V >= threshold, scaled_V, -jnp.inf))
    return jnp.where(temperature > 0, drawn, jnp.argmax(scores_V)).astype(jnp.int32)


def _check_settings(num_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    problems = []
    if num_tokens < 1:
        problems.append(f"num_tokens={num_tokens} must be at least 1")
    if not temperature >= 0:
        problems.append(f"temperature={temperature} must not be negative")
    if top_k < 0:
        problems.append(f"top_k={top_k} must not be negative")
    if not 0 < top_p <= 1:
        problems.append(f"top_p={top_p} must be above 0 and at most 1")
    if problems:
        raise ConfigError("; ".join(problems) + ".")
