"""The gradient of a whole global batch, however it is split over micro-batches and devices.

    gradient = d(sum of losses)/d(params),  to be divided by the sum of weights

Sums are added over micro-batches and devices first and divided once, so a row counts the same
wherever it lands. Micro-batch m holds the rows [m * b, (m + 1) * b) of the global batch.

How devices share the work: where mesh axes split the batch, everything from the batch to the
summed gradients is one region (`jax.shard_map`) that is manual over these axes and automatic over
the others (`tensor`). Each copy of the region sums its own rows of all micro-batches. Parameters
enter as the shards that are stored and are gathered just before use, by the model where it calls
`gather_param`, else here; their gradients leave reduced and scattered in the same places. What
the copies hold in common is added once, at the end: `data` costs one reduction of the gradients
however many micro-batches there are.

Left to itself, XLA would reduce over `data` inside the loop over micro-batches. A region that is
manual over `data` alone is no way out: XLA's partitioner aborts the process on a lookup that is
split over two automatic axes inside of it, like that of an embedding (jax 0.12.0; the case is in
tests/test_gradients.py).

Not in a region, but left to XLA, are models whose rows depend on each other: those with
model_state, whose batch statistics must see every row of the (micro-)batch, and those that say so
(`rows_are_independent=False`). And models that draw noise from the scalar `key` instead of
`row_keys`, because all copies of the region would draw the same.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain import tree
from jaxtrain.errors import ConfigError
from jaxtrain.loss_checks import check_loss_fn, check_sums, naming_batch
from jaxtrain.losses import LossFn, Sums
from jaxtrain.models.functional import Model, as_model
from jaxtrain.placement import param_shardings
from jaxtrain.rules import DEFAULT_RULES, ShardingRules, as_axes
from jaxtrain.sharding import check_batch_size, constrain, gather_stored, use_rules

GradFn = Callable[..., tuple[Any, Sums, Any]]
"""(params, model_state, batch, step_key) -> (gradient of the summed loss, Sums, model_state)."""

# Rows are numbered from 0, so no row's key is the parent of the keys of micro-batches.
_MICRO_BATCH_STREAM = 2**32 - 1


def make_grad_fn(
    model: Model | tuple[Callable, Callable],
    loss_fn: LossFn,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    accumulate_steps: int = 1,
    frozen: Any = None,
) -> GradFn:
    """Makes `(params, model_state, batch, step_key) -> (grads, sums, model_state)`.

    `grads` is the gradient of the *sum* of the loss over the global batch, float32, in the layout
    of the parameters, with None in the places of frozen parameters; divide by `sums["loss"][1]`.
    """
    model = as_model(model)
    check_loss_fn(loss_fn)

    def micro_grads(params, model_state, batch, key, layout):
        """Gradient, Sums and model state over the rows of one micro-batch."""
        fixed, trained = tree.partition(params, mask_of(params, frozen))

        def summed_loss(trained):
            params = layout.gather(tree.merge(trained, fixed))
            outputs, new_model_state = model.apply(params, model_state, batch, key=key, train=True)
            sums = loss_fn(outputs, batch, params)
            check_sums(sums)
            return sums["loss"][0], (sums, new_model_state)

        grads, (sums, new_model_state) = jax.grad(summed_loss, has_aux=True)(trained)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        # The next micro-batch, and the next step, take what this one returns.
        same_dtype = jax.tree.map(lambda n, o: n.astype(o.dtype), new_model_state, model_state)
        return layout.constrain(grads), sums, same_dtype

    def local_grads(params, model_state, batch, step_key, layout):
        """The same over all micro-batches, for the rows that this copy of the program sees."""
        if accumulate_steps == 1:
            return micro_grads(params, model_state, batch, _micro_batch_key(step_key, 0), layout)
        _, trained = tree.partition(params, mask_of(params, frozen))
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)

        def add_micro_batch(carry, micro):
            (summed, model_state), (index, batch) = carry, micro
            key = _micro_batch_key(step_key, index)
            grads, sums, model_state = micro_grads(params, model_state, batch, key, layout)
            return (jax.tree.map(jnp.add, summed, grads), model_state), sums

        start = (layout.constrain(zeros), model_state)
        micros = (jnp.arange(accumulate_steps), batch)
        with jax.named_scope("accumulate"):
            (grads, model_state), sums_A = jax.lax.scan(add_micro_batch, start, micros)
        return grads, jax.tree.map(jnp.sum, sums_A), model_state

    def grad_fn(params, model_state, batch, step_key):
        _check_params(params, frozen)
        num_rows = _check_batch(batch, accumulate_steps)
        check_batch_size(num_rows, accumulate_steps, mesh, rules)
        with use_rules(mesh, rules) as active, naming_batch(batch):
            batch = _add_row_keys(batch, step_key, accumulate_steps, num_rows)
            draws_from_key = probe(model, params, model_state, batch, active, accumulate_steps)
            layout = Layout.of(model, params, active, mask_of(params, frozen))
            axes = _axes_by_hand(mesh, rules)
            is_coupled = not model.rows_are_independent or bool(jax.tree.leaves(model_state))
            if not axes or is_coupled or draws_from_key:
                return local_grads(params, model_state, batch, step_key, layout)
            layout = dataclasses.replace(layout, axes=axes)

            def region(params, batch, step_key):
                grads, sums, _ = local_grads(params, model_state, batch, step_key, layout)
                with jax.named_scope("reduce_gradients"):
                    return layout.sum_copies(grads), jax.lax.psum(sums, axes)

            shards = layout.shard_specs()
            _, trained_shards = tree.partition(shards, layout.frozen)
            rows = PartitionSpec(*[None] * (accumulate_steps > 1), axes)
            # Without check_vma: it would make a model's own scan that starts from zeros (any
            # recurrent cell) declare that its carry varies over the manual axes.
            grads, sums = jax.shard_map(
                region,
                mesh=mesh,
                in_specs=(shards, rows, PartitionSpec()),
                out_specs=(trained_shards, PartitionSpec()),
                axis_names={*axes, *(axis for axis, size in mesh.shape.items() if size == 1)},
                check_vma=False,
            )(params, batch, step_key)
            return layout.constrain(grads), sums, model_state

    return grad_fn


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters and gradients lie, outside the manual region (axes is ()) or inside it."""

    specs: Any
    """PartitionSpec of every parameter in storage."""
    frozen: Any
    """True for parameters without a gradient."""
    active: Any
    """What `use_rules` yields."""
    axes: tuple[str, ...] = ()
    """Manual mesh axes."""

    @classmethod
    def of(cls, model: Model, params: Any, active: Any, frozen: Any) -> "Layout":
        """The layout of parameters in storage; `probe` comes first."""
        shardings = param_shardings(params, model.logical_axes, active.mesh, active.rules)
        active.gathers_before = not active.has_gathered
        return cls(jax.tree.map(lambda sharding: sharding.spec, shardings), frozen, active)

    def gather(self, params: Any) -> Any:
        """What to apply the model to: whole parameters, unless it calls `gather_param` itself."""
        if not self.active.gathers_before:
            return params
        return jax.tree.map(gather_stored, params, self.specs)

    def constrain(self, grads: Any) -> Any:
        """Lays gradients out like the parameters, over the axes that are not manual here."""

        def place(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
            sharding = self.active.place(spec)
            return grad if sharding is None else jax.lax.with_sharding_constraint(grad, sharding)

        _, specs = tree.partition(self.specs, self.frozen)
        return jax.tree.map(place, grads, specs)

    def shard_specs(self) -> Any:
        """Specs of the shards that enter the region: of the manual axes only."""

        def only_manual(spec: PartitionSpec) -> PartitionSpec:
            split = [[axis for axis in as_axes(e) or () if axis in self.axes] for e in spec]
            return PartitionSpec(*(tuple(axes) or None for axes in split))

        return jax.tree.map(only_manual, self.specs)

    def sum_copies(self, grads: Any) -> Any:
        """Adds what the copies of the region have, over the axes that do not split it."""

        def add(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
            split = {axis for entry in spec for axis in as_axes(entry) or ()}
            axes = tuple(axis for axis in self.axes if axis not in split)
            return jax.lax.psum(grad, axes) if axes else grad

        _, specs = tree.partition(self.specs, self.frozen)
        return jax.tree.map(add, grads, specs)


def _micro_batch_key(step_key: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(step_key, _MICRO_BATCH_STREAM), index)


def _add_row_keys(batch, step_key, accumulate_steps: int, num_rows: int) -> dict[str, jax.Array]:
    """Adds `row_key`: the step's key folded with the row's number in the global batch."""
    row = jnp.arange(num_rows, dtype=jnp.uint32)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    if accumulate_steps == 1:
        return dict(batch, row_key=fold(step_key, constrain(row, "batch")))
    row = constrain(row.reshape(accumulate_steps, -1), None, "batch")
    return dict(batch, row_key=jax.vmap(fold, (None, 0))(step_key, row))


def _axes_by_hand(mesh: Mesh, rules: ShardingRules) -> tuple[str, ...]:
    """The mesh axes of the manual region: those that split the batch."""
    return tuple(a for a in as_axes(rules.compute["batch"]) or () if mesh.shape[a] > 1)


def probe(
    model: Model,
    params: Any,
    model_state: Any,
    batch: Any,
    active: Any,
    accumulate_steps: int = 1,
    *,
    train: bool = True,
) -> bool:
    """Traces `model.apply` once, for what has to be known of a model before it is laid out.

    Returns:
        Whether its outputs depend on the argument `key`. Besides, `active.has_gathered` then
        tells whether it calls `gather_param`. On one device nothing needs to be known.
    """
    if active.mesh.size == 1:
        return False
    skip = 0 if accumulate_steps == 1 else 1
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[skip:], leaf.dtype), batch)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def outputs(key: jax.Array, params: Any, batch: Any) -> Any:
        return model.apply(params, model_state, batch, key=key, train=train)[0]

    jaxpr = jax.make_jaxpr(outputs)(jax.random.key(0), params, batch).jaxpr
    # Backwards from the outputs: a key that is only split, for noise nobody reads, is not used.
    needed = {id(var) for var in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(var) in needed for var in eqn.outvars):
            needed.update(id(var) for var in eqn.invars)
    return id(jaxpr.invars[0]) in needed


