"""The pure boundary: any NNX module becomes functions over plain nested dicts of arrays.

Only this package imports flax, and only this file splits and merges modules. What crosses a `jit`
boundary is a nested dict with string keys, never a module or an `nnx.State`: the call of a compiled
step is cheaper that way, and a checkpoint does not depend on the module library.

Shapes: B batch rows, T length, D embed, V vocab.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import ConfigError
from jaxtrain.models.layers import softcap

Params = dict[str, Any]
"""Nested dict of arrays; keys are strings, lists of modules count as "0", "1", ..."""

Batch = Mapping[str, jax.Array]
"""Name -> array whose dimension 0 is the rows."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions. `jaxtrain.functional` makes one from an NNX module.

    Compared and hashed by identity, so that it can be a static argument of `jax.jit`.
    """

    init: Callable[[jax.Array], tuple[Params, Params]]
    """key -> (params, model_state)"""
    apply: Callable[..., tuple[Any, Params]]
    """(params, model_state, batch, *, key, train) -> (outputs, new model_state)"""
    logical_axes: Any = None
    """Nested dict like the parameters; each leaf is a tuple with one logical axis name (or None)
    per dimension. Where a leaf or a branch is absent or None, path rules or sizes decide."""
    rows_are_independent: bool = True
    """False where outputs or loss of a row depend on other rows (a contrastive loss): the step is
    then left to XLA, to which the batch is whole on every mesh. Models with model_state are taken
    for such anyway."""
    frozen: str = ""
    """Regular expression, searched in paths of parameters: those that never train, whatever the
    optimizer; they get no gradient and no optimizer state. Empty: none."""
    kept_whole: str = ""
    """Pattern of those that may rest whole on every device of an axis: the audit of the layout does
    not take that for an accident, nor for their optimizer state. Empty: none."""
    num_padding_params: int = 0
    """Elements of the parameters that only pad the vocabulary; left out of parameter counts."""
    flops_per_token: Callable[[int], float] | None = None
    """sequence length -> FLOPs of one token in training; see `throughput`. None: not stated."""
    unembed: Callable[[Params], jax.Array] | None = None
    """params -> head_DV with padding columns; `outputs` are then the final hidden_BTD."""
    unembed_axes: tuple[str, str] = ("embed", "vocab")
    """Logical axes of what `unembed` returns."""
    vocab_size: int | None = None
    """True vocabulary size; columns of head_DV beyond it are padding."""
    logit_softcap: float = 0.0
    """Limit c of the scores, which are c * tanh(score / c); 0: none. `logits` and `lm_loss`
    respect it."""
    kernels: Callable[[Any, Batch], Mapping[str, str]] | None = None
    """(device, a batch of the run) -> facts about the kernels that a step for such a device uses,
    for log and report; ConfigError if none can do what the batch asks for"""
    init_cache: Callable[..., Any] | None = None
    """(batch_size, length, dtype) -> empty key/value cache"""
    decode: Callable[..., tuple[jax.Array, Any]] | None = None
    """(params, cache, tokens_BT, positions_BT) -> (hidden_BTD, cache)"""
    for_decode: Callable[[Params], Params] | None = None
    """params -> the same in the form in which `decode` is fastest token by token; it takes memory
    of its own. `decode` and `unembed` take either form."""


def as_model(model: Any) -> Model:
    """Accepts a `Model` or a plain pair `(init, apply)` of functions with the same signatures."""
    if isinstance(model, Model):
        return model
    if isinstance(model, tuple) and len(model) == 2 and all(callable(f) for f in model):
        return Model(init=model[0], apply=model[1])
    hint = ""
    if isinstance(model, nnx.Module):
        hint = "; make it pure with jaxtrain.functional(lambda rngs: YourModule(..., rngs=rngs))"
    raise ConfigError(
        f"a model is a jaxtrain Model or a pair of functions (init, apply), got "
        f"{type(model).__name__}{hint}."
    )


def row_keys(key: jax.Array, batch: Batch) -> jax.Array:
    """Returns one random key per row; the way to draw noise that no layout changes.

    The train step puts "row_key" into the batch: (seed, step, index of the row in the global
    batch) folded together. Noise drawn from it is the same on every mesh and for every number of
    micro-batches. Without it (a direct call of `apply`) `key` is folded with the row's index.
    """
    if "row_key" in batch:
        return batch["row_key"]
    num_rows = jax.tree.leaves(dict(batch))[0].shape[0]
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))


def logits(model: Model, params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """Scores of the true vocabulary, float32, from the hidden states that `apply` returns."""
    if model.unembed is None:
        raise ConfigError("logits() needs a language model: one with `unembed`.")
    head_DV = model.unembed(params).astype(hidden_BTD.dtype)
    scores_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, head_DV, preferred_element_type=jnp.float32)
    # The scores are cut, not the head: that would be copied for every token.
    return softcap(scores_BTV[..., : model.vocab_size], model.logit_softcap)


def functional(
    build: Callable[[nnx.Rngs], nnx.Module],
    *,
    call: Callable[..., Any] | None = None,
    precision: str = "float32",
    rows_are_independent: bool = True,
) -> Model:
    """Makes a pure `Model` from the constructor of any NNX module.

    `nnx.Param` becomes `params` and `nnx.BatchStat` becomes `model_state`. The names of
    `nnx.with_partitioning` or `out_sharding` are taken as logical axes. Stored `Rngs` are
    re-derived in every call: each key is the call's key folded with the key's path (split where
    layers are stacked) and every count starts at zero, so `nnx.Dropout` works as it is. Any other
    kind of Variable is refused with its path.

    When training, a module that draws random numbers and has no batch statistics is mapped over
    the rows, each row with its own key (`row_keys`): then neither the mesh nor accumulation
    changes a dropout mask. With batch statistics the rows cannot be separated, so one key serves
    the whole (micro-)batch: masks then depend on the number of micro-batches, as the statistics do.

    Args:
      build: called with `nnx.Rngs`; returns the module.
      call: `call(module, batch)` -> outputs, rows first; default `module(batch)`. If it (or, by
        default, the module's `__call__`) takes an argument `rngs`, it gets an `nnx.Rngs` that is
        derived from the call's key.
      precision: dtype of the computation, `config.precision`. With "bfloat16" the module gets its
        float32 parameters and the batch's float32 arrays in bfloat16, layers that were given no
        `dtype` get this one, and what the module returns is made float32. Batch statistics, and
        the parameters between two calls, stay float32.
      rows_are_independent: False for a module whose outputs of a row depend on other rows; like
        one with batch statistics it is never mapped over the rows.

    Returns:
      The model. `apply` calls `module.train()` or `module.eval()` first; `key` may be None when
      not training, a module that draws random numbers even then gets a fixed key.

    Raises:
      ConfigError: for Variables other than parameters, batch statistics and Rngs.
    """
    dtype = jnp.dtype(precision)

    def build_module(rngs: nnx.Rngs) -> nnx.Module:
        module = build(rngs)
        for _, layer in nnx.iter_modules(module) if dtype != jnp.float32 else ():
            # Else a norm answers in the dtype of its statistics, and all after it in float32.
            if getattr(layer, "dtype", dtype) is None:
                setattr(layer, "dtype", dtype)  # noqa: B010
        return module

    if isinstance(build, nnx.Module):
        name = type(build).__name__
        raise ConfigError(
            f"functional() takes what makes a module, and this {name} is made already; give "
            f"jaxtrain.functional(lambda rngs: {name}(..., rngs=rngs))."
        )
    # Not eager: annotations are names of logical axes for the sharding module, no mesh exists yet.
    with nnx.use_eager_sharding(False):
        skeleton = nnx.eval_shape(lambda: build_module(nnx.Rngs(0)))
    if not isinstance(skeleton, nnx.Module):
        raise ConfigError(
            f"functional() takes a function of rngs that returns an nnx.Module, this one returns "
            f"{'None' if skeleton is None else type(skeleton).__name__}."
        )
    graphdef, *states = nnx.split(skeleton, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    params_like, stats_like, rngs_like, rest = (nnx.to_pure_dict(state) for state in states)
    _refuse_others(rest, states[-1], "holds")
    wants_rngs = "rngs" in inspect.signature(call or type(skeleton).__call__).parameters
    is_random = wants_rngs or bool(jax.tree.leaves(rngs_like))
    lower = functools.partial(_cast, jnp.float32, dtype)
    restore = functools.partial(_cast, dtype, jnp.float32)

    def init(key: jax.Array) -> tuple[Params, Params]:
        with nnx.use_eager_sharding(False):
            module = build_module(nnx.Rngs(key))
        params, stats = (nnx.state(module, kind) for kind in (nnx.Param, nnx.BatchStat))
        return _string_keys(nnx.to_pure_dict(params)), _string_keys(nnx.to_pure_dict(stats))

    def run(params: Params, stats: Params, batch: Batch, key: jax.Array | None, train: bool):
        params, batch = lower(params), lower(batch)
        params = _original_keys(params, params_like, "parameters")
        stats = _original_keys(stats, stats_like, "model state")
        module = nnx.merge(graphdef, deep_merge(params, stats, _derive_rngs(rngs_like, key)))
        module.train() if train else module.eval()
        rngs = {"rngs": nnx.Rngs(_fold_path(key, ("call",)))} if wants_rngs else {}
        outputs = call(module, batch, **rngs) if call else module(batch, **rngs)  # pyright: ignore
        return restore(outputs), _collect(module, params)

    def apply(
        params: Params, model_state: Params, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Params]:
        if not is_random:
            return run(params, model_state, batch, None, train)
        if key is None:
            if train:
                raise ConfigError("a model with dropout or other noise needs a key to train.")
            key = jax.random.key(0)
        if not train or not rows_are_independent or jax.tree.leaves(stats_like):
            return run(params, model_state, batch, key, train)

        def run_row(row: Batch, key: jax.Array):
            row = {name: leaf[None] for name, leaf in row.items()}
            outputs, _ = run(params, model_state, row, key, train)
            return jax.tree.map(lambda leaf: leaf[0], outputs)

        return jax.vmap(run_row)(dict(batch), row_keys(key, batch)), model_state

    return Model(
        init=init,
        apply=apply,
        logical_axes=_annotated_axes(states[0]),
        rows_are_independent=rows_are_independent,
    )


def _cast(source: Any, target: Any, tree: Any) -> Any:
    """Arrays of one dtype in another; all else as it is."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(target) if getattr(leaf, "dtype", None) == source else leaf

    return tree if source == target else jax.tree.map(cast, tree)


def _annotated_axes(params_state: Any) -> Params | None:
    """Returns the logical axes of the parameters that are annotated; None if none is.

    Layers stacked by `jax.vmap` keep the annotation of one layer: the new dimensions come first.
    """
    flat = nnx.to_flat_state(params_state)
    names = [variable.get_metadata().get("out_sharding") for _, variable in flat]
    if not any(names):
        return None
    axes: Params = {}
    for (path, variable), given in zip(flat, names, strict=True):
        if not given:
            continue
        node = axes
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        node[str(path[-1])] = (None,) * (len(variable.shape) - len(given)) + tuple(given)
    return axes


def _refuse_others(rest: Params, state: Any, verb: str) -> None:
    """Raises ConfigError that lists every Variable (or bare array) we cannot carry."""
    if not jax.tree.leaves(rest):
        return
    found = ", ".join(
        f"'{'/'.join(map(str, path))}' ({type(leaf).__name__})"
        for path, leaf in nnx.to_flat_state(state)
    )
    raise ConfigError(
        f"a module for functional() holds only nnx.Param, nnx.BatchStat and Rngs, this one {verb} "
        f"{found}; make what is trained an nnx.Param, what is carried from step to step an "
        "nnx.BatchStat, and compute constants and caches inside the call."
    )


def _collect(module: nnx.Module, params: Params) -> Params:
    """Returns the module's batch statistics; refuses whatever else the call changed."""
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState, nnx.Intermediate, ...)
    _, new_params, stats, _, _, rest = nnx.split(module, *kinds)
    _refuse_others(nnx.to_pure_dict(rest), rest, "creates in its call")
    new_leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(new_params))
    written = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, new), old in zip(new_leaves, jax.tree.leaves(params), strict=True)
        if new is not old
    ]
    if written:
        raise ConfigError(
            f"a call must not write to parameters, this one writes to {', '.join(written)}; make "
            "what changes without a gradient an nnx.BatchStat."
        )
    return _string_keys(nnx.to_pure_dict(stats))


