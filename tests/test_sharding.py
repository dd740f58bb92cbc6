"""Rules, placement, constraints and the audit.

Shapes: B rows, D embed, F mlp, L layers.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layouts import CUBE, mesh_of, shapes, specs

from jaxtrain.errors import ConfigError
from jaxtrain.layout_audit import audit
from jaxtrain.loop import fit
from jaxtrain.models.functional import functional
from jaxtrain.sharding import (
    DEFAULT_RULES,
    ShardingRules,
    batch_sharding,
    check_batch_size,
    constrain,
    gather_param,
    gather_stored,
    opt_state_shardings,
    param_shardings,
    partition_spec,
    shard_batch,
    use_rules,
)


def with_rules(*, storage=None, compute=None, paths=()):
    return ShardingRules(
        storage={**DEFAULT_RULES.storage, **(storage or {})},
        compute={**DEFAULT_RULES.compute, **(compute or {})},
        paths=paths,
    )


# ---------------------------------------------------------------------------------------------
# Rules and specs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "table", "mesh", "spec"),
    [
        (("embed", "mlp"), "storage", CUBE, P("fsdp", "tensor")),
        (("layers", "mlp", "embed"), "storage", CUBE, P(None, "tensor", "fsdp")),
        (("embed", "mlp"), "storage", "fsdp:8", P("fsdp")),
        (("embed", "mlp"), "storage", "data:8", P()),
        (("embed", "mlp"), "compute", CUBE, P(None, "tensor")),
        (("batch", "length", "embed"), "compute", CUBE, P(("data", "fsdp"))),
        (("batch", "length", "heads", "head_dim"), "compute", "data:4,tensor:2",
         P("data", None, "tensor")),
        ((None, "kv_heads"), "storage", CUBE, P(None, "tensor")),
        ((), "storage", CUBE, P()),
    ],
)  # fmt: skip
def test_logical_axes_become_specs_without_axes_of_size_1(axes, table, mesh, spec):
    assert partition_spec(axes, getattr(DEFAULT_RULES, table), mesh_of(mesh)) == spec


def test_a_logical_axis_without_a_rule_is_refused():
    with pytest.raises(ConfigError, match=r"no rule for the logical axes \['embde'\]"):
        partition_spec(("embde", "mlp"), DEFAULT_RULES.storage, mesh_of(CUBE))


@pytest.mark.parametrize("mesh", [CUBE, "data:8"])
def test_one_mesh_axis_twice_in_an_array_is_refused_on_every_mesh(mesh):
    with pytest.raises(ConfigError, match=r"'tensor' twice .*\('heads', 'mlp'\)"):
        partition_spec(("heads", "mlp"), DEFAULT_RULES.storage, mesh_of(mesh))


def test_the_default_rules_are_short_in_a_signature():
    assert "rules: jaxtrain.rules.ShardingRules = DEFAULT_RULES," in str(inspect.signature(fit))
    other = ShardingRules(storage={"a": "fsdp"}, compute={})
    assert eval(repr(other)) == other


def test_rules_that_cannot_be_right_are_refused():
    with pytest.raises(ConfigError, match=r"'mlp' -> 'tensr'; the mesh axes are data, fsdp"):
        with_rules(storage={"mlp": "tensr"})
    with pytest.raises(ConfigError, match=r"path rule '\(' is not a regular expression"):
        with_rules(paths=(("(", ("embed",)),))


def test_meshes_with_explicit_axes_are_refused():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ConfigError, match="must be of type Auto"):
        param_shardings(shapes(a=(8,)), None, mesh)
    with pytest.raises(ConfigError, match="must be of type Auto"), use_rules(mesh):
        pass


# ---------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------


def test_parameters_are_placed_by_their_logical_axes():
    params, _ = jax.eval_shape(toy.toy().init, jax.random.key(0))
    placed = param_shardings(params, toy.LOGICAL_AXES, mesh_of(CUBE))
    assert specs(placed) == {
        "layers": {
            "up": {"kernel": P(None, "fsdp", "tensor"), "bias": P(None, "tensor")},
            "down": {"kernel": P(None, "tensor", "fsdp")},
            "norm": {"scale": P(None, "fsdp")},
        },
        "head": {"kernel": P("fsdp", "tensor")},
    }


def test_b1_all_dims_that_do_not_divide_are_listed_at_once():
    params = shapes(embed=(50257, 10), k=(12, 2, 64), fine=(16, 64))
    axes = {"embed": ("vocab", "embed"), "k": ("embed", "kv_heads", "head_dim")}
    axes["fine"] = ("embed", "mlp")
    with pytest.raises(ConfigError) as error:
        param_shardings(params, axes, mesh_of("fsdp:2,tensor:4"))
    text = str(error.value)
    assert "'embed' dim 0 (vocab) of 50257 is not divisible by tensor=4" in text
    assert "(next multiples 50260, or 50304 for 128)" in text
    assert "'k' dim 1 (kv_heads) of 2 is not divisible by tensor=4 (next multiple 4)" in text
    assert text.count("is not divisible") == 2
    with pytest.raises(ConfigError) as error:
        param_shardings(params, axes, mesh_of("fsdp:4,tensor:2"))
    text = str(error.value)
    assert "(vocab) of 50257 is not divisible by tensor=2 (next multiples 50258, or 50304" in text
    assert "'embed' dim 1 (embed) of 10 is not divisible by fsdp=4 (next multiple 12)" in text
    assert text.count("is not divisible") == 2


def test_logical_axes_must_fit_the_parameters():
    mesh, params = mesh_of(CUBE), shapes(a=(8, 8), b=(8,))
    with pytest.raises(ConfigError, match=r"axes to what is no parameter: 'c' \(near: a, b\)"):
        param_shardings(params, {"a": (None, None), "c": ("embed",)}, mesh)
    with pytest.raises(ConfigError, match=r"'a' of shape \(8, 8\) has 1 logical axes"):
        param_shardings(params, {"a": ("embed",), "b": ("embed",)}, mesh)
    with pytest.raises(ConfigError, match=r"'a' \['x'\], 'b' \['y'\]; the rules have"):
        param_shardings(params, {"a": ("x", None), "b": ("y",)}, mesh)


def test_path_rules_place_what_carries_no_axes_and_size_places_the_rest():
    params = {"conv": shapes(kernel=(3, 3, 16, 32), bias=(32,)), "out": shapes(kernel=(30, 6))}
    rules = with_rules(paths=(("conv/kernel", (None, None, "embed", "mlp")), ("conv", ("mlp",))))
    placed = specs(param_shardings(params, None, mesh_of("fsdp:4,tensor:2"), rules))
    assert placed["conv"] == {"kernel": P(None, None, "fsdp", "tensor"), "bias": P("tensor")}
    assert placed["out"] == {"kernel": P()}  # neither 30 nor 6 is divisible by 4
    placed = specs(param_shardings(params, None, mesh_of("fsdp:2")))
    assert placed["conv"] == {"kernel": P(None, None, None, "fsdp"), "bias": P("fsdp")}
    assert placed["out"] == {"kernel": P("fsdp")}  # the largest dim
    assert specs(param_shardings(params, None, mesh_of("fsdp:1")))["out"] == {"kernel": P()}


def test_axes_of_a_part_of_the_parameters_are_enough():
    params = shapes(a=(8, 16), b=(8, 16))
    for axes in ({"a": ("mlp", "embed"), "b": None}, {"a": ("mlp", "embed")}):
        placed = param_shardings(params, axes, mesh_of("fsdp:8"))
        assert specs(placed) == {"a": P(None, "fsdp"), "b": P(None, "fsdp")}
    # A path rule comes before the size, and a whole branch may have no axes.
    params = {"part": shapes(a=(8, 16), b=(8, 16)), "c": params["a"]}
    axes, rules = {"part": None, "c": (None, None)}, with_rules(paths=(("/b", ("embed", None)),))
    placed = param_shardings(params, axes, mesh_of("fsdp:8"), rules)
    assert specs(placed) == {"part": {"a": P(None, "fsdp"), "b": P("fsdp")}, "c": P()}


def test_a_partly_annotated_module_is_split_as_much_as_one_without_annotations():
    class Partly(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
            self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

    for mesh, up in (("fsdp:8", P("fsdp")), ("fsdp:4,tensor:2", P("fsdp", "tensor"))):
        result = audit(functional(Partly), mesh_of(mesh), optax.adamw(1e-3))
        assert {row.path: row.spec for row in result.rows if row.group == "params"} == {
            "params/up/kernel": up,
            "params/up/bias": P("fsdp"),
            "params/down/kernel": P("fsdp"),
            "params/down/bias": P("fsdp"),
        }
        assert result.replicated_share == 0


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (with_rules(storage={"experts": "tensor"}), "storage rule 'experts' -> ('tensor',)"),
        (with_rules(storage={"heads": "fsdp"}), "storage rule 'heads' -> ('fsdp',)"),
        (with_rules(paths=(("kernle", ("embed",)),)), "path rule 'kernle' (near paths: "),
        (with_rules(paths=(("up/kernel", ("embed",)),)), "change the storage table instead"),
    ],
)
def test_rules_that_apply_to_nothing_are_refused(rules, words):
    params, _ = jax.eval_shape(toy.toy().init, jax.random.key(0))
    with pytest.raises(ConfigError) as error:
        param_shardings(params, toy.LOGICAL_AXES, mesh_of(CUBE), rules)
    assert words in str(error.value)


def test_a_path_rule_behind_one_that_matches_more_is_refused():
    rules = with_rules(paths=(("a", ("embed", None)), ("ab", ("mlp", None))))
    with pytest.raises(ConfigError, match=r"path rule 'ab' \(earlier path rules match first\)"):
        param_shardings(shapes(ab=(8, 8)), None, mesh_of("fsdp:8"), rules)


# ---------------------------------------------------------------------------------------------
# Optimizer state
# ---------------------------------------------------------------------------------------------


def _is_kernel(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path[-1]), params)


def _labels(params):
    return jax.tree.map(lambda kernel: "matrix" if kernel else "rest", _is_kernel(params))


OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(1e-3, momentum=0.9),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "masked": optax.masked(optax.adam(1e-3), _is_kernel),
    "multi": optax.multi_transform(
        {"matrix": optax.adamw(1e-3), "rest": optax.sgd(1e-3, momentum=0.9)}, _labels
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_placed_like_its_parameters(name):
    """Checked against an independent search: which parameter's name ends the path of a leaf."""
    tx, mesh = OPTIMIZERS[name], mesh_of(CUBE)
    params, _ = jax.eval_shape(toy.toy().init, jax.random.key(0))
    placed = param_shardings(params, toy.LOGICAL_AXES, mesh)
    by_path = {
        jax.tree_util.keystr(path): (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(placed), strict=True
        )
    }
    state = jax.eval_shape(tx.init, params)
    shardings = opt_state_shardings(state, params, placed, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    found = {"like": 0, "lost": 0, "other": 0}
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(shardings), strict=True
    ):
        owners = [key for key in by_path if jax.tree_util.keystr(path).endswith(key)]
        shape, spec = by_path[owners[0]] if owners else (None, P())
        if leaf.shape == shape:
            assert sharding.spec == spec
            found["like"] += 1
        elif leaf.size > 1:  # a factored moment: L stays, one of the other dims is gone
            entries = dict(zip(shape, tuple(spec) + (None,) * (3 - len(spec)), strict=False))
            assert sharding.spec == P(*[entries[size] for size in leaf.shape])
            found["lost"] += 1
        else:
            assert sharding.spec == P()
            found["other"] += 1
    num_leaves = len(by_path)
    kernels = 3
    expected = {
        "adamw": {"like": 2 * num_leaves, "lost": 0, "other": 1},
        "lion": {"like": num_leaves, "lost": 0, "other": 1},
        "sgd": {"like": num_leaves, "lost": 0, "other": 0},
        # Rows and columns of the kernels; placeholders of size 1 for what is not factored.
        "adafactor": {"like": 2, "lost": 2 * kernels, "other": 1 + 2 * 2 + kernels},
        "masked": {"like": 2 * kernels, "lost": 0, "other": 1},
        "multi": {"like": 2 * kernels + 2, "lost": 0, "other": 1},
        "injected": {"like": 2 * num_leaves, "lost": 0, "other": 8},
    }
    assert found == expected[name]


