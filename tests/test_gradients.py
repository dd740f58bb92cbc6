"""The gradient of a global batch: weights, accumulation, noise, reductions, odd models.

Shapes: R rows, D features, H hidden units.
"""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stepping import (
    HYBRID,
    MLP,
    NORMALISED,
    TOKENS,
    D,
    H,
    compiled,
    mesh_of,
    mlp_apply,
    mlp_init,
    new_state,
    rows,
    run,
    squared_loss,
    tokens_loss,
)

from jaxtrain import tree
from jaxtrain.errors import ConfigError
from jaxtrain.gradients import make_grad_fn
from jaxtrain.models.functional import Model, as_model, row_keys
from jaxtrain.placement import param_shardings
from jaxtrain.sharding import constrain, gather_param, on_shards, shard_batch
from jaxtrain.step import make_eval_step, make_train_step

pytestmark = pytest.mark.usefixtures("compile_cache")

# Case E1: every token counts the same, however the batch is split.


SHORT_AND_LONG = {
    "x": np.array([[8, 0, 0], [0, 0, 0]], np.float32),
    "loss_mask": np.array([[1, 0, 0], [1, 1, 1]], np.float32),
}
ONE_EACH = {
    "x": np.array([[0], [0], [0], [8]], np.float32),
    "loss_mask": np.ones((4, 1), np.float32),
}


@pytest.mark.parametrize(
    ("sizes", "accumulate_steps", "batch"),
    [
        pytest.param("data:1", 1, SHORT_AND_LONG, id="a: one batch"),
        pytest.param("data:1", 2, SHORT_AND_LONG, id="b: accumulated"),
        pytest.param("data:2", 1, SHORT_AND_LONG, id="c: two devices, data"),
        pytest.param("fsdp:2", 1, SHORT_AND_LONG, id="c: two devices, fsdp"),
        pytest.param("data:2", 2, ONE_EACH, id="e: accumulated on two devices"),
        pytest.param("data:2", 2, {k: v[::-1] for k, v in ONE_EACH.items()}, id="e: swapped"),
    ],
)
def test_every_token_counts_the_same(sizes, accumulate_steps, batch):
    [(state, metrics)] = run(
        TOKENS, tokens_loss, optax.sgd(1.0), (sizes, accumulate_steps), [batch]
    )
    assert state.params["w"] == -2.0
    assert metrics["weight"] == 4
    assert metrics["grad_norm"] == 2.0


def test_micro_batches_must_divide_the_batch():
    batch = {"x": np.ones((5, 1), np.float32), "loss_mask": np.ones((5, 1), np.float32)}
    with pytest.raises(ConfigError, match=r"global_batch_size=5 .* accumulate_steps=2; use 4 or 6"):
        run(TOKENS, tokens_loss, optax.sgd(1.0), ("data:1", 2), [batch])


