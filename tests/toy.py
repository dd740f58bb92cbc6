"""A stack of feed-forward layers with logical axes, small enough to read its programs.

Shapes: B rows, D embed, F mlp, L layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.compile import remat
from jaxtrain.models.functional import Model
from jaxtrain.sharding import constrain, gather_param

LOGICAL_AXES = {
    "layers": {
        "up": {"kernel": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")},
        "down": {"kernel": ("layers", "mlp", "embed")},
        "norm": {"scale": ("layers", "embed")},
    },
    "head": {"kernel": ("embed", "vocab")},
}


@dataclasses.dataclass(frozen=True)
class Toy:
    """Sizes and options of the toy."""

    num_layers: int = 3
    embed_dim: int = 64
    mlp_dim: int = 128
    vocab_size: int = 256
    dtype: str = "float32"
    remat: str = "none"

    def init(self, key):
        keys = jax.random.split(key, 3)
        shape = (self.num_layers, self.embed_dim, self.mlp_dim)
        layers = {
            "up": {"kernel": jax.random.normal(keys[0], shape), "bias": jnp.zeros(shape[::2])},
            "down": {"kernel": jax.random.normal(keys[1], (shape[0], shape[2], shape[1]))},
            "norm": {"scale": jnp.ones(shape[:2])},
        }
        head = jax.random.normal(keys[2], (self.embed_dim, self.vocab_size))
        return {"layers": layers, "head": {"kernel": head}}, {}

    def apply(self, params, model_state, batch, *, key=None, train=True):
        del key, train

        def block(x_BD, layer):
            def use(*path):
                axes = LOGICAL_AXES["layers"][path[0]][path[1]][1:]
                return gather_param(layer[path[0]][path[1]], axes, self.dtype)

            x_BD = constrain(x_BD, "batch", "embed")
            h_BF = x_BD * use("norm", "scale")[None] / 8 @ use("up", "kernel")
            h_BF = constrain(jnp.tanh(h_BF + use("up", "bias")[None]), "batch", "mlp")
            y_BD = constrain(h_BF @ use("down", "kernel") / 16, "batch", "embed")
            return constrain(x_BD + y_BD, "batch", "embed"), None

        x_BD, _ = jax.lax.scan(
            remat(block, self.remat), batch["x"].astype(self.dtype), params["layers"]
        )
        head = gather_param(params["head"]["kernel"], LOGICAL_AXES["head"]["kernel"], self.dtype)
        return constrain(x_BD @ head, "batch", "vocab").astype(jnp.float32), model_state


def toy(**sizes) -> Model:
    config = Toy(**sizes)
    return Model(init=config.init, apply=config.apply, logical_axes=LOGICAL_AXES)


def unlabelled(**sizes) -> Model:
    return dataclasses.replace(toy(**sizes), logical_axes=None)


def summed_loss(model: Model, params, batch):
    outputs, _ = model.apply(params, {}, batch, key=None, train=True)
    return jnp.sum(jnp.square(outputs))
