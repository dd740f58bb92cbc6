"""Devices to plan for, by name: `h100:16x8`, `tpu-v5p:4x4x8`, `cpu:8`, `here`.

The figures of each kind of device are in a file of `targets/`, with the source of every one. No
array library is imported here: a wrong target is refused before anything heavy starts.
"""

import dataclasses
import functools
import importlib.resources
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError

HERE = "here"
SIMULATED = "@cpu"
"""Behind a target: compile for simulated CPU devices instead, which needs no further packages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What one kind of device has; rates are nominal, per device, links one way."""

    name: str
    """Of the file and in `--plan`, e.g. `h100`."""
    description: str
    platform: str
    """As `jax.Device.platform` says it."""
    device_kind: str
    """As `jax.Device.device_kind` says it, or the beginning of that."""
    max_devices_per_host: int
    peak_flops: float
    """FLOP/s of the matrix units in bfloat16, dense."""
    sustained_flops: float
    """FLOP/s that the best matrix products in bfloat16 were measured to reach: clocks sink under
    a full load."""
    float32_rate: float
    """Rate of float32 operands on the matrix units, as a share of that in bfloat16."""
    memory_bandwidth: float
    """Bytes per second."""
    memory_bytes: int
    link_bandwidth: float
    """Bytes per second to devices of the same host."""
    network_bandwidth: float
    """Bytes per second to devices of other hosts."""
    link_latency: float
    """Seconds of one step of a ring between devices of one host."""
    network_latency: float
    """The same between devices of two hosts."""
    host_memory_bytes: int
    """Of a typical host; 0: of this machine."""
    context_bytes: int
    """Device memory that the runtime takes for itself."""
    communicator_bytes: int
    """Device memory for the buffers of one communicator."""
    topology: str = ""
    """Name that a TPU's compiler knows the kind by."""
    topology_dims: int = 0
    """Dims of a TPU's torus."""
    compute_capability: str = ""
    """Of an NVIDIA GPU."""
    accelerated_features: bool = False
    """Whether code for exactly this GPU may be generated (`sm_90a` rather than `sm_90`)."""
    gpu_device_info: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    """What XLA asks of a GPU; the fields of its GpuDeviceInfoProto."""
    sources: Mapping[str, str]
    """Name of a field -> where its value is from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Devices of one kind, and how many."""

    text: str
    """As it was given."""
    kind: DeviceKind
    num_hosts: int
    devices_per_host: int
    torus: tuple[int, ...] = ()
    """Shape of a TPU slice."""
    is_simulated: bool = False
    """Compiled for simulated CPU devices: an estimate."""

    @property
    def num_devices(self) -> int:
        """Over all hosts."""
        return self.num_hosts * self.devices_per_host

    def on_hosts(self, num_hosts: int) -> "Target":
        """The same hosts, another number of them."""
        if self.torus:
            raise ValueError("a TPU slice has a shape, not a number of hosts")
        name = self.text.partition(":")[0]
        text = f"{name}:{num_hosts}x{self.devices_per_host}{SIMULATED * self.is_simulated}"
        return dataclasses.replace(self, text=text, num_hosts=num_hosts)

    def describe(self) -> str:
        """In words: `128 x NVIDIA H100 SXM5 80 GB, 16 hosts of 8`."""
        devices = f"{self.num_devices} x {self.kind.description}"
        if self.num_hosts == 1:
            return f"{devices}, one host"
        return f"{devices}, {self.num_hosts} hosts of {self.devices_per_host}"


def kind_names() -> list[str]:
    """Names of all kinds of devices that there are figures of."""
    files = importlib.resources.files("jaxtrain.plan") / "targets"
    return sorted(f.name.removesuffix(".toml") for f in files.iterdir() if f.name.endswith(".toml"))


@functools.cache
def device_kind(name: str) -> DeviceKind:
    """Reads the figures of a kind of device."""
    file = importlib.resources.files("jaxtrain.plan") / "targets" / f"{name}.toml"
    return DeviceKind(name=name, **tomllib.loads(file.read_text()))


