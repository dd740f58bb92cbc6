"""How a transformer decodes: its parameters, once in the form that is read fastest.

A token at batch size 1 reads every parameter once and computes next to nothing, so that whatever
copies parameters costs as much as the token. On CPU a loop over stacked layers copies each layer's
slice before the product (measured 2.4 times the processor time): there the layers are taken
apart once and the loop over them is unrolled.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxtrain.compile import target_device
from jaxtrain.models.functional import Params, functional

_STACKED = "layers"
# Norms and their scales are computed in float32.
_FLOAT32 = ("scale", "bias")


def takes_layers_apart() -> bool:
    """Whether parameters for decoding, and caches, are an array for each layer."""
    return target_device().platform == "cpu"


class Decoder(NamedTuple):
    """The functions of `Model` with these names."""

    for_decode: Callable[[Params], Params]
    decode: Callable[..., tuple[jax.Array, Any]]


def make_decoder(build: Callable[..., nnx.Module], *, num_layers: int, precision: str) -> Decoder:
    """Makes the decoding functions of a transformer.

    Args:
        build: (rngs, is_stacked=) -> module with `decode`; its layers are stacked, or a list.
        num_layers: of the model.
        precision: dtype of the computation.
    """

    def made(is_stacked: bool):
        return functional(
            functools.partial(build, is_stacked=is_stacked),
            call=lambda module, batch: module.decode(**batch),
        )

    stacked, listed = made(True), functools.cache(lambda: made(False))

    def decode(params: Params, cache: Any, tokens_BT: jax.Array, positions_BT: jax.Array):
        inputs = {"cache": cache, "tokens_BT": tokens_BT, "positions_BT": positions_BT}
        model = listed() if "0" in params[_STACKED] else stacked
        return model.apply(params, {}, inputs, key=None, train=False)[0]

    def for_decode(params: Params) -> Params:
        lowered = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if path[-1].key in _FLOAT32 else leaf.astype(precision), params
        )
        if not takes_layers_apart():
            return lowered
        layers = {
            str(layer): jax.tree.map(lambda leaf, layer=layer: leaf[layer], lowered[_STACKED])
            for layer in range(num_layers)
        }
        return lowered | {_STACKED: layers}

    return Decoder(for_decode, decode)