def test_the_longest_matching_path_owns_a_leaf():
    """`kernel` and `out/kernel` both end the path of the second moment."""
    params = {"kernel": jnp.zeros((8, 4)), "out": {"kernel": jnp.zeros((4, 8))}}
    rules = with_rules(paths=(("^kernel", ("embed", None)), ("out", (None, "embed"))))
    mesh = mesh_of("fsdp:4")
    placed = param_shardings(params, None, mesh, rules)
    moments = opt_state_shardings(optax.adam(1e-3).init(params), params, placed, mesh)[0].mu
    assert specs(moments) == {"kernel": P("fsdp"), "out": {"kernel": P(None, "fsdp")}}


# ---------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------


def test_batches_are_split_over_data_and_fsdp():
    assert batch_sharding(mesh_of(CUBE)).spec == P(("data", "fsdp"))
    assert batch_sharding(mesh_of("data:2,tensor:4"), accumulate_steps=3).spec == P(None, "data")
    assert batch_sharding(mesh_of("tensor:8")).spec == P()


def test_a_micro_batch_holds_consecutive_rows_and_a_device_its_share_of_each():
    rows = np.arange(16)
    batch = {"x": rows[:, None] * np.ones((1, 3)), "row": rows}
    plain = shard_batch(batch, mesh_of(CUBE))
    np.testing.assert_array_equal(plain["row"], rows)
    micro = shard_batch(batch, mesh_of(CUBE), accumulate_steps=2)
    np.testing.assert_array_equal(micro["row"], rows.reshape(2, 8))
    np.testing.assert_array_equal(micro["x"][1, 2], [10, 10, 10])
    shards = {tuple(np.ravel(shard.data)) for shard in micro["row"].addressable_shards}
    assert shards == {(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)}


