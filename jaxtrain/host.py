"""What a process asks of its host before anything heavy starts."""

import contextlib
import ctypes
import glob
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping

__all__ = [
    "accelerators",
    "cores_at_hand",
    "enable_huge_pages",
    "memory_bytes",
    "note_local_processes",
    "num_installed_gpus",
    "num_local_processes",
    "outgoing_ports",
    "reason_against_restart",
    "restart_with_huge_pages",
]

_OUTGOING_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
_TUNABLE = "glibc.malloc.hugetlb=1"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_PLUGINS = (*_CUDA_PLUGINS, "jax_rocm7_plugin", "libtpu")
_GOOGLE_PCI_VENDOR = "0x1ae0"
# Of a control group, versions 2 and 1; where there is none it is larger than any memory.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_num_local_processes = 1


def restart_with_huge_pages() -> str:
    """Restarts the interpreter with transparent huge pages for malloc; returns "on" after that.

    XLA on CPU allocates its temporaries anew in every step, and faulting them in page by page is
    a large part of a step (`scripts/bench_step.py` measures it). glibc reads its tunables only
    when a process starts, so the same command is executed once more, in the same process id,
    with the environment variable set. Where they are of no use, or not to be had, it returns why.
    """
    reason = enable_huge_pages(os.environ)
    if reason:
        return reason
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def enable_huge_pages(environ: MutableMapping[str, str]) -> str:
    """Asks for huge pages in an environment, for whoever is started with it.

    Returns:
        Why it was left as it is; empty if it was changed.
    """
    reason = _reason_against(environ)
    if not reason:
        present = environ.get("GLIBC_TUNABLES", "")
        environ["GLIBC_TUNABLES"] = f"{present}:{_TUNABLE}".lstrip(":")
    return reason


def outgoing_ports() -> list[int]:
    """First and last port that the system hands out to outgoing connections; empty: unknown."""
    try:
        with open(_OUTGOING_PORTS) as file:
            return [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return []


def reason_against_restart() -> str:
    """Why this process cannot execute its own command once more; empty if it can."""
    # A notebook, a prompt, a script from standard input (it is used up; its __file__ is
    # "<stdin>") and a test runner would lose what they have done so far.
    is_script = os.path.isfile(getattr(sys.modules["__main__"], "__file__", ""))
    if not is_script or "pytest" in sys.modules or sys.gettrace() is not None:
        return "only a script is restarted, and not in a debugger"
    return ""


def accelerators(*, only_usable: bool = True) -> list[str]:
    """Names of the installed packages that make JAX run on an accelerator.

    Args:
        only_usable: leave out those that cannot find a device here: there is no NVIDIA driver, or
            no TPU on the bus. The extra `plan` installs them to compile for devices elsewhere.
    """
    installed = [name for name in _PLUGINS if importlib.util.find_spec(name)]
    return [name for name in installed if not only_usable or _may_find_a_device(name)]


def num_installed_gpus() -> int:
    """NVIDIA GPUs that the driver lets this process use; JAX's backend is not started."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def memory_bytes() -> int:
    """Memory that processes may take on this host, or in this container; 0 if it does not say."""
    found = []
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as lines:
        found.append(next(int(line.split()[1]) * 1024 for line in lines if "MemTotal" in line))
    for path in _MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:  # ValueError: "max"
            found.append(int(file.read()))
    return min(found, default=0)


def note_local_processes(count: int) -> None:
    """Notes how many processes of the run share this host."""
    global _num_local_processes
    _num_local_processes = count


def num_local_processes() -> int:
    """Processes of the run on this host, this one included."""
    return _num_local_processes


def cores_at_hand() -> int:
    """Cores that this process may use, the run's other processes on this host having theirs."""
    share = (os.cpu_count() or 1) // _num_local_processes
    return max(1, min(len(os.sched_getaffinity(0)), share))


def _may_find_a_device(plugin: str) -> bool:
    if plugin in _CUDA_PLUGINS:
        try:
            ctypes.CDLL("libcuda.so.1")  # the driver's, which no package brings along
        except OSError:
            return False
    if plugin == "libtpu":
        for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
            with open(path) as file:
                if file.read().strip() == _GOOGLE_PCI_VENDOR:
                    return True
        return False
    return True


def _reason_against(environ: Mapping[str, str]) -> str:
    """What huge pages are, where a restart changes nothing; empty where it turns them on."""
    if "glibc.malloc.hugetlb=1" in environ.get("GLIBC_TUNABLES", ""):
        return "on"
    if "glibc.malloc.hugetlb" in environ.get("GLIBC_TUNABLES", ""):
        return "off, by GLIBC_TUNABLES"
    plugins = accelerators()
    if plugins and environ.get("JAX_PLATFORMS") != "cpu":
        return f"off, {plugins[0]} is installed and they help on CPU only"
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return f"off, the C library ({library or 'unknown'} {version}) has none; glibc 2.35 has"
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            if "[never]" in file.read():
                return "off, in this kernel (transparent_hugepage/enabled is never)"
    except OSError:
        return "off, this kernel has none"
    against = reason_against_restart()
    return f"off, {against}" if against else ""