def test_gradient_of_the_sum_against_numpy():
    batch, params = rows(0), mlp_init(jax.random.key(1))[0]
    mesh = mesh_of(HYBRID)
    grad_fn = jax.jit(make_grad_fn(MLP, squared_loss, mesh, accumulate_steps=2))
    grads, sums, _ = grad_fn(
        params, {}, shard_batch(batch, mesh, accumulate_steps=2), jax.random.key(0)
    )
    w1, b1, w2 = (
        np.asarray(leaf, np.float64)
        for leaf in (params["first"]["kernel"], params["first"]["bias"], params["second"]["kernel"])
    )
    x, y, mask = (batch[name].astype(np.float64) for name in ("x", "y", "loss_mask"))
    hidden = np.tanh(x @ w1 + b1)
    error = (hidden @ w2 - y) * mask[:, None]
    d_hidden = 2 * error @ w2.T * (1 - hidden**2)
    np.testing.assert_allclose(grads["second"]["kernel"], hidden.T @ (2 * error), rtol=1e-4)
    np.testing.assert_allclose(grads["first"]["kernel"], x.T @ d_hidden, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(grads["first"]["bias"], d_hidden.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums["loss"][0], np.sum(error**2), rtol=1e-5)
    assert sums["loss"][1] == mask.sum()


def test_gradients_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256: seven of the eight micro-batches would be lost."""
    model = (
        lambda key: ({"w": jnp.zeros((), jnp.bfloat16)}, {}),
        lambda params, state, batch, *, key, train: (params["w"] * batch["x"], state),
    )
    x = np.array([[256.0]] + [[1.0]] * 7, np.float32)
    batch = shard_batch(
        {"x": x, "loss_mask": np.ones_like(x)}, mesh_of("data:1"), accumulate_steps=8
    )
    grad_fn = make_grad_fn(model, tokens_loss, mesh_of("data:1"), accumulate_steps=8)
    with pytest.warns(UserWarning, match="low precision: w"):
        grads, _, _ = grad_fn({"w": jnp.zeros((), jnp.bfloat16)}, {}, batch, jax.random.key(0))
    assert grads["w"].dtype == jnp.float32
    assert grads["w"] == 263


# Models of every kind work in the region that is manual, or are kept out of it.


def recurrent_apply(params, model_state, batch, *, key, train):
    """A cell whose carry starts from zeros, as every recurrent model's does."""
    del key, train

    def cell(carry_RH, x_R1):
        carry_RH = jnp.tanh(x_R1 @ params["first"]["kernel"][:1] + carry_RH)
        return carry_RH, None

    start_RH = jnp.zeros((batch["x"].shape[0], H))
    hidden_RH, _ = jax.lax.scan(cell, start_RH, batch["x"].T[:, :, None])
    return hidden_RH @ params["second"]["kernel"], model_state


def contrasting_apply(params, model_state, batch, *, key, train):
    """Each row against the mean of all rows, without any state."""
    outputs_RD, model_state = mlp_apply(params, model_state, batch, key=key, train=train)
    return outputs_RD - jnp.mean(outputs_RD, axis=0, keepdims=True), model_state


CONTRASTING = Model(init=mlp_init, apply=contrasting_apply, rows_are_independent=False)


@pytest.mark.parametrize("accumulate_steps", [1, 4])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param((mlp_init, recurrent_apply), id="recurrent"),
        pytest.param(NORMALISED, id="batch statistics"),
        pytest.param(CONTRASTING, id="rows that depend on each other"),
    ],
)
def test_kinds_of_models_agree_between_meshes(model, accumulate_steps):
    batches = [rows(seed) for seed in range(2)]
    tx = optax.sgd(0.01)
    expected = run(model, squared_loss, tx, ("data:1", accumulate_steps), batches)
    actual = run(model, squared_loss, tx, (HYBRID, accumulate_steps), batches)
    for name in ("params", "model_state"):
        ours, theirs = (getattr(history[-1][0], name) for history in (actual, expected))
        for leaf, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(leaf, wanted, rtol=1e-4, atol=1e-6)


# Case E4: noise belongs to (seed, step, row), not to a device or a micro-batch.

NUM_FEATURES = 64


def noisy_model(draw):
    """Parameter w_RD meets row r's mask only, so that its gradient shows the mask of each row."""

    def apply(params, model_state, batch, *, key, train):
        if not train:
            return params["w"][batch["row"]], model_state
        return params["w"][batch["row"]] * draw(key, batch), model_state

    return (lambda key: ({"w": jnp.zeros((8, NUM_FEATURES))}, {})), apply


def draw_by_row(key, batch):
    keys = row_keys(key, batch)
    return jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (NUM_FEATURES,)))(keys)


def draw_at_once(key, batch):
    return jax.random.bernoulli(key, 0.5, (len(batch["row"]), NUM_FEATURES))


