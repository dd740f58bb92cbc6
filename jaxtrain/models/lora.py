"""LoRA: projections whose kernels stay as they are, and train a product of two small matrices.

Hu et al. 2021 (arXiv:2106.09685): y = x W + (alpha / rank) (x A) B. Beside the kernel of a target
lie `lora_a` and `lora_b`, stacked over layers like it. A is normal with a variance of 1 / inputs,
so that x A is about as large as x; B is zero, so that the first step begins with the base exactly.

Everything but A and B is frozen (`Model.frozen`): it gets no gradient and no optimizer state, and
rests in `base_dtype`.

Shapes: W [L, *inputs, *outputs], A [L, *inputs, R], B [L, R, *outputs]; L layers, R rank.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import tree
from jaxtrain.errors import ConfigError
from jaxtrain.models.layers import LORA_A, LORA_B, Projection
from jaxtrain.models.lora_config import LoraConfig

__all__ = [
    "ADAPTERS",
    "BASE",
    "adapt",
    "is_adapter",
    "keep_base",
    "merge",
    "without_adapters",
    "without_base",
]

BASE = rf"(?<!/{LORA_A})(?<!/{LORA_B})$"
"""Pattern for the paths of all parameters but A and B."""

ADAPTERS = rf"/({LORA_A}|{LORA_B})$"
"""Pattern for the paths of A and B. One of them has no dim that rests over fsdp: rank is small, and
no size that a mesh could be asked to divide."""


def is_adapter(path: str) -> bool:
    """Whether a parameter is an A or a B."""
    return path.endswith((f"/{LORA_A}", f"/{LORA_B}"))


def adapt(block: nnx.Module, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
    """Gives the projections of a layer that `config.targets` names their A and B.

    Raises:
        ConfigError: if the pattern matches no projection, or the rank exceeds a target's sizes.
    """
    found: dict[str, Projection] = {}
    for path, module in nnx.iter_modules(block):
        if isinstance(module, Projection):
            found["/".join(("layers", *map(str, path), "kernel"))] = module
    regex = tree.compile_pattern(config.targets, option="lora.targets")
    targets = {path: found[path] for path in sorted(found) if regex.search(path)}
    if not targets:
        near = ", ".join(tree.near_paths(config.targets, found))
        raise ConfigError(
            f"lora.targets={config.targets!r} matches no projection; near paths: {near}."
        )
    for path, projection in targets.items():
        inputs, outputs = projection.sizes
        if config.rank > min(inputs, outputs):
            raise ConfigError(
                f"lora.rank={config.rank} must be at most {min(inputs, outputs)} for {path}, which "
                f"maps {inputs} to {outputs} values; lower the rank or narrow lora.targets."
            )
        projection.add_lora(config.rank, config.scale, rngs=rngs)


def keep_base(params: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Parameters with all but A and B in `dtype`."""

    def keep(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return leaf if is_adapter(tree.path_str(path)) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(keep, params)


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of parameters, or the like, without A and B."""
    return _pick(params, lambda name: name not in (LORA_A, LORA_B))


def without_base(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of parameters, or the like, with A and B only; empty where there is no LoRA."""
    return _pick(params, lambda name: name in (LORA_A, LORA_B))


def _pick(node: Mapping[str, Any], is_kept: Callable[[str], bool]) -> dict[str, Any]:
    picked = {}
    for name, child in node.items():
        if not isinstance(child, Mapping):
            picked |= {name: child} if is_kept(name) else {}
        elif below := _pick(child, is_kept):
            picked[name] = below
    return picked


def merge(params: Mapping[str, Any], config: LoraConfig) -> dict[str, Any]:
    """The parameters of the model without LoRA that computes the same: W + (alpha / rank) A B.

    Computed in float32 and rounded to the dtype of W. Pure; parameters without A and B are returned
    as they are.
    """
    return _merge(params, config.scale)


def _merge(node: Mapping[str, Any], scale: float) -> dict[str, Any]:
    if LORA_A not in node:
        return {
            name: _merge(child, scale) if isinstance(child, Mapping) else child
            for name, child in node.items()
        }
    kernel, a, b = node["kernel"], node[LORA_A], node[LORA_B]
    layers, rank = a.shape[0], a.shape[-1]
    a_LIR = a.astype(jnp.float32).reshape(layers, math.prod(a.shape[1:-1]), rank)
    b_LRO = b.astype(jnp.float32).reshape(layers, rank, math.prod(b.shape[2:]))
    update_LIO = jnp.einsum("lir,lro->lio", a_LIR, b_LRO, precision="highest")
    merged = kernel.astype(jnp.float32) + scale * update_LIO.reshape(kernel.shape)
    rest = {name: leaf for name, leaf in node.items() if name not in (LORA_A, LORA_B)}
    return rest | {"kernel": merged.astype(kernel.dtype)}
