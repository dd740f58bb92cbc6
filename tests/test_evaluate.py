"""Exact evaluation (case B4): every row once, padding never, the same on any device count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import mesh_of
from stepping import HYBRID

from jaxtrain.data import load
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.evaluate import evaluate, require_masked
from jaxtrain.step import make_eval_step

pytestmark = pytest.mark.usefixtures("compile_cache")

PREDICTOR = (
    lambda key: ({"offset": jnp.zeros(())}, {}),
    lambda params, state, batch, *, key, train: (batch["x"] + params["offset"], state),
)
"""A fixed predictor: class x[:, 0] for every row."""


def accuracy_loss(outputs_R1, batch, params):
    del params
    mask = batch["loss_mask"]
    right = (jnp.rint(outputs_R1[:, 0]) == batch["label"]).astype(jnp.float32)
    return {
        "loss": (jnp.sum((1 - right) * mask), jnp.sum(mask)),
        "accuracy": (jnp.sum(right * mask), jnp.sum(mask)),
    }


def examples(count):
    """Right on the first 8, wrong on the others."""
    label = np.arange(count, dtype=np.int32)
    x = np.where(np.arange(count) < 8, label, label + 1).astype(np.float32)[:, None]
    return {"x": x, "label": label}


def run(data, sizes, loss_fn=accuracy_loss, batch_size=8):
    mesh = mesh_of(sizes)
    step = jax.jit(make_eval_step(PREDICTOR, loss_fn, mesh))
    params = {"offset": jnp.zeros(())}
    return evaluate(step, params, {}, load.eval_batches(data, mesh, batch_size=batch_size))


@pytest.mark.parametrize("sizes", ["data:1", "data:2", "data:8", "fsdp:8", HYBRID])
def test_last_batch_that_does_not_fill(sizes):
    means = run(examples(10), sizes)
    assert means["accuracy"] == 0.8
    np.testing.assert_allclose(means["loss"], 0.2, rtol=1e-12)
    assert (means["rows"], means["weight"]) == (10, 10)


@pytest.mark.parametrize("sizes", ["data:1", "data:8"])
def test_fewer_examples_than_a_batch(sizes):
    means = run(examples(3), sizes)
    assert means == {"loss": 0.0, "accuracy": 1.0, "rows": 3, "weight": 3}


def test_no_examples():
    with pytest.raises(DataError, match="0 rows"):
        evaluate(lambda *_: {}, {}, {}, [])


def test_rows_that_are_all_masked():
    data = dict(examples(4), loss_mask=np.zeros(4, np.float32))
    with pytest.raises(DataError, match=r"no row of the 4 .* accuracy, loss .*weight 0"):
        run(data, "data:1")


def test_rows_with_weights_of_their_own():
    """A mean over tokens: rows with more tokens count more."""
    data = dict(examples(10), loss_mask=np.arange(10, dtype=np.float32))
    means = run(data, "data:2")
    np.testing.assert_allclose(means["accuracy"], sum(range(8)) / sum(range(10)), rtol=1e-12)


def test_sums_are_exact_beyond_float32():
    """2^24 rows and one: a float32 counter would stay at 2^24."""
    sums = [
        {"loss": (np.float32(2**24), np.float32(2**24))},
        {"loss": (np.float32(0), np.float32(1))},
    ]
    batches = [({"x": np.zeros(1)}, 1), ({"x": np.zeros(1)}, 1)]
    means = evaluate(lambda params, state, batch: sums.pop(0), {}, {}, batches)
    assert means["weight"] == 2**24 + 1
    assert means["loss"] == 2**24 / (2**24 + 1)


@pytest.mark.parametrize("sizes", ["data:1", "data:8"])
def test_loss_that_counts_padding_is_refused(sizes):
    def careless_loss(outputs_R1, batch, params):
        return {"loss": (jnp.sum(outputs_R1), jnp.float32(len(outputs_R1)))}

    with pytest.raises(ConfigError, match=r"should be \(0, 0\) .*8\.0.* by batch\['loss_mask'\]"):
        run(examples(10), sizes, careless_loss)
    run(examples(16), sizes, careless_loss)  # nothing is padded, so nothing can be miscounted


def masked_weight_only(outputs_R1, batch, params):
    return {"loss": (jnp.sum(outputs_R1), jnp.sum(batch["loss_mask"]))}


def masked_sum_only(outputs_R1, batch, params):
    mask = batch["loss_mask"]
    return {"loss": (jnp.sum(outputs_R1[:, 0] * mask), jnp.float32(len(mask)))}


def constant_besides(outputs_R1, batch, params):
    weight = jnp.sum(batch["loss_mask"])
    return accuracy_loss(outputs_R1, batch, params) | {"z_loss": (jnp.float32(0), weight)}


@pytest.mark.parametrize("sizes", ["data:1", "data:8"])
@pytest.mark.parametrize(
    ("loss_fn", "careless"),
    [
        (accuracy_loss, ""),
        (constant_besides, ""),
        (jax.jit(accuracy_loss), ""),
        (masked_weight_only, "the sum of 'loss'"),
        (jax.jit(masked_weight_only), "the sum of 'loss'"),
        (masked_sum_only, "the weight of 'loss'"),
    ],
)
def test_a_loss_without_the_mask_is_seen_without_compiling(sizes, loss_fn, careless):
    mesh = mesh_of(sizes)
    batch = load.abstract_batch(examples(8), mesh, global_batch_size=8)
    args = (make_eval_step(PREDICTOR, loss_fn, mesh), {"offset": jnp.zeros(())}, {}, batch)
    if not careless:
        require_masked(*args)
        return
    with pytest.raises(ConfigError, match=rf"'\] does not enter {careless}: multiply each row"):
        require_masked(*args)


def test_padding_without_a_mask_is_refused():
    batches = [({"x": np.zeros((8, 1))}, 3)]
    with pytest.raises(ConfigError, match="has no loss_mask"):
        evaluate(lambda *_: {}, {}, {}, batches)


def test_padding_check_uses_the_same_program():
    mesh = mesh_of("data:2")
    step = jax.jit(make_eval_step(PREDICTOR, accuracy_loss, mesh))
    params = {"offset": jnp.zeros(())}
    evaluate(step, params, {}, load.eval_batches(examples(20), mesh, batch_size=8))
    assert step._cache_size() == 1


def test_a_step_runs_while_the_one_before_it_is_fetched():
    """Metrics that record when they are read: batch i is read after step i + 1 was started."""
    events = []

    class Recorded:
        def __init__(self, index):
            self.index = index

        def __array__(self, dtype=None, copy=None):
            events.append(("read", self.index))
            return np.ones((), dtype or np.float32)

    def step(params, state, batch):
        index = batch["index"][0]
        events.append(("start", index))
        return {"loss": (Recorded(index), np.float32(1))}

    evaluate(step, {}, {}, [({"index": np.array([i])}, 1) for i in range(3)])
    assert events == [
        ("start", 0),
        ("start", 1),
        ("read", 0),
        ("start", 2),
        ("read", 1),
        ("read", 2),
    ]
