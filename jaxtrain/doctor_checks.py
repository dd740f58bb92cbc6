"""From facts to verdicts: pure functions of what `doctor_facts` found, on one process and on all.

ok      as it should be
note    works, but worth knowing
wrong   a run would fail, or leave something idle
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.launch.meeting import format_ids
from jaxtrain.units import nbytes, seconds, several

__all__ = ["Finding", "check_process", "check_together", "hosts"]

OK, NOTE, WRONG = "ok", "note", "wrong"
_LOW_BYTES = 2**30
_SKEW_SECONDS = 1.0
# Hosts of one kind report a little more or less memory each.
_MEMORY_TOLERANCE = 0.05

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the doctor."""

    check: str
    verdict: str
    text: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""


def check_process(facts: Facts) -> list[Finding]:
    """What a process can say without the others, one finding for each check."""
    return [
        _devices(facts["devices"]),
        _driver(facts["gpus"]),
        _gpus(facts["gpus"], facts["devices"]),
        _memory(facts["memory_bytes"], facts["gpus"]),
        _names(facts["names"], facts["num_processes"]),
        _ports(facts["port"], facts["outgoing_ports"]),
        _directory("workdir", facts["workdir"], "give another --workdir"),
        _cache(facts["cache"]),
        _packages(facts["versions"]),
    ]


def _devices(devices: Facts) -> Finding:
    if error := devices.get("error"):
        return Finding(
            "devices",
            WRONG,
            f"JAX finds none: {error}",
            "end what else uses them, see the driver below; JAX_PLATFORMS=cpu trains on the CPU",
        )
    kinds = ", ".join(devices["kinds"])
    return Finding("devices", OK, f"{several(devices['count'], 'device')}: {kinds}")


def _driver(gpus: Facts) -> Finding:
    if error := gpus.get("error"):
        return Finding(
            "driver", WRONG, f"NVIDIA's says nothing: {error}", "try nvidia-smi; restart the node"
        )
    if not gpus["cuda"]:
        if gpus["on_bus"]:
            return Finding(
                "driver",
                WRONG,
                f"none for the NVIDIA GPUs on the bus ({gpus['on_bus']})",
                "install NVIDIA's driver; start a container with its GPUs (--gpus all, --nv)",
            )
        return Finding("driver", OK, "none, and no NVIDIA GPU on the bus")
    major, minor = gpus["cuda"] // 1000, gpus["cuda"] % 1000 // 10
    text = f"NVIDIA {gpus['driver'] or 'of unknown version'}, for CUDA up to {major}.{minor}"
    needed = [int(plugin.removeprefix("jax_cuda")[:2]) for plugin in gpus["plugins"]]
    if needed and min(needed) > major:
        return Finding(
            "driver",
            WRONG,
            f"{text}, but {', '.join(gpus['plugins'])} needs CUDA {min(needed)}",
            f"bash scripts/setup.sh cuda{major}, or a newer driver",
        )
    return Finding("driver", OK, text)


def _gpus(gpus: Facts, devices: Facts) -> Finding:
    if not gpus.get("installed"):
        return Finding("gpus", OK, "none")
    installed, visible = gpus["installed"], gpus["visible"]
    shown = f"{visible} of {installed} visible (CUDA_VISIBLE_DEVICES={gpus['visible_devices']})"
    if gpus["visible_devices"] is None:
        shown = f"{installed} visible"
    if gpus["platforms"].split(",")[0] == "cpu":
        return Finding(
            "gpus", NOTE, f"{shown}, none used: JAX_PLATFORMS={gpus['platforms']}", "unset it"
        )
    if not gpus["plugins"]:
        advice = f"bash scripts/setup.sh cuda{min(gpus['cuda'] // 1000, 13)}"
        return Finding("gpus", WRONG, f"{shown}, but JAX has no package for them", advice)
    used = devices.get("count", 0) if devices.get("platform") == "gpu" else 0
    if not visible or used != visible:
        return Finding(
            "gpus",
            WRONG,
            f"{shown}, {used} used by JAX",
            "let CUDA_VISIBLE_DEVICES name GPUs that are there, or unset it; see the devices",
        )
    if visible < installed:
        return Finding(
            "gpus", NOTE, f"{shown}, all used", "nothing, if the others belong to somebody else"
        )
    return Finding("gpus", OK, f"{shown}, all used")


