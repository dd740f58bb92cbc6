"""The train state: shapes, layouts, initialisation, donation.

Shapes: D embed, F mlp, L layers, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from jax.sharding import PartitionSpec as P

from jaxtrain.compile import compile_step
from jaxtrain.errors import ConfigError
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import Model
from jaxtrain.state import (
    TrainState,
    abstract_state,
    init_fn,
    init_state,
    num_params,
    state_shardings,
)

pytestmark = pytest.mark.usefixtures("compile_cache")

ADAMW = optax.adamw(1e-3)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def test_abstract_state_is_what_init_makes():
    model, mesh = toy.toy(), make_mesh("fsdp:4,tensor:2")
    abstract = abstract_state(model, ADAMW, seed=3, ema=True)
    state = init_state(model, ADAMW, mesh, seed=3, ema=True)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    shardings = jax.tree.leaves(state_shardings(abstract, model, mesh))
    for shape, leaf, sharding in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(state), shardings, strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding == sharding
    assert (state.step.dtype, state.step.shape) == (jnp.int32, ())
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    # Style 5.5: a jitted optimizer init without out_shardings would replicate the moments.
    assert state.opt_state[0].mu["head"]["kernel"].sharding.spec == P("fsdp", "tensor")
    assert state.ema_params["head"]["kernel"].sharding.spec == P("fsdp", "tensor")


def test_initial_values_depend_on_the_seed_alone():
    model = toy.toy()
    expected = init_state(model, ADAMW, one_device(), seed=5, ema=True)
    for text in ("data:8", "fsdp:2,data:2,tensor:2"):
        found = init_state(model, ADAMW, make_mesh(text), seed=5, ema=True)
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
        np.testing.assert_array_equal(*map(jax.random.key_data, (found.key, expected.key)))
    np.testing.assert_array_equal(
        expected.ema_params["head"]["kernel"], expected.params["head"]["kernel"]
    )
    other = init_state(model, ADAMW, one_device(), seed=6)
    assert (other.params["head"]["kernel"] != expected.params["head"]["kernel"]).any()
    assert (jax.random.key_data(other.key) != jax.random.key_data(expected.key)).any()
    large = init_state(model, ADAMW, one_device(), seed=2**32 - 1)
    assert (large.params["head"]["kernel"] != expected.params["head"]["kernel"]).any()


def test_initial_values_and_steps_do_not_share_a_key():
    """The state's key serves the steps: what made the parameters must not be drawn again."""
    keys = []

    def init(key):
        keys.append(key)
        return {"w": jax.random.normal(key, (8,))}, {}

    model = Model(init=init, apply=lambda *args, **kwargs: None)
    state = init_state(model, ADAMW, one_device(), seed=0)
    for key in (state.key, jax.random.fold_in(state.key, 0), jax.random.key(0)):
        assert (jax.random.normal(key, (8,)) != state.params["w"]).any()
    assert keys


def test_initialisation_never_holds_a_whole_parameter_on_one_device():
    """A parameter large against the rest: 8 MiB whole, 1 MiB per device."""
    model = toy.toy(vocab_size=32768, num_layers=1)
    mesh = make_mesh("fsdp:8")
    tx = optax.sgd(1e-3)
    shardings = state_shardings(abstract_state(model, tx, ema=True), model, mesh)
    compiled = init_fn(model, tx, shardings, ema=True).lower(np.uint32(0)).compile()
    whole = 64 * 32768 * 4
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes
    assert whole / 4 < outputs < whole / 4 + 200_000  # parameter and average, an eighth each
    assert outputs + memory.temp_size_in_bytes < whole
    text = compiled.as_text()
    assert "f32[8,32768]" in text
    assert "[64,32768]" not in text
    assert "all-gather" not in text


@pytest.mark.parametrize("ema", [False, True])
def test_no_buffer_is_in_the_state_twice(ema):
    state = init_state(toy.toy(), ADAMW, make_mesh("fsdp:8"), ema=ema)
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf is not state.key]
    pointers = [
        shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards
    ]
    assert len(set(pointers)) == len(pointers)
    assert (state.ema_params is not None) == ema


@pytest.mark.parametrize("text", ["data:1", "fsdp:8", "data:2,fsdp:2,tensor:2"])
def test_b3_a_compiled_step_takes_what_it_returned(text):
    model = toy.toy()
    mesh = make_mesh(text, devices=jax.devices()[: 1 if text == "data:1" else 8])
    abstract = abstract_state(model, ADAMW, ema=True)
    shardings = state_shardings(abstract, model, mesh)
    placed = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        abstract,
        shardings,
    )

    def step(state):
        updates, opt_state = ADAMW.update(state.params, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        return state, {"norm": optax.tree.norm(params)}

    compiled = compile_step(step, (placed,), donate_argnums=0, out_shardings=(shardings, None))
    state = init_state(model, ADAMW, mesh, ema=True)
    first = state
    for _ in range(3):  # a layout it was not compiled for would be an error
        state, metrics = compiled(state)
    assert int(state.step) == 3
    assert np.isfinite(float(metrics["norm"]))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


def test_parameters_are_counted_without_padding():
    model = dataclasses.replace(toy.toy(), num_padding_params=100)
    assert num_params(model) == 3 * (2 * 64 * 128 + 128 + 64) + 64 * 256 - 100
    assert num_params((model.init, model.apply)) == num_params(model) + 100


def test_a_state_is_replaced_not_changed():
    state = abstract_state(toy.toy(), ADAMW)
    new = state.replace(step=7)
    assert (new.step, new.params) == (7, state.params)
    assert state.step.shape == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 1
    assert isinstance(new, TrainState)


def test_an_init_that_returns_numbers_is_refused_with_their_paths():
    model = Model(init=lambda key: ({"a": {"w": 1.0}}, {"n": 3}), apply=lambda *a, **k: None)
    with pytest.raises(ConfigError, match=r"params/a/w \(float\), model_state/n \(int\)"):
        abstract_state(model, ADAMW)
