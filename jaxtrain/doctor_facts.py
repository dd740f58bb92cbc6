"""What `jaxtrain doctor` finds out about the machine of a process: plain values, for JSON.

A driver or a backend that does not answer must not take the doctor along, so both are asked in
processes of their own: `python -m jaxtrain.doctor_facts driver`, and `devices`, print what they
find.
"""

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import versions
from jaxtrain.host import accelerators, memory_bytes, outgoing_ports
from jaxtrain.launch.local_devices import count_visible
from jaxtrain.launch.meeting import is_loopback

__all__ = ["TOKEN", "gather", "nearest_directory"]

TOKEN = ".jaxtrain-doctor-"
"""Begins the names of the files that are written to see whether that works; they are deleted."""
_NVIDIA_PCI_VENDOR = "0x10de"
_DISPLAY_PCI_CLASS = "0x03"
# After SIGKILL; a process that hangs in a driver does not even end then.
_KILL_SECONDS = 5


def gather(
    *, workdir: str, cache: str, coordinator_host: str, device_timeout_seconds: float
) -> dict[str, Any]:
    """Everything that can be known without the other processes.

    Args:
        workdir: directory of the run, which need not exist yet.
        cache: `compilation_cache_dir` of the run.
        coordinator_host: name or address of process 0; empty for a single process.
        device_timeout_seconds: how long the driver and the devices may take to answer.
    """
    devices = _ask("devices", device_timeout_seconds, os.environ)
    return {
        "devices": devices,
        "gpus": _gpus(device_timeout_seconds),
        "memory_bytes": memory_bytes(),
        "names": _names(coordinator_host),
        "outgoing_ports": outgoing_ports(),
        "workdir": _directory(workdir),
        "cache": _cache(cache, devices.get("platform", "cpu")),
        "versions": versions(),
    }


def nearest_directory(path: str) -> Path:
    """The directory, or the nearest one above it that exists; a file if that is in the way."""
    directory = Path(path).expanduser().absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory


# Devices and driver


def _gpus(timeout_seconds: float) -> dict[str, Any]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The driver is asked for all GPUs of the node, whatever this process is shown.
    others = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    driver = _ask("driver", timeout_seconds, others)
    installed = driver.get("installed", 0)
    return {
        **driver,
        "visible_devices": visible,
        "visible": count_visible(visible, installed) if installed else 0,
        "on_bus": _count_on_bus(),
        "plugins": [name for name in accelerators(only_usable=False) if "cuda" in name],
        "platforms": os.environ.get("JAX_PLATFORMS", ""),
    }


def _ask(what: str, timeout_seconds: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a process of its own prints of the driver or the devices, or {"error": why not}."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.doctor_facts", what],
        env={**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_SECONDS)
        return {"error": f"no answer within {timeout_seconds:g} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = [line.strip() for line in err.splitlines() if line.strip()][-1:]
    return {"error": last[0] if last else f"ended with code {process.returncode}"}


def _devices() -> dict[str, Any]:
    import jax

    from jaxtrain.backend import pass_over_absent_accelerators

    pass_over_absent_accelerators()
    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "count": len(devices),
        "kinds": sorted({device.device_kind for device in devices}),
    }


def _driver() -> dict[str, Any]:
    """NVIDIA's; the count is 0 where there is none."""
    found: dict[str, Any] = {"driver": "", "cuda": 0, "installed": 0, "device_bytes": 0}
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        version = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.readline())
        found["driver"] = version[1] if version else ""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libcuda.so.1")
        number, size = ctypes.c_int(), ctypes.c_size_t()
        if not library.cuDriverGetVersion(ctypes.byref(number)):
            found["cuda"] = number.value
        if not library.cuInit(0) and not library.cuDeviceGetCount(ctypes.byref(number)):
            found["installed"] = number.value
        if found["installed"] and not library.cuDeviceTotalMem_v2(ctypes.byref(size), 0):
            found["device_bytes"] = size.value
    return found


def _count_on_bus() -> int:
    count = 0
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            kind = Path(vendor).with_name("class").read_text()
            is_nvidia = Path(vendor).read_text().strip() == _NVIDIA_PCI_VENDOR
            count += is_nvidia and kind.startswith(_DISPLAY_PCI_CLASS)
    return count


# Names and ports


def _names(coordinator_host: str) -> dict[str, Any]:
    host = socket.gethostname()
    return {
        "host": host,
        "addresses": _resolve(host),
        "is_loopback": is_loopback(host),
        "coordinator": coordinator_host,
        "coordinator_addresses": _resolve(coordinator_host) if coordinator_host else [],
    }


def _resolve(host: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError:
        return []


# Directories


def _directory(path: str) -> dict[str, Any]:
    """Whether files can be written there, tried in the nearest directory that exists."""
    found: dict[str, Any] = {"path": os.path.abspath(os.path.expanduser(path)), "error": ""}
    try:
        at = nearest_directory(path)
        found["free_bytes"] = shutil.disk_usage(at).free
        if not at.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{at} is a file")
        with tempfile.NamedTemporaryFile(prefix=TOKEN, dir=at) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _cache(directory: str, platform: str) -> dict[str, Any]:
    """As `_directory`; the path is empty where programs are not kept, or not in files."""
    from jaxtrain.backend import compile_cache_directory

    path = compile_cache_directory(directory, platform)
    if not path or "://" in path:
        return {"path": "", "error": "", "store": path}
    return {**_directory(path), "store": path}


if __name__ == "__main__":
    print(json.dumps({"driver": _driver, "devices": _devices}[sys.argv[1]]()))
