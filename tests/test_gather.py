"""Gathered parameters: read from the partitioned program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P
from layouts import CUBE, mesh_of, shapes, specs

from jaxtrain.backend import captured_stderr
from jaxtrain.gradients import make_grad_fn
from jaxtrain.sharding import (
    batch_sharding,
    constrain,
    gather_param,
    gather_stored,
    param_shardings,
    shard_batch,
    use_rules,
)


def partitioned(fn, args, directory):
    """The compiled program, and its text after XLA split it over devices.

    Only later does CPU compute collectives of bfloat16 in float32.
    """
    options = {
        "xla_dump_to": str(directory),
        "xla_dump_hlo_pass_re": "spmd-.*",
        "xla_dump_hlo_as_text": True,
    }
    compiled = jax.jit(fn).lower(*args).compile(compiler_options=options)
    (path,) = directory.glob("*after_spmd-partitioning*")
    return compiled, path.read_text()


def gathers(text):
    return re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)


def users_of(name, text):
    """Operations that take an array, seen through those that move nothing between devices."""
    found = re.findall(rf"%(\S+) = \S+ (\S+?)\([^)]*%{re.escape(name)}[,)]", text)
    through = [users_of(user, text) if op in ("transpose", "copy") else [op] for user, op in found]
    return [op for ops in through for op in ops]


def placed_args(model, mesh, rows=16):
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    shardings = param_shardings(params, model.logical_axes, mesh)
    place = lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s)  # noqa: E731
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=batch_sharding(mesh))
    return (jax.tree.map(place, params, shardings), {"x": x}), shardings


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_parameters_are_gathered_in_bfloat16_and_gradients_are_laid_out_for_storage(
    tmp_path, remat
):
    model, mesh = toy.toy(dtype="bfloat16", remat=remat), mesh_of(CUBE)
    args, shardings = placed_args(model, mesh)

    def grads(params, batch):
        with use_rules(mesh):
            return jax.grad(functools.partial(toy.summed_loss, model))(params, batch)

    compiled, text = partitioned(grads, args, tmp_path)
    found = gathers(text)
    assert {dtype for dtype, _ in found} == {"bf16"}
    # Each kernel is gathered over fsdp in the forward pass and again in the backward pass, and
    # keeps its part over tensor: [D, F/2], [F/2, D].
    assert [shape for _, shape in found].count("64,64") == 4
    # Gradients of kernels are summed and cut at once, which GPUs do as one reduce-scatter.
    sums = re.findall(r"%(all-reduce\S*) = bf16\[64,64\]", text)
    assert sums
    for name in sums:
        assert users_of(name, text) == ["dynamic-slice"]
    assert specs(compiled.output_shardings) == specs(shardings)


@pytest.mark.parametrize("text", ["fsdp:8", "data:2,fsdp:4"])
def test_under_remat_none_gathered_parameters_are_not_kept(text):
    """Kept for the backward pass, they would be the whole model on every device."""
    model, mesh = toy.toy(mlp_dim=1024, num_layers=8), mesh_of(text)
    (params, batch), _ = placed_args(model, mesh, rows=8)

    def loss_fn(outputs, batch, params):
        return {"loss": (jnp.sum(jnp.square(outputs)), jnp.float32(len(outputs)))}

    def grads(params, batch):
        return make_grad_fn(model, loss_fn, mesh)(params, {}, batch, jax.random.key(0))

    memory = jax.jit(grads).lower(params, batch).compile().memory_analysis()
    kernels = 8 * 2 * 64 * 1024 * 4
    gradients = kernels // mesh.shape["fsdp"]
    assert memory.temp_size_in_bytes < gradients + kernels / 2


def test_the_lookup_of_an_embedding_replicates_nothing():
    """Its gradient is where XLA would replicate the activations, if it were free to choose."""
    mesh, axes = mesh_of("fsdp:4,tensor:2"), ("vocab", "embed")
    table = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    placed = param_shardings({"t": table}, {"t": axes}, mesh)["t"]
    table = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=placed)
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32, sharding=batch_sharding(mesh))

    def grads(table_VD, tokens_BT):
        def loss(table_VD):
            x_BTD = gather_param(table_VD, axes, jnp.float32)[tokens_BT]
            return jnp.sum(jnp.sin(constrain(x_BTD, "batch", "length", "embed")))

        with use_rules(mesh):
            return jax.grad(loss)(table_VD)

    with captured_stderr() as log:
        jax.jit(grads).lower(table, tokens).compile()
    assert log.involuntary_remat() == []


def test_gradients_equal_those_without_a_mesh():
    model = toy.toy()
    params, _ = model.init(jax.random.key(0))
    batch = {"x": np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)}
    loss = functools.partial(toy.summed_loss, model)
    expected = jax.jit(jax.grad(loss))(params, batch)

    def auto(params, batch, mesh):
        with use_rules(mesh):
            return jax.grad(loss)(params, batch)

    def manual_over_data(params, batch, mesh):
        """As the train step does it: by hand over data, automatic over the other axes."""

        def local(params, batch):
            params = jax.tree.map(lambda p: jax.lax.pcast(p, ("data",), to="varying"), params)
            return jax.lax.psum(jax.grad(loss)(params, batch), "data")

        with use_rules(mesh):
            return jax.shard_map(
                local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
            )(params, batch)

    mesh = mesh_of(CUBE)
    for step in (auto, manual_over_data):
        placed = jax.device_put(params, param_shardings(params, toy.LOGICAL_AXES, mesh))
        found = jax.jit(functools.partial(step, mesh=mesh))(placed, shard_batch(batch, mesh))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max()),
            found,
            expected,
        )


def test_inside_a_region_manual_over_data_the_other_axes_are_still_laid_out():
    mesh = mesh_of(CUBE)

    def local(x_BD, w_DF):
        w_DF = gather_param(w_DF, ("embed", "mlp"), jnp.bfloat16)
        return constrain(x_BD.astype(jnp.bfloat16) @ w_DF, "batch", "mlp")

    def step(x_BD, w_DF):
        with use_rules(mesh):
            return jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P("data"), P()),
                out_specs=P("data"),
                axis_names={"data"},
            )(x_BD, w_DF)

    jaxpr = str(jax.make_jaxpr(step)(jnp.ones((8, 16)), jnp.ones((16, 32))))
    found = re.findall(r"spec=(P\([^)]*\))", jaxpr)
    assert found == ["P('fsdp', 'tensor')", "P(None, 'tensor')", "P('fsdp', 'tensor')"]
    everywhere = jax.shard_map(
        lambda x: constrain(x, "batch", "mlp"),
        mesh=mesh,
        in_specs=P(("data", "fsdp"), "tensor"),
        out_specs=P(("data", "fsdp"), "tensor"),
    )
    with use_rules(mesh):  # nothing is left to lay out
        assert "sharding_constraint" not in str(jax.make_jaxpr(everywhere)(jnp.ones((8, 16))))


def test_models_that_know_nothing_of_layouts_gather_parameters_not_activations(tmp_path):
    mesh, rows = mesh_of("fsdp:8"), 32
    params = {"a": shapes(kernel=(64, 128), bias=(128,)), "b": shapes(kernel=(128, 64))}
    shardings = param_shardings(params, None, mesh)
    placed = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        params,
        shardings,
    )
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=batch_sharding(mesh))

    def grads(params, x_BD):
        def loss(params):
            params = jax.tree.map(lambda p, s: gather_stored(p, s.spec), params, shardings)
            h_BF = jnp.tanh(x_BD @ params["a"]["kernel"] + params["a"]["bias"][None])
            return jnp.sum(jnp.square(h_BF @ params["b"]["kernel"]))

        with use_rules(mesh):
            return jax.grad(loss)(params)

    _, text = partitioned(grads, (placed, x), tmp_path)
    assert sorted({shape for _, shape in gathers(text)}) == ["128", "128,64", "64,128"]


# ---------------------------------------------------------------------------------------------
