"""Paths, selection by pattern, partition and norms of pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import tree
from jaxtrain.errors import ConfigError

PARAMS = {
    "embed": {"embedding": np.zeros((4, 2), np.float32)},
    "layers": {
        "attention": {
            "q": {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)}
        },
        "norm": {"scale": np.ones(2, np.float32)},
    },
}


def test_named_leaves_are_readable_and_in_the_order_of_the_leaves():
    named = tree.named_leaves({"a": [1, (2, 3)], "b": {"c": 4}})
    assert named == [("a/0", 1), ("a/1/0", 2), ("a/1/1", 3), ("b/c", 4)]


def test_select_searches_in_the_path():
    mask = tree.select(PARAMS, r"(^|/)(bias|scale)$", option="optimizer.no_decay")
    chosen = [path for path, marked in tree.named_leaves(mask) if marked]
    assert chosen == ["layers/attention/q/bias", "layers/norm/scale"]
    assert not any(jax.tree.leaves(tree.select(PARAMS, "", option="optimizer.freeze")))


def test_pattern_without_a_match_names_near_paths():
    with pytest.raises(ConfigError, match=r"optimizer\.freeze='layers/attn/q' matches no") as info:
        tree.select(PARAMS, "layers/attn/q", option="optimizer.freeze")
    near = str(info.value).split("near paths: ")[1]
    assert near.startswith("layers/attention/q/")
    mask = tree.select(PARAMS, "layers/attn/q", option="optimizer.freeze", must_match=False)
    assert not any(jax.tree.leaves(mask))


def test_pattern_that_is_no_regular_expression():
    with pytest.raises(ConfigError, match=r"optimizer\.freeze='\(' is not a regular expression"):
        tree.select(PARAMS, "(", option="optimizer.freeze")


def test_partition_and_merge_are_inverse():
    mask = tree.select(PARAMS, "attention", option="optimizer.freeze")
    selected, rest = tree.partition(PARAMS, mask)
    assert [path for path, _ in tree.named_leaves(selected)] == [
        "layers/attention/q/bias",
        "layers/attention/q/kernel",
    ]
    merged = tree.merge(selected, rest)
    assert jax.tree.structure(merged) == jax.tree.structure(PARAMS)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (merged, PARAMS)), strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_sees_one_bad_value_in_any_leaf(bad):
    values = {"a": jnp.ones((2, 3)), "b": jnp.ones(3, jnp.bfloat16), "n": jnp.ones(2, jnp.int32)}
    assert tree.all_finite(values)
    assert tree.all_finite({})
    for name in ("a", "b"):
        first = (0,) * values[name].ndim
        assert not tree.all_finite(dict(values, **{name: values[name].at[first].set(bad)}))


def test_global_norm_is_summed_in_float32():
    rng = np.random.default_rng(0)
    values = {"a": rng.normal(size=(5, 7)), "b": rng.normal(size=3)}
    flat = np.concatenate([values["a"].ravel(), values["b"]])
    np.testing.assert_allclose(
        tree.global_norm_f32(jax.tree.map(jnp.float32, values)), np.linalg.norm(flat), rtol=1e-6
    )
    # In bfloat16 the sum of 4096 ones stops at 256.
    ones = {"a": jnp.ones(4096, jnp.bfloat16), "count": jnp.array(7)}
    assert tree.global_norm_f32(ones) == 64
    assert tree.global_norm_f32({}).dtype == jnp.float32
