"""Generating from a language model, token by token, with a key/value cache.

Shapes: B rows.
"""

from collections.abc import Sequence

import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.models.decoding import Decoding
from jaxtrain.models.draw import draw_settings
from jaxtrain.models.functional import Model, Params

__all__ = ["generate", "greedy_answer", "start"]


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
    stop_tokens: Sequence[int] = (),
) -> np.ndarray:
    """Continues each prompt by `num_tokens` tokens, or to the first stop token.

    Programs are compiled once for rounded sizes (`decoding`): calling again with other prompts,
    seeds, settings or stop tokens does not compile again. A row's tokens depend on its prompt, its
    index and the seed, not on the other rows.

    Args:
      model: has `decode` and `init_cache`.
      params: its parameters.
      prompts: token ids of each row, at least one; lengths may differ.
      num_tokens: how many to generate at most.
      temperature: divides the scores; 0 takes the likeliest token.
      top_k: only the k likeliest tokens can be drawn; 0: all. Ties with the last are kept.
      top_p: only the likeliest tokens that together reach this probability; 1: all.
      seed: of the draws.
      stop_tokens: a row ends with the first of them. When all have ended, nothing more is computed.

    Returns:
      int32 tokens [B, num_tokens]; a row that has ended is filled up with its stop token.
    """
    decoding = start(
        model, params, prompts, num_tokens=num_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop_tokens=stop_tokens,
    )  # fmt: skip
    pieces = [decoding.read()]
    while not decoding.is_done:
        pieces.append(decoding.go_on())
    tokens = np.concatenate(pieces, axis=1)
    return np.pad(tokens, ((0, 0), (0, num_tokens - tokens.shape[1])), mode="edge")


def start(
    model: Model,
    params: Params,
    prompts: Sequence[np.typing.ArrayLike] | np.ndarray,
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    first_row: int = 0,
    ready: Params | None = None,
) -> Decoding:
    """`generate` for whoever looks at the tokens piece by piece, or wants to know the time.

    Where a batch is a part of all, `first_row` is the index of its first prompt, for the draws, and
    `ready` what `decoding.prepared` made of the parameters.
    """
    if model.decode is None or model.init_cache is None or model.vocab_size is None:
        raise ConfigError("generate() needs a language model: one with `decode`, `init_cache`.")
    if num_tokens < 1:
        raise ConfigError(f"num_tokens={num_tokens} must be at least 1.")
    settings = draw_settings(temperature, top_k, top_p)
    rows = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
    if not rows or not all(map(len, rows)):
        raise ConfigError("every prompt needs at least one token.")
    outside = [int(t) for row in rows for t in row if not 0 <= t < model.vocab_size]
    if outside:
        raise ConfigError(
            f"tokens {outside[:5]} of the prompts are outside the vocabulary of {model.vocab_size}."
        )
    return Decoding(
        model, params, rows,
        num_tokens=num_tokens, settings=settings, stop_tokens=stop_tokens,
        seed=seed, first_row=first_row, ready=ready,
    )  # fmt: skip


def greedy_answer(
    model: Model, params: Params, prompt: Sequence[int], *, num_tokens: int, end: int
) -> list[int]:
    """The likeliest tokens after a prompt, up to `num_tokens` or the token `end`, without it."""
    (row,) = generate(
        model, params, [prompt], num_tokens=num_tokens, temperature=0, stop_tokens=[end]
    )
    tokens = row.tolist()
    return tokens[: tokens.index(end)] if end in tokens else tokens