def _fold_path(key: jax.Array | None, path: tuple[Any, ...]) -> jax.Array:
    assert key is not None
    return jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))


def _derive_rngs(rngs_like: Params, key: jax.Array | None, path: tuple[Any, ...] = ()) -> Params:
    """Fills a tree of RngKey and RngCount leaves: keys folded with their path, counts zero."""
    if isinstance(rngs_like, dict):
        return {name: _derive_rngs(leaf, key, path + (name,)) for name, leaf in rngs_like.items()}
    if not jnp.issubdtype(rngs_like.dtype, jax.dtypes.prng_key):
        return jnp.zeros(rngs_like.shape, rngs_like.dtype)  # pyright: ignore[reportReturnType]
    folded = _fold_path(key, path)
    return jax.random.split(folded, rngs_like.shape) if rngs_like.shape else folded


def _string_keys(tree: Any) -> Any:
    """Lists of modules have int keys; JSON, checkpoints and path patterns want strings."""
    if not isinstance(tree, dict):
        return tree
    return {str(name): _string_keys(leaf) for name, leaf in tree.items()}


def _original_keys(tree: Any, like: Any, what: str, path: str = "") -> Any:
    """Undoes `_string_keys`, and says which name is missing or unknown."""
    if not isinstance(like, dict):
        return tree
    expected = {str(name): name for name in like}
    given = set(tree) if isinstance(tree, Mapping) else set()
    if given != set(expected):
        raise ConfigError(
            f"{what} do not fit the model at '{path}': missing {sorted(set(expected) - given)}, "
            f"unknown {sorted(given - set(expected))}."
        )
    return {
        name: _original_keys(tree[text], like[name], what, f"{path}/{text}".lstrip("/"))
        for text, name in expected.items()
    }


def deep_merge(*trees: Params) -> Params:
    """Joins nested dicts that share inner nodes but no leaf."""
    merged: Params = {}
    for tree in trees:
        for name, leaf in tree.items():
            merged[name] = (
                deep_merge(merged.get(name, {}), leaf) if isinstance(leaf, dict) else leaf
            )
    return merged
