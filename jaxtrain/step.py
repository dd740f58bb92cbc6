"""The train step and the evaluation step: pure functions, to be compiled by `compile.py`.

A train step takes the gradient of the global batch (`gradients.py`), divides it by the total
weight, lets the optimizer update the parameters, and keeps the old state if anything was not
finite.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxtrain import optim, tree
from jaxtrain.errors import ConfigError
from jaxtrain.gradients import Layout, make_grad_fn, mask_of, probe
from jaxtrain.loss_checks import check_loss_fn, check_sums, naming_batch
from jaxtrain.losses import LossFn, Sums
from jaxtrain.models.functional import Model, as_model
from jaxtrain.rules import DEFAULT_RULES, ShardingRules
from jaxtrain.sharding import use_rules
from jaxtrain.state import TrainState


def make_train_step(
    model: Model | tuple[Callable, Callable],
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    accumulate_steps: int = 1,
    learning_rate: optim.Schedule | None = None,
    ema_decay: float = 0.0,
    frozen: Any = None,
) -> Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """Makes the pure train step `(state, batch) -> (state, metrics)`. It is not compiled here.

    The metrics are float32 scalars: the mean of every name of the loss, and `grad_norm` (before
    clipping), `param_norm` (after the step, of what is not frozen), `learning_rate` (if a schedule
    is given), `weight` (the total weight of the loss, e.g. tokens), `is_applied` and `is_finite`
    (1 or 0).

    Non-finite values: when the loss, the gradient or the new model_state is not finite, the step
    returns params, opt_state, ema_params and model_state as they were; only `step` advances. The
    optimizer's count does not, so neither does the schedule, nor the averaging. `is_applied` and
    `is_finite` are then 0. `is_applied` 1 and `is_finite` 0 say that finite gradients made a
    parameter overflow, which cannot be undone: such a state must not be saved. A batch of total
    weight 0 has no mean, its loss is NaN.

    Args:
        model: a Model or a pair (init, apply).
        loss_fn: sums over rows; see `LossFn`.
        tx: any optax transformation, e.g. of `optim.make_optimizer`.
        mesh: mesh that state and batches live on.
        rules: layout of parameters and activations.
        accumulate_steps: number of micro-batches; if more than 1, the arrays of a batch are
            [accumulate_steps, rows per micro-batch, ...] as `shard_batch` makes them.
        learning_rate: the schedule inside `tx`, to be logged.
        ema_decay: decay of the average of the parameters, needed if the state has `ema_params`.
        frozen: tree of bool like the parameters; those marked True get no gradient and stay as
            they are.
    """
    optim.require_optimizer(tx)
    grad_fn = make_grad_fn(
        model, loss_fn, mesh, rules, accumulate_steps=accumulate_steps, frozen=frozen
    )

    def step(
        state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        _check_state(state, ema_decay)
        step_key = jax.random.fold_in(state.key, state.step)
        grads, sums, model_state = grad_fn(state.params, state.model_state, batch, step_key)
        metrics = {name: total / weight for name, (total, weight) in sums.items()}
        metrics["weight"] = sums["loss"][1]
        with jax.named_scope("mean_gradient"):
            grads = jax.tree.map(lambda g: g / metrics["weight"], grads)
            metrics["grad_norm"] = tree.global_norm_f32(grads)
        if learning_rate is not None:
            metrics["learning_rate"] = learning_rate(_count(state.opt_state, state.step))
        is_applied = (
            jnp.isfinite(metrics["loss"])
            & jnp.isfinite(metrics["grad_norm"])
            & tree.all_finite(model_state)
        )
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        new_state = _update(state, grads, model_state, is_applied, tx, ema_decay, frozen, is_cpu)
        # What is frozen does not change, and may be nearly all there is to read.
        _, trained = tree.partition(new_state.params, mask_of(new_state.params, frozen))
        metrics["param_norm"] = tree.global_norm_f32(trained)
        is_finite = is_applied & jnp.isfinite(metrics["param_norm"])
        metrics["is_applied"] = is_applied.astype(jnp.float32)
        metrics["is_finite"] = is_finite.astype(jnp.float32)
        return new_state, metrics

    return step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMetrics:
    """The metrics of a step in one array: fetching costs by the array, not by the byte."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    values_M: jax.Array
    """float32 [M]"""

    def read(self) -> dict[str, float]:
        """Waits for the step, and fetches."""
        return dict(zip(self.names, np.asarray(self.values_M).tolist(), strict=True))


