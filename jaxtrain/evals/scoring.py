"""How likely a model takes continuations to be, on a mesh.

Pairs are sorted by length, the longest first, and go through the model in batches of a fixed number
of rows whose length is rounded up to a power of two: few programs serve all requests. Only the
scores of continuations are computed, in float32, a chunk at a time.

Shapes: B rows, T length, C scored positions, c of them in a chunk, D embed, V padded vocabulary.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.errors import ConfigError, NonFiniteError
from jaxtrain.evals.pairs import Pair, bucket, cut
from jaxtrain.models.functional import Model, Params
from jaxtrain.models.layers import softcap
from jaxtrain.rules import DEFAULT_RULES, ShardingRules, as_axes, axis_size
from jaxtrain.sharding import check_batch_size, gather_param, shard_batch, use_rules

__all__ = ["Score", "Scorer", "batches", "num_rows", "require_known"]

_ROWS = 8
"""Of each batch shard, unless asked for others."""
_FEW = 16
"""Up to so many scored positions in a row: most answers to choose from are no longer."""
_CHUNK_BYTES = 2**28
_SAY_SECONDS = 10.0
_NEVER = -1e30

_log = logging.getLogger("jaxtrain")


class Score(NamedTuple):
    """What the model makes of a continuation."""

    log_likelihood: float
    """Natural logarithm of its probability, given the context."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one where it stands."""


