"""The losses against NumPy, and the chunked cross-entropy's compiled program.

Shapes: B batch, T length, D embed, V padded vocabulary.
"""

import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.losses import classification_loss, lm_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import Model
from jaxtrain.sharding import use_rules

pytestmark = pytest.mark.usefixtures("compile_cache")

ROWS, LENGTH, WIDTH, VOCAB, PADDED = 8, 12, 16, 50, 64
SPEC = jax.sharding.PartitionSpec


def head_model(vocab_size=VOCAB) -> Model:
    """Hidden states are given; the only parameter is the head."""
    return Model(
        init=lambda key: ({}, {}),
        apply=lambda params, state, batch, *, key, train: (params["hidden"], state),
        unembed=lambda params: params["head"],
        vocab_size=vocab_size,
    )


def inputs(rows=ROWS, length=LENGTH, width=WIDTH, vocab=VOCAB, padded=PADDED, seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "hidden": rng.normal(size=(rows, length, width)).astype(np.float32),
        "head": rng.normal(size=(width, padded)).astype(np.float32),
    }
    batch = {
        "targets": rng.integers(0, vocab, (rows, length)).astype(np.int32),
        "loss_mask": rng.integers(0, 2, (rows, length)).astype(np.float32) * 1.5,
    }
    return params, batch


def reference(params, batch, vocab=VOCAB, z_loss=0.0):
    """Float64: (nll, z, gradient of nll + z by hidden, by head)."""
    hidden, head = (np.asarray(params[k], np.float64) for k in ("hidden", "head"))
    mask = np.asarray(batch["loss_mask"], np.float64)
    scores = hidden @ head[:, :vocab]
    log_z = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    one_hot = np.eye(vocab)[batch["targets"]]
    nll = ((log_z - (scores * one_hot).sum(-1)) * mask).sum()
    z = z_loss * (log_z**2 * mask).sum()
    probabilities = np.exp(scores - log_z[..., None])
    grad = (probabilities * (1 + 2 * z_loss * log_z)[..., None] - one_hot) * mask[..., None]
    head_grad = np.zeros_like(head)
    head_grad[:, :vocab] = np.einsum("btd,btv->dv", hidden, grad)
    return nll, z, {"hidden": grad @ head[:, :vocab].T, "head": head_grad}


def value_and_grads(loss_fn, params, batch):
    def loss(params):
        sums = loss_fn(params["hidden"], batch, params)
        return sums["loss"][0], sums

    (_, sums), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return sums, grads


def assert_close(ours, expected, rtol=1e-5):
    for name in ("hidden", "head"):
        error = np.linalg.norm(np.asarray(ours[name], np.float64) - expected[name])
        assert error < rtol * np.linalg.norm(expected[name]), name


# A chunk of 12, 6, 5 (the last one padded) and 1 positions.
@pytest.mark.parametrize("chunk_bytes", [2**26, 4 * 8 * 6 * 64, 4 * 8 * 5 * 64, 1])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_value_and_gradient_equal_numpy(chunk_bytes, z_loss):
    params, batch = inputs()
    nll, z, expected = reference(params, batch, z_loss=z_loss)
    loss_fn = lm_loss(head_model(), z_loss=z_loss, chunk_bytes=chunk_bytes)
    sums, grads = value_and_grads(loss_fn, params, batch)
    assert_close(grads, expected)
    np.testing.assert_allclose(sums["loss"][0], nll + z, rtol=1e-5)
    np.testing.assert_allclose(sums["loss"][1], batch["loss_mask"].sum())
    assert (np.asarray(grads["head"])[:, VOCAB:] == 0).all()
    assert set(sums) == ({"loss", "nll", "z_loss"} if z_loss else {"loss"})
    if z_loss:
        np.testing.assert_allclose(sums["nll"][0], nll, rtol=1e-5)
        np.testing.assert_allclose(sums["z_loss"][0], z, rtol=1e-5)
    # Without a gradient the value is the same: evaluation takes this way.
    plain = jax.jit(loss_fn)(params["hidden"], batch, params)
    np.testing.assert_allclose(plain["loss"][0], sums["loss"][0], rtol=1e-6)


def test_sums_are_additive_over_rows():
    params, batch = inputs()
    loss_fn = lm_loss(head_model())

    def part(rows):
        cut = {name: leaf[rows] for name, leaf in batch.items()}
        return loss_fn(params["hidden"][rows], cut, params)["loss"]

    whole = loss_fn(params["hidden"], batch, params)["loss"]
    first, second = part(slice(0, 3)), part(slice(3, 8))
    np.testing.assert_allclose(whole, np.add(first, second), rtol=1e-6)
    alone = dict(batch, loss_mask=np.zeros_like(batch["loss_mask"]))
    assert [float(x) for x in loss_fn(params["hidden"], alone, params)["loss"]] == [0.0, 0.0]


