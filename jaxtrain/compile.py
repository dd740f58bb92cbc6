"""Compiling: everything that decides how a program is built, in one place for run and plan.

Compiler options, remat, attention kernels, the backend's settings and the compile cache are chosen
here and nowhere else, so that a program that is only planned is the program that would run.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtrain.backend import captured_stderr, mended_compile_cache
from jaxtrain.errors import ConfigError
from jaxtrain.gather import saves_all_but_gathered
from jaxtrain.sharding import active_rules, has_gathered_params, has_split_layers
from jaxtrain.units import nbytes

_log = logging.getLogger("jaxtrain")

GPU_PLATFORMS = ("gpu", "cuda", "rocm")

# Communication that overlaps with computation is what makes FSDP cheap. The thresholds merge small
# collectives of one layer without merging those of many layers, which could not overlap. Spellings
# of older and newer XLA stand side by side: what the installed one does not know is left out.
_GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 * 2**20,
    "xla_gpu_all_reduce_combine_threshold_bytes": 512 * 2**20,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {platform: _GPU_OPTIONS for platform in GPU_PLATFORMS},
    "none": {},
}
"""Compiler options by preset and platform; in float32, CPU and TPU are best left alone."""

# XLA on CPU can merge two bfloat16 convolutions into one kernel that reads memory nobody wrote, and
# gives NaN (jax 0.12.0.1; the program is in `tests/test_compile.py`). One by one they are right.
_CPU_BFLOAT16_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": (
        "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
    )
}

# Implies deterministic kernels and no autotuning, whose choice may differ between two compiles.
_DETERMINISTIC = {platform: {"xla_gpu_deterministic_ops": True} for platform in GPU_PLATFORMS}


def compiler_options(
    xla_preset: str,
    platform: str,
    *,
    precision: str = "float32",
    deterministic: bool = False,
    device: Any = None,
) -> dict[str, Any]:
    """The options a program is compiled with, without those the installed XLA does not know.

    Args:
        xla_preset: `default` or `none`.
        platform: of the devices the program is for, e.g. `gpu`.
        precision: dtype of the computation.
        deterministic: whether two runs must agree bit for bit; on CPU they do anyway.
        device: one that is not attached, if the program is for such; see `known_options`.
    """
    if xla_preset not in PRESETS:
        raise ConfigError(f"xla_preset={xla_preset!r} does not exist; use {' or '.join(PRESETS)}")
    options = dict(PRESETS[xla_preset].get(platform, {}))
    if (xla_preset, platform, precision) == ("default", "cpu", "bfloat16"):
        options |= _CPU_BFLOAT16_OPTIONS
    if deterministic:
        options |= _DETERMINISTIC.get(platform, {})
    return known_options(options, device)


def known_options(options: Mapping[str, Any], device: Any = None) -> dict[str, Any]:
    """Leaves out compiler options that the installed XLA does not know, with a line that says so.

    XLA is asked by compiling an empty program, the only public way.

    Args:
        options: name -> value.
        device: whose compiler is asked; None: that of the devices at hand.
    """
    known = dict(options)
    dropped = []
    while (unknown := _first_unknown(tuple(known.items()), device)) is not None:
        dropped.append(unknown)
        del known[unknown]
    if dropped:
        _log.debug("the installed XLA does not know %s; left out", ", ".join(dropped))
    return known


@functools.cache
def _first_unknown(options: tuple[tuple[str, Any], ...], device: Any) -> str | None:
    """The option that XLA refuses, if any; it stops at the first."""
    if not options:
        return None
    place = None if device is None else SingleDeviceSharding(device)
    lowered = jax.jit(lambda: 0, out_shardings=place).lower()
    try:
        lowered.compile(compiler_options=dict(options))
    except Exception as error:
        # XLA quotes the name; a name can begin with another one's, so the longest counts.
        named = [name for name, _ in options if name in str(error)]
        if not named:
            raise
        return max(named, key=len)
    return None


# ---------------------------------------------------------------------------------------------
# Kernels and rematerialisation
# ---------------------------------------------------------------------------------------------


class AttentionKernel(NamedTuple):
    """What an implementation of attention can do, and what it costs."""

    respects_segments: bool
    """Whether it can keep the documents of a packed row apart."""
    stores_scores: bool
    """Whether scores [rows, heads, length, length] go through memory, in float32."""


ATTENTION_KERNELS = {
    # `models.attention.attend` compares segment ids where it compares positions: measured on CPU,
    # with layers unrolled and scanned, a step takes the same memory with and without.
    "xla": AttentionKernel(respects_segments=True, stores_scores=True),
    # Its kernel can (offsets of the segments of a row), `jax.nn.dot_product_attention` does not
    # offer it: lengths there are one per row, and a mask [rows, 1, length, length] is added to the
    # scores as a bias that is read from memory.
    "cudnn": AttentionKernel(respects_segments=False, stores_scores=False),
}


class AttentionChoice(NamedTuple):
    """A key of `ATTENTION_KERNELS`, and why."""

    implementation: str
    reason: str


MASKINGS = ("none", "causal", "padding", "segments", "window", "capped", "cache")


# What `models.attention.attend` alone can do.
_ONLY_XLA = {"window": "sliding windows of some layers", "capped": "limit of scores"}


def attention_implementation(
    platform: str,
    compute_capability: str | None,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    *,
    masking: str = "causal",
) -> AttentionChoice:
    """Chooses the attention kernel for a target, attached or not.

    JAX itself never picks cuDNN, and its own checks look at the attached device.

    Args:
        platform: of the target, e.g. `gpu`, `cpu`.
        compute_capability: of an NVIDIA GPU, e.g. `9.0` (a letter behind it does not matter).
        dtype: of queries, keys and values.
        head_dim: size of a head.
        masking: `none`, `causal`, `padding` (by lengths), `segments` (packed rows), `window`
            (sliding, in some layers), `capped` (causal, and scores have a limit) or `cache` (one
            query against a key/value cache).
    """
    if masking not in MASKINGS:
        raise ConfigError(f"masking={masking!r} does not exist; use one of {', '.join(MASKINGS)}")
    dtype = np.dtype(dtype)
    if platform not in ("gpu", "cuda") or compute_capability is None:
        return AttentionChoice("xla", f"cuDNN needs an NVIDIA GPU, the platform is {platform}")
    digits = "".join(c for c in compute_capability if c.isdigit() or c == ".")
    capability = tuple(int(part) for part in digits.split("."))
    # Heads up to 256 are trained on Hopper alone; elsewhere the backward kernel stops at 128.
    max_head_dim = 256 if capability[0] == 9 else 128
    if masking == "segments" and not ATTENTION_KERNELS["cudnn"].respects_segments:
        reason = "cuDNN as JAX offers it cannot keep packed segments apart"
    elif masking in _ONLY_XLA:
        reason = f"cuDNN as used here has no {_ONLY_XLA[masking]}"
    elif masking == "cache":
        reason = "cuDNN's fused kernel gains nothing for one query against a cache"
    elif dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"cuDNN needs bfloat16 or float16, the dtype is {dtype.name}"
    elif capability < (8, 0):
        reason = f"cuDNN needs compute capability 8.0, the GPU has {compute_capability}"
    elif head_dim % 8 or head_dim > max_head_dim:
        reason = f"cuDNN needs head sizes by 8 up to {max_head_dim}, the model has {head_dim}"
    else:
        return AttentionChoice(
            "cudnn",
            f"fused kernel for {dtype.name}, head size {head_dim}, {masking} mask on compute"
            f" capability {compute_capability}",
        )
    return AttentionChoice("xla", reason)


def attention_on(
    device: Any, dtype: jax.typing.DTypeLike, head_dim: int, *, masking: str = "causal"
) -> AttentionChoice:
    """`attention_implementation` for a device, attached or of a topology that is only described."""
    capability = getattr(device, "compute_capability", None)
    return attention_implementation(device.platform, capability, dtype, head_dim, masking=masking)


def asked_attention(
    asked: str,
    device: Any,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    *,
    masking: str = "causal",
) -> AttentionChoice:
    """The implementation that a model was made with, or for `auto` the one for the device.

    Raises:
        ConfigError: for one that would ignore the segments of packed rows, a window or a limit.
    """
    if asked == "auto":
        return attention_on(device, dtype, head_dim, masking=masking)
    if masking == "segments" and not ATTENTION_KERNELS[asked].respects_segments:
        can = [name for name, kernel in ATTENTION_KERNELS.items() if kernel.respects_segments]
        raise ConfigError(
            f"attention={asked!r} cannot keep the documents of packed rows apart, and the batch has"
            f" segment_ids; use {' or '.join(['auto', *can])}, or let documents see each other with"
            " cross_document_attention"
        )
    if asked != "xla" and masking in _ONLY_XLA:
        raise ConfigError(
            f"attention={asked!r} has no {_ONLY_XLA[masking]}, and the model has; use auto or xla"
        )
    return AttentionChoice(asked, "asked for")


def attention_cost(
    implementation: str, num_rows: int, num_heads: int, length: int, *, masking: str = "causal"
) -> str:
    """What a choice costs on a device that holds so many rows and heads, in words."""
    if not ATTENTION_KERNELS[implementation].stores_scores:
        return "no scores in memory"
    size = nbytes(4 * num_rows * num_heads * length**2)
    cost = f"scores of {size} per layer and device ({num_rows} x {num_heads} x {length} x {length})"
    if masking == "segments":
        cost += "; segments kept apart, in no more memory than a causal mask takes"
    return cost


def target_device() -> Any:
    """A device that the step being traced is for; outside of a step the first one at hand."""
    active = active_rules()
    return jax.devices()[0] if active is None else active[0].devices.flat[0]


REMAT_POLICIES = ("none", "dots", "full")

SUMMED = "summed"
"""`jax.ad_checkpoint.checkpoint_name` of what the devices that split a layer have added up."""


def remat_policy(name: str) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy of a name; None where nothing is to be computed again.

    `full` keeps only the inputs of a block and, where devices split its layers, what is marked as
    `SUMMED`, so that no all-reduce runs twice; `dots` also the results of matrix products with
    weights. `none` keeps everything, except that where parameters are gathered for use the
    gathered copies are dropped and gathered again: kept, they would be the whole model on every
    device. Call it while the step is traced, where `use_rules` is active.
    """
    if name not in REMAT_POLICIES:
        raise ConfigError(f"remat={name!r} does not exist; use {', '.join(REMAT_POLICIES)}")
    if name == "full" and has_split_layers():
        return jax.checkpoint_policies.save_only_these_names(SUMMED)
    if name == "full":
        return jax.checkpoint_policies.nothing_saveable
    if name == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return saves_all_but_gathered if has_gathered_params() else None


