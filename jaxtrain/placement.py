"""Placement: where every array of the train state rests between steps, and why.

Parameters are placed by their logical axes, by path rules or by size; optimizer state is placed by
shape, like the parameters it belongs to. Each decision is a `Layout`, which the audit shows.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.rules import (
    DEFAULT_RULES,
    LogicalAxes,
    ShardingRules,
    axis_size,
    check_mesh,
    make_spec,
    partition_spec,
    say_axes,
)
from jaxtrain.tree import named_leaves, near_paths, path_str


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where one array of the train state lives, and why."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes | None
    spec: PartitionSpec
    why: str


def param_layouts(
    abstract_params: Any, logical_axes: Any, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES
) -> list[Layout]:
    """Decides the storage layout of every parameter, in the order of `jax.tree.leaves`.

    A parameter's logical axes come from the model, else from the first path rule that is found in
    its path. One that has neither is split over `fsdp` in its largest dim that divides. So a model
    may give logical axes to a part of its parameters; `(None, None)` keeps one whole.

    Raises:
        ConfigError: naming every parameter whose dims do not divide, every unknown logical axis
            and every rule that applies to nothing.
    """
    check_mesh(mesh)
    leaves = named_leaves(abstract_params)
    labels = _labels(leaves, logical_axes)
    layouts, unknown, uneven, matched = [], [], [], set()
    for path, leaf in leaves:
        axes, why = labels.get(path), "logical axes"
        if axes is None:
            for pattern, rule_axes in rules.paths:
                if re.search(pattern, path):
                    axes, why = tuple(rule_axes), f"path rule {pattern!r}"
                    matched.add(pattern)
                    break
        if axes is None:
            layouts.append(_layout_by_size(path, leaf, mesh))
            continue
        if len(axes) != len(leaf.shape):
            raise ConfigError(
                f"parameter {path!r} of shape {leaf.shape} has {len(axes)} logical axes {axes}"
                f" ({why}); give one per dim"
            )
        missing = [name for name in axes if name is not None and name not in rules.storage]
        if missing:
            unknown.append(f"{path!r} {missing}")
            continue
        spec = partition_spec(axes, rules.storage, mesh)
        uneven += _uneven_dims(path, leaf.shape, axes, spec, mesh)
        layouts.append(Layout(path, leaf.shape, leaf.dtype, axes, spec, why))
    if unknown:
        raise ConfigError(
            f"no storage rule for logical axes of the parameters {', '.join(unknown)}; the rules"
            f" have {', '.join(sorted(rules.storage))}"
        )
    _refuse_unused_rules([path for path, _ in leaves], labels, layouts, matched, rules)
    if uneven:
        raise ConfigError(
            f"parameters do not divide over the mesh: {'; '.join(uneven)}; choose a mesh whose"
            f" sizes divide them, or other model sizes"
        )
    return layouts


def param_shardings(
    abstract_params: Any, logical_axes: Any, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES
) -> Any:
    """The storage sharding of every parameter; see `param_layouts` for how it is decided.

    Args:
        abstract_params: parameters or their `jax.ShapeDtypeStruct`s.
        logical_axes: a tree like the parameters with tuples as leaves; None, there or in the
            place of a leaf or a branch, or nothing at all, for those that have none.
        mesh: from `make_mesh`.
        rules: the storage table and path rules are read.

    Returns:
        A tree of `NamedSharding` like the parameters.
    """
    layouts = param_layouts(abstract_params, logical_axes, mesh, rules)
    shardings = [NamedSharding(mesh, layout.spec) for layout in layouts]
    return jax.tree.unflatten(jax.tree.structure(abstract_params), shardings)


def opt_state_layouts(
    abstract_opt_state: Any, abstract_params: Any, shardings: Any, mesh: Mesh
) -> list[Layout]:
    """Places optimizer state by shape, in the order of `jax.tree.leaves`.

    A leaf belongs to the parameter whose path ends its own path, whatever optax wrapped around
    it. With that parameter's shape it takes its sharding; a leaf that lost dims (Adafactor) keeps
    the entries of the dims that are left; all else is replicated.
    """
    del mesh
    specs = [sharding.spec for sharding in jax.tree.leaves(shardings)]
    owners = {
        _keys(path): (leaf.shape, spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(abstract_params), specs, strict=True
        )
    }
    layouts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_opt_state):
        keys = _keys(path)
        suffixes = (keys[start:] for start in range(len(keys) + 1))
        owner = next((suffix for suffix in suffixes if suffix in owners), None)
        if owner is None:
            spec, why = PartitionSpec(), "belongs to no parameter"
        else:
            shape, param_spec = owners[owner]
            spec, why = _spec_of_part(leaf.shape, shape, param_spec)
        layouts.append(Layout(path_str(path), leaf.shape, leaf.dtype, None, spec, why))
    return layouts


def opt_state_shardings(
    abstract_opt_state: Any, abstract_params: Any, shardings: Any, mesh: Mesh
) -> Any:
    """The sharding of every leaf of the optimizer state; see `opt_state_layouts`.

    `jax.jit(tx.init)` needs it as `out_shardings`: without it the moments come back replicated.
    """
    layouts = opt_state_layouts(abstract_opt_state, abstract_params, shardings, mesh)
    placed = [NamedSharding(mesh, layout.spec) for layout in layouts]
    return jax.tree.unflatten(jax.tree.structure(abstract_opt_state), placed)


def _labels(leaves: list[tuple[str, Any]], logical_axes: Any) -> dict[str, LogicalAxes]:
    """Reads the logical axes that the model gives, by path; each has to be a parameter's."""
    is_label = lambda node: node is None or isinstance(node, tuple)  # noqa: E731
    entries = jax.tree_util.tree_leaves_with_path(logical_axes, is_leaf=is_label)
    labels = {path_str(path): label for path, label in entries if label is not None}
    paths = [path for path, _ in leaves]
    if extra := sorted(labels.keys() - set(paths)):
        named = (
            f"{path!r} (near: {', '.join(near_paths(path, paths)) or 'none'})" for path in extra
        )
        raise ConfigError(
            f"the model gives logical axes to what is no parameter: {', '.join(named)}; the names"
            f" must be those of the parameters"
        )
    return labels