def test_batches_with_uneven_arrays_are_refused():
    with pytest.raises(ConfigError, match=r"same number of rows; got .*'x': \(8, 2\)"):
        shard_batch({"x": np.zeros((8, 2)), "y": np.zeros(4)}, mesh_of("data:2"))
    with pytest.raises(ConfigError, match="same number of rows"):
        shard_batch({"x": np.zeros(())}, mesh_of("data:2"))


@pytest.mark.parametrize(
    ("size", "steps", "mesh", "words"),
    [
        (
            12,
            1,
            "data:2,fsdp:4",
            "12 is not divisible by the 8 batch shards (mesh data=2 x fsdp=4)",
        ),
        (12, 1, "data:2,fsdp:4", "; use 8 or 16"),
        (19, 1, "data:4", "19 is not divisible by the 4 batch shards (mesh data=4); use 16 or 20"),
        (4, 1, "data:8", "4 is not divisible by the 8 batch shards (mesh data=8); use 8"),
        (24, 2, "fsdp:8", "(mesh fsdp=8) times accumulate_steps=2; use 16 or 32"),
        (5, 2, "tensor:8", "5 is not divisible by accumulate_steps=2; use 4 or 6"),
        (0, 1, "data:8", "use 8"),
    ],
)
def test_b1_batch_sizes_that_do_not_divide_are_refused(size, steps, mesh, words):
    with pytest.raises(ConfigError) as error:
        check_batch_size(size, steps, mesh_of(mesh))
    assert words in str(error.value)


