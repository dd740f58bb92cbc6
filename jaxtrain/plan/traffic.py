"""Finds the collectives of a compiled program: over which mesh axes, how many bytes, how often.

What one device sends in one collective of a group of n devices, with F the bytes of the whole
array (all of a gather's result, all of a reduction's input); it receives as much:

    all-gather, reduce-scatter, all-to-all      (n - 1) / n x F
    all-reduce (a reduce-scatter and a gather)  2 (n - 1) / n x F
    collective-permute, broadcast, send         F

These are the numbers of ring algorithms, the least that any algorithm can send but for small
arrays. A collective inside a loop counts as often as the loop turns.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from jaxtrain.mesh import factor_over_nodes
from jaxtrain.plan.collectives import Part, part_of
from jaxtrain.plan.hlo import Module, Site


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program."""

    name: str
    """Of the instruction that starts it."""
    kind: str
    """E.g. `all-gather`."""
    axis: str
    """Mesh axes along which the devices of a group differ, outermost first, joined by `+`."""
    group_size: int
    devices_inside: int
    """Devices of a group that share a host; `group_size` if the group stays inside one."""
    num_bytes: int
    """The whole array, F above."""
    bytes_sent: float
    """By one device, each time it runs."""
    dtypes: tuple[str, ...]
    """As HLO spells them, without doubles."""
    times: int
    """How often it runs in one call of the program."""
    loops: tuple[str, ...]
    """Scopes of the loops around it, outermost first, e.g. `accumulate`, `layers`."""
    source: str
    """`file:line` that traced it."""

    @property
    def spans_hosts(self) -> bool:
        """Whether its bytes go over the network."""
        return self.devices_inside < self.group_size

    @property
    def total_bytes_sent(self) -> float:
        """By one device in one call of the program."""
        return self.times * self.bytes_sent


def communication(
    module: Module, mesh_axes: Mapping[str, int], devices_per_host: int
) -> list[Collective]:
    """Lists the collectives of a program in the order in which they start.

    Args:
        module: from `hlo.parse`.
        mesh_axes: size of every mesh axis, outermost first. The program numbers its devices row
            by row over them.
        devices_per_host: devices that share fast links. Which ones do follows from the way
            `jaxtrain.mesh.make_mesh` lays axes over hosts.

    Raises:
        ValueError: when the mesh does not have as many devices as the program.
    """
    num_devices = math.prod(mesh_axes.values())
    if num_devices != module.num_devices:
        raise ValueError(
            f"the program is for {module.num_devices} devices, the mesh {dict(mesh_axes)} has"
            f" {num_devices}; give the mesh it was compiled for"
        )
    layout = _Layout.of(tuple(mesh_axes.items()), devices_per_host)
    found = []
    for site in module.walk():
        part = part_of(module, site.computation, site.instruction)
        if part is not None and part.kind != "recv" and part.role in ("start", "whole"):
            found.append(_collective(module, site, part, layout))
    return found


