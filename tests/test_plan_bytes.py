"""Bytes that the compiled CUDA step sends, against the formulas of docs/planning.md.

Shapes: B rows of a device and micro-batch, T length, D embed, L layers, V vocabulary.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planning import needs_cuda

from jaxtrain.compile import compiler_options
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.plan import hlo, traffic
from jaxtrain.plan.compile_target import target_devices
from jaxtrain.plan.targets import parse_target
from jaxtrain.sharding import batch_sharding
from jaxtrain.state import placed_state
from jaxtrain.step import make_train_step

B, T, D, L, V = 2, 512, 512, 4, 4096
CONFIG = TransformerConfig(
    vocab_size=V, num_layers=L, embed_dim=D, num_heads=8, head_dim=64, mlp_dim=1024
)
NUM_PARAMS = L * (4 * D * D + 3 * D * 1024 + 2 * D) + 2 * V * D + D
IN_LAYERS = NUM_PARAMS - 2 * V * D - D


def sent_by_formula(sizes, accumulate_steps):
    """Axis -> bytes, as docs/planning.md derives them."""
    f, d, t = (sizes.get(axis, 1) for axis in ("fsdp", "data", "tensor"))
    gathers_and_scatters = 2 * NUM_PARAMS + 2 * IN_LAYERS + 4 * NUM_PARAMS
    additions = (4 * L + 2) * 2 * (t - 1) / t * B * T * D * 2
    return {
        "fsdp": accumulate_steps * (f - 1) / f * gathers_and_scatters / t,
        "data": 2 * (d - 1) / d * 4 * NUM_PARAMS / (f * t),
        "tensor": accumulate_steps * additions,
    }


def compiled_step(mesh, accumulate_steps):
    model = transformer(CONFIG, precision="bfloat16", remat="full")
    tx = optax.adamw(1e-3)
    state = placed_state(model, tx, mesh)
    rows = B * mesh.shape["data"] * mesh.shape["fsdp"]
    shape = (rows, T) if accumulate_steps == 1 else (accumulate_steps, rows, T)
    sharding = batch_sharding(mesh, accumulate_steps=accumulate_steps)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    mask = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": mask}
    step = make_train_step(model, lm_loss(model), tx, mesh, accumulate_steps=accumulate_steps)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    options = compiler_options("default", "gpu", device=mesh.devices.flat[0])
    return jitted.lower(state, batch).compile(compiler_options=options)


CASES = [
    (sizes, steps)
    for sizes in ("fsdp:8", "tensor:8", "fsdp:4,tensor:2", "data:2,fsdp:4")
    for steps in (1, 4)
]
IN_CI = ("fsdp:4,tensor:2", 4)


@needs_cuda
@pytest.mark.parametrize(
    ("text", "accumulate_steps"),
    [pytest.param(*case, marks=() if case == IN_CI else pytest.mark.long) for case in CASES],
)
def test_a_step_sends_what_the_formula_says(text, accumulate_steps):
    _, devices = target_devices(parse_target("h100:1x8"))
    mesh = make_mesh(text, devices=devices)
    compiled = compiled_step(mesh, accumulate_steps)
    found = traffic.communication(hlo.parse(compiled.as_text()), dict(mesh.shape), 8)
    sent = collections.defaultdict(float)
    for collective in found:
        sent[collective.axis] += collective.total_bytes_sent
    expected = sent_by_formula(dict(mesh.shape), accumulate_steps)
    for axis, size in mesh.shape.items():
        if size > 1:
            # Maxima and sums of the loss over a split vocabulary, and norms, are the rest.
            assert sent.pop(axis) == pytest.approx(expected[axis], rel=0.05), axis
    assert sum(sent.values()) < 1e-3 * np.sum([*expected.values()]), "over several axes: scalars"
