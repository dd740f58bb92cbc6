"""Pytrees by name: paths, selection by pattern, partition, norms and sizes.

A path is written as in logs, flags and checkpoints: `layers/attention/q/kernel`.
Everything here works on abstract leaves (`jax.ShapeDtypeStruct`) too, unless it says otherwise.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError

NUM_NEAR_PATHS = 5
"""How many paths an error about a pattern shows."""


def path_str(path: tuple[Any, ...]) -> str:
    """Writes a key path of `jax.tree_util` as `layers/attention/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Lists (path, leaf) in the order of `jax.tree.leaves`."""
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def compile_pattern(pattern: str, *, option: str) -> re.Pattern[str]:
    """Compiles a regular expression given by the user as `option`."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{option}={pattern!r} is not a regular expression ({error}); "
            "give a Python regular expression over paths like 'layers/attention/q/kernel'."
        ) from None


def near_paths(pattern: str, paths: Iterable[str]) -> list[str]:
    """Paths that resemble `pattern`, nearest first: what the user may have meant."""
    words = " ".join(re.findall(r"\w+", pattern)).lower()

    def likeness(path: str) -> float:
        matcher = difflib.SequenceMatcher(None, words, path.replace("/", " ").lower())
        return matcher.ratio() + matcher.find_longest_match().size / max(len(words), 1)

    return sorted(paths, key=likeness, reverse=True)[:NUM_NEAR_PATHS]


def select(tree: Any, pattern: str, *, option: str, must_match: bool = True) -> Any:
    """Marks the leaves whose path matches a regular expression.

    Args:
        tree: parameters, concrete or abstract.
        pattern: searched anywhere in the path (`^` and `$` anchor it); "" selects nothing.
        option: the flag that holds the pattern, for the error.
        must_match: whether a pattern that matches no path is an error.

    Returns:
        A tree of bool like `tree`, True where the pattern was found.
    """
    if not pattern:
        return jax.tree.map(lambda _: False, tree)
    regex = compile_pattern(pattern, option=option)
    paths = [path for path, _ in named_leaves(tree)]
    if must_match and not any(regex.search(path) for path in paths):
        raise ConfigError(
            f"{option}={pattern!r} matches no parameter; near paths: "
            f"{', '.join(near_paths(pattern, paths)) or 'none, the model has no parameters'}."
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: regex.search(path_str(path)) is not None, tree
    )


def partition(tree: Any, mask: Any) -> tuple[Any, Any]:
    """Splits a tree by a tree of bool into (selected, rest), with None in the places left out."""
    selected = jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree)
    rest = jax.tree.map(lambda chosen, leaf: None if chosen else leaf, mask, tree)
    return selected, rest


def merge(selected: Any, rest: Any) -> Any:
    """Undoes `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, selected, rest, is_leaf=lambda leaf: leaf is None
    )


def restrict(tree: Any, present: Any) -> Any:
    """A tree without the leaves in whose places `present` has None."""
    return jax.tree.map(
        lambda there, leaf: None if there is None else leaf,
        present,
        tree,
        is_leaf=lambda leaf: leaf is None,
    )


def is_float(leaf: Any) -> bool:
    """Whether a leaf holds real floating-point numbers, bfloat16 and float8 included."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating-point leaf is finite: a bool scalar on the device."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree) if is_float(leaf)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.array(True)


def global_norm_f32(tree: Any) -> jax.Array:
    """L2 norm over all floating-point leaves together, in float32 whatever their dtype."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree) if is_float(leaf)]
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in leaves), jnp.zeros(())))


def num_elements(tree: Any) -> int:
    """Number of array elements in all leaves together."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
