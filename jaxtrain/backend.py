"""The backend's settings, the compile cache, and what XLA writes to the terminal.

`configure_backend` has to come before the first array: a backend keeps what it finds at its start.
"""

import contextlib
import glob
import logging
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from typing import Protocol

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.host import accelerators

_log = logging.getLogger("jaxtrain")

_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_BROKEN_ENTRY = re.compile(r"Error reading persistent compilation cache entry for '([^']+)'")


# Processes that outlive a capture because somebody else still writes to them.
_lingering: list[subprocess.Popen] = []


class BackendConfig(Protocol):
    """The fields of a run's configuration that are read here."""

    @property
    def num_cpu_devices(self) -> int: ...
    @property
    def memory_fraction(self) -> float: ...
    @property
    def compilation_cache_dir(self) -> str: ...


def configure_backend(config: BackendConfig) -> None:
    """Prepares the backend, starts it, and turns the compile cache on.

    Raises:
        ConfigError: when a setting comes too late because the backend runs already.
    """
    # 1. What a backend reads when it starts.
    pass_over_absent_accelerators()
    _set_cpu_devices(config.num_cpu_devices)
    if not any(os.environ.get(name) for name in _MEMORY_VARIABLES):
        os.environ[_MEMORY_VARIABLES[0]] = str(config.memory_fraction)
    # 2. The next line starts the backend, so `distributed.join` comes before this function.
    platform = jax.default_backend()
    if config.num_cpu_devices and platform != "cpu":
        raise ConfigError(
            f"num_cpu_devices={config.num_cpu_devices} simulates devices on CPU but JAX runs on"
            f" {platform}; set JAX_PLATFORMS=cpu, or leave num_cpu_devices out"
        )
    # 3. What is read at the first compilation.
    _set_compile_cache(config.compilation_cache_dir, platform)


def pass_over_absent_accelerators() -> None:
    """Keeps packages for devices that are not here from complaining on the way to the CPU.

    The extras `plan` and `tpu` install them to compile for devices elsewhere.
    """
    if not jax.config.jax_platforms and accelerators(only_usable=False) and not accelerators():
        jax.config.update("jax_platforms", "cpu")


def _set_cpu_devices(num_devices: int) -> None:
    if not num_devices:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        found = len(jax.devices())
        if found != num_devices:
            raise ConfigError(
                f"num_cpu_devices={num_devices} comes too late, JAX runs already with {found}"
                f" {jax.default_backend()} devices; set it before the first use of an array"
            ) from None


def compile_cache_directory(directory: str, platform: str) -> str:
    """Where compiled programs are kept; empty: nowhere.

    Args:
        directory: `compilation_cache_dir` of a configuration.
        platform: that of the devices.
    """
    if directory == "none":
        return ""
    if not directory:
        # On CPU a cached program may use instructions that the next machine lacks.
        if platform == "cpu" or jax.config.jax_compilation_cache_dir:
            return jax.config.jax_compilation_cache_dir or ""
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        directory = os.path.join(caches, "jaxtrain", "xla")
    return os.path.expanduser(directory)


def _set_compile_cache(directory: str, platform: str) -> None:
    if directory == "none":
        jax.config.update("jax_enable_compilation_cache", False)
    directory = compile_cache_directory(directory, platform)
    if not directory or directory == jax.config.jax_compilation_cache_dir:
        return
    if "://" not in directory:  # JAX takes object stores as well
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            _log.warning("no compile cache: cannot make %s (%s)", directory, error.strerror)
            return
    jax.config.update("jax_compilation_cache_dir", directory)


@contextlib.contextmanager
def mended_compile_cache() -> Iterator[None]:
    """Deletes entries of the compile cache that turn out to be broken, with one line each.

    JAX warns of such an entry, compiles anew, and never replaces it. Its warning names the program;
    it comes before the new program is written, so what is deleted here is also written again.
    """
    with warnings.catch_warnings():
        # Our hook has to see each one, also where warnings are errors or are shown once.
        warnings.filterwarnings("always", message=_BROKEN_ENTRY.pattern)
        show = warnings.showwarning

        def mend(message, *args, **kwargs):
            broken = _BROKEN_ENTRY.match(str(message))
            if broken is None:
                show(message, *args, **kwargs)
                return
            directory = jax.config.jax_compilation_cache_dir or ""
            for entry in glob.glob(os.path.join(glob.escape(directory), f"{broken[1]}-*")):
                os.unlink(entry)
            _log.warning(
                "the compile cache in %s had a broken entry for %s; deleted, compiling anew",
                directory,
                broken[1],
            )

        warnings.showwarning = mend
        yield


class StderrLog:
    """What was written to stderr by C++ code."""

    def __init__(self):
        self.text = ""

    def involuntary_remat(self) -> list[str]:
        """What XLA says of each array that it replicates for lack of a better way."""
        marked = [line for line in self.text.splitlines() if "nvoluntary full remat" in line]
        return [_describe_remat(line) for line in marked]


def _describe_remat(line: str) -> str:
    layouts = re.search(r"from sharding (.*?) to (\{.*\}) efficiently", line)
    operation = re.search(r'op_name="([^"]*)"', line)
    if layouts is None:
        return line
    return f"from {layouts[1]} to {layouts[2]} in {operation[1] if operation else 'an operation'}"


@contextlib.contextmanager
def captured_stderr(*, is_shown: bool = True) -> Iterator[StderrLog]:
    """Records what goes to file descriptor 2, where XLA logs, and passes it on as it comes.

    With `is_shown` False it is kept from the terminal.

    A `tee` process does it rather than a thread: if XLA aborts this process, its last words still
    reach the terminal. Its copy is a file without a name, so that a kill leaves nothing behind.
    Where there is no `tee`, or no /dev/fd, nothing is recorded.
    """
    log = StderrLog()
    if shutil.which("tee") is None or not os.path.exists("/dev/fd"):
        yield log
        return
    _lingering[:] = [tee for tee in _lingering if tee.poll() is None]
    with tempfile.TemporaryFile() as copy:
        original = os.dup(2)
        tee = subprocess.Popen(
            ["tee", f"/dev/fd/{copy.fileno()}"],
            stdin=subprocess.PIPE,
            stdout=original if is_shown else subprocess.DEVNULL,
            pass_fds=(copy.fileno(),),
            # So that Ctrl-C does not end it before the last line.
            start_new_session=True,
        )
        assert tee.stdin is not None
        os.dup2(tee.stdin.fileno(), 2)
        tee.stdin.close()
        try:
            yield log
        finally:
            os.dup2(original, 2)
            os.close(original)
            # A process that was started meanwhile keeps the pipe open; do not wait for its end.
            try:
                tee.wait(timeout=2)
            except subprocess.TimeoutExpired:
                _lingering.append(tee)
            copy.seek(0)
            log.text = copy.read().decode(errors="replace")
