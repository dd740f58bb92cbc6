"""Reads compiled programs (optimised HLO as text): which collectives run, how often, over what."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes over which its groups reach."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the arrays it makes; XLA combines several collectives into one with many."""
    num_bytes: int
    times: int
    """How often it runs in one call of the program: product of the trip counts around it."""
    op_name: str
    """The named scopes it came from."""


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Lists all collectives of a program that was compiled for `mesh`."""
    computations, entry = _computations(text)
    found = []
    for times, line in _walk(computations, entry, 1):
        match = re.match(r"(?:ROOT )?%\S+ = (.*?) ([a-z-]+?)(-start)?\(", line)
        if not match or match[2] not in COLLECTIVES:
            continue
        shapes, num_bytes = _shapes(match[1])
        op_name = re.search(r'op_name="([^"]*)"', line)
        axes = _axes(line, mesh)
        name = op_name[1] if op_name else ""
        found.append(Collective(match[2], axes, shapes, num_bytes, times, name))
    return found


def reductions(text: str, mesh: Mesh, axis: str) -> list[Collective]:
    """Those that add or scatter sums over a mesh axis."""
    return [
        c
        for c in collectives(text, mesh)
        if c.kind in ("all-reduce", "reduce-scatter") and axis in c.axes
    ]


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line.strip())
    return computations, entry


def _walk(computations: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[int, str]]:
    for line in computations[name]:
        yield times, line
        trips = 1
        if " while(" in line:
            trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            if trip_count is None:
                raise AssertionError(f"a loop without a known trip count: {line}")
            trips = int(trip_count[1])
        for called in re.findall(r"(?:body|calls|to_apply|true_computation)=%?([\w.\-]+)", line):
            yield from _walk(computations, called, times * trips)


def _shapes(text: str) -> tuple[tuple[tuple[int, ...], ...], int]:
    arrays = re.findall(r"\b([a-z]+[0-9]*)\[([\d,]*)\]", text)
    shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, dims in arrays)
    sizes = (ITEM_BYTES[dtype] * math.prod(s) for (dtype, _), s in zip(arrays, shapes, strict=True))
    return shapes, sum(sizes)


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes along which the devices of one group differ."""
    groups = _groups(line, mesh.size)
    shape = tuple(mesh.shape.values())
    positions = [np.stack(np.unravel_index(group, shape)) for group in groups]
    return tuple(
        axis
        for index, axis in enumerate(mesh.axis_names)
        if any(len(set(position[index])) > 1 for position in positions)
    )


def _groups(line: str, num_devices: int) -> list[list[int]]:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    listed = re.search(r"replica_groups=\{\{(.*?)\}\}", line)
    if pairs or listed:
        inside = (pairs or listed)[1]
        return [
            [int(n) for n in group.split(",")] for group in re.split(r"\},\{", inside.strip("{"))
        ]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inner = re.findall(r"'(\w+)'(?=,|$)", named[2])
        outer = [name for name in sizes if name not in inner]
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = [list(sizes).index(name) for name in outer + inner]
        return devices.transpose(order).reshape(-1, math.prod(sizes[n] for n in inner)).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        assert "replica_groups=" not in line or "replica_groups={}" in line, line
        return [list(range(num_devices))]
    to, source = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
    devices = np.arange(math.prod(source)).reshape(source)
    if iota[3]:
        devices = devices.transpose([int(n) for n in iota[3].split(",")])
    return devices.reshape(to).tolist()
