"""Test configuration: 8 simulated devices, explicit rank promotion, warnings are errors."""

import os
import signal
import threading

# XLA reads these when the backend starts, so they come before the first jax call.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As `prepare_backend` does for a plan: two workers may compile for a TPU at the same time.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import processes
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.stop_signals import STOP_SIGNALS

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def handlers_stay():
    """A handler that a test leaves behind would meet the Ctrl-C of another test."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def no_loader_thread_stays():
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("the loader")]
    assert not left


@pytest.fixture(scope="session", autouse=True)
def shared_programs(tmp_path_factory):
    """Directories for all workers of the session; pytest deletes them with its other files."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    for name in ("programs", "programs_of_workers"):
        (shared / name).mkdir(exist_ok=True)
    processes.Programs.shared = shared / "programs"
    return shared / "programs_of_workers"


@pytest.fixture(scope="module")
def compile_cache(shared_programs, tmp_path_factory):
    """Lets a module's tests use what others have compiled: `pytest.mark.usefixtures`.

    Not for tests that read what a compilation leaves besides the program, its log or its dump.
    """
    own = tmp_path_factory.mktemp("programs")
    processes.link_all(shared_programs, own)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    saved = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(own), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in saved.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    processes.link_all(own, shared_programs)
