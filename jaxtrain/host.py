"""What a process asks of its host before anything heavy starts."""

import ctypes
import glob
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping

__all__ = ["accelerators", "num_installed_gpus", "restart_with_huge_pages"]

_TUNABLE = "glibc.malloc.hugetlb=1"
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_PLUGINS = (*_CUDA_PLUGINS, "jax_rocm7_plugin", "libtpu")
_GOOGLE_PCI_VENDOR = "0x1ae0"


def restart_with_huge_pages() -> str:
    """Restarts the interpreter with transparent huge pages for malloc; returns "on" after that.

    XLA on CPU allocates its temporaries anew in every step, and faulting them in page by page is
    a large part of a step (`scripts/bench_step.py` measures it). glibc reads its tunables only
    when a process starts, so the same command is executed once more, in the same process id,
    with the environment variable set. Where they are of no use, or not to be had, it returns why.
    """
    reason = _reason_against(os.environ)
    if reason:
        return reason
    present = os.environ.get("GLIBC_TUNABLES", "")
    os.environ["GLIBC_TUNABLES"] = f"{present}:{_TUNABLE}".lstrip(":")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
    # A notebook, a prompt, a script from standard input (it is used up; its __file__ is
    # "<stdin>") and a test runner would lose what they have done so far.
    is_script = os.path.isfile(getattr(sys.modules["__main__"], "__file__", ""))
    if not is_script or "pytest" in sys.modules or sys.gettrace() is not None:
        return "off, only a script is restarted, and not in a debugger"
    return ""
