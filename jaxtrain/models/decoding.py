"""A batch of prompts being continued, piece by piece, by programs that are compiled once a bucket.

    decoding = Decoding(model, params, prompts, num_tokens=100, settings=settings)
    tokens = [decoding.read()]                # reads the prompts
    while not decoding.is_done:
        tokens.append(decoding.go_on())       # up to PIECE tokens more of each row
        decoding.finish(row)                  # of a row that needs no more

Rows and lengths are rounded up to powers of two: a program serves all prompts, settings and seeds
of its bucket. A piece ends early when all rows have ended. Padding is never seen: a slot of the
cache is written before a query comes that could see it, and rows that only fill the batch have
ended.

Shapes: B rows of the bucket, P its prompt length, S slots of the cache, N tokens of a piece, E stop
tokens.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.models.draw import DrawSettings, draw
from jaxtrain.models.functional import Model, Params, logits

PIECE = 32
"""Tokens that are generated before the host looks at them."""

_LEAST_PROMPT, _LEAST_TOKENS, _LEAST_STOPS = 32, 32, 8
_NO_TOKEN = -1


class _State(NamedTuple):
    """What generating has come to; on the device, and given away with every call."""

    cache: Any
    tokens_B: jax.Array
    """Drawn last; their keys and values are not in the cache yet."""
    has_ended_B: jax.Array
    step: jax.Array
    """How many tokens each row has."""


class _Inputs(NamedTuple):
    """What stays the same from piece to piece."""

    lengths_B: np.ndarray
    rows_B: np.ndarray
    """Indices of the rows, for the draws."""
    stop_tokens_E: np.ndarray
    settings: DrawSettings
    seed: np.uint32


@dataclasses.dataclass
class Seconds:
    """Where the time went."""

    compile: float = 0.0
    """And bringing the parameters into the form for decoding."""
    prefill: float = 0.0
    decode: float = 0.0


def prepared(model: Model, params: Params) -> Params:
    """The parameters in the form for decoding, which several batches can share."""
    prepare = _compiled(_prepare, (model,), (params,), _replicated(params))
    return jax.block_until_ready(prepare(params))


class Decoding:
    """A batch, from its prompts to the last token of the last row.

    Args:
        model: has `decode` and `init_cache`.
        params: its parameters.
        prompts: token ids of each row, at least one row and one token each; checked by the caller.
        num_tokens: how many to generate at most.
        settings: of the draws.
        stop_tokens: a row ends with the first of them.
        seed: of the draws.
        first_row: index of the first prompt, for the draws.
        ready: what `prepared` made of the parameters; None: it is made for this batch alone.

    Raises:
        ConfigError: for prompts and tokens that do not fit the model.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        num_tokens: int,
        settings: DrawSettings,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        first_row: int = 0,
        ready: Params | None = None,
    ):
        self._model, self._params, self._ready = model, params, ready
        self.num_rows, self.num_tokens, self.num_done = len(prompts), num_tokens, 0
        self.seconds = Seconds()
        lengths = [len(prompt) for prompt in prompts]
        length, self._num_slots = _lengths(model, max(lengths), num_tokens)
        num_filling = _bucket(self.num_rows, 1) - self.num_rows
        rows = [np.pad(prompt, (0, length - len(prompt))) for prompt in prompts]
        num_stops = _bucket(len(stop_tokens), _LEAST_STOPS)
        stops = [*stop_tokens, *(num_stops - len(stop_tokens)) * [_NO_TOKEN]]
        self._prompts_BP = np.stack(rows + num_filling * [0 * rows[0]]).astype(np.int32)
        self._has_ended_B = np.arange(self.num_rows + num_filling) >= self.num_rows
        self._inputs = _Inputs(
            np.array(lengths + num_filling * [1], np.int32),
            np.arange(first_row, first_row + len(self._has_ended_B), dtype=np.int32),
            np.array(stops, np.int32),
            settings,
            np.uint32(seed % 2**32),
        )
        self._place = _replicated(params)
        self._state: Any = None

    @property
    def is_done(self) -> bool:
        """Whether all rows have ended, or have all their tokens."""
        return self.num_done >= self.num_tokens or bool(self._has_ended_B.all())

    def read(self) -> np.ndarray:
        """Reads the prompts; returns the first token of each row, int32 [rows, 1]."""
        arguments = (self._params, self._prompts_BP, self._has_ended_B, self._inputs)
        with _adding(self.seconds, "compile"):
            static = (self._model, self._num_slots, self._place)
            prefill = _compiled(_prefill, static, arguments, self._place)
        with _adding(self.seconds, "prefill"):
            self._state = prefill(*arguments)
            self._note_ended()
        self.num_done = 1
        return np.asarray(self._state.tokens_B)[: self.num_rows, None]

    def go_on(self) -> np.ndarray:
        """Generates up to PIECE tokens more; returns them, int32 [rows, N].

        A row that has ended repeats its last token.
        """
        with _adding(self.seconds, "compile"):
            if self._ready is None:
                self._ready = prepared(self._model, self._params)
            limit = np.int32(min(PIECE, self.num_tokens - self.num_done))
            arguments = (self._ready, self._state, self._inputs, self._has_ended_B, limit)
            static = (self._model, self._place)
            piece = _compiled(_piece, static, arguments, self._place, donated=1)
        with _adding(self.seconds, "decode"):
            self._state, tokens_BN, count = piece(*arguments)
            self._note_ended()
        self.num_done += int(count)
        return np.asarray(tokens_BN)[: self.num_rows, : int(count)]

    def finish(self, row: int) -> None:
        """Ends a row that needs no more tokens."""
        self._has_ended_B[row] = True

    def _note_ended(self) -> None:
        assert self._state is not None
        self._has_ended_B = self._has_ended_B | np.asarray(self._state.has_ended_B)


