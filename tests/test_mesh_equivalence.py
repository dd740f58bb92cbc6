"""The same training on every mesh: losses, gradients, and what the compiled programs move.

CI has the mesh with all axes, the long suite the others.
"""

import collections
import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import tree
from jaxtrain.backend import captured_stderr
from jaxtrain.config import OptimizerConfig
from jaxtrain.losses import lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.optim import make_optimizer
from jaxtrain.sharding import shard_batch
from jaxtrain.state import init_state, state_shardings
from jaxtrain.step import make_train_step

HYBRID = "data:2,fsdp:2,tensor:2"
LAYOUTS = [
    pytest.param("data:8", 1, marks=pytest.mark.long),
    pytest.param("fsdp:8", 1, marks=pytest.mark.long),
    pytest.param("fsdp:4,tensor:2", 1, marks=pytest.mark.long),
    (HYBRID, 1),
    (HYBRID, 4),
]
NUM_STEPS, NUM_ROWS, LENGTH = 50, 32, 64


def batches():
    """Random walks over the bytes: something a model can learn in 50 steps."""
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        moves = rng.integers(-2, 3, (NUM_ROWS, LENGTH + 1))
        tokens = (np.cumsum(moves, axis=1) + 128).astype(np.int32) % 256
        mask = (rng.random((NUM_ROWS, LENGTH)) < 0.9).astype(np.float32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def keep_gradients(tx):
    """Wraps an optimizer so that its state also holds the gradient that the step gave it."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), tx.init(params)

    def update(grads, state, params=None):
        updates, inner = tx.update(grads, state[1], params)
        return updates, (grads, inner)

    return optax.GradientTransformation(init, update)


MODEL = transformer(TransformerConfig())
OPTIMIZER = OptimizerConfig(warmup_steps=10)


@functools.cache
def start():
    """Optimizer and initial state, on one device."""
    params, _ = jax.eval_shape(MODEL.init, jax.random.key(0))
    tx = keep_gradients(make_optimizer(OPTIMIZER, params, num_steps=NUM_STEPS))
    return tx, init_state(MODEL, tx, make_mesh("data:1", devices=jax.devices()[:1]))


@functools.cache
def train(sizes, accumulate_steps):
    """(loss of every step, gradients of step 0, text of the compiled program) of nano."""
    tx, state = start()
    mesh = make_mesh(sizes, devices=jax.devices()[: 1 if sizes == "data:1" else 8])
    shardings = state_shardings(state, MODEL, mesh)
    state = jax.device_put(state, shardings)
    step = make_train_step(MODEL, lm_loss(MODEL), tx, mesh, accumulate_steps=accumulate_steps)
    # Not donated: the layouts share the buffers they start from.
    step = jax.jit(step, out_shardings=(shardings, None))
    losses, grads, program = [], None, None
    for batch in batches():
        batch = shard_batch(batch, mesh, accumulate_steps=accumulate_steps)
        if program is None:
            with captured_stderr() as log:
                program = step.lower(state, batch).compile()
            assert log.involuntary_remat() == []
        state, metrics = program(state, batch)
        losses.append(metrics["loss"])
        grads = grads or dict(tree.named_leaves(jax.device_get(state.opt_state[0])))
    return np.array(jax.device_get(losses)), grads, program.as_text()


@pytest.mark.parametrize(("sizes", "accumulate_steps"), LAYOUTS)
def test_training_is_the_same_on_every_mesh(sizes, accumulate_steps):
    losses, grads, _ = train(sizes, accumulate_steps)
    expected_losses, expected_grads, _ = train("data:1", 1)
    assert expected_losses[-1] < 0.75 * expected_losses[0]  # it does learn something
    np.testing.assert_allclose(losses[:10], expected_losses[:10], rtol=1e-5)
    np.testing.assert_allclose(losses[-1], expected_losses[-1], rtol=1e-3)
    assert grads.keys() == expected_grads.keys()
    for path, expected in expected_grads.items():
        error = np.linalg.norm(grads[path] - expected) / np.linalg.norm(expected)
        assert error < 1e-5, path


def test_gradients_of_nano_are_reduced_over_data_as_often_for_four_micro_batches_as_for_one():
    mesh = make_mesh(HYBRID)
    found = []
    for accumulate_steps in (1, 4):
        reductions = hlo.reductions(train(HYBRID, accumulate_steps)[2], mesh, "data")
        assert all(c.times == 1 for c in reductions)
        found.append(collections.Counter(shape for c in reductions for shape in c.shapes))
    assert found[0] == found[1]
    # One array for each parameter, and the sum and weight of the loss.
    assert found[0].total() == len(jax.tree.leaves(start()[1].params)) + 2