class Scorer:
    """A model that scores continuations; its programs are compiled once."""

    def __init__(
        self,
        model: Model,
        params: Params,
        mesh: Mesh,
        *,
        max_length: int,
        global_batch_size: int = 0,
        rules: ShardingRules = DEFAULT_RULES,
    ) -> None:
        """Takes a language model.

        Args:
            model: has `unembed` and `vocab_size`.
            params: on the mesh.
            mesh: from `make_mesh`.
            max_length: tokens that it reads at a time; longer contexts are cut on the left.
            global_batch_size: rows at a time; 0: 8 for each batch shard.
            rules: which logical axes go over which mesh axes.

        Raises:
            ConfigError: for a batch that the mesh does not divide, and in a run of several
                processes.
        """
        self._model, self._params = model, params
        self._mesh, self._rules = mesh, rules
        self._max_length = max_length
        self._num_rows = num_rows(global_batch_size, mesh, rules)
        self._run = jax.jit(self._scores)

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Scores each pair, in the order given.

        Raises:
            ConfigError: for a continuation longer than `max_length`, and tokens that the model
                does not have.
            NonFiniteError: for scores that are not finite.
        """
        cuts = [cut(pair, self._max_length) for pair in pairs]
        require_known([[*tokens, targets[-1]] for tokens, targets in cuts], self._model)
        counts = [len(pair.continuation) for pair in pairs]
        found: dict[int, Score] = {}
        for chosen in batches([len(tokens) for tokens, _ in cuts], self._num_rows, "scored"):
            rows = [cuts[number] for number in chosen]
            scores = self._score_rows(rows, [counts[number] for number in chosen])
            found.update(zip(chosen, scores, strict=True))
        return [found[number] for number in range(len(pairs))]

    def _score_rows(
        self, rows: Sequence[tuple[list[int], list[int]]], counts: Sequence[int]
    ) -> list[Score]:
        length = bucket(max(len(tokens) for tokens, _ in rows), self._max_length)
        most = max(counts)
        width = min(_FEW if most <= _FEW else length, length)
        batch = {
            "tokens": np.zeros((self._num_rows, length), np.int32),
            "places": np.zeros((self._num_rows, width), np.int32),
            "targets": np.zeros((self._num_rows, width), np.int32),
        }
        for row, ((tokens, targets), count) in enumerate(zip(rows, counts, strict=True)):
            batch["tokens"][row, : len(tokens)] = tokens
            batch["places"][row, :count] = np.arange(len(tokens) - count, len(tokens))
            batch["targets"][row, :count] = targets[-count:]
        placed = shard_batch(batch, self._mesh, rules=self._rules)
        log_probs_BC, is_likeliest_BC = map(np.asarray, self._run(self._params, placed))
        scores = []
        for row, count in enumerate(counts):
            log_probs = log_probs_BC[row, :count]
            if not np.isfinite(log_probs).all():
                raise NonFiniteError(
                    "log-likelihoods must be finite; those of this model are not. Is it trained, "
                    "and the --precision one that it bears?"
                )
            total = float(log_probs.sum(dtype=np.float64))
            scores.append(Score(total, bool(is_likeliest_BC[row, :count].all())))
        return scores

    def _scores(self, params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(log-probability of each target, whether it is the likeliest), [B, C]."""
        model = self._model
        assert model.unembed is not None
        with use_rules(self._mesh, self._rules):
            inputs = {"tokens": batch["tokens"]}
            hidden_BTD, _ = model.apply(params, {}, inputs, key=None, train=False)
            hidden_BCD = jnp.take_along_axis(hidden_BTD, batch["places"][:, :, None], axis=1)
            head_DV = gather_param(model.unembed(params), model.unembed_axes, hidden_BCD.dtype)
            return self._in_chunks(hidden_BCD, head_DV, batch["targets"])

    def _in_chunks(
        self, hidden_BCD: jax.Array, head_DV: jax.Array, targets_BC: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`_of_chunk` over positions, as many at a time as the scores have room for."""
        B, C, D = hidden_BCD.shape
        axes = self._rules.compute
        rows = B // axis_size(self._mesh, as_axes(axes["batch"]))
        columns = head_DV.shape[1] // axis_size(self._mesh, axes[self._model.unembed_axes[1]])
        c = min(max(_CHUNK_BYTES // (4 * rows * columns), 1), C)
        if c == C:
            return self._of_chunk(hidden_BCD, head_DV, targets_BC)
        n = -(-C // c)
        hidden_BCD = jnp.pad(hidden_BCD, ((0, 0), (0, n * c - C), (0, 0)))
        targets_BC = jnp.pad(targets_BC, ((0, 0), (0, n * c - C)))
        chunks = (
            jnp.swapaxes(hidden_BCD.reshape(B, n, c, D), 0, 1),
            jnp.swapaxes(targets_BC.reshape(B, n, c), 0, 1),
        )
        found = jax.lax.map(lambda chunk: self._of_chunk(chunk[0], head_DV, chunk[1]), chunks)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(B, n * c)[:, :C], found)

    def _of_chunk(
        self, hidden_BcD: jax.Array, head_DV: jax.Array, targets_Bc: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("bcd,dv->bcv", hidden_BcD, head_DV, preferred_element_type=jnp.float32)
        scores = softcap(scores, self._model.logit_softcap)
        column_V = jnp.arange(head_DV.shape[1])[None, None, :]
        vocab_size = self._model.vocab_size
        assert vocab_size is not None
        if vocab_size < head_DV.shape[1]:
            scores = jnp.where(column_V < vocab_size, scores, _NEVER)
        # A comparison instead of a gather: it stays local where the vocabulary is split.
        is_target = column_V == targets_Bc[:, :, None]
        target_Bc = jnp.sum(jnp.where(is_target, scores, 0), -1)
        log_probs_Bc = target_Bc - jax.nn.logsumexp(scores, -1)
        return log_probs_Bc, jnp.argmax(scores, -1) == targets_Bc


def num_rows(global_batch_size: int, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES) -> int:
    """Rows of a batch, which the mesh divides.

    Raises:
        ConfigError: if it does not, and in a run of several processes.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            f"tasks of lm-eval are answered by one process; this run has {jax.process_count()}. "
            "Start one, on a machine whose devices hold the model."
        )
    shards = axis_size(mesh, as_axes(rules.compute["batch"]))
    rows = global_batch_size or _ROWS * shards
    check_batch_size(rows, 1, mesh, rules)
    return rows


def batches(lengths: Sequence[int], size: int, done: str) -> Iterator[list[int]]:
    """Numbers of the rows of each batch, the longest rows first; says now and then how far it is.

    Args:
        lengths: of all rows.
        size: most rows of a batch.
        done: what has happened to a row whose batch is done, for the log.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    said = time.monotonic()
    for begin in range(0, len(order), size):
        yield order[begin : begin + size]
        if time.monotonic() - said >= _SAY_SECONDS:
            said = time.monotonic()
            _log.info("%s %d of %d", done, min(begin + size, len(order)), len(order))


def require_known(rows: Sequence[Sequence[int]], model: Model) -> None:
    """Refuses tokens outside of the vocabulary, which a model looks up as something else.

    Raises:
        ConfigError: naming one.
    """
    assert model.vocab_size is not None
    largest = max((max(row) for row in rows), default=0)
    if largest >= model.vocab_size:
        raise ConfigError(
            f"token {largest} is outside of the model's vocabulary of {model.vocab_size}; is this "
            "tokenizer the model's own?"
        )
