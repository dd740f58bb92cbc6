"""Compiler options, kernels, remat, compiling ahead, and what XLA writes to the terminal."""

import dataclasses
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain import backend, compile
from jaxtrain.backend import captured_stderr, configure_backend
from jaxtrain.compile import (
    attention_implementation,
    compile_step,
    compiler_options,
    known_options,
    remat,
    remat_policy,
)
from jaxtrain.errors import ConfigError
from jaxtrain.mesh import make_mesh
from jaxtrain.sharding import use_rules

# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def test_options_are_for_gpus_and_those_xla_does_not_know_are_left_out():
    assert compiler_options("default", "cpu") == {}
    assert compiler_options("default", "cpu", deterministic=True) == {}
    options = compiler_options("default", "gpu")
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == 2**27
    # Two spellings of one wish, of older and newer XLA: no installed one knows both.
    pipelined = {"xla_gpu_enable_pipelined_all_gather", "xla_gpu_pipeline_all_gather"}
    assert len(pipelined & options.keys()) == 1
    # What is left is taken: the names are known to XLA wherever it runs.
    jax.jit(lambda: 0).lower().compile(compiler_options=options)


def test_presets_and_determinism_change_the_options():
    assert compiler_options("none", "gpu") == {}
    assert compiler_options("none", "gpu", deterministic=True) == {
        "xla_gpu_deterministic_ops": True
    }
    with pytest.raises(ConfigError, match="xla_preset='fast' does not exist; use default or none"):
        compiler_options("fast", "gpu")


def test_bfloat16_convolutions_on_cpu_give_numbers():
    """Two of them under a mean: left alone, XLA makes one kernel of it whose results are NaN."""
    normal = lambda seed, *shape: jax.random.normal(  # noqa: E731
        jax.random.key(seed), shape, jnp.bfloat16
    )
    x_BHWC, kernels = normal(0, 64, 4, 4, 16), (normal(1, 3, 3, 16, 32), normal(2, 3, 3, 32, 32))

    def mean_of_two(x_BHWC, kernels):
        for kernel in kernels:
            dims = ("NHWC", "HWIO", "NHWC")
            x_BHWC = jax.lax.conv_general_dilated(
                x_BHWC, kernel / 16, (1, 1), "SAME", dimension_numbers=dims
            )
            x_BHWC = jnp.maximum(x_BHWC, 0)
        return jnp.mean(x_BHWC, (1, 2))

    options = compiler_options("default", "cpu", precision="bfloat16")
    step = compile_step(mean_of_two, (x_BHWC, kernels), options=options)
    found = np.asarray(step(x_BHWC, kernels), np.float32)
    np.testing.assert_allclose(found, np.asarray(mean_of_two(x_BHWC, kernels), np.float32), 0.05)


def test_unknown_options_and_bad_values_are_left_out_one_by_one():
    options = {
        "xla_no_such_option": 1,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_autotune_level": "high",
        "xla_no_such_option_either": True,
    }
    assert known_options(options) == {"xla_gpu_deterministic_ops": True}


# ---------------------------------------------------------------------------------------------
# Kernels and remat
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "head_dim", "masking", "implementation", "reason"),
    [
        ("gpu", "9.0", "bfloat16", 128, "causal", "cudnn", "fused kernel for bfloat16"),
        ("cuda", "9.0a", "float16", 256, "none", "cudnn", "head size 256"),
        ("gpu", "8.0", "bfloat16", 64, "padding", "cudnn", "padding mask"),
        ("gpu", "10.0", "bfloat16", 128, "causal", "cudnn", "10.0"),
        ("gpu", "8.0", "bfloat16", 256, "causal", "xla", "up to 128, the model has 256"),
        ("gpu", "10.0", "bfloat16", 256, "causal", "xla", "up to 128, the model has 256"),
        ("gpu", "9.0", "bfloat16", 100, "causal", "xla", "by 8 up to 256, the model has 100"),
        ("gpu", "7.0", "float16", 64, "causal", "xla", "8.0, the GPU has 7.0"),
        ("gpu", "9.0", "float32", 64, "causal", "xla", "the dtype is float32"),
        ("gpu", "9.0", "bfloat16", 64, "segments", "xla", "cannot keep packed segments apart"),
        ("gpu", "9.0", "bfloat16", 64, "cache", "xla", "one query against a cache"),
        ("cpu", None, "bfloat16", 64, "causal", "xla", "the platform is cpu"),
        ("rocm", "9.0", "bfloat16", 64, "causal", "xla", "the platform is rocm"),
    ],
)
def test_attention_kernels(platform, capability, dtype, head_dim, masking, implementation, reason):
    choice = attention_implementation(platform, capability, dtype, head_dim, masking=masking)
    assert choice.implementation == implementation
    assert reason in choice.reason


