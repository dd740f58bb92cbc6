"""Device meshes: from `data:2,fsdp:4` to a `jax.sharding.Mesh`.

A mesh axis is a way to split work. From outer to inner:

- `data`: replicated state, other rows of the batch on every device;
- `fsdp`: sharded state, other rows of the batch on every device;
- `tensor`: one layer split over devices that see the same rows.

The order of the names in the flag has no meaning. Outer axes span nodes, inner axes stay inside
a node, where the links are fast: `factor_over_nodes` says how each axis is split. A node is a
machine, whatever the number of processes on it: `distributed` knows them from the launcher.
"""

import collections
import difflib
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtrain.distributed import node_names
from jaxtrain.errors import ConfigError

AXES = ("data", "fsdp", "tensor")
"""Mesh axes, outer to inner."""

AUTO = "auto"
"""In place of a mesh: the best one is searched for (`jaxtrain.plan.search`)."""

_LATER_AXES = ("stage", "expert", "context")

_log = logging.getLogger(__name__)


def parse_mesh(text: str) -> dict[str, int]:
    """Parses `data:2,fsdp:-1` into sizes by axis name; one size may be -1.

    Raises:
        ConfigError: for anything but known axis names, once each, with sizes.
    """
    if text == AUTO:
        raise ConfigError(
            f"mesh={AUTO} is searched for by scripts that start with jaxtrain.main; name a mesh"
            f" here, such as data:2,fsdp:4"
        )
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, colon, size = (piece.strip() for piece in part.partition(":"))
        if not name or not colon:
            raise ConfigError(
                f"mesh={text!r} has {part.strip()!r} where an axis and its size must stand;"
                f" write it like data:2,fsdp:4 with the axes {_axis_list()}"
            )
        if name in sizes:
            raise ConfigError(f"mesh={text!r} names the axis {name!r} twice; name it once")
        try:
            sizes[name] = int(size)
        except ValueError:
            raise ConfigError(
                f"mesh={text!r} gives axis {name!r} the size {size!r}; a size is a positive"
                f" integer, or -1 (once) for all devices that are left"
            ) from None
    _check_sizes(sizes)
    return sizes


