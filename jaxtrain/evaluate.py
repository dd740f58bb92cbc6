"""Exact means over a finite set: every row once, padding never, one division at the end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError, DataError
from jaxtrain.losses import Sums

_RULE = (
    "a batch that does not fill is padded with rows whose batch['loss_mask'] is 0, and a loss "
    "must not count them"
)
_WAY_OUT = "multiply each row's loss and weight by batch['loss_mask'] in loss_fn."

EvalStep = Callable[[Any, Any, Mapping[str, jax.Array]], Sums]
"""(params, model_state, batch) -> Sums, compiled."""


def evaluate(
    eval_step: EvalStep,
    params: Any,
    model_state: Any,
    batches: Iterable[tuple[Mapping[str, jax.Array], int]],
) -> dict[str, float]:
    """Takes the weighted mean of every name of the loss over all batches.

    A step's sums are fetched while the next step computes, and added on the host in float64: a
    float32 counter on the device would lose rows from 2^24 on.

    Args:
        eval_step: the compiled `make_eval_step`.
        params: parameters, or their average.
        model_state: batch statistics, or {}.
        batches: (arrays, number of true rows); rows beyond that number are padding, which only
            fills the batch up, and their `loss_mask` is 0.

    Returns:
        The mean of every name, `weight` (the total weight of the loss, e.g. tokens) and `rows`
        (the number of rows).

    Raises:
        DataError: if there is no row, or no row counts.
        ConfigError: if the loss counts padding.
    """
    totals: dict[str, list[float]] = {}
    num_rows = 0
    is_padding_checked = False
    pending: Sums | None = None

    def add(sums: Sums | None) -> None:
        for name, (total, weight) in (jax.device_get(sums) or {}).items():
            entry = totals.setdefault(name, [0.0, 0.0])
            entry[0] += float(total)
            entry[1] += float(weight)

    for batch, num_true_rows in batches:
        size = next(iter(batch.values())).shape[0]
        if num_true_rows < size and not is_padding_checked:
            _check_padding(eval_step, params, model_state, batch)
            is_padding_checked = True
        num_rows += num_true_rows
        newest = eval_step(params, model_state, batch)
        add(pending)
        pending = newest
    add(pending)
    if not num_rows:
        raise DataError("the evaluation data holds 0 rows, so there is no mean to take; give data.")
    empty = [name for name, (_, weight) in totals.items() if weight == 0]
    if empty:
        raise DataError(
            f"no row of the {num_rows} evaluation rows counts for {', '.join(empty)} (total weight "
            "0); is loss_mask 0 everywhere?"
        )
    means = {name: total / weight for name, (total, weight) in totals.items()}
    return means | {"weight": totals["loss"][1], "rows": float(num_rows)}


def combine(
    parts: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]
) -> dict[str, float]:
    """The means of several parts of the evaluation data, and those over all of them.

    Args:
        parts: name of the part -> what `evaluate` returned for it.
        shares: of the parts in the mean over all; they sum to 1.

    Returns:
        For every name of the loss the sum of the parts' means, each times its share, and
        `NAME/PART` for each part; `weight` and `rows` of all together.
    """
    names = [name for name in next(iter(parts.values())) if name not in ("weight", "rows")]
    means = {name: sum(shares[p] * part[name] for p, part in parts.items()) for name in names}
    means |= {f"{name}/{p}": part[name] for name in names for p, part in parts.items()}
    return means | {name: sum(part[name] for part in parts.values()) for name in ("weight", "rows")}


def require_masked(
    eval_step: EvalStep, params: Any, model_state: Any, batch: Mapping[str, Any]
) -> None:
    """Refuses a loss that cannot leave padding out because `loss_mask` does not enter it.

    The step is traced, not compiled, so this costs little before a run begins. What enters the
    loss and is used wrongly is left to `evaluate`, which sees values.

    Args:
        eval_step: of `make_eval_step`, not compiled.
        params: arrays or `jax.ShapeDtypeStruct`s, like all of the following.
        model_state: batch statistics, or {}.
        batch: with a `loss_mask`.

    Raises:
        ConfigError: naming the sums and weights concerned.
    """
    args = (params, model_state, dict(batch))
    closed, sums = jax.make_jaxpr(eval_step, return_shape=True)(*args)
    others = jax.tree.map(lambda _: False, (params, model_state))
    is_mask = jax.tree.leaves((*others, {name: name == "loss_mask" for name in batch}))
    structure = jax.tree.structure(sums)
    masked = jax.tree.unflatten(structure, reached(closed.jaxpr, is_mask))
    varying = jax.tree.unflatten(structure, reached(closed.jaxpr, [True] * len(is_mask)))
    careless = []
    for name in sums:
        # A sum that nothing enters may be 0 for good.
        careless += [f"the sum of {name!r}"] * (varying[name][0] and not masked[name][0])
        careless += [f"the weight of {name!r}"] * (not masked[name][1])
    if careless:
        raise ConfigError(
            f"{_RULE}, but batch['loss_mask'] does not enter {' and '.join(careless)}: {_WAY_OUT}"
        )


def reached(jaxpr: Any, is_marked: Sequence[bool]) -> list[bool]:
    """Which outputs of a program depend on the marked inputs, at most."""
    found = {id(var) for var, mark in zip(jaxpr.invars, is_marked, strict=True) if mark}
    for eqn in jaxpr.eqns:
        marks = [id(var) in found for var in eqn.invars]
        if not any(marks):
            continue
        outs = [True] * len(eqn.outvars)
        if eqn.primitive.name in ("jit", "pjit"):
            outs = reached(eqn.params["jaxpr"].jaxpr, marks)
        found.update(id(var) for var, out in zip(eqn.outvars, outs, strict=True) if out)
    return [id(var) in found for var in jaxpr.outvars]


def _check_padding(
    eval_step: EvalStep, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
) -> None:
    """Runs the step with every row masked, when all its sums must be 0."""
    if "loss_mask" not in batch:
        raise ConfigError(f"{_RULE}, but the batch has no loss_mask; add one, and {_WAY_OUT}")
    mask = batch["loss_mask"]
    masked = dict(batch, loss_mask=jnp.zeros_like(mask, device=mask.sharding))
    sums = jax.device_get(eval_step(params, model_state, masked))
    # A value that is not finite stays so whatever it is multiplied with: it shows in the mean.
    counted = {
        name: (float(total), float(weight))
        for name, (total, weight) in sums.items()
        if weight != 0 or (total != 0 and np.isfinite(total))
    }
    if counted:
        raise ConfigError(
            f"{_RULE}; with every row masked its (sum, weight) should be (0, 0) but are {counted}: "
            f"{_WAY_OUT}"
        )