def test_unknown_names_are_refused():
    with pytest.raises(
        ConfigError, match="masking='causl' does not exist; use one of none, causal"
    ):
        attention_implementation("gpu", "9.0", jnp.bfloat16, 64, masking="causl")
    with pytest.raises(ConfigError, match="remat='all' does not exist; use none, dots, full"):
        remat_policy("all")


def test_remat_policies_keep_what_their_names_say():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))

    def residuals(name):
        block = remat(lambda x: jnp.sin(jnp.sin(x) @ w), name, is_scanned=False)
        _, pullback = jax.vjp(block, x)
        return sum(leaf.shape == (4, 8) for leaf in jax.tree.leaves(pullback))

    # none: the derivatives of both sines; dots: x and the product; full: x alone.
    assert (residuals("none"), residuals("dots"), residuals("full")) == (2, 2, 1)
    names = {}
    for name in compile.REMAT_POLICIES:
        block = remat(lambda x: jnp.sin(jnp.sin(x) @ w).sum(), name)
        names[name] = str(jax.make_jaxpr(jax.grad(block))(x)).count("dot_general")
    # The product forward and its transpose; computed once more only if nothing was kept.
    assert names == {"none": 2, "dots": 2, "full": 3}
    # Outside of a loop XLA would merge the second computation with the first.
    for is_scanned in (True, False):
        block = remat(lambda x: jnp.sin(x).sum(), "full", is_scanned=is_scanned)
        assert f"prevent_cse={not is_scanned}" in str(jax.make_jaxpr(jax.grad(block))(x))


def test_remat_none_wraps_nothing_unless_parameters_are_gathered():
    def block(x):
        return x

    assert remat(block, "none") is block
    for text, is_wrapped in (("data:8", False), ("tensor:8", False), ("fsdp:8", True)):
        with use_rules(make_mesh(text)):
            assert (remat_policy("none") is not None) == is_wrapped


# ---------------------------------------------------------------------------------------------
# Compiling ahead
# ---------------------------------------------------------------------------------------------


def _sharded(shape, *spec):
    mesh = make_mesh("data:2,fsdp:2,tensor:2")
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def test_a_step_is_compiled_once_ahead_and_reports_time_and_memory():
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *args, **kwargs: events.append(event) if "backend_compile" in event else None
    )
    abstract = _sharded((64, 32), "fsdp", "tensor")

    def double(x, y):
        return x + y, jnp.sum(x)

    step = compile_step(
        double,
        (abstract, abstract),
        donate_argnums=(0,),
        out_shardings=(abstract.sharding, None),
    )
    assert len(events) == 1
    assert 0 < step.compile_seconds < 60
    shard = 64 * 32 * 4 // 4
    assert step.memory["argument"] == 2 * shard
    assert step.memory["alias"] == shard
    memory = step.memory
    total = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    assert memory["total"] == total >= 2 * shard
    y = jax.device_put(np.ones((64, 32), np.float32), abstract.sharding)
    x = jax.device_put(np.ones((64, 32), np.float32), abstract.sharding)
    num_events = len(events)
    for _ in range(2):
        x, total = step(x, y)
    assert len(events) == num_events
    assert float(total) == 2 * 64 * 32
    np.testing.assert_array_equal(x, 3 * np.ones((64, 32)))


def test_another_layout_is_an_error_not_a_second_compilation():
    step = compile_step(jnp.sin, (_sharded((64, 32), "fsdp"),))
    with pytest.raises(ValueError, match="sharding"):
        step(jax.device_put(np.ones((64, 32), np.float32), _sharded((64, 32), "data").sharding))
    with pytest.raises(TypeError, match="compiled"):
        step(jnp.ones((32, 32)))


