"""Meshes, shapes and specs for the tests of layouts."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.mesh import make_mesh

CUBE = "data:2,fsdp:2,tensor:2"


def mesh_of(text):
    count = int(np.prod([int(part.split(":")[1]) for part in text.split(",")]))
    return make_mesh(text, devices=jax.devices()[:count])


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)
