"""The pure boundary around NNX modules, in graph mode and in tree mode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import Model, as_model, functional, row_keys


@pytest.fixture(params=["graph", "tree"], autouse=True)
def nnx_mode(request):
    """Runs every test in both modes of NNX."""
    graph = request.param == "graph"
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        yield request.param


class DropoutMLP(nnx.Module):
    """As in the Flax tutorials: Rngs stored by nnx.Dropout."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linears = nnx.List([nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, 3, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def hidden(self, x_BD):
        return self.dropout(jnp.ones_like(self.linears[0](x_BD)))

    def __call__(self, x_BD):
        return self.linears[1](self.dropout(nnx.relu(self.linears[0](x_BD))))


class TutorialCNN(nnx.Module):
    """The CNN of the Flax MNIST tutorial, smaller: BatchNorm, dropout keys given by the call."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.5)
        self.linear = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = nnx.relu(self.batch_norm(self.dropout(self.conv(x), rngs=rngs)))
        return self.linear(x.mean((1, 2)))


class Stack(nnx.Module):
    """Layers stacked by vmap over the constructor: the stored keys are stacked as well."""

    def __init__(self, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), 3)
        self.layers = jax.vmap(lambda key: DropoutMLP(64, nnx.Rngs(key)))(keys)

    def __call__(self, x_BD):
        return jax.vmap(lambda layer: layer.hidden(x_BD), out_axes=1)(self.layers)


def apply_masks(model: Model, batch, key, *, train=True):
    params, state = model.init(jax.random.key(0))
    outputs, _ = model.apply(params, state, batch, key=key, train=train)
    return np.asarray(outputs) == 0


def test_params_are_a_plain_nested_dict_with_string_keys():
    model = functional(lambda rngs: DropoutMLP(8, rngs))
    params, model_state = model.init(jax.random.key(0))
    assert model_state == {}
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {
        "linears": {
            "0": {"bias": (8,), "kernel": (4, 8)},
            "1": {"bias": (3,), "kernel": (8, 3)},
        }
    }
    assert all(type(leaf).__name__ == "ArrayImpl" for leaf in jax.tree.leaves(params))


def test_apply_equals_the_formula_in_numpy_and_has_gradients():
    model = functional(lambda rngs: DropoutMLP(8, rngs), call=lambda module, b: module(b["x"]))
    params, state = model.init(jax.random.key(0))
    x_BD = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)

    def loss(params):
        outputs, _ = model.apply(params, state, {"x": x_BD}, key=None, train=False)
        return jnp.sum(outputs), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    first, second = params["linears"]["0"], params["linears"]["1"]
    hidden = np.maximum(x_BD @ first["kernel"] + np.asarray(first["bias"])[None], 0)
    expected = hidden @ second["kernel"] + np.asarray(second["bias"])[None]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        grads["linears"]["1"]["kernel"], np.tile(hidden.sum(0)[:, None], (1, 3)), rtol=1e-5
    )


def test_precision_is_that_of_the_products_and_of_nothing_that_is_kept():
    def build(rngs):
        return TutorialCNN(rngs=rngs)

    params, stats = functional(build).init(jax.random.key(0))
    batch = np.random.default_rng(0).normal(size=(4, 6, 6, 1)).astype(np.float32)

    def run(model):
        return model.apply(params, stats, {"x": batch}, key=jax.random.key(1), train=True)

    whole, half = (
        functional(build, call=lambda module, b, rngs: module(b["x"], rngs), precision=precision)
        for precision in ("float32", "bfloat16")
    )
    text = str(jax.make_jaxpr(lambda: run(half))())
    products = [line for line in text.splitlines() if "conv_general" in line or "dot_gen" in line]
    assert products
    assert all("bf16[" in line.split(" = ")[0] for line in products)
    (expected, expected_stats), (outputs, new_stats) = run(whole), run(half)
    assert {leaf.dtype for leaf in jax.tree.leaves((outputs, new_stats, params))} == {
        jnp.dtype("float32")
    }
    assert not np.array_equal(outputs, expected)
    np.testing.assert_allclose(outputs, expected, atol=0.05)
    for found, right in zip(
        jax.tree.leaves(new_stats), jax.tree.leaves(expected_stats), strict=True
    ):
        np.testing.assert_allclose(found, right, atol=0.02)


def test_row_masks_differ_by_row_and_key_and_vanish_in_evaluation():
    """Case E4: 8 identical rows of width 64, rate 0.5."""
    model = functional(lambda rngs: DropoutMLP(64, rngs), call=lambda m, b: m.hidden(b["x"]))
    batch = {"x": jnp.ones((8, 4))}
    masks = apply_masks(model, batch, jax.random.key(1))
    assert len(np.unique(masks, axis=0)) == 8
    assert 0.4 < masks.mean() < 0.6
    np.testing.assert_array_equal(masks, apply_masks(model, batch, jax.random.key(1)))
    assert (masks != apply_masks(model, batch, jax.random.key(2))).any(1).all()
    assert not apply_masks(model, batch, jax.random.key(1), train=False).any()


def test_masks_are_the_same_on_8_devices_and_in_micro_batches():
    model = functional(lambda rngs: DropoutMLP(64, rngs), call=lambda m, b: m.hidden(b["x"]))
    params, _ = model.init(jax.random.key(0))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(8))
    batch = {"x": jnp.ones((8, 4)), "row_key": keys}

    @jax.jit
    def masks(params, batch, key):
        return model.apply(params, {}, batch, key=key, train=True)[0] == 0

    one_device = np.asarray(masks(params, batch, jax.random.key(1)))
    assert len(np.unique(one_device, axis=0)) == 8
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = masks(params, jax.device_put(batch, rows), jax.random.key(1))
    np.testing.assert_array_equal(one_device, np.asarray(sharded))
    manual = jax.shard_map(
        lambda batch: model.apply(params, {}, batch, key=jax.random.key(5), train=True)[0] == 0,
        mesh=mesh, in_specs=jax.sharding.PartitionSpec("data"),
        out_specs=jax.sharding.PartitionSpec("data"),
    )  # fmt: skip
    np.testing.assert_array_equal(one_device, np.asarray(jax.jit(manual)(batch)))
    halves = [
        masks(
            params,
            jax.tree.map(lambda leaf, m=m: leaf[4 * m : 4 * m + 4], batch),
            jax.random.key(m),
        )
        for m in range(2)
    ]
    np.testing.assert_array_equal(one_device, np.concatenate(halves))


def test_stacked_keys_are_split():
    model = functional(Stack, call=lambda module, batch: module(batch["x"]))
    masks = apply_masks(model, {"x": jnp.ones((8, 4))}, jax.random.key(0))
    assert masks.shape == (8, 3, 64)
    assert len(np.unique(masks.reshape(24, 64), axis=0)) == 24


def test_tutorial_cnn_updates_statistics_and_gets_rngs():
    model = functional(
        lambda rngs: TutorialCNN(rngs=rngs), call=lambda m, b, rngs: m(b["image"], rngs)
    )
    params, state = model.init(jax.random.key(0))
    assert set(params) == {"conv", "batch_norm", "linear"}
    assert jax.tree.map(jnp.shape, state) == {"batch_norm": {"mean": (8,), "var": (8,)}}
    batch = {"image": jax.random.normal(jax.random.key(3), (4, 8, 8, 1))}

    @jax.jit
    def train(params, state, key):
        return model.apply(params, state, batch, key=key, train=True)

    first, new_state = train(params, state, jax.random.key(1))
    second, _ = train(params, state, jax.random.key(2))
    assert np.abs(np.asarray(first - second)).max() > 1e-3, "dropout must follow the key"
    assert not np.allclose(new_state["batch_norm"]["var"], state["batch_norm"]["var"])
    once, kept = model.apply(params, new_state, batch, key=None, train=False)
    again, _ = model.apply(params, new_state, batch, key=jax.random.key(9), train=False)
    np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(kept["batch_norm"]["mean"], new_state["batch_norm"]["mean"])


def test_call_default_passes_the_batch():
    class Sum(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.full((), 3.0))

        def __call__(self, batch):
            return batch["x"] * self.scale[...]

    model = functional(Sum)
    params, _ = model.init(jax.random.key(0))
    outputs, _ = model.apply(params, {}, {"x": jnp.ones(2)}, key=None, train=True)
    np.testing.assert_array_equal(outputs, [3.0, 3.0])


def test_other_variables_are_refused_with_all_paths():
    class Bad(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jnp.ones(3))
            self.cache = nnx.Cache(jnp.ones(3))
            self.parts = nnx.List([nnx.Variable(jnp.ones(2))])
            self.table = nnx.data(jnp.ones(2))

    with pytest.raises(ConfigError, match=r"'cache' \(Cache\)") as error:
        functional(Bad)
    assert "'parts/0' (Variable)" in str(error.value)
    assert "'table'" in str(error.value)
    assert "nnx.BatchStat" in str(error.value)


def test_a_module_that_is_made_already_and_what_is_none():
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"this Linear is .*functional\(lambda rngs: Linear\("):
        functional(module)
    with pytest.raises(ConfigError, match=r"returns an nnx\.Module, this one returns None"):
        functional(lambda rngs: None)


def test_writes_to_parameters_and_new_variables_are_refused():
    class Writer(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jnp.ones(3))

        def __call__(self, batch):
            self.weight[...] = self.weight[...] * 2
            return batch["x"]

    class Creator(Writer):
        def __call__(self, batch):
            self.extra = nnx.Variable(batch["x"])
            return batch["x"]

    for module, match in ((Writer, "writes to weight"), (Creator, "creates in its call 'extra'")):
        model = functional(module)
        params, state = model.init(jax.random.key(0))
        with pytest.raises(ConfigError, match=match):
            model.apply(params, state, {"x": jnp.ones(3)}, key=None, train=True)


def test_shared_parameters_are_one_parameter(nnx_mode):
    if nnx_mode == "tree":
        pytest.skip("NNX itself refuses shared Variables in tree mode")

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encode = nnx.Param(jnp.full((2, 2), 3.0))
            self.decode = self.encode

        def __call__(self, batch):
            return batch["x"] @ self.encode[...] @ self.decode[...]

    model = functional(Tied)
    params, _ = model.init(jax.random.key(0))
    assert len(jax.tree.leaves(params)) == 1
    outputs, _ = model.apply(params, {}, {"x": jnp.eye(2)}, key=None, train=True)
    np.testing.assert_allclose(outputs, np.full((2, 2), 18.0))


def test_annotations_become_logical_axes():
    class Annotated(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            make = lambda key: nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(key))  # noqa: E731
            self.layers = jax.vmap(make)(jax.random.split(rngs.params(), 2))

    model = functional(Annotated)
    # The bias is not annotated: its place is not decided here.
    assert model.logical_axes == {"layers": {"kernel": (None, "embed", "mlp")}}
    assert jax.tree.map(jnp.shape, model.init(jax.random.key(0))[0]) == {
        "layers": {"kernel": (2, 4, 8), "bias": (2, 8)}
    }
    assert functional(lambda rngs: DropoutMLP(8, rngs)).logical_axes is None


def test_wrong_parameters_and_missing_key_have_clear_errors():
    model = functional(lambda rngs: DropoutMLP(8, rngs), call=lambda m, b: m(b["x"]))
    params, _ = model.init(jax.random.key(0))
    broken = {"linears": {"0": params["linears"]["0"], "2": {}}}
    batch = {"x": jnp.ones((2, 4))}
    with pytest.raises(ConfigError, match=r"at 'linears': missing \['1'\], unknown \['2'\]"):
        model.apply(broken, {}, batch, key=jax.random.key(0), train=True)
    with pytest.raises(ConfigError, match="needs a key"):
        model.apply(params, {}, batch, key=None, train=True)


def test_as_model():
    model = functional(lambda rngs: DropoutMLP(8, rngs))
    assert as_model(model) is model
    pair = as_model((model.init, model.apply))
    assert (pair.init, pair.apply, pair.logical_axes) == (model.init, model.apply, None)
    with pytest.raises(ConfigError, match="functional"):
        as_model(DropoutMLP(8, nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="pair of functions"):
        as_model(3)
    assert dataclasses.replace(model, vocab_size=3).vocab_size == 3


def test_row_keys_prefer_the_steps_own():
    key = jax.random.key(0)
    keys = row_keys(key, {"x": jnp.ones((4, 2))})
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == 4
    given = jax.random.split(key, 2)
    assert row_keys(key, {"x": jnp.ones((2, 2)), "row_key": given}) is given