def _replicates(x):
    """Goes between two layouts that XLA knows no direct way between."""
    mesh = make_mesh("data:2,fsdp:2,tensor:2")
    for spec in (P(None, ("data", "fsdp"), None), P("fsdp", None, "data")):
        x = jnp.sin(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
    return x


def test_involuntary_rematerialisation_is_one_clear_warning(caplog):
    abstract = jax.ShapeDtypeStruct((16, 16, 16), jnp.float32)
    with caplog.at_level(logging.WARNING):
        compile_step(jnp.sin, (abstract,))
        assert not caplog.records
        compile_step(_replicates, (abstract,))
    (record,) = caplog.records
    text = record.getMessage()
    assert "replicates an array of _replicates on every device" in text
    assert "[{}, {'data', 'fsdp'}, {}]" in text
    assert "\n" not in text


def test_stderr_is_recorded_and_passed_on(capfd):
    with captured_stderr() as log:
        os.write(2, b"from C++\n")
        print("from Python", file=sys.__stderr__, flush=True)
    os.write(2, b"after\n")
    assert "from C++\n" in log.text
    assert "after" not in log.text
    assert "from C++\n" in capfd.readouterr().err


def test_stderr_is_given_back_after_an_error_and_children_do_not_block_it():
    before = os.fstat(2)
    children, logs = [], []

    def fail():
        with captured_stderr() as log:
            logs.append(log)
            children.append(subprocess.Popen(["sleep", "60"]))
            os.write(2, b"last words\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    children[0].kill()
    children[0].wait()
    assert (os.fstat(2).st_ino, os.fstat(2).st_dev) == (before.st_ino, before.st_dev)
    assert logs[0].text == "last words\n"
    # The one that recorded ends with the child, and the next recording knows.
    assert backend._lingering.pop().wait(20) == 0


def test_last_words_of_a_crash_reach_the_terminal():
    code = (
        "import os; from jaxtrain.backend import captured_stderr\n"
        "with captured_stderr():\n"
        "    os.write(2, b'F0000 check failed'); os.abort()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == -6
    assert "check failed" in result.stderr


def test_a_kill_in_a_capture_leaves_no_file_behind(tmp_path):
    code = (
        "import os; from jaxtrain.backend import captured_stderr\n"
        "with captured_stderr():\n"
        "    os.write(2, b'compiling'); os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == -9
    assert "compiling" in result.stderr
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# Backend and cache
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of a run's configuration that the backend reads."""

    num_cpu_devices: int = 0
    memory_fraction: float = 0.9
    compilation_cache_dir: str = ""


@pytest.fixture
def restored(monkeypatch):
    """Takes back what configure_backend changes."""
    for name in backend._MEMORY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
    )
    saved = {name: getattr(jax.config, name) for name in names}
    yield
    os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
    for name, value in saved.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_devices_that_come_too_late_are_refused(restored):
    assert len(jax.devices()) == 8
    configure_backend(Settings(num_cpu_devices=8))
    with pytest.raises(ConfigError, match=r"num_cpu_devices=4 comes too late, .* 8 cpu devices"):
        configure_backend(Settings(num_cpu_devices=4))


def test_devices_and_memory_are_set_before_the_backend_starts():
    code = (
        "import os, types, jax; from jaxtrain.backend import configure_backend\n"
        "configure_backend(types.SimpleNamespace(\n"
        "    num_cpu_devices=3, memory_fraction=0.5, compilation_cache_dir=''))\n"
        "print(len(jax.devices()), os.environ['XLA_CLIENT_MEM_FRACTION'],\n"
        "      jax.config.jax_compilation_cache_dir)\n"
    )
    env = {k: v for k, v in os.environ.items() if "MEM_FRACTION" not in k and k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120,
        check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["3", "0.5", "None"]


def test_a_memory_fraction_in_the_environment_wins(restored, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    configure_backend(Settings())
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


def test_the_cache_is_for_accelerators_unless_named(restored, monkeypatch, tmp_path, caplog):
    configure_backend(Settings())
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    configure_backend(Settings())
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "caches/jaxtrain/xla")
    configure_backend(Settings(compilation_cache_dir="none"))
    assert not jax.config.jax_enable_compilation_cache
    (tmp_path / "file").write_text("")
    configure_backend(Settings(compilation_cache_dir=str(tmp_path / "file/cache")))
    assert "no compile cache: cannot make" in caplog.text
    with pytest.raises(ConfigError, match=r"num_cpu_devices=8 simulates .* JAX runs on gpu"):
        configure_backend(Settings(num_cpu_devices=8))


def test_a_broken_cache_entry_is_replaced_with_one_line(restored, tmp_path, caplog):
    configure_backend(Settings(compilation_cache_dir=str(tmp_path)))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    def cached_program(x):
        return jnp.cos(x) * 3

    def other_program(x):
        return jnp.cos(x) * 4

    abstract = (jax.ShapeDtypeStruct((16,), jnp.float32),)
    for program in (cached_program, other_program):
        compile_step(program, abstract)
    (entry,) = tmp_path.glob("jit_cached_program-*-cache")
    good = entry.read_bytes()
    entry.write_bytes(good[: len(good) // 2])
    jax.clear_caches()
    with caplog.at_level(logging.WARNING):
        step = compile_step(cached_program, abstract)
    (record,) = caplog.records
    assert "had a broken entry for jit_cached_program; deleted" in record.getMessage()
    np.testing.assert_allclose(step(np.zeros(16, np.float32)), 3 * np.ones(16))
    assert len(entry.read_bytes()) > len(good) // 2  # written again, whole
    assert [*tmp_path.glob("jit_other_program-*-cache")]  # nothing else is touched
    jax.clear_caches()
    caplog.clear()
    compile_step(cached_program, abstract)
    assert not caplog.records