def resolve_mesh(sizes: Mapping[str, int], num_devices: int, platform: str = "") -> dict[str, int]:
    """Fills in a -1 and the axes that are not named.

    Args:
        sizes: by axis name, as `parse_mesh` makes them.
        num_devices: to be used, all of them.
        platform: of the devices, for the message.

    Returns:
        A size for every axis of `AXES`, in that order, whose product is `num_devices`.

    Raises:
        ConfigError: when the sizes cannot use exactly `num_devices` devices.
    """
    _check_sizes(sizes)
    given = format_sizes(sizes)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    resolved = {axis: sizes.get(axis, 1) for axis in AXES}
    if -1 in sizes.values():
        if num_devices % fixed:
            raise ConfigError(
                f"mesh={given} cannot fill its -1: {num_devices} devices are not divisible by the"
                f" product {fixed} of the other axes (axes: {_axis_list()})"
            )
        return {a: num_devices // fixed if n == -1 else n for a, n in resolved.items()}
    if fixed != num_devices:
        is_simulable = platform == "cpu" and fixed > num_devices
        simulate = f", or simulate {fixed} with --num_cpu_devices={fixed}" * is_simulable
        raise ConfigError(
            f"mesh={given} needs {fixed} devices (the product of its sizes) but there"
            f" {'is' if num_devices == 1 else 'are'} {num_devices}; make the product"
            f" {num_devices}, or let one axis be -1 (axes: {_axis_list()}){simulate}, or pass an"
            f" explicit device list to make_mesh"
        )
    return resolved


def make_mesh(
    mesh: str | Mapping[str, int] = "fsdp:-1",
    *,
    devices: Sequence[Any] | None = None,
    devices_per_node: int | None = None,
) -> Mesh:
    """Makes the mesh over all devices, or over exactly those given.

    Args:
        mesh: text such as `data:2,fsdp:-1`, or sizes by axis name.
        devices: all of `jax.devices()` unless given; never a part of them by accident.
        devices_per_node: devices that share fast links, in the order of the processes; those of
            one node of the run that was joined unless given.

    Returns:
        A mesh with all of `AXES` (unnamed ones have size 1), of type `AxisType.Auto`: XLA
        propagates the layouts, constraints steer it.

    Raises:
        ConfigError: when the mesh does not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ConfigError("a mesh needs at least one device, the device list given is empty")
    try:
        requested = parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh)
        sizes = resolve_mesh(requested, len(devices), devices[0].platform)
    except ConfigError as error:
        raise ConfigError(f"{error} [{_count(len(devices), devices[0].platform)}]") from None
    if devices_per_node is None:
        devices = _by_node(devices)
        devices_per_node = _devices_per_node(devices)
    else:
        devices.sort(key=lambda device: (device.process_index, device.id))
    factors = factor_over_nodes(sizes, devices_per_node)
    if devices[0].platform != "tpu":
        _require_nested(sizes, factors, devices_per_node)
    _warn_if_split_badly(sizes, factors, devices_per_node)
    types = (AxisType.Auto,) * len(AXES)
    if len(devices) == devices_per_node or devices[0].platform == "tpu":
        # Within one node, and on a TPU's torus, JAX knows the better order of the devices.
        shape = tuple(sizes.values())
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    return Mesh(_over_nodes(devices, factors), AXES, axis_types=types)


def factor_over_nodes(
    sizes: Mapping[str, int], devices_per_node: int
) -> dict[str, tuple[int, int]]:
    """Splits every axis into (size across nodes, size inside a node), filling inner axes first."""
    factors = {}
    left = devices_per_node
    for axis in reversed(AXES):
        inside = math.gcd(sizes.get(axis, 1), left)
        left //= inside
        factors[axis] = (sizes.get(axis, 1) // inside, inside)
    return {axis: factors[axis] for axis in AXES}


def find_unnested(factors: Mapping[str, tuple[int, int]]) -> tuple[str, str] | None:
    """(axis that leaves the nodes, axis outside of it that stays in them); None if there are none.

    Args:
        factors: from `factor_over_nodes`.
    """
    crossing = ""
    for axis in reversed(AXES):
        across, inside = factors[axis]
        if crossing and inside > 1:
            return crossing, axis
        if across > 1:
            crossing = axis
    return None


def describe_mesh(mesh: Mesh) -> str:
    """Says a mesh in one line: sizes, devices, and how axes spread over nodes."""
    devices = list(mesh.devices.flat)
    sizes = dict(mesh.shape)
    text = f"mesh {format_sizes(sizes)} on {_count(len(devices), devices[0].platform)}"
    num_processes = len({device.process_index for device in devices})
    num_nodes = len({node_of(device) for device in devices})
    if num_processes == 1:
        return text
    if num_nodes == 1:
        return f"{text} of {num_processes} processes on one node"
    factors = factor_over_nodes(sizes, _devices_per_node(devices))
    split = ", ".join(
        f"{axis} {across} across x {inside} inside"
        for axis, (across, inside) in factors.items()
        if across * inside > 1
    )
    return f"{text} of {num_nodes} nodes ({split})"


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Writes sizes as the flag takes them, in canonical order, without axes of size 1."""
    named = [axis for axis in AXES if axis in sizes] + [a for a in sizes if a not in AXES]
    shown = [axis for axis in named if sizes[axis] != 1] or named[:1]
    return ",".join(f"{axis}:{sizes[axis]}" for axis in shown)


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if name in _LATER_AXES:
            raise ConfigError(
                f"mesh axis {name!r} is not supported yet; the axes are {_axis_list()}"
            )
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown mesh axis {name!r}; the axes are {_axis_list()}{hint}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ConfigError(f"mesh axis {name!r} has the size {size!r}; a size is an integer")
        if size < 1 and size != -1:
            raise ConfigError(
                f"mesh axis {name!r} has the size {size}; a size is a positive integer, or -1"
                f" (once) for all devices that are left"
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(
            f"mesh={format_sizes(sizes)} leaves {' and '.join(open_axes)} open; only one axis may"
            f" be -1"
        )


def _over_nodes(devices: Sequence[Any], factors: Mapping[str, tuple[int, int]]):
    """Arranges devices, given node by node, so that the inner part of every axis lies in one."""
    across = [factors[axis][0] for axis in AXES]
    inside = [factors[axis][1] for axis in AXES]
    grid = np.array(devices, dtype=object).reshape(across + inside)
    # [a0, a1, a2, i0, i1, i2] -> [a0, i0, a1, i1, a2, i2] -> [a0 * i0, a1 * i1, a2 * i2]
    order = [i + part * len(AXES) for i in range(len(AXES)) for part in (0, 1)]
    return grid.transpose(order).reshape([a * i for a, i in zip(across, inside, strict=True)])


def _warn_if_split_badly(
    sizes: Mapping[str, int], factors: Mapping[str, tuple[int, int]], devices_per_node: int
) -> None:
    across, inside = factors["tensor"]
    if across == 1:
        return
    better = dict(sizes) | {"tensor": inside, "fsdp": sizes["fsdp"] * across}
    _log.warning(
        "mesh=%s splits tensor:%d across %d nodes of %d devices, whose links are slow for it; "
        "better: mesh=%s",
        format_sizes(sizes),
        sizes["tensor"],
        across,
        devices_per_node,
        format_sizes(better),
    )


def _require_nested(
    sizes: Mapping[str, int], factors: Mapping[str, tuple[int, int]], devices_per_node: int
) -> None:
    unnested = find_unnested(factors)
    if unnested is None:
        return
    crossing, axis = unnested
    num_nodes = math.prod(sizes.values()) // devices_per_node
    raise ConfigError(
        f"mesh={format_sizes(sizes)} does not fit {num_nodes} nodes of {devices_per_node} devices:"
        f" {crossing} would go across nodes, and {axis}, which is outside of it, not; sizes that"
        f" work: {' or '.join(_nested_sizes(sizes, devices_per_node))}"
    )


def _nested_sizes(sizes: Mapping[str, int], devices_per_node: int) -> list[str]:
    """The nearest sizes whose inner axes stay inside of a node."""
    num_devices = math.prod(sizes.values())
    used = [axis for axis in AXES if sizes[axis] > 1]
    inner = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    found = []
    for rest in itertools.product(inner, repeat=len(used) - 1):
        first, left = divmod(num_devices, math.prod(rest))
        inside = math.prod(rest[1:])
        # All inside but the first two, which the border of a node may split.
        if left or devices_per_node % inside:
            continue
        node_has = devices_per_node // inside
        if rest[0] % node_has and node_has % rest[0]:
            continue
        candidate = dict(sizes) | dict(zip(used, (first, *rest), strict=True))
        distance = sum(abs(math.log(candidate[axis] / sizes[axis])) for axis in used)
        found.append((distance, format_sizes(candidate)))
    return [text for _, text in sorted(found)[:3]]


def node_of(device: Any) -> Any:
    """The node of a device: by name if a run of several processes was joined, else its process."""
    names = node_names()
    index = device.process_index
    return names[index] if index < len(names) else index


def _by_node(devices: Sequence[Any]) -> list[Any]:
    """Sorts devices node by node, whatever the order in which processes were given to nodes."""
    place = lambda device: (device.process_index, device.id)  # noqa: E731
    ordered = sorted(devices, key=place)
    first = {}
    for device in ordered:
        first.setdefault(node_of(device), len(first))
    return sorted(ordered, key=lambda device: (first[node_of(device)], place(device)))


def _devices_per_node(devices: Sequence[Any]) -> int:
    for what, key in (("process", lambda device: device.process_index), ("node", node_of)):
        counts = collections.Counter(map(key, devices))
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{what} {i}: {n}" for i, n in sorted(counts.items()))
            raise ConfigError(
                f"every {what} must bring the same number of devices to the mesh ({listed})"
            )
    return next(iter(counts.values()))


def _axis_list() -> str:
    return ", ".join(AXES)


def _count(num_devices: int, platform: str) -> str:
    return f"{num_devices} {platform} device{'s' if num_devices != 1 else ''}"