def mask_of(params: Any, frozen: Any) -> Any:
    return jax.tree.map(lambda _: False, params) if frozen is None else frozen


def _check_params(params: Any, frozen: Any) -> None:
    """Refuses what has no gradient, and warns of what cannot take small updates."""
    _, trained = tree.partition(params, mask_of(params, frozen))
    leaves = tree.named_leaves(trained)
    whole = [f"{path} ({leaf.dtype})" for path, leaf in leaves if not tree.is_float(leaf)]
    if whole:
        raise ConfigError(
            f"only floating-point parameters can be trained, not {', '.join(whole)}; "
            "name them in optimizer.freeze (frozen=) or keep them out of the parameters."
        )
    low = [f"{path} ({leaf.dtype})" for path, leaf in leaves if leaf.dtype.itemsize < 4]
    if low:
        shown = ", ".join(low[:3]) + (f" and {len(low) - 3} more" if len(low) > 3 else "")
        warnings.warn(
            f"parameters are kept in low precision: {shown}; updates below about 1/256 of a value "
            "(bfloat16) are lost. Keep parameters in float32 and let --precision=bfloat16 "
            "compute in bfloat16.",
            stacklevel=2,
        )


def _check_batch(batch: Any, accumulate_steps: int) -> int:
    """Checks the shapes of a batch and returns its number of rows."""
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(
            f"a batch is a dict of name -> array with rows first; got {type(batch).__name__}."
        )
    dims = 1 if accumulate_steps == 1 else 2
    shapes = {path: leaf.shape for path, leaf in tree.named_leaves(dict(batch))}
    leading = {shape[:dims] for shape in shapes.values()}
    rows = next(iter(leading))
    if len(leading) > 1 or len(rows) < dims or (dims == 2 and rows[0] != accumulate_steps):
        wanted = "[rows, ...]" if dims == 1 else f"[{accumulate_steps}, rows per micro-batch, ...]"
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ConfigError(
            f"with accumulate_steps={accumulate_steps} every array of a batch must be {wanted} "
            f"with the same rows; got {listed}. jaxtrain.shard_batch(batch, mesh, "
            f"accumulate_steps={accumulate_steps}) makes it from arrays [rows, ...]."
        )
    return math.prod(rows)