def packing(
    step: Callable[..., tuple[Any, Mapping[str, jax.Array]]],
) -> Callable[..., tuple[Any, PackedMetrics]]:
    """The train step `(state, batch) -> (state, PackedMetrics)`."""

    @functools.wraps(step)
    def packed(state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, PackedMetrics]:
        state, metrics = step(state, batch)
        values = [value.astype(jnp.float32) for value in metrics.values()]
        return state, PackedMetrics(tuple(metrics), jnp.stack(values))

    return packed


def make_eval_step(
    model: Model | tuple[Callable, Callable],
    loss_fn: LossFn,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
) -> Callable[[Any, Any, Mapping[str, jax.Array]], Sums]:
    """Makes the pure evaluation step `(params, model_state, batch) -> Sums`. Not compiled here.

    The model is applied with `train=False`; noise that it draws even so is the same every time.
    """
    model = as_model(model)
    check_loss_fn(loss_fn)

    def eval_step(params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Sums:
        with use_rules(mesh, rules) as active, naming_batch(batch):
            probe(model, params, model_state, batch, active, train=False)
            params = Layout.of(model, params, active, mask_of(params, None)).gather(params)
            outputs, _ = model.apply(params, model_state, batch, key=jax.random.key(0), train=False)
            sums = loss_fn(outputs, batch, params)
        check_sums(sums)
        return sums

    return eval_step


def _update(
    state: TrainState,
    grads: Any,
    model_state: Any,
    is_applied: jax.Array,
    tx: optax.GradientTransformation,
    ema_decay: float,
    frozen: Any,
    is_cpu: bool,
) -> TrainState:
    """The state after the step, or the old one with `step` advanced where `is_applied` is False.

    XLA for CPU writes every array in a loop of its own. There the optimizer's state is updated
    after the parameters, or XLA would keep a copy of it to compute them from.
    """
    mask = mask_of(state.params, frozen)

    def guard(new: Any, old: Any) -> Any:
        # The cast keeps dtypes what they were: the compiled step must accept what it returns.
        return jax.tree.map(lambda n, o: jnp.where(is_applied, n.astype(o.dtype), o), new, old)

    with jax.named_scope("optimizer"):
        fixed, trained = tree.partition(state.params, mask)
        zeros = jax.tree.map(jnp.zeros_like, fixed)
        grads = tree.merge(grads, zeros)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        _, updates = tree.partition(updates, mask)
        moved = jax.tree.map(
            lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), trained, updates
        )
        params = tree.merge(guard(moved, trained), fixed)
    ema_params = None
    if ema_decay:
        with jax.named_scope("ema"):
            fixed_ema, ema = tree.partition(state.ema_params, mask)
            share = _ema_share(_count(opt_state, state.step + 1), ema_decay)
            average = lambda e, p: share * p.astype(jnp.float32) + (1 - share) * e  # noqa: E731
            ema = guard(jax.tree.map(average, ema, moved), ema)
            ema_params = tree.merge(ema, fixed_ema)
    if is_cpu:
        with jax.named_scope("optimizer"):
            read_first = params, ema_params
            _, old_opt_state = jax.lax.optimization_barrier((read_first, state.opt_state))
            _, opt_state = tx.update(grads, old_opt_state, state.params)
            state = state.replace(opt_state=old_opt_state)
    return state.replace(
        step=state.step + 1,
        params=params,
        model_state=guard(model_state, state.model_state),
        opt_state=guard(opt_state, state.opt_state),
        ema_params=ema_params,
    )


def _ema_share(count: jax.Array, decay: float) -> jax.Array:
    """Share of the new parameters in an average that is debiased at every update.

    The bias-corrected average of Kingma & Ba 2015 (arXiv:1412.6980, section 3) after update t,
    `sum_i decay^(t-i) p_i * (1 - decay) / (1 - decay^t)`, obeys
    `ema_t = ema_{t-1} + (p_t - ema_{t-1}) * (1 - decay) / (1 - decay^t)`. Keeping it in this form
    the average can be used as it is, its first value is the parameters after the first update,
    and it needs no counter but the optimizer's.
    """
    debias = -jnp.expm1(count.astype(jnp.float32) * np.log(decay))
    # Exactly 1 at first, whatever the rounding: the initial parameters leave no trace.
    return jnp.where(count == 1, 1.0, (1 - decay) / debias)


def _count(opt_state: Any, otherwise: jax.Array) -> jax.Array:
    """Updates made so far. An optimizer without a counter is taken never to skip a step."""
    count = optim.num_updates(opt_state)
    return otherwise if count is None else count


def _check_state(state: TrainState, ema_decay: float) -> None:
    if (state.ema_params is None) == bool(ema_decay):
        raise ConfigError(
            f"ema_decay={ema_decay} but the state has "
            f"{'no' if state.ema_params is None else 'an'} average of the parameters; pass "
            "init_state(ema=True) and a decay above 0, or neither."
        )