def kind_of(platform: str, device_kind_text: str) -> DeviceKind | None:
    """The kind of a device that is attached; None where there are no figures of it.

    Args:
        platform: `jax.Device.platform`.
        device_kind_text: `jax.Device.device_kind`.
    """
    kinds = [device_kind(name) for name in kind_names()]
    found = [k for k in kinds if k.platform == platform and k.device_kind in device_kind_text]
    return max(found, key=lambda kind: len(kind.device_kind), default=None)


def parse_target(text: str) -> Target | None:
    """Reads a target; None for `here`, which is known only when the backend has started.

    Raises:
        ConfigError: for a name without figures, or a shape that such devices do not come in.
    """
    if text == HERE:
        return None
    body = text.removesuffix(SIMULATED)
    name, _, shape = body.partition(":")
    if name not in kind_names():
        raise ConfigError(
            f"plan={text}: there is no target {name!r}; the targets are {HERE},"
            f" {', '.join(kind_names())}"
        )
    kind = device_kind(name)
    sizes = _parse_shape(text, shape, kind)
    is_simulated = body != text
    if kind.platform == "cpu":
        if is_simulated:
            raise ConfigError(f"plan={text}: it is compiled for simulated CPU devices anyway")
        return Target(text=text, kind=kind, num_hosts=1, devices_per_host=sizes[0])
    if kind.platform == "tpu":
        num_devices = math.prod(sizes)
        # Up to 8 chips of a v5e or v6e can share a host; larger slices, and all of a v5p, have 4.
        per_host = num_devices if num_devices <= 4 else 4
        if num_devices == 8 and kind.topology_dims == 2:
            per_host = 8
        hosts = num_devices // per_host
    else:
        hosts, per_host = sizes
    return Target(
        text=text,
        kind=kind,
        num_hosts=hosts,
        devices_per_host=per_host,
        torus=sizes if kind.platform == "tpu" else (),
        is_simulated=is_simulated,
    )


def _parse_shape(text: str, shape: str, kind: DeviceKind) -> tuple[int, ...]:
    num_dims = {"cpu": 1, "tpu": kind.topology_dims}.get(kind.platform, 2)
    example, meaning = {
        "cpu": ("8", "a number of simulated devices"),
        "tpu": ("x".join(["4"] * num_dims), f"the {num_dims} sizes of a slice of chips"),
    }.get(kind.platform, ("2x8", "hosts x GPUs per host"))
    whole = re.fullmatch(r"[1-9]\d{0,6}(x[1-9]\d{0,6})*", shape)
    sizes: tuple[int, ...] = tuple(map(int, shape.split("x"))) if whole else ()
    if len(sizes) != num_dims:
        raise ConfigError(
            f"plan={text} has the shape {shape!r}; behind {kind.name}: stands {meaning},"
            f" e.g. {kind.name}:{example}"
        )
    last = max(sizes[num_dims - 1 :])
    if kind.platform != "tpu" and last > kind.max_devices_per_host:
        hosts = -(-last // kind.max_devices_per_host)
        way_out = (
            f"use {kind.name}:{hosts * sizes[0]}x{kind.max_devices_per_host}"
            if len(sizes) == 2
            else "use fewer"
        )
        raise ConfigError(
            f"plan={text}: a host has at most {kind.max_devices_per_host} {kind.name} devices;"
            f" {way_out}"
        )
    return sizes


def gpu_target_config(kind: DeviceKind) -> str:
    """The text form of XLA's GpuTargetConfigProto for a kind of GPU (xla/stream_executor)."""
    major, minor = kind.compute_capability.split(".")
    extension = "ACCELERATED_FEATURES" if kind.accelerated_features else "NONE"
    info = "\n".join(f"  {name}: {value}" for name, value in kind.gpu_device_info.items())
    return f"""
gpu_device_info {{
{info}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind.device_kind}"
"""


def as_json(kind: DeviceKind) -> dict[str, Any]:
    """The figures that a plan rests on, without those that only the compiler reads."""
    left_out = ("sources", "gpu_device_info")
    values = dataclasses.asdict(kind)
    return {name: value for name, value in values.items() if name not in left_out and value != ""}