def _memory(host_bytes: int, gpus: Facts) -> Finding:
    device_bytes = gpus.get("installed", 0) * gpus.get("device_bytes", 0)
    if not device_bytes:
        return Finding("memory", OK, f"{nbytes(host_bytes)} on the host")
    text = f"{nbytes(host_bytes)} on the host, {nbytes(device_bytes)} on its GPUs"
    if host_bytes < device_bytes:
        return Finding(
            "memory",
            NOTE,
            f"{text}: a state that fills them does not fit into it",
            "--plan=here says what a run needs on the host",
        )
    return Finding("memory", OK, text)


def _names(names: Facts, num_processes: int) -> Finding:
    host, addresses = names["host"], ", ".join(names["addresses"])
    if names["coordinator"] and not names["coordinator_addresses"]:
        return Finding(
            "names",
            WRONG,
            f"the coordinator {names['coordinator']} has no address here",
            "give its address with --coordinator=HOST:PORT, or add it to /etc/hosts or the DNS",
        )
    advice = f"map {host} to the machine's own address in /etc/hosts"
    if not addresses:
        verdict = WRONG if num_processes > 1 else NOTE
        return Finding("names", verdict, f"the host name {host} has no address", advice)
    if names["is_loopback"] and num_processes == 1:
        return Finding(
            "names",
            NOTE,
            f"{host} is {addresses}, which other machines cannot reach",
            f"nothing for a run on one machine; else {advice}",
        )
    return Finding("names", OK, f"{host} is {addresses}")


def _ports(port: int, outgoing: Sequence[int]) -> Finding:
    if not port:
        return Finding("ports", OK, "none needed by a single process")
    if outgoing and outgoing[0] <= port <= outgoing[-1]:
        return Finding(
            "ports",
            NOTE,
            f"{port} of the coordinator is one of those that outgoing connections get"
            f" ({outgoing[0]} to {outgoing[-1]}), so it may be taken at times",
            "give one outside of them with --coordinator=HOST:PORT",
        )
    return Finding("ports", OK, f"{port} of the coordinator")


def _directory(check: str, directory: Facts, advice: str) -> Finding:
    if directory["error"]:
        text = f"{directory['path']} cannot be written: {directory['error']}"
        return Finding(check, WRONG, text, f"{advice}, or mend the rights or the disk")
    text = f"{directory['path']} can be written, {nbytes(directory['free_bytes'])} free"
    if directory["free_bytes"] < _LOW_BYTES:
        return Finding(check, NOTE, text, f"{advice}, or make room")
    return Finding(check, OK, text)


def _cache(cache: Facts) -> Finding:
    if not cache["path"]:
        return Finding("cache", OK, cache["store"] or "compiled programs are not kept")
    return _directory("cache", cache, "give another --compilation_cache_dir")


def _packages(versions: Mapping[str, str]) -> Finding:
    return Finding("packages", OK, ", ".join(f"{name} {v}" for name, v in versions.items()))


# All processes


def check_together(
    everybody: Sequence[Facts],
    joining: Callable[[Sequence[Facts]], None],
    share: Callable[[int, int, int], Sequence[int]],
) -> list[Finding]:
    """What is seen only beside the others, by process id.

    Args:
        everybody: facts of all processes.
        joining: raises where a run would refuse to join them.
        share: (visible devices, which of the node's processes, how many) -> those it uses; may
            raise as well.
    """
    return [
        _joining(everybody, joining),
        _shares(everybody, share),
        _odd_hosts(everybody),
        _shared_directory(everybody),
        _clocks(everybody),
    ]


def _joining(everybody: Sequence[Facts], joining: Callable[[Sequence[Facts]], None]) -> Finding:
    try:
        joining(everybody)
    except ValueError as error:
        text, _, advice = str(error).rpartition("; ")
        return Finding("together", WRONG, text, advice)
    return Finding("together", OK, f"{len(everybody)} processes fit together")


def _shares(everybody: Sequence[Facts], share: Callable[[int, int, int], Sequence[int]]) -> Finding:
    idle = []
    for node, members in _by_node(everybody).items():
        seen, used = set(), set()
        for place, who in enumerate(members):
            if who["num_gpus"] is None:
                continue
            names = _visible_names(who["gpus"])
            seen.update(names)
            try:
                used.update(names[i] for i in share(len(names), place, len(members)))
            except ValueError as error:
                text, _, advice = str(error).partition("; ")
                return Finding("shares", WRONG, f"{node}: {text}", advice)
        if seen - used:
            idle.append(f"{', '.join(sorted(seen - used))} of {node}")
    if idle:
        return Finding(
            "shares",
            WRONG,
            f"visible GPUs that no process would use: {'; '.join(idle)}",
            "start more processes on a node, or leave out --process_per",
        )
    return Finding("shares", OK, "no GPU would be idle")


