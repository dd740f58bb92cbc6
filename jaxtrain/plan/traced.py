"""What one row costs a step, from its traced program; nothing is compiled.

A step is traced on one described device, with the kernels that the target has, for two numbers of
rows. What differs between the two belongs to rows, what does not to the model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from jaxtrain.data.load import abstract_batch
from jaxtrain.layout_audit import Row
from jaxtrain.main import Experiment
from jaxtrain.models.functional import as_model
from jaxtrain.rules import ShardingRules
from jaxtrain.sharding import use_rules
from jaxtrain.state import TrainState
from jaxtrain.tree import merge, partition

_ROWS = (7, 14)
"""Of the two traces; other dims rarely have these sizes."""
_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_ATTENTION = "dot_product_attention"
"""How the names of JAX's primitives for fused attention begin."""


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What one row keeps for the backward pass, whatever the mesh."""

    whole_bytes: float
    """On every device along `tensor`."""
    split_bytes: float
    """What `tensor` splits."""

    def kept(self, tensor: int) -> float:
        """Bytes on one of so many devices along `tensor`."""
        return self.whole_bytes + self.split_bytes / tensor


def residuals_of(
    experiment: Experiment, state: TrainState, frozen: Any, params: Sequence[Row], mesh: Mesh
) -> Residuals:
    """What `jax.vjp` keeps of one row: exactly what remat decides.

    Args:
        experiment: with the remat that is asked about.
        state: its own, abstract.
        frozen: tree of bool like its parameters, True for those without a gradient.
        params: the layout of its parameters, on any mesh.
        mesh: of one device, or of the fewest that `tensor` can split: then the residuals are
            those of split layers.
    """
    loss, batches = _loss(experiment, mesh), _batches(experiment, mesh)

    fixed, trained = partition(state.params, frozen)

    def residuals(trained: Any, fixed: Any, model_state: Any, batch: Any) -> Any:
        return jax.vjp(lambda trained: loss(trained, fixed, model_state, batch), trained)[1]

    kept = [
        jax.tree.leaves(jax.eval_shape(residuals, trained, fixed, state.model_state, batch))
        for batch in batches
    ]
    split_sizes = _split_sizes(params, experiment.rules)
    split_sizes -= {leaf.shape[1] for leaf in batches[0].values() if len(leaf.shape) == 2}
    whole = split = 0.0
    for first, second in zip(*kept, strict=True):
        grown = [i for i, size in enumerate(first.shape) if size != second.shape[i]]
        size = (second.size - first.size) * first.dtype.itemsize / (_ROWS[1] - _ROWS[0])
        if grown and split_sizes & set(first.shape[grown[0] + 1 :]):
            split += size
        else:
            whole += size
    return Residuals(whole, split)


def row_flops(
    experiment: Experiment, state: TrainState, frozen: Any, mesh: Mesh
) -> dict[tuple[str, str], float]:
    """(kind, dtype as HLO spells it) -> operations on matrix units of one row, remat included."""
    loss, (batch, _) = _loss(experiment, mesh), _batches(experiment, mesh)
    fixed, trained = partition(state.params, frozen)
    program = jax.make_jaxpr(jax.grad(loss))(trained, fixed, state.model_state, batch)
    return {key: count / _ROWS[0] for key, count in flops_of(program.jaxpr).items()}


def _loss(experiment: Experiment, mesh: Mesh) -> Callable[..., jax.Array]:
    model, rules = as_model(experiment.model), experiment.rules

    def loss(trained: Any, fixed: Any, model_state: Any, batch: Any) -> jax.Array:
        params = merge(trained, fixed)
        with use_rules(mesh, rules):
            key = jax.random.key(0)
            outputs, _ = model.apply(params, model_state, batch, key=key, train=True)
            return experiment.loss_fn(outputs, batch, params)["loss"][0]

    return loss


def _batches(experiment: Experiment, mesh: Mesh) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Abstract batches of `_ROWS` rows."""
    rules = experiment.rules
    one = abstract_batch(experiment.train_data, mesh, rules=rules, global_batch_size=1)
    return [
        {n: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for n, leaf in one.items()}
        for rows in _ROWS
    ]


def flops_of(jaxpr: Jaxpr) -> dict[tuple[str, str], float]:
    """(kind, dtype) -> operations on matrix units; loops as often as they turn, where they say so.

    Products 2 x result x contracted dims; convolutions 2 x result x kernel of one output feature;
    fused attention as `jaxtrain.plan.work` counts it, taken to be causal.
    """
    counts: dict[tuple[str, str], float] = {}
    for equation, times in _equations(jaxpr, 1):
        name = equation.primitive.name
        shapes: list[Any] = [getattr(v.aval, "shape", ()) for v in equation.invars]
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            size = math.prod(equation.outvars[0].aval.shape)
            kind = "matmul"
            count = 2.0 * size * math.prod(shapes[0][dim] for dim in contracted)
        elif name == "conv_general_dilated":
            features = equation.params["dimension_numbers"].rhs_spec[0]
            kernel = math.prod(shapes[1]) / shapes[1][features]
            kind, count = "convolution", 2.0 * math.prod(equation.outvars[0].aval.shape) * kernel
        elif name.startswith(_ATTENTION):
            (num_rows, length, heads, size), key_length = shapes[0], shapes[1][1]
            products = 5 if "_bwd" in name else 2
            product = 2.0 * num_rows * heads * length * key_length * size
            kind, count = "attention", products * product / 2
        else:
            continue
        dtype = str(equation.invars[0].aval.dtype)
        key = kind, _HLO_DTYPES.get(dtype, dtype)
        counts[key] = counts.get(key, 0.0) + times * count
    return counts


def _equations(jaxpr: Jaxpr, times: int) -> Iterator[tuple[Any, int]]:
    """All equations, each with how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        if equation.primitive.name.startswith(_ATTENTION):
            continue
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _equations(inner.jaxpr, times * turns)
                elif isinstance(inner, Jaxpr):
                    yield from _equations(inner, times * turns)


def _split_sizes(rows: Sequence[Row], rules: ShardingRules) -> set[int]:
    """Sizes of the dims that `tensor` splits while layers work, also of two in one (heads x size).

    Where a size is also that of a dim that is not split, it does not count.
    """
    split = {name for name, axes in rules.compute.items() if "tensor" in (axes or ())}
    sizes, others = set(), set()
    for row in rows:
        names = row.logical_axes or ()
        for dim, name in enumerate(names):
            (sizes if name in split else others).add(row.shape[dim])
            if name in split and dim + 1 < len(names):
                sizes.add(row.shape[dim] * row.shape[dim + 1])
    return sizes - others