def test_batch_sizes_that_divide_are_taken():
    check_batch_size(16, 2, mesh_of(CUBE))
    check_batch_size(7, 1, mesh_of("tensor:8"))


# ---------------------------------------------------------------------------------------------
# Constraints while a step is traced
# ---------------------------------------------------------------------------------------------


def test_without_rules_and_on_one_device_nothing_is_added():
    """The step on one device is measured against bare JAX: only the cast may remain."""

    def bare(x_BD, w_DF):
        return jnp.tanh(x_BD @ w_DF.astype(jnp.bfloat16))

    def ours(x_BD, w_DF):
        w_DF = gather_param(w_DF, ("embed", "mlp"), jnp.bfloat16)
        return constrain(jnp.tanh(constrain(x_BD, "batch", "embed") @ w_DF), "batch", "mlp")

    def on_one_device(x_BD, w_DF):
        with use_rules(mesh_of("fsdp:1")):
            return ours(x_BD, gather_stored(w_DF, P("fsdp")))

    args = (jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 16)))
    for loss in (lambda f: f, lambda f: jax.grad(lambda *args: f(*args).sum(), argnums=(0, 1))):
        expected = str(jax.make_jaxpr(loss(bare))(*args))
        assert str(jax.make_jaxpr(loss(ours))(*args)) == expected
        assert str(jax.make_jaxpr(loss(on_one_device))(*args)) == expected