def _visible_names(gpus: Facts) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that a process sees, in its order."""
    if gpus["visible_devices"] is None:
        return [str(i) for i in range(gpus["visible"])]
    return gpus["visible_devices"].split(",")[: gpus["visible"]]


def _odd_hosts(everybody: Sequence[Facts]) -> Finding:
    rows = hosts(everybody)
    odd = [
        f"{row['host']} has {column} {row[column]} instead of {_usual(rows, column)}"
        for row in rows
        for column in row["odd"]
    ]
    if not odd:
        return Finding("hosts", OK, "all alike")
    is_wrong = any("devices" in row["odd"] or "packages" in row["odd"] for row in rows)
    return Finding(
        "hosts",
        WRONG if is_wrong else NOTE,
        "; ".join(odd),
        "make the hosts alike, or leave it out",
    )


def _shared_directory(everybody: Sequence[Facts]) -> Finding:
    outside = [who["process_id"] for who in everybody if not who.get("is_shared", True)]
    if outside:
        return Finding(
            "shared",
            WRONG,
            f"process 0 does not see the workdir of process {format_ids(outside)}",
            "give a --workdir on a file system that all hosts share",
        )
    return Finding("shared", OK, "the workdir is the same directory for all")


def _clocks(everybody: Sequence[Facts]) -> Finding:
    worst = max(everybody, key=lambda who: abs(who["clock_skew_seconds"]))
    skew, round_trip = abs(worst["clock_skew_seconds"]), worst["round_trip_seconds"]
    text = f"at most {seconds(skew)} apart (+-{seconds(round_trip / 2)})"
    if skew > _SKEW_SECONDS:
        return Finding(
            "clocks", NOTE, f"{text}: that of {worst['node']}", "let NTP or chrony set it"
        )
    return Finding("clocks", OK, text)


def hosts(everybody: Sequence[Facts]) -> list[dict[str, Any]]:
    """A row for each node; `odd` lists the columns in which it differs from most others."""
    rows: list[dict[str, Any]] = []
    differing = _differing_packages(everybody)
    for node, members in _by_node(everybody).items():
        first = members[0]
        devices = first["devices"]
        rows.append(
            {
                "host": node,
                "processes": format_ids([who["process_id"] for who in members]),
                "devices": devices.get("error")
                or f"{devices['count']} {', '.join(devices['kinds'])}",
                "driver": first["gpus"].get("driver") or "none",
                "memory": nbytes(first["memory_bytes"]),
                "memory_bytes": first["memory_bytes"],
                "packages": _packages_of(members, differing) or "alike",
                "clock": f"{first['clock_skew_seconds']:+.3f} s",
            }
        )
    sizes = [row.pop("memory_bytes") for row in rows]
    # What most have, more or less; of equally many, what the first has.
    usual = max(sizes, key=lambda size: sum(_is_near(size, other) for other in sizes))
    for row, size in zip(rows, sizes, strict=True):
        row["odd"] = [
            name for name in ("devices", "driver", "packages") if row[name] != _usual(rows, name)
        ]
        if not _is_near(size, usual):
            row["odd"].append("memory")
    return rows


def _by_node(everybody: Sequence[Facts]) -> dict[str, list[Facts]]:
    nodes: dict[str, list[Facts]] = {}
    for who in everybody:
        nodes.setdefault(who["node"], []).append(who)
    return nodes


def _differing_packages(everybody: Sequence[Facts]) -> list[str]:
    names = {name: None for who in everybody for name in who["versions"]}
    return [name for name in names if len({who["versions"].get(name) for who in everybody}) > 1]


def _packages_of(members: Sequence[Facts], names: Sequence[str]) -> str:
    found = {name: {who["versions"].get(name) or "absent" for who in members} for name in names}
    return ", ".join(f"{name} {' or '.join(sorted(versions))}" for name, versions in found.items())


def _usual(rows: Sequence[Mapping[str, Any]], column: str) -> str:
    """What most hosts have; of equally many, what the first has."""
    return collections.Counter(row[column] for row in rows).most_common(1)[0][0]


def _is_near(size: int, other: int) -> bool:
    return abs(size - other) <= _MEMORY_TOLERANCE * max(size, other)
