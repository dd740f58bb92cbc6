"""Compiling the train step for devices that are not here. Nothing runs, nothing is allocated."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jaxtrain.backend import captured_stderr
from jaxtrain.compile import CompiledStep
from jaxtrain.errors import ConfigError
from jaxtrain.mesh import node_of
from jaxtrain.plan import buffers, hlo
from jaxtrain.plan.targets import (
    HERE,
    SIMULATED,
    Target,
    device_kind,
    gpu_target_config,
    kind_of,
)
from jaxtrain.program import TrainProgram

_CUDA_PACKAGES = {
    "jax_cuda12_plugin": "jax-cuda12-plugin",
    "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
    "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
    "nvidia.cudnn": "nvidia-cudnn-cu12",
}
_MAX_SENTENCE = 400
# By libtpu: "Used 63.80G of 30.75G hbm", or "the total memory required for HLO temporaries
# (113.10G) exceeds available HBM (95.73G)".
_OUT_OF_MEMORY = re.compile(
    r"(?:Used |HLO temporaries \()([\d.]+)([KMGT]?)\)? (?:of |exceeds available HBM \()"
    r"([\d.]+)([KMGT]?)(?: hbm|\))"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A step compiled for a target, and what was learnt on the way."""

    step: CompiledStep
    module: hlo.Module
    assignment: buffers.Assignment | None
    involuntary_remat: list[str]
    """Arrays that XLA replicates for lack of a better way, in words."""


class DoesNotFit(Exception):
    """The compiler of a target itself refuses a program that needs more memory than there is."""

    def __init__(self, needed_bytes: int, capacity_bytes: int):
        super().__init__(f"needs {needed_bytes} bytes of {capacity_bytes}")
        self.needed_bytes = needed_bytes
        self.capacity_bytes = capacity_bytes


def prepare_backend(target: Target | None) -> None:
    """Sees to it that JAX itself stays on CPU; call it before the first array.

    A program for another machine must not come from the compile cache: what is read off a
    compilation would be missing.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    if target is None:
        return
    jax.config.update("jax_platforms", "cpu")
    # libtpu would look for the metadata server of a machine with TPUs.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No chip is used, so nobody has to be kept from it: several plans may be made at a time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if target.is_simulated or target.kind.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.num_devices)


def target_here() -> Target:
    """The devices at hand, as a target.

    Raises:
        ConfigError: for devices that there are no figures of.
    """
    devices = jax.devices()
    kind = kind_of(devices[0].platform, devices[0].device_kind)
    if kind is None and devices[0].platform == "cpu":
        kind = device_kind("cpu")
    if kind is None:
        raise ConfigError(
            f"plan=here: there are no figures of {devices[0].device_kind!r}; add a file of them to"
            f" jaxtrain/plan/targets/, or plan for a target that has one"
        )
    num_hosts = len({node_of(device) for device in devices})
    return Target(
        text=HERE, kind=kind, num_hosts=num_hosts, devices_per_host=len(devices) // num_hosts
    )


def target_devices(target: Target) -> tuple[Target, list[Any]]:
    """Descriptions of the devices of a target, for a mesh; and the target as the compiler knows it.

    Raises:
        ConfigError: when the packages that describe them are not installed, or do not know them.
    """
    kind = target.kind
    if target.text == HERE or target.is_simulated or kind.platform == "cpu":
        return target, list(jax.devices())
    _check_packages(target)
    try:
        if kind.platform == "tpu":
            name = f"{kind.topology}:{'x'.join(map(str, target.torus))}"
            with captured_stderr(is_shown=False):
                topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
        else:
            shape = f"1x{target.num_hosts}x{target.devices_per_host}"
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name=shape,
                topology=shape,
                target_config=gpu_target_config(kind),
            )
    except RuntimeError as error:  # by PJRT; of what it does not support a NotImplementedError
        raise ConfigError(
            f"plan={target.text}: the compiler does not know such devices"
            f" ({_sentence(str(error))}); use another shape, or a newer jax"
        ) from error
    devices = list(topology.devices)
    hosts = len({device.process_index for device in devices})
    per_host = len(devices) // hosts
    return dataclasses.replace(target, num_hosts=hosts, devices_per_host=per_host), devices


def compile_for(
    target: Target, program: TrainProgram, batch: Mapping[str, Any], *, log_dir: str
) -> Compilation:
    """Compiles a step for the devices of its mesh.

    Args:
        target: of the mesh's devices, for messages.
        program: the step.
        batch: abstract arrays.
        log_dir: where the log of a failure goes; empty: the directory for temporary files.

    Raises:
        DoesNotFit: when the compiler refuses it for want of memory.
        ConfigError: when it fails otherwise, with the first sentence of its message.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jaxtrain-plan-") as dump, contextlib.ExitStack() as on:
        log = on.enter_context(captured_stderr(is_shown=False))
        # It changes nothing about the program, and is the one way to see its buffers.
        seen = dataclasses.replace(program, xla={**program.xla, "xla_dump_to": dump})
        failure: Exception | None = None
        try:
            step = seen.compile(batch)
        except RuntimeError as error:  # by XLA; what JAX cannot lower is a NotImplementedError
            failure = error
        on.close()
        if failure is not None:
            _refuse(target, failure, log.text, log_dir, time.perf_counter() - begin)
        module = hlo.parse(step.compiled.as_text() or "")
        assignment = buffers.read_dump(pathlib.Path(dump), target.kind.platform)
    return Compilation(step, module, assignment, log.involuntary_remat())


def _check_packages(target: Target) -> None:
    if target.kind.platform == "tpu":
        missing = [] if _is_installed("libtpu") else ["libtpu"]
        extra = "tpu"
    else:
        missing = [name for module, name in _CUDA_PACKAGES.items() if not _is_installed(module)]
        extra = "plan"
    if missing:
        raise ConfigError(
            f"plan={target.text} needs the packages {', '.join(missing)}, which compile for"
            f" {target.kind.description} on any machine; install them with `bash scripts/setup.sh"
            f" {extra}`. Or ask for an estimate that needs none of them, from compiling for"
            f" simulated CPU devices: --plan={target.text}{SIMULATED}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _refuse(target: Target, error: Exception, log: str, log_dir: str, seconds: float) -> None:
    """Turns what XLA says into one sentence; the rest goes to a file."""
    message = str(error)
    found = _OUT_OF_MEMORY.search(message)
    if found:
        needed, capacity = float(found[1]), float(found[3])
        raise DoesNotFit(int(needed * _UNITS[found[2]]), int(capacity * _UNITS[found[4]]))
    directory = pathlib.Path(log_dir or tempfile.gettempdir())
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "plan-compile.log"
    path.write_text(f"{message}\n\n{log}")
    raise ConfigError(
        f"plan={target.text}: XLA cannot compile this step, after {seconds:.0f} s:"
        f" {_sentence(message)}. The whole log is in {path}; another mesh or --remat may do"
    ) from error


def _sentence(message: str) -> str:
    """The first line of a message, cut where it gets long."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no message")
    return first if len(first) <= _MAX_SENTENCE else first[: _MAX_SENTENCE - 3] + "..."