@functools.cache
def masks(draw, sizes, accumulate_steps=1, num_steps=2):
    model, mesh = noisy_model(draw), mesh_of(sizes)
    tx = optax.sgd(1.0)
    state = new_state(model, tx, mesh)
    loss_fn = lambda out, batch, params: {"loss": (out.sum(), jnp.float32(1))}  # noqa: E731
    step = make_train_step(model, loss_fn, tx, mesh, accumulate_steps=accumulate_steps)
    step, batch = compiled(step, state), {"row": np.arange(8)}
    batch, seen = shard_batch(batch, mesh, accumulate_steps=accumulate_steps), []
    for _ in range(num_steps):
        before = np.asarray(state.params["w"])
        state, metrics = step(state, batch)
        seen.append(np.rint((before - np.asarray(state.params["w"])) * metrics["weight"]))
    return np.stack(seen)


NOISY_MESHES = ["data:8", "fsdp:8", HYBRID, "data:4"]


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("sizes", NOISY_MESHES)
def test_noise_by_row_is_the_same_on_every_layout(sizes, accumulate_steps):
    if sizes.endswith(":8") and accumulate_steps == 2:
        sizes = sizes.replace("8", "4")
    expected = masks(draw_by_row, "data:1")
    np.testing.assert_array_equal(masks(draw_by_row, sizes, accumulate_steps), expected)
    assert set(np.unique(expected)) == {0, 1}
    assert len(np.unique(expected.reshape(16, -1), axis=0)) == 16  # 8 rows, 2 steps: all differ


@pytest.mark.parametrize("sizes", NOISY_MESHES)
def test_noise_from_the_scalar_key_differs_between_rows_on_every_mesh(sizes):
    expected = masks(draw_at_once, "data:1")
    np.testing.assert_array_equal(masks(draw_at_once, sizes), expected)
    assert len(np.unique(expected.reshape(16, -1), axis=0)) == 16


def test_noise_from_the_scalar_key_differs_between_micro_batches():
    seen = masks(draw_at_once, "data:2", accumulate_steps=2)
    assert len(np.unique(seen.reshape(16, -1), axis=0)) == 16


# Frozen parameters.


def test_frozen_parameters_take_no_gradient_work():
    mesh = mesh_of("data:1")
    params = jax.eval_shape(mlp_init, jax.random.key(0))[0]

    def num_products(frozen):
        grad_fn = make_grad_fn(MLP, squared_loss, mesh, frozen=frozen)
        args = (params, {}, rows(0), jax.random.key(0))
        return str(jax.make_jaxpr(grad_fn)(*args)).count("dot_general")

    frozen = tree.select(params, "^first/", option="freeze")
    assert num_products(None) == 5  # two forward; backward: two kernels and the hidden units
    assert num_products(frozen) == 3  # two forward, the second kernel


def test_whole_number_parameters_are_refused_unless_frozen():
    def init(key):
        return dict(mlp_init(key)[0], table=jnp.arange(3)), {}

    params = jax.eval_shape(init, jax.random.key(0))[0]
    grad_fn = make_grad_fn((init, mlp_apply), squared_loss, mesh_of("data:1"))
    with pytest.raises(ConfigError, match=r"only floating-point .* not table \(int32\)"):
        jax.eval_shape(grad_fn, params, {}, rows(0), jax.random.key(0))
    frozen = tree.select(params, "^table$", option="freeze")
    grad_fn = make_grad_fn((init, mlp_apply), squared_loss, mesh_of("data:1"), frozen=frozen)
    grads, _, _ = jax.eval_shape(grad_fn, params, {}, rows(0), jax.random.key(0))
    assert grads["table"] is None


# The compiled program.


