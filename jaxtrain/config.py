"""The configuration of a run: frozen dataclasses, every default once.

An experiment derives its own class from `RunConfig` and adds what it builds from:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class LmConfig(RunConfig):
        model: TransformerConfig = field(default_factory=TransformerConfig)
        data: TextDataConfig = field(default_factory=TextDataConfig)

Every field becomes a flag (`jaxtrain.flags`), is stored in the run's `config.json`, and says
whether it may change when the run is resumed.
"""

import dataclasses
import functools
import re
from typing import ClassVar

from jaxtrain.data.config import DataConfig
from jaxtrain.errors import ConfigError
from jaxtrain.fields import Config, Leaf, field, leaves, override, record_reads, unread
from jaxtrain.resolve import (
    Difference,
    changed,
    dump,
    from_dict,
    replace_paths,
    resume_differences,
    summary,
    to_dict,
    versions,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Difference",
    "Leaf",
    "OptimizerConfig",
    "RunConfig",
    "changed",
    "dump",
    "field",
    "from_dict",
    "leaves",
    "override",
    "record_reads",
    "replace_paths",
    "resume_differences",
    "summary",
    "to_dict",
    "unread",
    "versions",
]

_INT32_MAX = 2**31 - 1
# A field that may change when a run is resumed.
_free = functools.partial(field, on_resume="free")
_RUN, _BATCH, _LOG, _NUMERICS, _DEVICES, _PROCESSES = (
    "run",
    "training length and batch",
    "evaluation and logging",
    "numerics",
    "devices and compiler",
    "several processes",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """What `optim.make_optimizer` builds."""

    name: str = field(
        "adamw",
        choices=("adamw", "lion", "sgd"),
        refused={
            "muon": "optax's picks the wrong leaves of stacked layers; use adamw, lion or sgd",
            "adafactor": "its factored state is not placed yet; use adamw, lion or sgd",
        },
        help="optimizer; --optimizer=NAME is the same",
    )
    learning_rate: float = field(1e-3, positive=True, help="peak learning rate, after warm-up")
    schedule: str = field(
        "cosine",
        choices=("constant", "cosine", "linear", "wsd"),
        help="learning rate after the warm-up; wsd: constant, then a linear decay",
    )
    warmup_steps: int = field(
        0,
        unit="steps",
        minimum=-1,
        maximum=_INT32_MAX,
        help="linear warm-up from 0, any schedule; -1: a tenth of num_steps, at most 2000",
    )
    final_learning_rate_ratio: float = field(
        0.1,
        minimum=0,
        maximum=1,
        used_when={"schedule": ("cosine", "linear", "wsd")},
        help="learning rate at the last step, as a share of the peak",
    )
    decay_fraction: float = field(
        0.2,
        above=0,
        maximum=1,
        used_when={"schedule": ("wsd",)},
        help="share of the steps at the end over which wsd decays",
    )
    b1: float = field(
        0.9,
        minimum=0,
        below=1,
        used_when={"name": ("adamw", "lion")},
        help="decay of the first moment",
    )
    b2: float = field(
        0.95,
        minimum=0,
        below=1,
        used_when={"name": ("adamw", "lion")},
        help="decay of the second moment (lion: of its momentum; its authors use 0.99)",
    )
    eps: float = field(
        1e-8, positive=True, used_when={"name": ("adamw",)}, help="added to the denominator"
    )
    momentum: float = field(
        0.0, minimum=0, below=1, used_when={"name": ("sgd",)}, help="momentum; 0: none"
    )
    weight_decay: float = field(0.1, minimum=0, help="decoupled weight decay; 0: none")
    no_decay: str = field(
        r"(^|/)(bias|scale)$|(^|/)position/",
        pattern=True,
        help="parameters without decay: regular expression, searched in the path",
    )
    freeze: str = field(
        "",
        pattern=True,
        help="parameters that stay as they are: regular expression, searched in the path",
    )
    clip_norm: float = field(1.0, minimum=0, help="largest global gradient norm; 0: no clipping")
    no_clip: str = field(
        "",
        pattern=True,
        help="parameters whose gradients clipping neither counts nor scales: regular expression, "
        "searched in the path",
    )
    ema_decay: float = field(
        0.0, minimum=0, below=1, help="decay of the moving average of the parameters; 0: none kept"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When checkpoints are written, which are kept, and what a new run starts from."""

    every_steps: int = _free(
        100, unit="steps", minimum=0, help="cadence of checkpoints; 0: only the last step is saved"
    )
    keep_last: int = _free(3, unit="checkpoints", minimum=1, help="how many of the newest are kept")
    keep_every_steps: int = _free(
        0, unit="steps", minimum=0, help="steps divisible by it are kept for good; 0: none"
    )
    restore_from: str = _free(
        "", help="another run's directory to start from (parameters, optimizer, step)"
    )
    restore_step: int = _free(
        -1, unit="step", minimum=-1, help="the step to restore; -1: the newest"
    )
    partial_restore: str = _free(
        "",
        pattern=True,
        help="what is not read from --checkpoint.restore_from: it keeps its initial values, be it "
        "there or not; regular expression, searched in the path of a parameter (head/; its moments "
        "and average go with it) and of an array of the state (^(opt_state|step))",
    )
    overwrite: bool = _free(
        False, help="start anew in a directory that holds checkpoints; they are deleted"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """What every experiment has; its flags are flat (`--num_steps`), the sections dotted."""

    _path: ClassVar[str | None] = ""

    workdir: str = _free(
        "",
        group=_RUN,
        help="directory of the run: config, metrics, checkpoints, report; empty: no files",
    )
    resume: str = _free(
        "auto",
        choices=("auto", "never", "must"),
        group=_RUN,
        help="auto: go on from the newest checkpoint if there is one; never, must: refuse "
        "otherwise",
    )
    evaluate: bool = _free(False, group=_RUN, help="only evaluate the newest checkpoint, whole")
    audit: bool = _free(False, group=_RUN, help="only print where every parameter lives")
    peek: int = _free(
        0,
        unit="rows",
        minimum=0,
        group=_RUN,
        help="only show the first rows of the training data as the model sees them; images also in "
        "workdir/peek.html",
    )
    plan: str = _free(
        "",
        group=_RUN,
        help="only say what the run would need, and how fast it would be, on TARGET: h100:16x8 "
        "(hosts x GPUs), tpu-v5p:4x4x8 (chips), cpu:8, or here",
    )
    num_steps: int = _free(
        1000,
        unit="steps",
        minimum=1,
        maximum=_INT32_MAX,
        group=_BATCH,
        help="length of the run; the learning rate schedule ends there",
    )
    global_batch_size: int = _free(
        32, unit="rows", minimum=1, group=_BATCH, help="of one step, over all devices"
    )
    accumulate_steps: int = _free(
        1,
        unit="micro-batches",
        minimum=1,
        group=_BATCH,
        help="parts a batch is computed in, one after the other",
    )
    seed: int = field(
        0,
        minimum=0,
        # jax.random.key takes larger numbers and uses the lower 32 bits: 2**32 would be 0.
        maximum=2**32 - 1,
        group=_BATCH,
        help="of initial values, order of the data, and noise",
    )
    eval_every_steps: int = _free(
        100,
        unit="steps",
        minimum=0,
        group=_LOG,
        help="cadence of evaluation; 0: only after the last step",
    )
    eval_batches: int = _free(
        16,
        unit="batches",
        minimum=0,
        group=_LOG,
        help="of global_batch_size rows in an evaluation; 0: all data; the last one is whole",
    )
    log_every_steps: int = _free(
        10, unit="steps", minimum=0, group=_LOG, help="cadence of metrics; 0: never"
    )
    profile: str = _free(
        "", group=_LOG, help="START:STOP, steps whose profile goes to workdir/profile; empty: none"
    )
    precision: str = field(
        "float32",
        choices=("float32", "bfloat16"),
        group=_NUMERICS,
        help="dtype of the computation; parameters, norms and losses stay float32",
    )
    nonfinite: str = _free(
        "stop",
        group=_NUMERICS,
        help="stop: end the run at a non-finite loss or gradient; skip:N: leave out such steps, "
        "end after N in a row",
    )
    remat: str = _free(
        "none",
        choices=("none", "dots", "full"),
        group=_NUMERICS,
        help="what the backward pass computes again to save memory; dots: all but matrix products",
    )
    deterministic: bool = _free(False, group=_NUMERICS, help="bit-reproducible on GPUs, at a price")
    mesh: str = _free(
        "fsdp:-1",
        group=_DEVICES,
        help="sizes of the axes data, fsdp, tensor, e.g. data:2,fsdp:-1; -1: the devices left; "
        "auto: the fastest that fits",
    )
    allow_replicated: float = _free(
        0.02,
        minimum=0,
        maximum=1,
        group=_DEVICES,
        help="share of the bytes that may be replicated although a rule could shard them",
    )
    num_cpu_devices: int = _free(
        0,
        unit="devices",
        minimum=0,
        group=_DEVICES,
        help="simulated devices on CPU; 0: as JAX finds them",
    )
    xla_preset: str = _free(
        "default",
        choices=("default", "none"),
        group=_DEVICES,
        help="compiler options: ours for the device, or none",
    )
    compilation_cache_dir: str = _free(
        "",
        group=_DEVICES,
        help="keeps compiled programs; empty: the user's cache on accelerators, none on CPU; "
        "none: off",
    )
    memory_fraction: float = _free(
        0.9,
        above=0,
        maximum=1,
        group=_DEVICES,
        help="share of an accelerator's memory that JAX takes",
    )
    huge_pages: str = _free(
        "auto",
        choices=("auto", "off"),
        group=_DEVICES,
        help="auto: transparent huge pages for malloc on CPU, where the C library has them",
    )
    launcher: str = _free(
        "auto",
        choices=("auto", "none", "jaxtrain", "torchrun", "slurm", "mpi", "kubernetes"),
        group=_PROCESSES,
        help="whose variables say which process of how many this is; auto: whoever's are complete; "
        "none: a single process",
    )
    coordinator: str = _free(
        "",
        group=_PROCESSES,
        help="host:port of process 0, on which it listens; empty: as the launcher says",
    )
    num_processes: int = _free(
        0, unit="processes", minimum=0, group=_PROCESSES, help="of the run; 0: as the launcher says"
    )
    process_id: int = _free(
        -1, minimum=-1, group=_PROCESSES, help="of this process, from 0; -1: as the launcher says"
    )
    process_per: str = _free(
        "auto",
        choices=("auto", "device", "node"),
        group=_PROCESSES,
        help="what a process uses of the GPUs it sees. auto: its share among the node's processes; "
        "device: one; node: all",
    )
    init_timeout_seconds: float = _free(
        1800.0,
        unit="seconds",
        positive=True,
        group=_PROCESSES,
        help="how long the processes wait for each other at the start",
    )
    guardian: bool = _free(
        True,
        group=_PROCESSES,
        help="each process runs under a small parent that ends all when one is lost or hangs",
    )
    stall_timeout_seconds: float = _free(
        600.0,
        unit="seconds",
        minimum=0,
        group=_PROCESSES,
        help="how long a step, an evaluation batch or a wait for data may take until the guardians "
        "end the run; a save 3 times, start, compilation, restore and end 6 times as long; 0: for "
        "ever",
    )
    preemption_grace_seconds: float = _free(
        30.0,
        unit="seconds",
        minimum=0,
        group=_RUN,
        help="how long a process may live after SIGTERM where it runs; a save that takes longer is "
        "warned of",
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Flags `--optimizer.NAME`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Flags `--checkpoint.NAME`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Flags `--data.NAME`; an experiment puts a class of its own here, derived from DataConfig."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nonfinite != "stop" and not re.fullmatch(r"skip:[1-9][0-9]*", self.nonfinite):
            raise ConfigError(
                f"nonfinite={self.nonfinite} must be stop, or skip:N with N at least 1"
            )
        if [bool(self.plan), self.evaluate, self.audit, bool(self.peek)].count(True) > 1:
            raise ConfigError(
                "plan, evaluate, audit and peek exclude each other; ask for one of them"
            )
        window = re.fullmatch(r"(\d+):(\d+)", self.profile)
        if self.profile and not (window and int(window[1]) < int(window[2])):
            raise ConfigError(
                f"profile={self.profile} must be START:STOP, two steps with START before STOP"
            )
        if window and int(window[1]) >= self.num_steps:
            raise ConfigError(
                f"profile={self.profile} must start before the end, num_steps={self.num_steps}"
            )

    @property
    def num_workers(self) -> int | None:
        """Processes that read training data; None: to be found out, as with a section `data` that
        does not derive from `DataConfig`."""
        return self.data.worker_count if isinstance(self.data, DataConfig) else None

    @property
    def is_training(self) -> bool:
        """Whether the run trains, instead of only looking at something."""
        return not (self.plan or self.evaluate or self.audit or self.peek)

    @property
    def max_skipped(self) -> int:
        """How many non-finite steps in a row are left out before the run ends; 0: none."""
        return 0 if self.nonfinite == "stop" else int(self.nonfinite.removeprefix("skip:"))
