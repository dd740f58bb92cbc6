"""Logical axes -> PartitionSpec -> NamedSharding: where every array of the training lives.

A parameter's dims carry *logical* axes ("embed", "mlp", ...). Two tables of rules map them to
*mesh* axes: the storage table for what rests between steps (parameters, optimizer state) and the
compute table for what a layer works with (activations, gathered parameters). In the notation
A[I_X, J_Y] (dim I split over mesh axis X) a feed-forward kernel is stored as
W[D_fsdp, F_tensor], gathered to W[D, F_tensor] in the compute dtype just before it is used, and
its gradient is reduced and scattered back to dW[D_fsdp, F_tensor].

Nothing here is global: the rules are values, and `use_rules` makes them known to the model only
while one function is traced.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.gather import constrain_if, gather, split_by_hand
from jaxtrain.placement import (
    Layout,
    opt_state_layouts,
    opt_state_shardings,
    param_layouts,
    param_shardings,
)
from jaxtrain.rules import (
    DEFAULT_RULES,
    LogicalAxes,
    ShardingRules,
    as_axes,
    axis_size,
    check_mesh,
    make_spec,
    partition_spec,
    say_axes,
)

__all__ = [
    "DEFAULT_RULES",
    "Layout",
    "LogicalAxes",
    "ShardingRules",
    "active_rules",
    "batch_sharding",
    "check_batch_size",
    "constrain",
    "gather_param",
    "gather_stored",
    "has_gathered_params",
    "has_split_layers",
    "on_shards",
    "opt_state_layouts",
    "opt_state_shardings",
    "param_layouts",
    "param_shardings",
    "partition_spec",
    "shard_batch",
    "use_rules",
]


def batch_sharding(
    mesh: Mesh, rules: ShardingRules = DEFAULT_RULES, *, accumulate_steps: int = 1
) -> NamedSharding:
    """Layout of every array of a batch.

    Rows are dim 0; with `accumulate_steps` > 1 arrays are [accumulate_steps, rows, ...] and rows
    are dim 1.
    """
    axes = ("batch",) if accumulate_steps == 1 else (None, "batch")
    return NamedSharding(mesh, partition_spec(axes, rules.compute, mesh))


def check_batch_size(
    global_batch_size: int,
    accumulate_steps: int,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
) -> None:
    """Checks that every device gets the same number of rows in every micro-batch.

    Raises:
        ConfigError: with the nearest sizes that work.
    """
    axes = as_axes(rules.compute["batch"]) or ()
    shards = axis_size(mesh, axes)
    unit = shards * accumulate_steps
    if global_batch_size > 0 and global_batch_size % unit == 0:
        return
    parts = []
    if shards > 1:
        parts.append(f"the {shards} batch shards (mesh {say_axes(axes, mesh)})")
    if accumulate_steps > 1:
        parts.append(f"accumulate_steps={accumulate_steps}")
    below = global_batch_size // unit * unit
    sizes = " or ".join(str(size) for size in (below, below + unit) if size > 0)
    raise ConfigError(
        f"global_batch_size={global_batch_size} is not divisible by"
        f" {' times '.join(parts) or '1'}; use {sizes}"
    )


def shard_batch(
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    accumulate_steps: int = 1,
) -> dict[str, jax.Array]:
    """Puts a batch of host arrays [B, ...], which holds all global rows, onto the mesh.

    Args:
        batch: name -> array with rows in dim 0, as many in each.
        mesh: from `make_mesh`.
        rules: over which mesh axes the logical axis "batch" goes.
        accumulate_steps: number A of micro-batches; if more than 1, micro-batch m gets the rows
            [m * b, (m + 1) * b), b = B / A.

    Returns:
        name -> array [B, ...], or [A, b, ...] if A > 1.

    Raises:
        ConfigError: when the arrays differ in their number of rows, or it does not divide.
    """
    rows = {name: np.shape(array)[:1] for name, array in batch.items()}
    if not rows or len(set(rows.values())) != 1 or () in rows.values():
        shapes = {name: np.shape(array) for name, array in batch.items()}
        raise ConfigError(f"all arrays of a batch need the same number of rows; got {shapes}")
    (num_rows,) = next(iter(rows.values()))
    check_batch_size(num_rows, accumulate_steps, mesh, rules)
    sharding = batch_sharding(mesh, rules, accumulate_steps=accumulate_steps)
    if accumulate_steps > 1:
        batch = {
            name: np.reshape(array, (accumulate_steps, -1, *np.shape(array)[1:]))
            for name, array in batch.items()
        }
    return {name: jax.device_put(array, sharding) for name, array in batch.items()}


# ---------------------------------------------------------------------------------------------
# Constraints inside the model, while it is traced
# ---------------------------------------------------------------------------------------------


class _Active:
    """The rules of one trace. Compared by identity: each trace is its own."""

    def __init__(self, mesh: Mesh, rules: ShardingRules):
        self.mesh = mesh
        self.rules = rules
        self.used: set[str] = set()
        self.has_gathered = False
        self.gathers_before = False

    def sharding(self, logical_axes: Sequence[str | None], table: str) -> NamedSharding | None:
        """The sharding of an array in this trace, or None where there is nothing to split."""
        if table == "compute":
            self.used.update(name for name in logical_axes if name is not None)
        spec = partition_spec(logical_axes, getattr(self.rules, table), self.mesh)
        return self.place(spec)

    def place(self, spec: PartitionSpec) -> NamedSharding | None:
        """Drops the axes that an enclosing shard_map handles by hand."""
        if self.mesh.size == 1:
            return None
        context = jax.sharding.get_abstract_mesh()
        if context.empty or not context.manual_axes:
            return NamedSharding(self.mesh, spec)
        if set(context.manual_axes) >= {a for a in self.mesh.axis_names if self.mesh.shape[a] > 1}:
            return None
        entries = [
            tuple(axis for axis in as_axes(entry) or () if axis not in context.manual_axes)
            for entry in spec
        ]
        return NamedSharding(context, make_spec(entries, self.mesh))


# A user context rather than a ContextVar: it is part of the key of JAX's trace caches, so that a
# function traced under one mesh is never taken from the cache under another.
_active = jax.make_user_context(None)


@contextlib.contextmanager
def use_rules(mesh: Mesh, rules: ShardingRules = DEFAULT_RULES) -> Iterator[_Active]:
    """Makes mesh and rules known to `constrain` and `gather_param` while a step is traced.

    Yields:
        What the trace has read so far: `has_gathered` tells whether `gather_param` was called.
        Whoever gathers all parameters before that sets `gathers_before`.

    Raises:
        ConfigError: at the end, when a compute rule that is not a default was never read.
    """
    check_mesh(mesh)
    active = _Active(mesh, rules)
    with _active(active):
        yield active
    unused = [
        f"{name!r} -> {axes!r}"
        for name, axes in rules.compute.items()
        if axes and name not in active.used and DEFAULT_RULES.compute.get(name) != axes
    ]
    if unused:
        raise ConfigError(
            f"compute rules that no array of the model reads: {', '.join(unused)}; remove them or"
            f" name their logical axes in constrain() or gather_param()"
        )


def active_rules() -> tuple[Mesh, ShardingRules] | None:
    """Mesh and rules of the step that is being traced; None outside of one."""
    active = _active.value
    return None if active is None else (active.mesh, active.rules)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Lays an activation out by the compute table; identity where no rules are active."""
    active = _active.value
    if active is None:
        return x
    _check_rank(x, logical_axes)
    sharding = active.sharding(logical_axes, "compute")
    if sharding is None:
        return x
    _check_divides(x, logical_axes, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def on_shards(
    fn: Callable[..., jax.Array],
    in_axes: Sequence[Sequence[str | None]],
    out_axes: Sequence[str | None],
) -> Callable[..., jax.Array]:
    """Makes `fn` see only what one device holds of its arguments, laid out by the compute table.

    For functions that work on every row and head by itself and that XLA cannot split, such as a
    kernel of a library. `in_axes` and `out_axes` are the logical axes of arguments and result.
    """
    active = _active.value
    if active is None:
        return fn
    out = active.sharding(out_axes, "compute")
    if out is None:
        return fn
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return jax.shard_map(
        fn,
        mesh=out.mesh,
        in_specs=tuple(active.sharding(axes, "compute").spec for axes in in_axes),
        out_specs=out.spec,
        axis_names=set(out.mesh.axis_names) - set(manual),
        check_vma=False,
    )


def gather_param(
    param: jax.Array, logical_axes: Sequence[str | None], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Brings a stored parameter to `dtype` and to its compute layout.

    The all-gather moves the compute dtype (half the bytes of float32 for bfloat16). The gradient
    is laid out for storage before it is cast back, so that XLA reduces and scatters it instead of
    reducing it everywhere. In a region that is manual over axes of the storage layout, where
    `param` is the shard of this copy, both are written out.

    A model that calls this for one parameter has to call it for all, also for small ones.
    """
    active = _active.value
    if active is None:
        return param.astype(dtype)
    _check_rank(param, logical_axes)
    active.has_gathered = True
    storage = active.sharding(logical_axes, "storage")
    compute = active.sharding(logical_axes, "compute")
    if active.gathers_before:
        return constrain_if(param.astype(dtype), compute)
    by_hand = split_by_hand(partition_spec(logical_axes, active.rules.storage, active.mesh))
    if not by_hand and (storage is None or compute is None):
        return param.astype(dtype)
    return gather(param, storage, compute, by_hand, np.dtype(dtype), param.dtype)


def gather_stored(param: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gathers a parameter that is stored by `spec` over the mesh axes that split the batch.

    For models that know nothing of layouts. Without it XLA is free to move the activations of the
    whole batch instead of the parameters, which it does for plain layers.
    """
    active = _active.value
    batch_axes = as_axes(active.rules.compute["batch"]) or ()
    entries = [
        tuple(axis for axis in as_axes(entry) or () if axis not in batch_axes) for entry in spec
    ]
    storage, compute = active.place(spec), active.place(make_spec(entries, active.mesh))
    by_hand = split_by_hand(spec)
    if not by_hand and storage == compute:
        return param
    return gather(param, storage, compute, by_hand, param.dtype, param.dtype)


def has_gathered_params() -> bool:
    """Whether the active rules store parameters more split than they are used."""
    active = _active.value
    if active is None:
        return False
    rules, mesh = active.rules, active.mesh
    return any(
        mesh.shape.get(axis, 1) > 1 and axis not in (as_axes(rules.compute.get(name)) or ())
        for name, axes in rules.storage.items()
        for axis in as_axes(axes) or ()
    )


def has_split_layers() -> bool:
    """Whether the active rules split a layer over devices that see the same rows and positions."""
    active = _active.value
    if active is None:
        return False
    rules, mesh = active.rules, active.mesh
    apart = {
        axis for name in ("batch", "length") for axis in as_axes(rules.compute.get(name)) or ()
    }
    return any(
        axis_size(mesh, tuple(axis for axis in as_axes(axes) or () if axis not in apart)) > 1
        for axes in rules.compute.values()
    )


def _check_rank(x: jax.Array, logical_axes: Sequence[str | None]) -> None:
    if len(logical_axes) != x.ndim:
        raise ConfigError(
            f"{len(logical_axes)} logical axes {tuple(logical_axes)} were given for an array of"
            f" shape {x.shape}; give one per dim"
        )


def _check_divides(x: jax.Array, logical_axes: Sequence[str | None], sharding) -> None:
    bad = [
        f"{name} {size} by {say_axes(entry, sharding.mesh)}"
        for name, size, entry in zip(logical_axes, x.shape, sharding.spec, strict=False)
        if size % axis_size(sharding.mesh, entry)
    ]
    if bad:
        raise ConfigError(
            f"an activation of shape {x.shape} with logical axes {tuple(logical_axes)} does not"
            f" divide over the mesh: {', '.join(bad)}; choose sizes that divide"
        )