def test_constraints_decide_the_layout_of_activations():
    def f(x):
        with use_rules(mesh_of(CUBE)):
            return constrain(x * 2, "batch", "mlp")

    y = jax.jit(f)(jnp.ones((8, 4)))
    assert y.sharding.spec == P(("data", "fsdp"), "tensor")
    np.testing.assert_array_equal(y, 2 * np.ones((8, 4)))


def test_constraints_that_cannot_hold_are_refused_by_name():
    def f(x, *axes):
        with use_rules(mesh_of(CUBE)):
            return constrain(x, *axes)

    with pytest.raises(ConfigError, match=r"shape \(6, 3\).*batch 6 by data=2 x fsdp=2, mlp 3 by"):
        jax.eval_shape(lambda x: f(x, "batch", "mlp"), jnp.ones((6, 3)))
    with pytest.raises(ConfigError, match=r"1 logical axes \('batch',\).*one per dim"):
        jax.eval_shape(lambda x: f(x, "batch"), jnp.ones((8, 4)))
    with pytest.raises(ConfigError, match=r"no rule for the logical axes \['btach'\]"):
        jax.eval_shape(lambda x: f(x, "btach", None), jnp.ones((8, 4)))


def test_compute_rules_that_nothing_reads_are_refused():
    rules = with_rules(compute={"mlp": None, "length": "tensor"})

    def f(x, *axes):
        with use_rules(mesh_of(CUBE), rules):
            return constrain(x, *axes)

    with pytest.raises(
        ConfigError, match=r"no array of the model reads: 'length' -> \('tensor',\)"
    ):
        jax.eval_shape(lambda x: f(x, "batch", None), jnp.ones((8, 4)))
    jax.eval_shape(lambda x: f(x, "batch", "length"), jnp.ones((8, 4)))
    with pytest.raises(ZeroDivisionError), use_rules(mesh_of(CUBE), rules):
        raise ZeroDivisionError  # not hidden by a complaint about rules


def test_rules_end_with_their_block_and_nest():
    outer, inner = mesh_of("fsdp:8"), mesh_of("data:8")
    x = jnp.ones((8, 8))
    with use_rules(outer):
        with use_rules(inner):
            jaxpr = str(jax.make_jaxpr(lambda x: constrain(x, "batch", None))(x))
            assert "spec=P('data'" in jaxpr
        assert "spec=P('fsdp'" in str(jax.make_jaxpr(lambda x: constrain(x, "batch", None))(x))
    assert constrain(x, "batch", None) is x


@jax.checkpoint
def _cached_block(x):
    return constrain(jnp.sin(x), "batch", None)


def test_traces_are_not_shared_between_meshes():
    """jax.checkpoint and jax.jit keep traces by function; the rules must be part of the key."""

    def step(x, mesh):
        with use_rules(mesh):
            return _cached_block(x)

    for text in ("fsdp:8", "data:8", "fsdp:1", "tensor:2,data:4"):
        mesh = mesh_of(text)
        jaxpr = str(jax.make_jaxpr(functools.partial(step, mesh=mesh))(jnp.ones((8, 8))))
        axis = text.rpartition(",")[2].split(":")[0]
        assert ("sharding_constraint" in jaxpr) == (mesh.size > 1)
        if mesh.size > 1:
            assert f"spec=P('{axis}'" in jaxpr


# ---------------------------------------------------------------------------------------------
