"""Optimizers and learning-rate schedules from an `OptimizerConfig`, with masks by parameter name.

Everything is built from optax transformations. What is decided here:

- The schedule counts *optimizer steps*. A step that the non-finite guard skips changes neither the
  moments nor the count, so it does not advance the schedule either, and the rate that is logged is
  always the rate that was applied (`num_updates` is where both come from).
- The schedule is a function of the count and of the configuration alone. A run that is resumed
  with another `num_steps` follows the schedule of the new total from the restored count on.
- Weight decay is decoupled for every optimizer: `rate * weight_decay * parameter`.
- Moments are float32 whatever the dtype of the parameters: with bfloat16 a decay of 0.999 is 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import tree
from jaxtrain.config import OptimizerConfig
from jaxtrain.errors import ConfigError

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
"""Optimizer step, counted from 0 -> learning rate, float32."""


def require_optimizer(tx: Any) -> None:
    """Refuses what is no optax optimizer, first of all the function that makes one.

    Raises:
        ConfigError: naming what was given.
    """
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    name = getattr(tx, "__name__", type(tx).__name__)
    way_out = f"call it: {name}(learning_rate)" if callable(tx) else "give what optax.adam(1e-3) is"
    raise ConfigError(
        f"tx must be an optax optimizer, with init and update; got {name}: {way_out}."
    )


def _warmup_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Number of steps in which the rate rises to its peak."""
    return min(num_steps // 10, 2000) if config.warmup_steps < 0 else config.warmup_steps


def _decay_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Number of steps in which the rate falls from its peak."""
    if config.schedule == "constant":
        return 0
    if config.schedule == "wsd":
        return round(config.decay_fraction * num_steps)
    return num_steps - _warmup_steps(config, num_steps)


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> Schedule:
    """Makes the schedule: linear warm-up from 0, then constant, cosine, linear or wsd.

    Step i of the warm-up has the rate `learning_rate * i / warmup_steps`, so the peak is reached
    at step `warmup_steps`. Cosine and linear fall from there until `num_steps`, wsd ("warm-up,
    stable, decay", Hu et al. 2024, arXiv:2404.06395) stays at the peak and falls linearly in the
    last `decay_fraction` of all steps. At `num_steps`, one after the last step, the rate would
    be `learning_rate * final_learning_rate_ratio`; it stays there.

    Raises:
        ConfigError: if warm-up and decay do not fit into `num_steps`.
    """
    warmup_steps, decay_steps = _warmup_steps(config, num_steps), _decay_steps(config, num_steps)
    if warmup_steps + decay_steps > num_steps or decay_steps < 0:
        raise ConfigError(
            f"warmup_steps={warmup_steps} and the {max(decay_steps, 0)} decay steps of "
            f"schedule={config.schedule} do not fit into num_steps={num_steps}; train longer or "
            "lower optimizer.warmup_steps (or optimizer.decay_fraction for wsd)."
        )
    peak, final = config.learning_rate, config.learning_rate * config.final_learning_rate_ratio

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step_f32 = jnp.asarray(step, jnp.float32)
        rate = jnp.full_like(step_f32, peak)
        if decay_steps:
            # Counted back from the end: 1 at the peak, 0 at num_steps.
            left = jnp.clip((num_steps - step_f32) / decay_steps, 0.0, 1.0)
            if config.schedule == "cosine":
                left = 0.5 * (1.0 - jnp.cos(np.pi * left))
            rate = final + (peak - final) * left
        if warmup_steps:
            warmup = peak * (step_f32 / warmup_steps)
            rate = jnp.where(step_f32 < warmup_steps, warmup, rate)
        return rate

    return schedule


def frozen_mask(config: OptimizerConfig, abstract_params: Any, always: str = "") -> Any:
    """Marks the parameters that `freeze` or `always` names: a tree of bool, True where frozen.

    Args:
        config: with the pattern `freeze`.
        abstract_params: the parameters or their shapes.
        always: pattern of those that the model itself keeps from training (`Model.frozen`).

    Raises:
        ConfigError: if `freeze` matches no parameter, or leaves none to train.
    """
    mask = tree.select(abstract_params, config.freeze, option="optimizer.freeze")
    by_model = tree.select(abstract_params, always, option="Model.frozen")
    mask = jax.tree.map(lambda asked, kept: asked or kept, mask, by_model)
    if config.freeze and all(jax.tree.leaves(mask)):
        num_trained = sum(not kept for kept in jax.tree.leaves(by_model))
        raise ConfigError(
            f"optimizer.freeze={config.freeze!r} matches all {num_trained} parameters that "
            "could train, nothing is left; narrow the pattern."
        )
    return mask


def keep_frozen(
    optimizer: optax.GradientTransformation, frozen: Any
) -> optax.GradientTransformation:
    """Spares the parameters marked True in `frozen` the optimizer: no state, updates of zero."""
    if not any(jax.tree.leaves(frozen)):
        return optimizer
    zero = optax.masked(optax.set_to_zero(), frozen)
    return optax.chain(_where_not(frozen, optimizer), zero)


def make_optimizer(
    config: OptimizerConfig, abstract_params: Any, *, num_steps: int, frozen: str = ""
) -> optax.GradientTransformation:
    """Makes the optimizer: clip, then AdamW, Lion or SGD, with masks by parameter name.

    Frozen parameters hold no state and get updates of zero; `make_train_step(frozen=...)` spares
    them the gradient too.

    Args:
        config: the options; patterns are regular expressions searched in parameter paths.
        abstract_params: the parameters or their shapes.
        num_steps: length of the run, for the schedule.
        frozen: pattern of parameters that are frozen besides those of `config.freeze`: that of the
            model (`Model.frozen`).

    Raises:
        ConfigError: for a pattern that matches nothing, or a schedule longer than the run.
    """
    mask = frozen_mask(config, abstract_params, frozen)
    # The default pattern speaks of norms and biases; a model without any is not an error.
    is_own_pattern = config.no_decay != OptimizerConfig().no_decay
    no_decay = tree.select(
        abstract_params, config.no_decay, option="optimizer.no_decay", must_match=is_own_pattern
    )
    no_clip = tree.select(abstract_params, config.no_clip, option="optimizer.no_clip")
    steps = []
    if config.clip_norm:
        steps.append(_where_not(no_clip, clip_by_global_norm(config.clip_norm)))
    if config.name == "adamw":
        steps.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
    elif config.name == "lion":
        steps.append(optax.scale_by_lion(config.b1, config.b2))
    elif config.momentum:
        steps.append(optax.trace(config.momentum))
    if config.weight_decay:
        steps.append(_where_not(no_decay, optax.add_decayed_weights(config.weight_decay)))
    steps.append(optax.scale_by_learning_rate(learning_rate_schedule(config, num_steps)))
    return keep_frozen(in_float32(optax.chain(*steps)), mask)


def _where_not(
    excluded: Any, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Leaves out the parameters marked True: they pass unchanged and hold no state."""
    if not any(jax.tree.leaves(excluded)):
        return transformation
    return optax.masked(transformation, jax.tree.map(lambda marked: not marked, excluded))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of at most `max_norm`.

    Like optax's, but the norm is written as the step's metric `grad_norm` is, so that XLA computes
    it once, and gradients within the norm are multiplied by exactly 1.
    """

    def init(params: Any) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, Any]:
        del params
        scale = max_norm / jnp.maximum(tree.global_norm_f32(updates), max_norm)
        return jax.tree.map(lambda g: g * scale, updates), state

    return optax.GradientTransformation(init, update)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets an optimizer see parameters, gradients and its own state in float32."""

    def cast(values: Any) -> Any:
        return optax.tree.cast(values, jnp.float32)

    def update(updates: Any, state: Any, params: Any = None):
        return optimizer.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: optimizer.init(cast(params)), update)


def num_updates(opt_state: Any) -> jax.Array | None:
    """The optimizer's own count of the updates it has made; None if its state has no counter.

    optax names it `count`. Parameters may carry that name too, hence the test for a scalar.
    """
    found = [count for _, count in optax.tree.get_all_with_path(opt_state, "count")]
    counts = [
        count
        for count in found
        if getattr(count, "shape", None) == () and jnp.issubdtype(count.dtype, jnp.integer)
    ]
    return counts[0] if counts else None
