"""The train step of every preset, compiled at full width on simulated devices.

Nothing is computed and no memory is needed: arguments are abstract.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxtrain.backend import captured_stderr
from jaxtrain.compile import compile_step
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import PRESETS, TransformerConfig, transformer
from jaxtrain.sharding import batch_sharding
from jaxtrain.state import abstract_state, state_shardings
from jaxtrain.step import make_train_step

MESHES = ("data:8", "fsdp:8", "fsdp:4,tensor:2", "data:2,fsdp:2,tensor:2")
FAST = [("nano", "fsdp:4,tensor:2"), ("nano", "data:2,fsdp:2,tensor:2")]
LONG = [(name, mesh) for name in PRESETS for mesh in MESHES if (name, mesh) not in FAST]


@pytest.mark.parametrize(
    ("preset", "text"), [*FAST, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_no_preset_makes_xla_replicate_an_activation(preset, text):
    config = dataclasses.replace(TransformerConfig(**PRESETS[preset]), num_layers=2)
    model, mesh, tx = transformer(config), make_mesh(text), optax.adamw(1e-3)
    abstract = abstract_state(model, tx)
    shardings = state_shardings(abstract, model, mesh)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        abstract,
        shardings,
    )
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    batch = {
        name: jax.ShapeDtypeStruct((32, 256), kind, sharding=batch_sharding(mesh))
        for name, kind in kinds.items()
    }
    step = make_train_step(model, lm_loss(model), tx, mesh)
    with captured_stderr() as log:
        compiled = compile_step(
            step, (state, batch), donate_argnums=0, out_shardings=(shardings, None)
        )
    assert log.involuntary_remat() == []
    # The state is updated in place.
    assert compiled.memory["alias"] >= compiled.memory["argument"] * 0.9
