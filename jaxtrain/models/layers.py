"""Layers of the transformer: each holds its parameters with their logical axes.

A layer's parameters rest in the storage layout and float32. `gathered` brings one to the compute
layout and dtype where it is used; `logical_axes` collects the names for the sharding module.

Shapes: B batch, T length, D embed, F mlp, V vocab.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.rules import axis_size
from jaxtrain.sharding import active_rules, constrain, gather_param

Dtype = jax.typing.DTypeLike
Initializer = Callable[..., jax.Array]
Axes = tuple[tuple[str | None, int], ...]
"""(logical axis, size) of every dim of a parameter; None: never split."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the matrices of LoRA beside a kernel."""

INIT_STDDEV = 0.02


def normal(stddev: float = INIT_STDDEV) -> Initializer:
    """Normal initial values; GPT-2 and Llama use one standard deviation for all kernels."""
    return jax.nn.initializers.normal(stddev)


class Weights(nnx.Module):
    """Base of layers that hold parameters: `<name>_axes` are the logical axes of `<name>`."""

    def add(self, name: str, axes: Axes, init: Initializer, rngs: nnx.Rngs) -> None:
        """Makes a float32 parameter."""
        shape = tuple(size for _, size in axes)
        setattr(self, name, nnx.Param(init(rngs.params(), shape, jnp.float32)))
        setattr(self, f"{name}_axes", tuple(axis for axis, _ in axes))

    def gathered(self, name: str, dtype: Dtype) -> jax.Array:
        """The parameter in `dtype` and in the layout of the computation."""
        return gather_param(getattr(self, name)[...], getattr(self, f"{name}_axes"), dtype)


def logical_axes(module: nnx.Module, params: Any, *, stacked: str = "layers") -> Any:
    """Returns a tree like `params` with the logical axes of every parameter of a module.

    Args:
        module: holds only layers derived from `Weights`.
        params: nested dict of its parameters.
        stacked: attribute (and logical axis) of the layers that `jax.vmap` stacked.
    """

    def axes(path: tuple[Any, ...], _: Any) -> tuple[str, ...]:
        names = [entry.key for entry in path]
        owner = module
        for name in names[:-1]:
            owner = getattr(owner, name)
        own = getattr(owner, f"{names[-1]}_axes")
        return (stacked, *own) if names[0] == stacked else own

    return jax.tree_util.tree_map_with_path(axes, params)


class Projection(Weights):
    """Linear map of [B, T, *inputs] to [B, T, *outputs]; with `add_lora` adapted by LoRA."""

    lora_scale = 0.0
    """What the update of LoRA is multiplied with; 0: there is none."""

    def __init__(
        self,
        inputs: Axes,
        outputs: Axes,
        *,
        use_bias: bool = False,
        init: Initializer,
        rngs: nnx.Rngs,
    ):
        self.num_inputs, self.axes = len(inputs), inputs + outputs
        self.use_bias = use_bias
        self.add("kernel", self.axes, init, rngs)
        if use_bias:
            self.add("bias", outputs, jax.nn.initializers.zeros, rngs)

    @property
    def sizes(self) -> tuple[int, int]:
        """(number of inputs, number of outputs)."""
        sizes = [size for _, size in self.axes]
        return math.prod(sizes[: self.num_inputs]), math.prod(sizes[self.num_inputs :])

    def add_lora(self, rank: int, scale: float, *, rngs: nnx.Rngs) -> None:
        """Adds scale * (x A) B to what comes out; see `lora`."""
        inputs, outputs = self.axes[: self.num_inputs], self.axes[self.num_inputs :]
        self.add(LORA_A, (*inputs, (None, rank)), normal(self.sizes[0] ** -0.5), rngs)
        self.add(LORA_B, ((None, rank), *outputs), jax.nn.initializers.zeros, rngs)
        self.lora_scale = scale

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _product(x, self.gathered("kernel", x.dtype), self.num_inputs)
        if self.lora_scale:
            # Never A B: it would be as large as the kernel, and so would its gradient.
            h_BTR = self.lora_scale * _product(x, self.gathered(LORA_A, x.dtype), self.num_inputs)
            h_BTR = constrain(h_BTR, "batch", "length", None)
            y += _product(h_BTR, self.gathered(LORA_B, x.dtype), 1)
        if self.use_bias:
            bias = self.gathered("bias", x.dtype)
            y += jnp.expand_dims(bias, range(y.ndim - bias.ndim))
        return y