def compiled_gradient(model, loss_fn, sizes, accumulate_steps, batch):
    """The program of the gradient alone, its parameters and gradients laid out for storage."""
    mesh, model = mesh_of(sizes), as_model(model)
    params = jax.eval_shape(model.init, jax.random.key(0))[0]
    shardings = param_shardings(params, model.logical_axes, mesh)
    params = jax.tree.map(
        lambda leaf, placed: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed),
        params,
        shardings,
    )
    grad_fn = make_grad_fn(model, loss_fn, mesh, accumulate_steps=accumulate_steps)
    batch = shard_batch(batch, mesh, accumulate_steps=accumulate_steps)
    grad_fn = jax.jit(grad_fn, out_shardings=(shardings, None, None))
    return grad_fn.lower(params, {}, batch, jax.random.key(0)).compile()


def test_gradients_are_reduced_over_data_once():
    """As often for four micro-batches as for one, and never inside their loop."""
    num_params = sum(p.size for p in jax.tree.leaves(mlp_init(jax.random.key(0))))
    for accumulate_steps in (1, 4):
        program = compiled_gradient(MLP, squared_loss, HYBRID, accumulate_steps, rows(0))
        reductions = hlo.reductions(program.as_text(), mesh_of(HYBRID), "data")
        assert all(c.times == 1 for c in reductions)
        # Every gradient once, split by fsdp:2; besides, the sum and the weight of the loss.
        assert sum(len(c.shapes) for c in reductions) == 3 + 2
        assert sum(c.num_bytes for c in reductions) == num_params // 2 * 4 + 8


VOCAB = 32


def lookup_init(key):
    return {"embedding": jax.random.normal(key, (VOCAB, D)), "head": jnp.ones((D, VOCAB))}, {}


def lookup_apply(params, model_state, batch, *, key, train):
    """Knows nothing of layouts."""
    del key, train
    return params["embedding"][batch["tokens"]] @ params["head"], model_state


def laid_out_lookup_apply(params, model_state, batch, *, key, train):
    del key, train
    embedding = gather_param(params["embedding"], ("vocab", "embed"), jnp.float32)
    x_RTD = constrain(embedding[batch["tokens"]], "batch", "length", "embed")
    head = gather_param(params["head"], ("embed", "vocab"), jnp.float32)
    return constrain(x_RTD @ head, "batch", "length", "vocab"), model_state


def token_loss(logits_RTV, batch, params):
    del params
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_RTV), batch["tokens"][..., None], axis=-1)
    return {"loss": (-jnp.sum(log_p), jnp.float32(log_p.size))}


LAID_OUT_LOOKUP = Model(
    init=lookup_init,
    apply=laid_out_lookup_apply,
    logical_axes={"embedding": ("vocab", "embed"), "head": ("embed", "vocab")},
)