def bytes_sent(kind: str, num_bytes: float, group_size: int) -> float:
    """What one device sends; the formulas are in the docstring of this module."""
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return num_bytes * (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * num_bytes * (group_size - 1) / group_size
    return float(num_bytes) if group_size > 1 else 0.0


def loop_scopes(op_name: str) -> tuple[str, ...]:
    """Names of the scopes of the loops in an `op_name`, without the transformations around them.

    `jit(step)/accumulate/while/body/transpose(jvp(layers))/while/body/...` gives `accumulate`,
    `layers`.
    """
    # XLA names what it merged `prefix/(first:second:...)`; the first stands for all.
    scopes = re.findall(r"([^/]+)/while/", op_name.partition(":")[0])
    return tuple(scope.rpartition("(")[2].rstrip(")") for scope in scopes)


def _collective(module: Module, site: Site, part: Part, layout: "_Layout") -> Collective:
    inner = part.instruction
    groups = _groups_of(inner.attributes, layout.num_devices)
    is_pairs = "source_target_pairs" in inner.attributes
    arrays = part.computation.operand_arrays(inner)
    group_size = groups.shape[1]
    whole = sum(array.num_bytes for array in arrays)
    whole *= group_size if part.kind == "all-gather" else 1
    axis, devices_inside = layout.describe(groups)
    return Collective(
        name=site.instruction.name,
        kind=part.kind,
        axis=axis,
        group_size=group_size,
        devices_inside=devices_inside,
        num_bytes=whole,
        bytes_sent=bytes_sent(part.kind, whole, group_size) * (groups.size > 0 or not is_pairs),
        dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
        times=site.times,
        loops=loop_scopes(inner.op_name),
        source=module.source(inner),
    )


# ---------------------------------------------------------------------------------------------
# Device groups
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the devices of a mesh stand."""

    axes: tuple[tuple[str, int], ...]
    hosts: np.ndarray
    """Host of every device."""

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, axes: tuple[tuple[str, int], ...], devices_per_host: int) -> "_Layout":
        """Lays axes over hosts as `make_mesh` does."""
        sizes = dict(axes)
        factors = factor_over_nodes(sizes, devices_per_host)
        position = np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values()))
        hosts = np.zeros_like(position[0])
        for (name, _), index in zip(axes, position, strict=True):
            across, inside = factors.get(name, (1, 1))
            hosts = hosts * across + index // inside
        return cls(axes, hosts)

    @property
    def num_devices(self) -> int:
        return self.hosts.size

    def describe(self, groups: np.ndarray) -> tuple[str, int]:
        """(mesh axes along which devices of a group differ, devices of a group on one host)."""
        position = np.unravel_index(groups, tuple(size for _, size in self.axes))
        differs = [bool((index != index[:, :1]).any()) for index in position]
        names = [name for (name, _), differ in zip(self.axes, differs, strict=True) if differ]
        hosts = np.sort(self.hosts[groups], axis=1)
        num_hosts = 1 + (np.diff(hosts, axis=1) != 0).sum(axis=1)
        return "+".join(names), int(groups.shape[1] // max(num_hosts.max(initial=1), 1))


def _groups_of(attributes: Mapping[str, str], num_devices: int) -> np.ndarray:
    """The groups of a collective, [groups, devices of a group]; of a permutation its pairs."""
    if "source_target_pairs" in attributes:
        pairs = parse_groups(attributes["source_target_pairs"], num_devices)
        return pairs[pairs[:, 0] != pairs[:, 1]] if pairs.size else pairs.reshape(0, 2)
    return parse_groups(attributes.get("replica_groups", "{}"), num_devices)


@functools.lru_cache(maxsize=1 << 10)
def parse_groups(text: str, num_devices: int) -> np.ndarray:
    """Parses device groups in any of the forms that XLA writes: [groups, devices of a group].

        {{0,1},{2,3}}   listed; {} is one group of all
        [4,2]<=[2,4]T(1,0)   arange(8).reshape(2, 4).transpose(1, 0).reshape(4, 2)
        mesh['a'=2,'b'=4] {'b'}   along axes of a mesh of XLA's own

    A part of an axis is written `'b':(2)2`: of the size 4, the 2 that follow an outer 2.

    Raises:
        ValueError: for any other form.
    """
    if text.startswith("{"):
        groups = re.findall(r"\{([\d,\s]+)\}", text)
        if not groups:
            return np.arange(num_devices).reshape(1, -1)
        return np.array([[int(n) for n in group.split(",")] for group in groups])
    if text.startswith("mesh"):
        return _mesh_groups(text)
    return _iota(text)


def _iota(text: str) -> np.ndarray:
    found = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", text)
    if found is None or found[2] is None:
        raise ValueError(f"unknown form of device groups: {text[:200]!r}")
    shape, source = (tuple(int(n) for n in found[i].split(",")) for i in (1, 2))
    devices = np.arange(math.prod(source)).reshape(source)
    if found[3]:
        devices = devices.transpose([int(n) for n in found[3].split(",")])
    return devices.reshape(shape)


def _mesh_groups(text: str) -> np.ndarray:
    found = re.match(r"mesh\[(.*?)(?:,\s*device_ids=\((.*)\))?\]\s*\{(.*)\}$", text)
    if found is None:
        raise ValueError(f"unknown form of device groups: {text[:200]!r}")
    sizes = {name: int(n) for name, n in re.findall(r"'?([\w.\-]+)'?=(\d+)", found[1])}
    devices = np.arange(math.prod(sizes.values()))
    if found[2]:
        ids = found[2].strip("()")
        is_listed = "<=" not in ids
        devices = np.array([int(n) for n in ids.split(",")]) if is_listed else _iota(ids).ravel()
    wanted = re.findall(r"'?([\w.\-]+?)'?(?::\((\d+)\)(\d+))?(?:,|$)", found[3])
    cuts = {
        name: sorted({1, size, *_cuts([w for w in wanted if w[0] == name], size)})
        for name, size in sizes.items()
    }
    # Every axis becomes its parts, outermost first; those asked for come last.
    dims, inner = [], {}
    for name, ends in cuts.items():
        for start, end in itertools.pairwise(ends):
            for order, (wanted_name, before, size) in enumerate(wanted):
                low, high = (int(before), int(before) * int(size)) if before else (1, sizes[name])
                if wanted_name == name and low <= start and end <= high:
                    inner[len(dims)] = order
            dims.append(end // start)
    last = sorted(inner, key=lambda dim: (inner[dim], dim))
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    group_size = math.prod(dims[dim] for dim in last)
    return devices.reshape(dims).transpose(outer + last).reshape(-1, group_size)


def _cuts(parts: list[tuple[str, str, str]], size: int) -> list[int]:
    return [
        end
        for _, low, part in parts
        for end in ((int(low), int(low) * int(part)) if low else (size,))
    ]