# What is compiled


def _prepare(model, params):
    return params if model.for_decode is None else model.for_decode(params)


def _prefill(model, num_slots, place, params, prompts_BP, has_ended_B, inputs):
    """Reads all prompts in one pass and draws the first token of each row."""
    num_rows, length = prompts_BP.shape
    cache = model.init_cache(num_rows, num_slots)
    positions_BP = jnp.broadcast_to(jnp.arange(length)[None], prompts_BP.shape)
    # Slots of the padding lie after a row's positions, so they are written before they are seen.
    hidden_BPD, cache = model.decode(params, cache, prompts_BP, positions_BP)
    last_B1D = jnp.take_along_axis(hidden_BPD, (inputs.lengths_B - 1)[:, None, None], axis=1)
    tokens_B, has_ended_B = _draw(model, params, last_B1D, inputs, jnp.int32(0), has_ended_B)
    return _constrained(_State(cache, tokens_B, has_ended_B, jnp.int32(1)), place)


def _piece(model, place, params, state, inputs, has_ended_B, limit):
    """Up to `limit` tokens; returns (state, tokens [B, PIECE], how many of them there are)."""
    state = state._replace(has_ended_B=state.has_ended_B | has_ended_B)
    tokens_BN = jnp.zeros((state.tokens_B.shape[0], PIECE), jnp.int32)

    def goes_on(carry):
        count, state, _ = carry
        return (count < limit) & ~jnp.all(state.has_ended_B)

    def next_token(carry):
        count, state, tokens_BN = carry
        cache, tokens_B, has_ended_B, step = state
        positions_B1 = (inputs.lengths_B + step - 1)[:, None]
        hidden_B1D, cache = model.decode(params, cache, tokens_B[:, None], positions_B1)
        drawn_B, ends_B = _draw(model, params, hidden_B1D, inputs, step, has_ended_B)
        tokens_B = jnp.where(has_ended_B, tokens_B, drawn_B)
        tokens_BN = jax.lax.dynamic_update_slice(tokens_BN, tokens_B[:, None], (0, count))
        state = _constrained(_State(cache, tokens_B, ends_B, step + 1), place)
        return count + 1, state, tokens_BN

    carry = (jnp.int32(0), _constrained(state, place), tokens_BN)
    count, state, tokens_BN = jax.lax.while_loop(goes_on, next_token, carry)
    return state, tokens_BN, count


def _draw(model, params, hidden_B1D, inputs, step, has_ended_B):
    """(next token of each row, whether it has ended with that)."""
    scores_BV = logits(model, params, hidden_B1D)[:, 0]
    fold = jax.random.fold_in
    # By row and step, so that a row's draws do not depend on the rows beside it.
    key = jax.random.key(inputs.seed)
    keys_B = jax.vmap(lambda row: fold(fold(key, row), step))(inputs.rows_B)
    tokens_B = draw(keys_B, scores_BV, inputs.settings)
    ends_B = jnp.any(tokens_B[:, None] == inputs.stop_tokens_E[None], axis=1)
    return tokens_B, has_ended_B | ends_B


def _constrained(state, place):
    """All of it whole on every device: else every call might choose another layout."""
    return state if place is None else jax.lax.with_sharding_constraint(state, place)


# Inside


@contextlib.contextmanager
def _adding(seconds: Seconds, name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    setattr(seconds, name, getattr(seconds, name) + time.perf_counter() - begin)


def _bucket(number: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << math.ceil(math.log2(max(number, 1))))


def _lengths(model: Model, longest: int, num_tokens: int) -> tuple[int, int]:
    """(prompt length, slots of the cache), rounded up as far as the model has positions."""
    assert model.init_cache is not None
    length = _bucket(longest, _LEAST_PROMPT)
    for num_slots in (length + _bucket(num_tokens, _LEAST_TOKENS), length + num_tokens):
        try:
            jax.eval_shape(functools.partial(model.init_cache, 1, num_slots))
        except ConfigError:
            # A table of learned positions that the rounding does not fit may fit the prompts.
            continue
        return length, num_slots
    jax.eval_shape(functools.partial(model.init_cache, 1, longest + num_tokens))
    return longest, longest + num_tokens


def _replicated(params: Params) -> NamedSharding | None:
    """The layout "whole on every device" of the parameters' mesh, if that has several devices."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec())


def _compiled(
    function: Any,
    static: tuple,
    arguments: tuple,
    place: NamedSharding | None,
    donated: int | None = None,
) -> Any:
    """The program for arguments of these shapes, dtypes and layouts; compiled once."""
    leaves, treedef = jax.tree.flatten(arguments)
    abstract = tuple(_abstract(leaf, place) for leaf in leaves)
    return _compile(function, static, treedef, abstract, donated)


def _abstract(leaf: Any, place: NamedSharding | None) -> jax.ShapeDtypeStruct:
    # An array that was put nowhere goes where the others are.
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    # XLA has several names for "whole on every device", and programs are found by name.
    if sharding is not None and place is not None and sharding.is_equivalent_to(place, leaf.ndim):
        sharding = place
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@functools.lru_cache(maxsize=64)
def _compile(function, static, treedef, leaves, donated) -> Any:
    arguments = jax.tree.unflatten(treedef, leaves)
    jitted = jax.jit(
        functools.partial(function, *static),
        donate_argnums=() if donated is None else (donated,),
    )
    return jitted.lower(*arguments).compile()
