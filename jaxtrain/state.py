"""The train state: what a step takes and returns, and how it comes into being.

    step = state.step                         # int32 scalar on the devices
    state = state.replace(params=new_params)

Everything the training carries from step to step and that lives on devices is here. Counters that
can grow large (samples seen) live on the host, in the checkpoint's JSON item.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import Model, as_model
from jaxtrain.optim import require_optimizer
from jaxtrain.placement import opt_state_shardings, param_shardings
from jaxtrain.rules import DEFAULT_RULES, ShardingRules
from jaxtrain.tree import named_leaves, num_elements, partition, restrict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All arrays of a training, as one tree."""

    step: jax.Array
    """int32 scalar: optimizer steps done."""
    params: Any
    """Nested dict of the model's parameters, float32 unless the model has others."""
    model_state: Any
    """What a model carries besides parameters (batch statistics); often empty."""
    opt_state: Any
    """What the optimizer's `init` made of the parameters."""
    ema_params: Any = None
    """Moving average of the parameters that train, None in the places of the others; None unless
    asked for."""
    key: jax.Array
    """Base key, constant over the run; a step folds its number into it."""

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a state with some fields replaced."""
        return dataclasses.replace(self, **changes)


def abstract_state(
    model: Model | tuple,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    ema: bool = False,
    frozen: Any = None,
) -> TrainState:
    """The shapes and dtypes of a train state; nothing is computed, no device is needed."""
    require_optimizer(tx)
    model = as_model(model)
    return jax.eval_shape(lambda seed: _new_state(model, tx, seed, ema, frozen), np.uint32(seed))


def state_shardings(
    abstract: TrainState,
    model: Model | tuple,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
) -> TrainState:
    """The sharding of every leaf of a train state.

    Parameters go by their logical axes, path rules or size, their moving average like them,
    optimizer state by shape; all else is replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(abstract.params, as_model(model).logical_axes, mesh, rules)
    return TrainState(
        step=replicated,  # pyright: ignore[reportArgumentType]
        params=params,
        model_state=jax.tree.map(lambda _: replicated, abstract.model_state),
        opt_state=opt_state_shardings(abstract.opt_state, abstract.params, params, mesh),
        ema_params=abstract.ema_params and restrict(params, abstract.ema_params),
        key=replicated,  # pyright: ignore[reportArgumentType]
    )


def placed_state(
    model: Model | tuple,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    seed: int = 0,
    ema: bool = False,
    frozen: Any = None,
) -> TrainState:
    """`abstract_state` with the sharding of every leaf: what a restore asks for."""
    abstract = abstract_state(model, tx, seed=seed, ema=ema, frozen=frozen)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        state_shardings(abstract, model, mesh, rules),
    )


def init_state(
    model: Model | tuple,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    seed: int = 0,
    ema: bool = False,
    frozen: Any = None,
) -> TrainState:
    """Initialises a train state on the mesh, every leaf in its final layout.

    One compiled program makes all of it: each device computes its own shards, so no whole
    parameter ever exists on one device or on the host. The values depend on `seed` alone, not on
    the mesh.

    Args:
        model: a Model or a pair (init, apply).
        tx: the optimizer, e.g. of `optim.make_optimizer`.
        mesh: from `make_mesh`.
        rules: which logical axes are stored over which mesh axes.
        seed: of the parameters and of the state's key.
        ema: whether to keep a moving average of the parameters, which begins as a copy.
        frozen: tree of bool like the parameters; those marked True need no average.

    Raises:
        ConfigError: when parameters do not divide over the mesh, or are no arrays.
    """
    abstract = abstract_state(model, tx, seed=seed, ema=ema, frozen=frozen)
    shardings = state_shardings(abstract, model, mesh, rules)
    return init_fn(model, tx, shardings, ema=ema, frozen=frozen)(np.uint32(seed))


def init_fn(
    model: Model | tuple,
    tx: optax.GradientTransformation,
    shardings: TrainState,
    *,
    ema: bool,
    frozen: Any = None,
) -> Any:
    """The jitted function seed (uint32) -> TrainState behind `init_state`."""
    model = as_model(model)
    return jax.jit(lambda seed: _new_state(model, tx, seed, ema, frozen), out_shardings=shardings)


def start_average(params: Any, abstract_average: Any) -> Any:
    """What a moving average begins as: a copy of the parameters that it is kept of, if any is."""
    if abstract_average is None:
        return None
    return jax.tree.map(jnp.copy, restrict(params, abstract_average))


def num_params(model: Model | tuple) -> int:
    """Counts the parameters of a model, without the rows that only pad its vocabulary.

    Args:
        model: a Model or a pair (init, apply); nothing is computed.
    """
    model = as_model(model)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    return num_elements(params) - model.num_padding_params


def _new_state(
    model: Model,
    tx: optax.GradientTransformation,
    seed: jax.typing.ArrayLike,
    ema: bool,
    frozen: Any,
) -> TrainState:
    init_key, key = jax.random.split(jax.random.key(seed))
    params, model_state = model.init(init_key)
    _refuse_python_scalars(params, model_state)
    averaged = params if frozen is None else partition(params, frozen)[1]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=tx.init(params),
        # A copy inside the program: a buffer that is in the state twice cannot be donated.
        ema_params=jax.tree.map(jnp.copy, averaged) if ema else None,
        key=key,
    )


def _refuse_python_scalars(params: Any, model_state: Any) -> None:
    wrong = [
        f"{name}/{path} ({type(leaf).__name__})"
        for name, tree in (("params", params), ("model_state", model_state))
        for path, leaf in named_leaves(tree)
        if not isinstance(leaf, jax.Array | np.ndarray)
    ]
    if wrong:
        raise ConfigError(
            f"model.init must return trees of arrays; these leaves are not: {', '.join(wrong)}"
        )