def remat(block: Callable[..., Any], name: str, *, is_scanned: bool = True) -> Callable[..., Any]:
    """Wraps a block in `jax.checkpoint` as `remat_policy` says.

    Args:
        block: function of arrays, e.g. the body of a scan over layers.
        name: `none`, `dots` or `full`.
        is_scanned: whether the block is the body of a scan, where XLA cannot merge the second
            computation with the first, so nothing has to keep it from that.
    """
    policy = remat_policy(name)
    if policy is None:
        return block
    return jax.checkpoint(block, policy=policy, prevent_cse=not is_scanned)


# ---------------------------------------------------------------------------------------------
# Compiling ahead
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A program compiled ahead of its first call; call it like the function it was made from.

    It takes exactly the shapes, dtypes and layouts it was compiled for. Anything else is an error
    rather than a second compilation. A call costs what a call of `jax.jit` costs: measured on a
    state of 50 leaves, 2 cores, both 0.11 ms at best and 0.16 ms in the median.
    """

    compiled: jax.stages.Compiled
    compile_seconds: float
    """Tracing, lowering and compiling."""
    memory: dict[str, int]
    """Bytes per device: argument, output, alias (outputs in place of arguments), temp, total."""

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        return self.compiled(*args)


def compile_step(
    fn: Callable[..., Any],
    abstract_args: tuple[Any, ...],
    *,
    donate_argnums: int | tuple[int, ...] = (),
    out_shardings: Any = None,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles a function ahead of its first call.

    Args:
        fn: pure function of arrays.
        abstract_args: one tree per argument, of `jax.ShapeDtypeStruct` with shardings or arrays.
        donate_argnums: arguments whose memory the outputs may take over.
        out_shardings: layouts of the outputs, a prefix of their tree; None leaves a part to XLA.
            For a step they are those of the state that goes in: it has to take what it returned.
        options: from `compiler_options`.
    """
    start = time.perf_counter()
    kwargs = {} if out_shardings is None else {"out_shardings": out_shardings}
    jitted = jax.jit(fn, donate_argnums=donate_argnums, **kwargs)
    with captured_stderr() as log, mended_compile_cache():
        lowered = jitted.lower(*abstract_args)
        compiled = lowered.compile(compiler_options=dict(options or {}))
    seconds = time.perf_counter() - start
    for line in log.involuntary_remat():
        _log.warning(
            "XLA replicates an array of %s on every device, because it knows no other way from one"
            " layout to the next; this costs time and memory: %s",
            getattr(fn, "__name__", "a program"),
            line,
        )
    return CompiledStep(compiled, seconds, memory_per_device(compiled))


def memory_per_device(compiled: jax.stages.Compiled) -> dict[str, int]:
    """What a compiled program needs on each device, in bytes; empty where XLA does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    parts = ("argument", "output", "alias", "temp")
    memory = {part: int(getattr(stats, f"{part}_size_in_bytes")) for part in parts}
    memory["total"] = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"]
    return memory