def _layout_by_size(path: str, leaf: Any, mesh: Mesh) -> Layout:
    fsdp = axis_size(mesh, "fsdp")
    fits = [dim for dim, size in enumerate(leaf.shape) if size % fsdp == 0 and size]
    if fsdp == 1:
        entries, why = [], "by size: fsdp=1"
    elif fits:
        best = max(fits, key=lambda dim: leaf.shape[dim])
        entries = [None] * best + [("fsdp",)]
        why = f"by size: dim {best} is the largest that fsdp={fsdp} divides"
    else:
        entries, why = [], f"by size: no dim is divisible by fsdp={fsdp}"
    spec = make_spec(entries, mesh)
    return Layout(path, leaf.shape, leaf.dtype, None, spec, why)


def _uneven_dims(
    path: str, shape: Sequence[int], axes: LogicalAxes, spec: PartitionSpec, mesh: Mesh
) -> list[str]:
    uneven = []
    for dim, (name, size, entry) in enumerate(zip(axes, shape, spec, strict=False)):
        parts = axis_size(mesh, entry)
        if size % parts == 0:
            continue
        text = f"{path!r} dim {dim} ({name}) of {size} is not divisible by {say_axes(entry, mesh)}"
        above = -(-size // parts) * parts
        padded = -(-size // 128) * 128
        if name == "vocab" and padded % parts == 0 and padded != above:
            text += f" (next multiples {above}, or {padded} for 128)"
        else:
            text += f" (next multiple {above})"
        uneven.append(text)
    return uneven


def _refuse_unused_rules(paths, labels, layouts, matched, rules: ShardingRules) -> None:
    """A rule that somebody wrote and that applies to nothing is a mistake."""
    carried = {name for layout in layouts for name in layout.logical_axes or ()}
    unused = [
        f"storage rule {name!r} -> {axes!r}"
        for name, axes in rules.storage.items()
        if axes and name not in carried and DEFAULT_RULES.storage.get(name) != axes
    ]
    for pattern, _ in rules.paths:
        if pattern in matched:
            continue
        hit = [path for path in paths if re.search(pattern, path)]
        labelled = hit and all(labels.get(path) is not None for path in hit)
        reason = (
            "the model gives all it matches logical axes, change the storage table instead"
            if labelled
            else "earlier path rules match first"
            if hit
            else f"near paths: {', '.join(near_paths(pattern, paths)) or 'none'}"
        )
        unused.append(f"path rule {pattern!r} ({reason})")
    if unused:
        raise ConfigError(f"rules that apply to no parameter: {'; '.join(unused)}; remove them")


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(path_str((entry,)) for entry in path)


def _spec_of_part(
    shape: Sequence[int], param_shape: Sequence[int], param_spec: PartitionSpec
) -> tuple[PartitionSpec, str]:
    """The spec of an array with some of a parameter's dims, in their order."""
    if tuple(shape) == tuple(param_shape):
        return param_spec, "like its parameter"
    entries = list(param_spec) + [None] * (len(param_shape) - len(param_spec))
    choices = [
        kept
        for kept in itertools.combinations(range(len(param_shape)), len(shape))
        if all(param_shape[dim] == size for dim, size in zip(kept, shape, strict=True))
    ]
    if not shape or not choices:
        return PartitionSpec(), "shape is not that of its parameter"
    # Equal dims make it ambiguous which were lost; the most split choice needs the least memory.
    kept = max(choices, key=lambda dims: sum(entries[dim] is not None for dim in dims))
    spec = [entries[dim] for dim in kept]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec), f"like dims {', '.join(map(str, kept))} of its parameter"