def test_large_scores_and_a_scaled_loss_stay_exact():
    params, batch = inputs()
    params["hidden"] *= 1000
    nll, _, expected = reference(params, batch)
    loss_fn = lm_loss(head_model())
    sums, grads = value_and_grads(loss_fn, params, batch)
    np.testing.assert_allclose(sums["loss"][0], nll, rtol=1e-5)
    assert_close(grads, expected, rtol=1e-4)
    half = jax.grad(lambda p: 0.5 * loss_fn(p["hidden"], batch, p)["loss"][0])(params)
    assert_close(half, {name: leaf / 2 for name, leaf in expected.items()}, rtol=1e-4)


def test_bfloat16_hidden_states_keep_a_float32_loss():
    params, batch = inputs()
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    nll, _, expected = reference(jax.tree.map(lambda x: x.astype(np.float32), low), batch)
    for chunk_bytes in (2**26, 4 * 8 * 5 * 64):
        loss_fn = lm_loss(head_model(), chunk_bytes=chunk_bytes)
        sums, grads = value_and_grads(loss_fn, low, batch)
        assert all(value.dtype == jnp.float32 for value in sums["loss"])
        assert grads["hidden"].dtype == grads["head"].dtype == jnp.bfloat16
        np.testing.assert_allclose(sums["loss"][0], nll, rtol=1e-5)
        assert_close(jax.tree.map(lambda leaf: leaf.astype(np.float32), grads), expected, rtol=2e-2)


# On a mesh ------------------------------------------------------------------------------------

AXES = {"hidden": SPEC(("data", "fsdp")), "head": SPEC("fsdp", "tensor")}


def placed(mesh, params, batch):
    put = lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
    rows = {name: put(leaf, SPEC(("data", "fsdp"))) for name, leaf in batch.items()}
    return {name: put(leaf, AXES[name]) for name, leaf in params.items()}, rows


def automatic_grads(loss_fn, mesh):
    """All mesh axes automatic, as for a model with model_state."""

    def loss(params, batch):
        return loss_fn(params["hidden"], batch, params)["loss"][0]

    def grads(params, batch):
        with use_rules(mesh):
            return jax.value_and_grad(loss)(params, batch)

    return jax.jit(grads)


def manual_over_data_grads(loss_fn, mesh):
    """A region that is manual over `data` only, around loss and gradient."""

    def region(params, batch):
        loss = lambda p: loss_fn(p["hidden"], batch, p)["loss"][0]  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        head = jax.lax.psum(grads["head"], "data")
        return jax.lax.psum(value, "data"), {"hidden": grads["hidden"], "head": head}

    def grads(params, batch):
        specs = {"hidden": SPEC("data"), "head": SPEC()}
        with use_rules(mesh):
            return jax.shard_map(
                region, mesh=mesh, in_specs=(specs, SPEC("data")), out_specs=(SPEC(), specs),
                axis_names={"data"}, check_vma=False,
            )(params, batch)  # fmt: skip

    return jax.jit(grads)


