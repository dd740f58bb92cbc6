"""The likeliest text after a prompt, up to a stop, on a mesh.

Prompts of a batch are padded to one length. The model reads them in one pass and then adds a block
of tokens at a time, until each row has come to a token that ends it or to a stop string.

Shapes: B rows, P prompt length, S slots of the cache, K tokens of a block, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.errors import ConfigError
from jaxtrain.evals.pairs import Coder, bucket
from jaxtrain.evals.scoring import batches, num_rows, require_known
from jaxtrain.models.functional import Model, Params, logits
from jaxtrain.rules import DEFAULT_RULES, ShardingRules
from jaxtrain.sharding import constrain, shard_batch, use_rules

__all__ = ["Generator"]

_BLOCK = 16
_CACHE_AXES = (None, "batch", "kv_heads", None, None)


class Generator:
    """A model that goes on with texts, taking the likeliest token each time."""

    def __init__(
        self,
        model: Model,
        params: Params,
        mesh: Mesh,
        coder: Coder,
        *,
        ends: Collection[int],
        max_length: int,
        global_batch_size: int = 0,
        rules: ShardingRules = DEFAULT_RULES,
    ) -> None:
        """Takes a language model.

        Args:
            model: has `decode` and `init_cache`.
            params: on the mesh.
            mesh: from `make_mesh`.
            coder: of the model's tokenizer.
            ends: tokens after which there is no more.
            max_length: tokens of prompt and answer together.
            global_batch_size: rows at a time; 0: 8 for each batch shard.
            rules: which logical axes go over which mesh axes.

        Raises:
            ConfigError: for a batch that the mesh does not divide, and in a run of several
                processes.
        """
        self._model, self._params, self._coder = model, params, coder
        self._mesh, self._rules = mesh, rules
        self._ends, self._max_length = frozenset(ends), max_length
        self._num_rows = num_rows(global_batch_size, mesh, rules)
        self._read = jax.jit(self._reading, static_argnums=2)
        self._extend = jax.jit(self._extending, donate_argnums=1)

    def generate(
        self, prompts: Sequence[str], *, stops: Sequence[str], max_tokens: int
    ) -> list[str]:
        """What follows each prompt, without the stop.

        Args:
            prompts: texts, cut on the left to leave room for the answer.
            stops: strings at which an answer ends.
            max_tokens: length at which it ends anyway.

        Raises:
            ConfigError: when the answer alone does not fit `max_length`.
        """
        room = self._max_length - max_tokens
        if max_tokens < 1 or room < 1:
            raise ConfigError(
                f"max_gen_toks={max_tokens} must be at least 1 and leave room for a prompt in the "
                f"model's context of {self._max_length}; set max_gen_toks in generation_kwargs of "
                "the task, or raise --max_length if the model was trained on more."
            )
        rows = [(self._coder.encode(prompt) or [self._coder.prefix])[-room:] for prompt in prompts]
        require_known(rows, self._model)
        found: dict[int, str] = {}
        for chosen in batches([len(row) for row in rows], self._num_rows, "answered"):
            answers = self._answer([rows[number] for number in chosen], room, stops, max_tokens)
            found.update(zip(chosen, answers, strict=True))
        return [found[number] for number in range(len(prompts))]

    def _answer(
        self, rows: Sequence[list[int]], room: int, stops: Sequence[str], max_tokens: int
    ) -> list[str]:
        """One batch: blocks of tokens until every row has ended."""
        length = bucket(max(len(row) for row in rows), room)
        prompts_BP = np.zeros((self._num_rows, length), np.int32)
        lengths_B = np.ones(self._num_rows, np.int32)
        for number, row in enumerate(rows):
            prompts_BP[number, : len(row)], lengths_B[number] = row, len(row)
        batch = {"prompts": prompts_BP, "lengths": lengths_B}
        batch = shard_batch(batch, self._mesh, rules=self._rules)
        token_B, cache = self._read(self._params, batch, length + max_tokens)
        answers: list[list[int]] = [[] for _ in rows]
        texts: list[str | None] = [None for _ in rows]
        for step in range(0, max_tokens, _BLOCK):
            positions_B = batch["lengths"] + step
            cache, tokens_BK, token_B = self._extend(self._params, cache, token_B, positions_B)
            block = np.asarray(tokens_BK)
            is_last = step + _BLOCK >= max_tokens
            for number, answer in enumerate(answers):
                if texts[number] is None:
                    answer += block[number].tolist()
                    texts[number] = self._ended(answer[:max_tokens], stops, is_last)
            if None not in texts:
                break
        return [text for text in texts if text is not None]

    def _ended(self, tokens: list[int], stops: Sequence[str], is_last: bool) -> str | None:
        """The text before the end; None if it has not come yet."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        text = whole = self._coder.tokenizer.decode(tokens[:end])
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text if is_last or end is not None or text != whole else None

    def _reading(
        self, params: Params, batch: dict[str, jax.Array], num_slots: int
    ) -> tuple[jax.Array, Any]:
        """(the token after each prompt [B], the cache with the prompts)."""
        decode, init_cache = self._model.decode, self._model.init_cache
        assert decode is not None
        assert init_cache is not None
        with use_rules(self._mesh, self._rules):
            prompts_BP, lengths_B = batch["prompts"], batch["lengths"]
            # In the form of the parameters: those are stacked.
            cache = _placed(init_cache(prompts_BP.shape[0], num_slots).stacked())
            positions_BP = jnp.broadcast_to(jnp.arange(prompts_BP.shape[1])[None], prompts_BP.shape)
            # Slots of the padding lie after a row's positions: written before they are read.
            hidden_BPD, cache = decode(params, cache, prompts_BP, positions_BP)
            last_B1D = jnp.take_along_axis(hidden_BPD, (lengths_B - 1)[:, None, None], axis=1)
            return self._likeliest(params, last_B1D), _placed(cache)

    def _extending(
        self, params: Params, cache: Any, token_B: jax.Array, positions_B: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array]:
        """(the cache, the next tokens [B, K], the one after them [B]).

        Args:
            params: of the model.
            cache: of all positions before.
            token_B: which is known already, the first of the block.
            positions_B: its position.
        """
        decode = self._model.decode
        assert decode is not None
        num_slots = cache.keys.shape[3]

        def next_token(carry: tuple[jax.Array, Any], step: jax.Array):
            token_B, cache = carry
            # What is beyond the last slot comes after the end of every row.
            places_B1 = jnp.minimum(positions_B + step, num_slots - 1)[:, None]
            hidden_B1D, cache = decode(params, cache, token_B[:, None], places_B1)
            return (self._likeliest(params, hidden_B1D), _placed(cache)), token_B

        with use_rules(self._mesh, self._rules):
            (token_B, cache), tokens_KB = jax.lax.scan(
                next_token, (token_B, cache), jnp.arange(_BLOCK)
            )
            return cache, tokens_KB.T, token_B

    def _likeliest(self, params: Params, hidden_B1D: jax.Array) -> jax.Array:
        scores_B1V = logits(self._model, params, hidden_B1D)
        return constrain(jnp.argmax(scores_B1V[:, 0], -1).astype(jnp.int32), "batch")


def _placed(cache: Any) -> Any:
    """A cache laid out by rows and heads."""
    return jax.tree.map(lambda slots_LBKSH: constrain(slots_LBKSH, *_CACHE_AXES), cache)
