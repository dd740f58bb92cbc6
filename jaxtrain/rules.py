"""Sharding rules: tables that map logical axes of arrays to mesh axes.

A rule is a value. `storage` says how parameters and optimizer state rest between steps, `compute`
how a layer sees its activations and gathered parameters. `jaxtrain.sharding` applies them.
"""

import dataclasses
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.mesh import AXES

MeshAxes = str | tuple[str, ...] | None
LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Maps logical axes to mesh axes, once for storage and once for compute.

    Change one entry with `dataclasses.replace(rules, storage={**rules.storage, "mlp": None})`.
    """

    storage: Mapping[str, MeshAxes]
    """Layout of parameters and optimizer state."""
    compute: Mapping[str, MeshAxes]
    """Layout of activations and of parameters that are gathered for use."""
    paths: tuple[tuple[str, LogicalAxes], ...] = ()
    """(pattern, logical axes) for models that carry none, or to overrule those they carry. The
    pattern is a regular expression for the whole path, like `"layers/.*/kernel"`; the first that
    matches counts."""

    def __post_init__(self):
        for table in ("storage", "compute"):
            rules = {name: as_axes(axes) for name, axes in getattr(self, table).items()}
            unknown = {a: n for n, axes in rules.items() for a in axes or () if a not in AXES}
            if unknown:
                listed = ", ".join(f"{n!r} -> {a!r}" for a, n in unknown.items())
                raise ConfigError(
                    f"{table} rules name mesh axes that do not exist: {listed}; the mesh axes are"
                    f" {', '.join(AXES)}"
                )
            object.__setattr__(self, table, types.MappingProxyType(rules))
        for pattern, _ in self.paths:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"path rule {pattern!r} is not a regular expression: {error}"
                ) from None

    def __repr__(self) -> str:
        """Short for the default, which stands in the signature of `fit` and others."""
        if self == DEFAULT_RULES:
            return "DEFAULT_RULES"
        tables = f"storage={dict(self.storage)!r}, compute={dict(self.compute)!r}"
        return f"ShardingRules({tables}, paths={self.paths!r})"


def partition_spec(
    logical_axes: Sequence[str | None], table: Mapping[str, MeshAxes], mesh: Mesh
) -> PartitionSpec:
    """Maps the logical axes of one array to mesh axes; axes of size 1 are left out.

    Raises:
        ConfigError: for a name the table does not have, or a mesh axis used twice.
    """
    unknown = [name for name in logical_axes if name is not None and name not in table]
    if unknown:
        raise ConfigError(
            f"no rule for the logical axes {unknown} of an array with {tuple(logical_axes)}; the"
            f" table has {sorted(table)}"
        )
    entries = [as_axes(table[name]) if name is not None else None for name in logical_axes]
    used = [axis for entry in entries for axis in entry or ()]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise ConfigError(
            f"the rules use mesh axis {', '.join(map(repr, twice))} twice in an array with logical"
            f" axes {tuple(logical_axes)}; a mesh axis can split one dim of an array"
        )
    return make_spec(entries, mesh)


def axis_size(mesh: Any, axes: MeshAxes) -> int:
    """Number of parts that a spec entry cuts a dim into."""
    return math.prod(mesh.shape.get(axis, 1) for axis in as_axes(axes) or ())


def as_axes(axes: Any) -> tuple[str, ...] | None:
    if axes is None or isinstance(axes, tuple):
        return axes or None
    return (axes,) if isinstance(axes, str) else tuple(axes)


def make_spec(entries: Sequence[tuple[str, ...] | None], mesh: Any) -> PartitionSpec:
    """Leaves out axes of size 1 and trailing Nones, so that equal layouts are equal values."""
    kept: list[MeshAxes] = []
    for entry in entries:
        axes = tuple(axis for axis in entry or () if mesh.shape.get(axis, 1) > 1)
        kept.append(axes if len(axes) > 1 else axes[0] if axes else None)
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def check_mesh(mesh: Mesh) -> None:
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            f"mesh axes must be of type Auto, got {mesh.axis_types}; make the mesh with"
            f" jaxtrain.make_mesh, or pass axis_types to jax.make_mesh"
        )


def say_axes(axes: MeshAxes, mesh: Any) -> str:
    """Names mesh axes with their sizes, without those of size 1."""
    sizes = [(axis, mesh.shape.get(axis, 1)) for axis in as_axes(axes) or ()]
    return " x ".join(f"{axis}={size}" for axis, size in sizes if size > 1)


DEFAULT_RULES = ShardingRules(
    storage={
        "embed": "fsdp",
        "vocab": "tensor",
        "mlp": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "layers": None,
        "length": None,
    },
    compute={
        "batch": ("data", "fsdp"),
        "length": None,
        "embed": None,
        "vocab": "tensor",
        "mlp": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "head_dim": None,
        "layers": None,
    },
)
"""FSDP over `embed`, Megatron-style tensor parallelism over `mlp`, heads and vocabulary."""