@pytest.mark.parametrize("accumulate_steps", [1, 4])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param((lookup_init, lookup_apply), id="knows nothing of layouts"),
        pytest.param(LAID_OUT_LOOKUP, id="gathers its parameters"),
    ],
)
def test_lookups_on_a_mesh_of_three_axes(model, accumulate_steps):
    """XLA aborts the process on such a lookup in a region that is manual over `data` alone."""
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (32, 4))}
    program = compiled_gradient(model, token_loss, HYBRID, accumulate_steps, batch)
    mesh = mesh_of(HYBRID)
    params = lookup_init(jax.random.key(2))[0]
    expected = jax.grad(
        lambda p: token_loss(lookup_apply(p, {}, batch, key=None, train=True)[0], batch, p)["loss"][
            0
        ]
    )(params)
    shardings = param_shardings(params, as_model(model).logical_axes, mesh)
    placed = shard_batch(batch, mesh, accumulate_steps=accumulate_steps)
    grads, _, _ = program(jax.device_put(params, shardings), {}, placed, jax.random.key(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected
    )


def test_parameters_that_a_model_gathers_move_over_fsdp_alone():
    """The program of the model above: shards of `tensor` stay shards."""
    batch = {"tokens": np.zeros((32, 4), np.int32)}
    text = compiled_gradient(LAID_OUT_LOOKUP, token_loss, HYBRID, 1, batch).as_text()
    found = hlo.collectives(text, mesh_of(HYBRID))
    moved = [
        (c.kind, c.axes, c.shapes) for c in found if c.kind in ("all-gather", "reduce-scatter")
    ]
    half_vocab, half_embed = (VOCAB // 2, D), (D // 2, VOCAB // 2)
    assert sorted(moved) == sorted(
        [
            ("all-gather", ("fsdp",), (half_vocab,)),
            ("all-gather", ("fsdp",), ((D, VOCAB // 2),)),
            ("reduce-scatter", ("fsdp",), ((VOCAB // 2, D // 2),)),
            ("reduce-scatter", ("fsdp",), (half_embed,)),
        ]
    )


@pytest.mark.parametrize("sizes", ["data:1", "tensor:8", "data:4,tensor:2", HYBRID])
def test_a_kernel_sees_what_one_device_holds(sizes):
    seen = set()

    def kernel(hidden_RH):
        seen.add(hidden_RH.shape)
        return jnp.tanh(hidden_RH)

    def apply(params, model_state, batch, *, key, train):
        del key, train
        first = gather_param(params["first"]["kernel"], ("embed", "mlp"), jnp.float32)
        bias = gather_param(params["first"]["bias"], ("mlp",), jnp.float32)
        second = gather_param(params["second"]["kernel"], ("mlp", "embed"), jnp.float32)
        axes = ("batch", "mlp")
        hidden_RH = on_shards(kernel, (axes,), axes)(batch["x"] @ first + bias[None])
        return hidden_RH @ second, model_state

    axes = {"first": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}
    axes |= {"second": {"kernel": ("mlp", "embed")}}
    model = Model(init=mlp_init, apply=apply, logical_axes=axes)
    # One is what a device holds; the whole is what `probe` and a mesh of one device see.
    program = compiled_gradient(model, squared_loss, sizes, 1, rows(0))
    mesh = mesh_of(sizes)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    assert (32 // shards, H // mesh.shape["tensor"]) in seen
    params = mlp_init(jax.random.key(3))[0]
    placed = jax.device_put(params, param_shardings(params, axes, mesh))
    grads, _, _ = program(placed, {}, shard_batch(rows(0), mesh), jax.random.key(0))
    grad_fn = make_grad_fn(MLP, squared_loss, mesh_of("data:1"))
    expected, _, _ = grad_fn(params, {}, rows(0), jax.random.key(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, expected
    )


def test_hlo_reader_counts_loops_and_axes():
    """The reader under the tests above: a reduction over `data` inside a loop is found there."""
    mesh = mesh_of(HYBRID)
    spec = jax.sharding.PartitionSpec

    def body(carry, _):
        return jax.lax.psum(carry, "data") / 2 + 1, None

    fn = jax.shard_map(
        lambda x: jax.lax.scan(body, x, length=5)[0],
        mesh=mesh,
        in_specs=spec("data"),
        out_specs=spec("data"),
        check_vma=False,
    )
    text = jax.jit(fn).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).compile().as_text()
    [found] = hlo.reductions(text, mesh, "data")
    assert (found.axes, found.shapes, found.times) == (("data",), ((4, 4),), 5)
    assert not hlo.reductions(text, mesh, "tensor")


# What a user can get wrong.


@pytest.mark.parametrize(
    ("accumulate_steps", "shapes", "message"),
    [
        (1, {"x": (4, 8), "y": (5, 8)}, r"must be \[rows, \.\.\.\].*x \[4, 8\], y \[5, 8\]"),
        (1, {"x": (4, 8), "scale": ()}, r"scale \[\]"),
        (2, {"x": (4, 8), "y": (4, 8)}, r"must be \[2, rows per micro-batch, \.\.\.\].*x \[4, 8\]"),
        (2, {"x": (2,)}, r"shard_batch\(batch, mesh, accumulate_steps=2\)"),
    ],
)
def test_batch_of_the_wrong_shape(accumulate_steps, shapes, message):
    grad_fn = make_grad_fn(MLP, squared_loss, mesh_of("data:1"), accumulate_steps=accumulate_steps)
    batch = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    params = mlp_init(jax.random.key(0))[0]
    with pytest.raises(ConfigError, match=message):
        grad_fn(params, {}, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        ({"nll": (jnp.float32(1), jnp.float32(1))}, r"needs the name 'loss'; got \['nll'\]"),
        (
            dict.fromkeys(("loss", "weight", "process_wish"), (jnp.float32(1), jnp.float32(1))),
            r"own metrics: \['weight', 'process_wish'\]; rename them",
        ),
        (jnp.float32(1), r"needs the name 'loss'; got a float32\[\] array\."),
        (jnp.ones(8), r"needs the name 'loss'; got a float32\[8\] array\."),
        (None, "needs the name 'loss'; got a NoneType"),
        ({"loss": jnp.float32(1)}, r"two float32 scalars \(sum, weight\) for \['loss'\]"),
        ({"loss": jnp.float32(1)}, r"got 'loss': a float32\[\] array\. The weight is .*loss_mask"),
        ({"loss": (jnp.float32(1), 64)}, r"got 'loss': \(a float32\[\] array, the int 64\)\."),
        ({"loss": (jnp.ones(3), jnp.float32(1))}, r"'loss': \(a float32\[3\] array, a float32\[\]"),
        ({"loss": (jnp.float32(1), jnp.int32(1))}, r"for \['loss'\]"),
        ({"loss": (jnp.float32(1), None)}, r"got 'loss': \(a float32\[\] array, a NoneType\)"),
        (
            {"loss": (jnp.float32(1),) * 2, "weight": (jnp.float32(1),) * 2},
            r"own metrics: \['weight'\]; rename",
        ),
    ],
)
def test_loss_of_the_wrong_form(sums, message):
    grad_fn = make_grad_fn(MLP, lambda *_: sums, mesh_of("data:1"))
    with pytest.raises(ConfigError, match=message):
        grad_fn(mlp_init(jax.random.key(0))[0], {}, rows(0), jax.random.key(0))


def test_a_loss_is_called_by_its_type_inside_of_a_gradient():
    """There it is a tracer, whose class says nothing to the user."""
    loss_fn = lambda outputs, batch, params: jnp.mean(outputs)  # noqa: E731
    grad_fn = make_grad_fn(MLP, loss_fn, mesh_of("data:1"))
    with pytest.raises(ConfigError, match=r"got a float32\[\] array\."):
        grad_fn(mlp_init(jax.random.key(0))[0], {}, rows(0), jax.random.key(0))


@pytest.mark.parametrize("make", [make_grad_fn, make_eval_step])
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda outputs, batch: {}, r"loss_fn\(outputs, batch, params\), but <lambda>\(outputs, b"),
        (lambda *, outputs: {}, "does not take that; give it these three arguments"),
        ("nll", "loss_fn is a function .*; got str"),
    ],
)
def test_loss_with_other_arguments(make, loss_fn, message):
    with pytest.raises(ConfigError, match=message):
        make(MLP, loss_fn, mesh_of("data:1"))


@pytest.mark.parametrize("sizes", ["data:1", "data:2"])
def test_a_key_that_the_batch_lacks(sizes):
    loss_fn = lambda outputs, batch, params: {"loss": batch["label"]}  # noqa: E731
    grad_fn = make_grad_fn(MLP, loss_fn, mesh_of(sizes))
    with pytest.raises(KeyError, match="label") as caught:
        grad_fn(mlp_init(jax.random.key(0))[0], {}, rows(0), jax.random.key(0))
    assert f"the batch has: {', '.join(rows(0))}" in caught.value.__notes__
