"""How a stored parameter is gathered for use, and its gradient scattered back.

Forward, W[D_fsdp, F_tensor] is cast to the compute dtype and then gathered to W[D, F_tensor].
Backward, dW[D, F_tensor] is summed over the batch and cut to dW[D_fsdp, F_tensor] at once, which
is a reduce-scatter. Where a mesh axis is automatic, constraints make XLA do this; where an
enclosing `jax.shard_map` is manual over it, the collectives are written out.
"""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.rules import as_axes

Dims = tuple[tuple[int, tuple[str, ...]], ...]
"""Dims of an array, each with the mesh axes that split it."""


def split_by_hand(spec: PartitionSpec) -> Dims:
    """The dims, with their mesh axes, that `spec` splits over axes that are manual here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    split = [
        (dim, tuple(axis for axis in as_axes(entry) or () if axis in manual))
        for dim, entry in enumerate(spec)
    ]
    return tuple((dim, axes) for dim, axes in split if axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def gather(param, storage, compute, by_hand, dtype, param_dtype):
    """Gathers a parameter; the shardings are None where nothing is automatic.

    Args:
        param: as it is stored; inside a manual region the shard of this copy.
        storage: its layout over the automatic axes.
        compute: the layout of the result over the automatic axes.
        by_hand: from `split_by_hand`.
        dtype: of the result.
        param_dtype: of `param`, and of its gradient.
    """
    # The first constraint holds the cast on the storage side of the gather.
    del param_dtype
    param = constrain_if(param.astype(dtype), storage)
    if by_hand:
        param = _on_shards(_all_gather, storage)(param, by_hand)
    return constrain_if(param, compute)


def _gather_fwd(param, storage, compute, by_hand, dtype, param_dtype):
    return gather(param, storage, compute, by_hand, dtype, param_dtype), None


def _gather_bwd(storage, compute, by_hand, dtype, param_dtype, residuals, grad):
    del dtype, residuals
    if by_hand:
        # Sums over devices are taken in the dtype of the parameter.
        grad = _on_shards(_reduce_scatter, storage)(grad.astype(param_dtype), by_hand)
    else:
        # Summed in the layout of use and cut at once, a reduce-scatter. From the layout of storage
        # alone XLA works backwards, and replicates the activations of an embedding's lookup.
        grad = constrain_if(grad, compute)
    return (constrain_if(grad, storage).astype(param_dtype),)


gather.defvjp(_gather_fwd, _gather_bwd)


def _all_gather(x, by_hand):
    for dim, axes in by_hand:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _reduce_scatter(x, by_hand):
    for dim, axes in by_hand:
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x


def _on_shards(collective: Any, storage: NamedSharding | None) -> Any:
    """Applies a collective to what one device holds, also where automatic axes split the array.

    XLA's partitioner replicates over automatic axes around a collective of a manual region.
    """
    if storage is None:
        return collective
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return lambda x, by_hand: jax.shard_map(
        lambda x: collective(x, by_hand),
        mesh=storage.mesh,
        in_specs=storage.spec,
        out_specs=storage.spec,
        axis_names=set(storage.mesh.axis_names) - set(manual),
        check_vma=False,
    )(x)


def constrain_if(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Constrains an array, unless there is nothing to constrain it to."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def saves_all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy that drops gathered parameters, and nothing else.

    Nor does it keep what is only reshaped, which costs nothing: it may be a gathered parameter.
    """
    if primitive.name == "reshape":
        return False
    if primitive.name != "custom_vjp_call" or "call_jaxpr" not in params:
        return True
    # A policy sees neither the function nor its name, but a gather is made of these alone.
    operations = {equation.primitive.name for equation in params["call_jaxpr"].eqns}
    moves = {"sharding_constraint", "shard_map", "all_gather"}
    return not operations & moves or bool(operations - moves - {"convert_element_type"})
