"""The convolutional classifier: batch statistics of the global batch, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.data.images import digits_datasets
from jaxtrain.errors import ConfigError
from jaxtrain.losses import classification_loss
from jaxtrain.mesh import make_mesh
from jaxtrain.models.convnet import ConvNetConfig, convnet

pytestmark = pytest.mark.usefixtures("compile_cache")

TINY = ConvNetConfig(channels=4)


def images(rows=8, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 8, 8, 1)).astype(np.float32)


def apply(model, params, state, batch, *, train):
    return jax.jit(
        lambda p, s, b: model.apply(p, s, b, key=jax.random.key(0), train=train)
    )(params, state, batch)  # fmt: skip


def test_shapes_of_parameters_and_state():
    model = convnet(TINY)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    assert params["stages"]["0"]["first"]["kernel"].shape == (3, 3, 1, 4)
    assert params["stages"]["1"]["second"]["kernel"].shape == (3, 3, 8, 8)
    assert params["head"]["kernel"].shape == (8, 10)
    assert len(jax.tree.leaves(state)) == 8
    assert state["stages"]["1"]["first_norm"]["mean"].shape == (8,)
    outputs, _ = jax.eval_shape(
        lambda p, s: model.apply(p, s, {"image": images()}, key=None, train=False), params, state
    )
    assert outputs.shape == (8, 10)


def test_pixels_of_8_bits_are_those_from_0_to_1():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), np.uint8)
    model = convnet(TINY)
    params, state = jax.jit(model.init)(jax.random.key(0))
    found, wanted = (
        apply(model, params, state, {"image": image}, train=True)[0]
        for image in (pixels, pixels.astype(np.float32) / 255)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_running_statistics_follow_the_batch_in_numpy():
    model = convnet(TINY)
    params, state = jax.jit(model.init)(jax.random.key(0))
    batch = {"image": images()}
    _, new_state = apply(model, params, state, batch, train=True)
    kernel = np.asarray(params["stages"]["0"]["first"]["kernel"], np.float64)
    padded = np.pad(batch["image"], ((0, 0), (1, 1), (1, 1), (0, 0))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    activations = np.einsum("bhwcij,ijcd->bhwd", windows, kernel)
    statistics = new_state["stages"]["0"]["first_norm"]
    np.testing.assert_allclose(
        statistics["mean"], 0.1 * activations.mean((0, 1, 2)), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(statistics["var"], 0.9 + 0.1 * activations.var((0, 1, 2)), rtol=1e-4)


@pytest.mark.parametrize("mesh", ["data:8", "data:2,fsdp:4"])
def test_statistics_are_those_of_the_global_batch_on_every_mesh(mesh):
    model = convnet(TINY)
    params, state = jax.jit(model.init)(jax.random.key(0))
    # Rows of very different size: statistics of a shard would be far off.
    batch = {"image": images() * np.arange(1, 9, dtype=np.float32)[:, None, None, None]}
    expected, expected_state = apply(model, params, state, batch, train=True)
    spec = jax.sharding.PartitionSpec(("data", "fsdp"))
    rows = jax.sharding.NamedSharding(make_mesh(mesh), spec)
    outputs, new_state = apply(model, params, state, jax.device_put(batch, rows), train=True)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    for ours, other in zip(
        jax.tree.leaves(new_state), jax.tree.leaves(expected_state), strict=True
    ):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-6)


def test_padding_rows_change_nothing_in_evaluation():
    model = convnet(TINY)
    params, state = jax.jit(model.init)(jax.random.key(0))
    whole = images()
    padded = np.concatenate([whole[:5], np.full_like(whole[:3], 100)])
    outputs, kept = apply(model, params, state, {"image": padded}, train=False)
    expected, _ = apply(model, params, state, {"image": whole}, train=False)
    np.testing.assert_allclose(outputs[:5], expected[:5], rtol=1e-5, atol=1e-6)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), kept, state))


def test_bfloat16_keeps_float32_parameters_and_statistics():
    model = convnet(TINY, precision="bfloat16")
    params, state = jax.jit(model.init)(jax.random.key(0))
    outputs, new_state = apply(model, params, state, {"image": images()}, train=True)
    assert outputs.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves((params, new_state))} == {jnp.dtype("float32")}


def test_dropout_is_only_for_training():
    model = convnet(ConvNetConfig(channels=4, dropout=0.5))
    params, state = jax.jit(model.init)(jax.random.key(0))
    run = jax.jit(
        lambda key, train: model.apply(
            params, state, {"image": images()}, key=jax.random.key(key), train=train
        )[0],
        static_argnums=1,
    )
    assert not np.allclose(run(0, True), run(1, True))
    np.testing.assert_array_equal(run(0, False), run(1, False))


def test_remat_gives_the_same_gradients_and_state():
    batch = {"image": images()}
    params, state = jax.jit(convnet(TINY).init)(jax.random.key(0))
    results, convolutions = {}, {}
    for remat in ("none", "dots", "full"):

        def loss(params, model=convnet(TINY, remat=remat)):  # noqa: B008
            outputs, new_state = model.apply(params, state, batch, key=None, train=True)
            return jnp.sum(jnp.square(outputs)), new_state

        grad = jax.grad(loss, has_aux=True)
        results[remat] = jax.jit(grad)(params)
        convolutions[remat] = str(jax.make_jaxpr(grad)(params)).count("conv_general_dilated[")
    for remat in ("dots", "full"):
        for ours, expected in zip(
            jax.tree.leaves(results[remat]), jax.tree.leaves(results["none"]), strict=True
        ):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)
    assert convolutions["full"] == convolutions["dots"] > convolutions["none"]
    with pytest.raises(ConfigError, match="remat='some' does not exist"):
        convnet(TINY, remat="some").apply(params, state, batch, key=None, train=True)


def test_it_learns_the_digits():
    """A short training; experiments/train_image.py trains longer."""
    train, held_out = digits_datasets()
    model, loss_fn = convnet(ConvNetConfig()), classification_loss()
    params, state = jax.jit(model.init)(jax.random.key(0))
    tx = optax.adamw(3e-3)

    @jax.jit
    def step(params, state, opt_state, batch):
        def loss(params):
            outputs, new_state = model.apply(params, state, batch, key=None, train=True)
            sums = loss_fn(outputs, batch, params)
            return sums["loss"][0] / sums["loss"][1], new_state

        grads, state_ = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state_, opt_state

    opt_state = tx.init(params)
    rng = np.random.default_rng(0)
    for _ in range(100):
        batch = train.read(rng.integers(0, len(train), 64))
        params, state, opt_state = step(params, state, opt_state, batch)
    batch = held_out.read(np.arange(len(held_out)))
    outputs, _ = apply(model, params, state, batch, train=False)
    right, count = loss_fn(outputs, batch, params)["accuracy"]
    assert count == 360
    assert right / count > 0.97