def _product(x: jax.Array, kernel: jax.Array, num_inputs: int) -> jax.Array:
    """Sums over the last `num_inputs` dims of `x` and the first ones of `kernel`."""
    if _length_is_split():
        return jnp.tensordot(x, kernel, num_inputs)
    # One product of two matrices: for more dims XLA on CPU copies what the gradient of the kernel
    # multiplies, badly; measured twice the time of a feed-forward layer.
    inputs, outputs = kernel.shape[:num_inputs], kernel.shape[num_inputs:]
    rows = x.shape[: x.ndim - num_inputs]
    matrix = kernel.reshape(math.prod(inputs), math.prod(outputs))
    y = x.reshape(math.prod(rows), math.prod(inputs)) @ matrix
    return y.reshape(*rows, *outputs)


def _length_is_split() -> bool:
    """Whether the length of activations lies over a mesh axis: it cannot be merged with rows."""
    active = active_rules()
    return active is not None and axis_size(active[0], active[1].compute.get("length")) > 1


class Norm(Weights):
    """LayerNorm (scale and bias) or RMSNorm (scale) over the last dims, in float32.

    `rms_plus_one` stores what is added to 1 to give the scale, as Gemma's weights do.
    """

    def __init__(self, kind: str, axes: Axes, *, epsilon: float, rngs: nnx.Rngs):
        self.kind = kind
        self.epsilon = epsilon
        self.num_dims = len(axes)
        init = jax.nn.initializers.zeros if kind == "rms_plus_one" else jax.nn.initializers.ones
        self.add("scale", axes, init, rngs)
        if kind == "layer":
            self.add("bias", axes, jax.nn.initializers.zeros, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        dims = tuple(range(-self.num_dims, 0))
        if self.kind == "layer":
            y -= jnp.mean(y, dims, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), dims, keepdims=True) + self.epsilon)
        leading = range(x.ndim - self.num_dims)
        scale = self.gathered("scale", jnp.float32)
        if self.kind == "rms_plus_one":
            scale += 1
        y *= jnp.expand_dims(scale, leading)
        if self.kind == "layer":
            y += jnp.expand_dims(self.gathered("bias", jnp.float32), leading)
        return y.astype(x.dtype)


class Embedding(Weights):
    """A table of vectors."""

    def __init__(self, axis: str, size: int, embed_dim: int, *, rngs: nnx.Rngs):
        self.add("embedding", ((axis, size), ("embed", embed_dim)), normal(), rngs)


_GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
}


class Mlp(nnx.Module):
    """Feed-forward layers: GELU (tanh form, as GPT-2's), SwiGLU (Llama) or GeGLU (Gemma)."""

    def __init__(
        self,
        activation: str,
        embed_dim: int,
        mlp_dim: int,
        *,
        use_bias: bool,
        init_down: Initializer,
        rngs: nnx.Rngs,
    ):
        embed, mlp = (("embed", embed_dim),), (("mlp", mlp_dim),)
        kwargs = {"use_bias": use_bias, "rngs": rngs}
        self.activation = activation
        if activation in _GATES:
            self.gate = Projection(embed, mlp, init=normal(), **kwargs)
        self.up = Projection(embed, mlp, init=normal(), **kwargs)
        self.down = Projection(mlp, embed, init=init_down, **kwargs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = constrain(self.up(x_BTD), "batch", "length", "mlp")
        if self.activation in _GATES:
            gate_BTF = constrain(self.gate(x_BTD), "batch", "length", "mlp")
            h_BTF = _GATES[self.activation](gate_BTF) * h_BTF
        else:
            h_BTF = jax.nn.gelu(h_BTF, approximate=True)
        return self.down(h_BTF)


def dropout(
    x: jax.Array, keys_B: jax.Array | None, site: jax.typing.ArrayLike, rate: float
) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the others up.

    Args:
        x: [B, ...]
        keys_B: one random key per row, so that a row's mask does not depend on the rows beside it;
            None for no dropout.
        site: number of the place in the model, so that no two have the same mask.
        rate: 0 to below 1.
    """
    if keys_B is None or rate == 0:
        return x
    draw = lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape[1:])  # noqa: E731
    keep = jax.vmap(draw)(keys_B)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def softcap(scores: jax.Array, limit: float) -> jax.Array:
    """Scores between -limit and limit: limit * tanh(scores / limit). 0 leaves them as they are."""
    return limit * jnp.tanh(scores / limit) if limit else scores


def residual_init(num_layers: int) -> Initializer:
    """For kernels that write to the residual stream, 2 per layer: their sum keeps its size."""
    return normal(INIT_STDDEV / math.sqrt(2 * num_layers))