@pytest.mark.parametrize("make_grads", [automatic_grads, manual_over_data_grads])
def test_chunks_on_a_mesh(make_grads):
    """Right values, no collective over the head inside the loop, no whole float32 scores."""
    mesh = make_mesh("data:2,fsdp:2,tensor:2")
    params, batch = inputs(length=24)
    nll, _, expected = reference(params, batch)
    # Per device 2 rows and 32 columns: 3 positions in a chunk, 8 chunks.
    loss_fn = lm_loss(head_model(), chunk_bytes=4 * 2 * 3 * 32)
    args = placed(mesh, params, batch)
    compiled = make_grads(loss_fn, mesh).lower(*args).compile()
    value, grads = compiled(*args)
    np.testing.assert_allclose(value, nll, rtol=1e-5)
    assert_close(grads, expected)
    text = compiled.as_text()
    found = hlo.collectives(text, mesh)
    in_loop = [c for c in found if c.times > 1]
    assert in_loop, "the vocabulary is split: maxima and sums of a chunk cross `tensor`"
    assert {c.times for c in in_loop} == {8}
    assert {axis for c in in_loop for axis in c.axes} == {"tensor"}
    assert max(c.num_bytes for c in in_loop) <= 4 * 2 * 3 * WIDTH
    over_head = [c for c in found if (WIDTH, PADDED // 2) in c.shapes and c.kind == "all-reduce"]
    assert {c.times for c in over_head} == {1}
    assert not whole_scores(text)
    unchunked = make_grads(lm_loss(head_model()), mesh).lower(*args).compile().as_text()
    assert whole_scores(unchunked), "the search must find what it looks for"
    assert "while" not in unchunked


def whole_scores(text: str) -> list[str]:
    """Float32 buffers of a device that hold [B, T, V] scores, in any order of dims."""
    size = (ROWS // 4) * 24 * (PADDED // 2)
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    return [s for s in shapes if np.prod([int(n) for n in s.split(",")]) >= size]


def test_the_number_of_chunks_follows_what_a_device_holds():
    """64 MB of scores on one device are cut; split over 8 devices they are not."""
    params = {
        "hidden": jax.ShapeDtypeStruct((16, 256, 8), jnp.float32),
        "head": jax.ShapeDtypeStruct((8, 8192), jnp.float32),
    }
    batch = {
        "targets": jax.ShapeDtypeStruct((16, 256), jnp.int32),
        "loss_mask": jax.ShapeDtypeStruct((16, 256), jnp.float32),
    }
    loss_fn = lm_loss(head_model(8192))

    def loops(mesh):
        def loss(params, batch):
            return loss_fn(params["hidden"], batch, params)["loss"][0]

        def grads(params, batch):
            if mesh is None:
                return jax.grad(loss)(params, batch)
            with use_rules(mesh):
                return jax.grad(loss)(params, batch)

        return str(jax.make_jaxpr(grads)(params, batch)).count("scan[")

    assert loops(None) == 1
    assert loops(make_mesh("data:1", devices=jax.devices()[:1])) == 1
    assert loops(make_mesh("fsdp:4,tensor:2")) == 0
    assert loops(make_mesh("tensor:8")) == 0


def test_a_chunk_of_a_large_vocabulary_is_not_cut_to_a_few_positions():
    """64 MB are 128 positions of 131,072 scores; every chunk adds to the head's whole gradient."""
    vocab_size = 131_072
    params = {"head": jax.ShapeDtypeStruct((8, vocab_size), jnp.float32)}
    batch = {}

    def scores(length=4096, **kwargs):
        params["hidden"] = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
        batch["targets"] = jax.ShapeDtypeStruct((1, length), jnp.int32)
        batch["loss_mask"] = jax.ShapeDtypeStruct((1, length), jnp.float32)
        loss_fn = lm_loss(head_model(vocab_size), **kwargs)
        loss = lambda params, batch: loss_fn(params["hidden"], batch, params)["loss"][0]  # noqa: E731
        text = str(jax.make_jaxpr(jax.grad(loss))(params, batch))
        return {int(n) for n in re.findall(rf"f32\[(?:1,)?(\d+),{vocab_size}\]", text)} - {8}

    assert scores() == {1024}
    assert scores(chunk_bytes=2**26) == {128}
    # Matrix units take rows by eights: 3 chunks of 1,000 and not of 994.
    assert scores(length=2980) == {1000}


def test_bad_arguments_are_refused():
    model = head_model()
    params, batch = inputs()
    with pytest.raises(ConfigError, match=r"\(8, 12, 16\), \(8, 11\), \(8, 12\)"):
        lm_loss(model)(params["hidden"], dict(batch, targets=batch["targets"][:, 1:]), params)
    with pytest.raises(ConfigError, match="z_loss=-1"):
        lm_loss(model, z_loss=-1)
    with pytest.raises(ConfigError, match="language model"):
        lm_loss(Model(init=model.init, apply=model.apply))
    with pytest.raises(ConfigError, match="classification_loss needs"):
        classification_loss()(
            jnp.zeros((4, 3)), {"label": jnp.zeros(3), "loss_mask": jnp.ones(4)}, {}
        )


def test_classification_equals_numpy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32)
    batch = {
        "label": np.array([0, 1, 2, 3, 0, 1], np.int32),
        "loss_mask": np.array([1, 1, 1, 1, 0, 0], np.float32),
    }
    logits[0, 0] = logits[1, 1] = logits[4, 0] = 9
    logits[2, 3] = logits[3, 0] = 9
    sums = classification_loss()(jnp.asarray(logits), batch, {})
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nll = -np.log(probabilities[np.arange(4), batch["label"][:4]]).sum()
    np.testing.assert_allclose(sums["loss"][0], nll, rtol=1e-5)
    assert float(sums["loss"][1]) == 4
    assert [float(x) for x in sums["accuracy"]] == [2, 4]
    low = classification_loss()(jnp.asarray(logits, jnp.bfloat16), batch, {})
    assert low["loss"][0].dtype == jnp.float32
