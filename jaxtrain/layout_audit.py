"""The audit: where every array of the train state lives, how large it is there, and why.

Nothing is computed: shapes come from abstract evaluation. The short form is printed at the start
of a run, the whole table with `--audit`, and the golden tables in the tests are made by it.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.mesh import format_sizes
from jaxtrain.models.functional import Model, as_model
from jaxtrain.placement import Layout, opt_state_layouts, param_layouts, param_shardings
from jaxtrain.rules import DEFAULT_RULES, LogicalAxes, ShardingRules, as_axes, axis_size
from jaxtrain.state import TrainState, abstract_state
from jaxtrain.tree import named_leaves
from jaxtrain.units import nbytes

DEFAULT_ALLOW_REPLICATED = 0.02
"""Share of the bytes that may be replicated although a rule could shard them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of the train state."""

    path: str
    """Like `params/layers/mlp/up/kernel`."""
    shape: tuple[int, ...]
    dtype: str
    logical_axes: LogicalAxes | None
    spec: PartitionSpec
    total_bytes: int
    bytes_per_device: int
    is_needlessly_replicated: bool
    """Whole on every device, although one of its dims divides over a mesh axis for storage."""
    why: str

    @property
    def group(self) -> str:
        """The field of the train state: `params`, `opt_state`, ..."""
        return self.path.split("/", 1)[0]


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found; print `short()` or `table()`."""

    mesh: dict[str, int]
    rows: tuple[Row, ...]
    idle_axes: tuple[str, ...]
    """Mesh axes other than those of the batch that split no parameter."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the train state, each array counted once."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the train state on each device."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated_share(self) -> float:
        """Share of `total_bytes` that is replicated although a rule could shard it.

        A property of model and rules: it does not grow with the number of devices.
        """
        wasted = sum(row.total_bytes for row in self.rows if row.is_needlessly_replicated)
        return wasted / max(self.total_bytes, 1)

    def group_bytes_per_device(self) -> dict[str, int]:
        """Bytes on each device by field of the train state."""
        groups: dict[str, int] = {}
        for row in self.rows:
            groups[row.group] = groups.get(row.group, 0) + row.bytes_per_device
        return groups

    def short(self) -> str:
        """One line for the start of a run."""
        groups = ", ".join(
            f"{name} {nbytes(size)}" for name, size in self.group_bytes_per_device().items()
        )
        return (
            f"layout on {format_sizes(self.mesh)}: {nbytes(self.bytes_per_device)} per device"
            f" ({groups}) of {nbytes(self.total_bytes)} in all;"
            f" {self.replicated_share:.2%} replicated although it could be sharded"
        )

    def table(self) -> str:
        """One line per array, and totals."""
        header = ("array", "shape", "logical axes", "spec", "bytes/device", "why")
        cells = [header] + [
            (
                row.path,
                f"{row.dtype}[{','.join(map(str, row.shape))}]",
                _format_axes(row.logical_axes),
                format_spec(row.spec),
                f"{row.bytes_per_device:,}",
                row.why + (" [replicated, could be sharded]" * row.is_needlessly_replicated),
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        lines = []
        for line in cells:
            padded = [
                cell.rjust(width) if column == 4 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
        for name, size in self.group_bytes_per_device().items():
            lines.append(f"{name}: {size:,} bytes per device")
        return "\n".join([*lines, self.short()])

    def to_json(self) -> dict[str, Any]:
        """The audit as plain values, for files and reports."""
        return {
            "mesh": dict(self.mesh),
            "total_bytes": self.total_bytes,
            "bytes_per_device": self.bytes_per_device,
            "replicated_share": self.replicated_share,
            "rows": [
                {
                    "path": row.path,
                    "shape": list(row.shape),
                    "dtype": row.dtype,
                    "logical_axes": None if row.logical_axes is None else list(row.logical_axes),
                    "spec": format_spec(row.spec),
                    "total_bytes": row.total_bytes,
                    "bytes_per_device": row.bytes_per_device,
                    "is_needlessly_replicated": row.is_needlessly_replicated,
                    "why": row.why,
                }
                for row in self.rows
            ],
        }

    def check(self, allow_replicated: float = DEFAULT_ALLOW_REPLICATED) -> None:
        """Refuses a layout that wastes memory or devices without anybody having said so.

        Raises:
            ConfigError: when more than `allow_replicated` is replicated although a rule could
                shard it, or a mesh axis splits nothing.
        """
        if allow_replicated >= 1:
            return
        if self.idle_axes:
            named = ", ".join(f"{axis}={self.mesh[axis]}" for axis in self.idle_axes)
            raise ConfigError(
                f"mesh axis {named} splits no parameter, so its devices would repeat each other's"
                f" work; use the axis fsdp instead, or give the parameters logical axes or path"
                f" rules that map to it (allow_replicated=1 allows it)"
            )
        if self.replicated_share > allow_replicated:
            rows = [row for row in self.rows if row.is_needlessly_replicated]
            rows.sort(key=lambda row: -row.total_bytes)
            named = ", ".join(f"{row.path} ({nbytes(row.total_bytes)})" for row in rows[:5])
            more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
            raise ConfigError(
                f"{self.replicated_share:.1%} of the train state is replicated on every device"
                f" although a rule could shard it, more than allow_replicated={allow_replicated}:"
                f" {named}{more}; give them rules, or allow it"
            )


def audit(
    model: Model | tuple,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    allow_replicated: float = DEFAULT_ALLOW_REPLICATED,
    ema: bool = False,
    frozen: Any = None,
) -> Audit:
    """Says where parameters and optimizer state of a model would live on a mesh.

    Args:
        model: a `Model` or a pair of functions (init, apply).
        mesh: from `make_mesh`.
        optimizer: its state is counted too; None for parameters alone.
        rules: the rules of the run.
        allow_replicated: see `Audit.check`; 1 allows everything.
        ema: whether the state has a moving average of the parameters.
        frozen: tree of bool like the parameters; those marked True have no average.

    Returns:
        One row per array; print its `table()` or `short()`.

    Raises:
        ConfigError: as `Audit.check` and `param_layouts` do.
    """
    model = as_model(model)
    state = abstract_state(model, optimizer or optax.identity(), ema=ema, frozen=frozen)
    return audit_state(state, model, mesh, rules=rules, allow_replicated=allow_replicated)


def audit_state(
    state: TrainState,
    model: Model,
    mesh: Any,
    *,
    rules: ShardingRules = DEFAULT_RULES,
    allow_replicated: float = DEFAULT_ALLOW_REPLICATED,
) -> Audit:
    """`audit` of an abstract state that is there already, on a mesh that may be abstract too."""
    logical_axes = model.logical_axes
    layouts = param_layouts(state.params, logical_axes, mesh, rules)
    shardings = param_shardings(state.params, logical_axes, mesh, rules)
    groups: list[tuple[str, list[Layout]]] = [("params", layouts)]
    if state.ema_params is not None:
        averaged = {path for path, _ in named_leaves(state.ema_params)}
        groups.append(("ema_params", [each for each in layouts if each.path in averaged]))
    if jax.tree.leaves(state.opt_state):
        groups.append(
            ("opt_state", opt_state_layouts(state.opt_state, state.params, shardings, mesh))
        )
    storage_axes = {axis for axes in rules.storage.values() for axis in as_axes(axes) or ()}
    split_axes = [a for a in mesh.axis_names if a in storage_axes | {"fsdp"} and mesh.shape[a] > 1]
    whole = model.kept_whole and re.compile(model.kept_whole)
    rows = [
        _row(name, each, mesh, [] if whole and whole.search(each.path) else split_axes)
        for name, group in groups
        for each in group
    ]
    why = "model state is replicated"
    rows += [
        _row("model_state", Layout(path, leaf.shape, leaf.dtype, None, PartitionSpec(), why), mesh)
        for path, leaf in named_leaves(state.model_state)
    ]
    used = {axis for row in rows for entry in row.spec for axis in as_axes(entry) or ()}
    used |= set(as_axes(rules.compute.get("batch")) or ())
    idle = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in used)
    result = Audit(dict(mesh.shape), tuple(rows), idle)
    result.check(allow_replicated)
    return result


def format_spec(spec: PartitionSpec) -> str:
    """Writes a spec as it is written in code, e.g. `P(None, 'fsdp')`."""
    return f"P({', '.join(map(repr, spec))})"


def _row(group: str, layout: Layout, mesh: Mesh, split_axes: list[str] | None = None) -> Row:
    parts = math.prod(axis_size(mesh, entry) for entry in layout.spec)
    total = math.prod(layout.shape) * layout.dtype.itemsize
    could_shard = any(
        size and size % mesh.shape[axis] == 0 for size in layout.shape for axis in split_axes or ()
    )
    return Row(
        path=f"{group}/{layout.path}",
        shape=tuple(layout.shape),
        dtype=str(layout.dtype),
        logical_axes=layout.logical_axes,
        spec=layout.spec,
        total_bytes=total,
        bytes_per_device=total // parts,
        is_needlessly_replicated=parts == 1 and could_shard,
        why=layout.why,
    )


def _format_axes(axes: LogicalAxes | None) -> str:
    return "-" if axes is None else ",".join(name or "-" for name in axes)
