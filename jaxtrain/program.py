"""The train step of a configuration, for whoever runs it and whoever only reads it.

`fit` compiles it for the devices at hand and calls it; `--plan` compiles it for devices that are
not here. Both get it from `train_program`, so that what is planned is what would run: the same
optimizer, layouts, kernels, rematerialisation, donation and compiler options.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import optim
from jaxtrain.agreement import WISH, carrying_train_step
from jaxtrain.compile import CompiledStep, compile_step, compiler_options
from jaxtrain.config import OptimizerConfig, RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout_audit import Audit, audit
from jaxtrain.models.functional import Model
from jaxtrain.placement import param_shardings
from jaxtrain.rules import ShardingRules
from jaxtrain.sharding import check_batch_size
from jaxtrain.state import TrainState, placed_state
from jaxtrain.step import make_train_step, packing


@dataclasses.dataclass(frozen=True, eq=False)
class TrainProgram:
    """A train step that is not compiled yet, and what belongs to it."""

    tx: optax.GradientTransformation
    abstract: TrainState
    """Shapes, dtypes and shardings of the state that goes in and comes out."""
    frozen: Any
    """Tree of bool like the parameters: True for those that do not train."""
    layout: Audit
    step: Callable[..., Any]
    """(state, batch) -> (state, metrics)"""
    xla: dict[str, Any]
    """Compiler options for the devices of the mesh."""

    def compile(self, batch: Mapping[str, Any]) -> CompiledStep:
        """Compiles the step for the mesh's devices, attached or not.

        The compiled step returns (state, `PackedMetrics`).

        Args:
            batch: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        """
        step = carrying_train_step(self.step) if WISH in batch else self.step
        layouts = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        return compile_step(
            packing(step),
            (self.abstract, batch),
            donate_argnums=0,
            out_shardings=(layouts, NamedSharding(layouts.step.mesh, PartitionSpec())),
            options=self.xla,
        )


def train_program(
    model: Model,
    loss_fn: Callable[..., Any],
    config: RunConfig,
    mesh: Mesh,
    *,
    rules: ShardingRules,
    tx: optax.GradientTransformation | None = None,
) -> TrainProgram:
    """Puts together the train step of a configuration; nothing is computed or compiled.

    Args:
        model: from `as_model`.
        loss_fn: (outputs, batch, params) -> name -> (sum, weight) over the rows given.
        config: of the run.
        mesh: of the devices the program is for; they need not be attached.
        rules: which logical axes go over which mesh axes.
        tx: an optimizer instead of the one in `config.optimizer`.

    Raises:
        ConfigError: for a batch or a layout that does not fit the mesh.
    """
    abstract_params, _ = jax.eval_shape(model.init, jax.random.key(0))
    _check_sizes(model, abstract_params, config, mesh, rules)
    is_own = tx is not None
    frozen = frozen_params(config, model, abstract_params, has_own_optimizer=is_own)
    learning_rate = (
        None if is_own else optim.learning_rate_schedule(config.optimizer, config.num_steps)
    )
    tx = optimizer_of(config, model, abstract_params, tx)
    ema_decay = config.optimizer.ema_decay
    average: dict[str, Any] = {"ema": ema_decay > 0, "frozen": frozen}
    allowed = config.allow_replicated
    layout = audit(model, mesh, tx, rules=rules, allow_replicated=allowed, **average)
    step = make_train_step(
        model,
        loss_fn,
        tx,
        mesh,
        rules,
        accumulate_steps=config.accumulate_steps,
        learning_rate=learning_rate,
        ema_decay=ema_decay,
        frozen=frozen,
    )
    abstract = placed_state(model, tx, mesh, rules=rules, seed=config.seed, **average)
    return TrainProgram(tx, abstract, frozen, layout, step, program_options(config, mesh))


def frozen_params(
    config: RunConfig, model: Model, abstract_params: Any, *, has_own_optimizer: bool = False
) -> Any:
    """The parameters of a run that do not train: a tree of bool, True where frozen."""
    options = OptimizerConfig() if has_own_optimizer else config.optimizer
    return optim.frozen_mask(options, abstract_params, model.frozen)


def optimizer_of(
    config: RunConfig,
    model: Model,
    abstract_params: Any,
    tx: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """The optimizer of a run: the configured one, or `tx`, without what the model keeps frozen."""
    if tx is None:
        return optim.make_optimizer(
            config.optimizer, abstract_params, num_steps=config.num_steps, frozen=model.frozen
        )
    if not model.frozen:
        return tx
    frozen = optim.frozen_mask(OptimizerConfig(), abstract_params, model.frozen)
    return optim.keep_frozen(tx, frozen)


def _check_sizes(
    model: Model, abstract_params: Any, config: RunConfig, mesh: Mesh, rules: ShardingRules
) -> None:
    """Names everything that does not divide at once: batch and parameters."""
    problems = []
    try:
        check_batch_size(config.global_batch_size, config.accumulate_steps, mesh, rules)
    except ConfigError as error:
        problems.append(str(error))
    try:
        param_shardings(abstract_params, model.logical_axes, mesh, rules)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("; and ".join(problem.rstrip(".") for problem in problems))


def program_options(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """The compiler options of a run on the devices of a mesh."""
    device = mesh.devices.flat[0]
    return compiler_options(
        config.xla_preset,
        device.platform,
        precision=config.precision,
        deterministic=config.deterministic,
        device=None if device in jax.devices() else device,
    )
