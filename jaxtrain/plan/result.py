"""What planning comes to: the values of `plan.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ExitCode
from jaxtrain.layout_audit import Audit
from jaxtrain.plan import advice, cost
from jaxtrain.plan.memory import Buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan.json` holds. Rates and bytes are per device unless they say otherwise."""

    target: str
    description: str
    """Of the target, in words."""
    is_estimate: bool
    """Whether it was compiled for other devices than those of the target."""
    num_devices: int
    num_hosts: int
    devices_per_host: int
    mesh: Mapping[str, int]
    flags: tuple[str, ...]
    """What to add to the command of the run."""
    fits: bool
    """On the device and on the host."""
    peak_bytes_per_device: int
    device_bytes: int
    """What the run will have of a device."""
    device_text: str
    """Where that figure is from."""
    memory: Mapping[str, int]
    """Class -> bytes on each device."""
    buffers: tuple[Buffer, ...]
    host_bytes: int
    host_memory: Mapping[str, int]
    """Use -> bytes on each host."""
    flops_per_device: float | None
    flops: Mapping[str, float]
    """Kind of kernel -> operations of one device in a step, those of remat included."""
    communication: Mapping[str, cost.AxisTime]
    prediction: cost.Prediction | None
    fused_attention: bool | None
    """None for a program without attention, or one that is not known."""
    warnings: tuple[advice.Warned, ...]
    min_hosts: int | None
    """Hosts of this kind that it needs at least, with the state shared among all; None: no number
    of hosts is enough, because the rest does not fit one device."""
    audit: Audit
    figures: Mapping[str, Any]
    """Of the kind of device; see `targets/`."""
    compile_seconds: float | None
    ranking: tuple["Plan", ...] = ()
    """With `--mesh=auto`: what was compiled, best first; this plan is the first of it."""
    reason: str = ""
    """Why it stands where it does in a ranking."""
    estimates: tuple[Mapping[str, Any], ...] = ()
    """With `--mesh=auto`: the fastest by the analytic model, most of them not compiled."""
    num_considered: int = 0
    """With `--mesh=auto`: how many the analytic model looked at."""

    @property
    def choice(self) -> tuple[str, ...]:
        """Those of the flags that tell plans of one run apart."""
        return self.flags[:1] + self.flags[2:4]

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of a step."""
        return None if self.prediction is None else self.prediction.step_seconds

    @property
    def exit_code(self) -> ExitCode:
        """OK if it fits."""
        return ExitCode.OK if self.fits else ExitCode.CONFIG

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        p = self.prediction
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["prediction"]
        return values | {
            "buffers": [dataclasses.asdict(buffer) for buffer in self.buffers],
            "communication": {
                axis: {
                    "bytes_sent_per_device": time.bytes_sent,
                    "seconds": time.seconds,
                    "exposed_seconds": time.exposed_seconds,
                }
                for axis, time in self.communication.items()
            },
            "choice": list(self.choice),
            "warnings": [warned._asdict() for warned in self.warnings],
            "audit": self.audit.to_json(),
            "ranking": [plan.to_json() for plan in self.ranking],
            "step_seconds": self.step_seconds,
            "step_seconds_range": p and [p.low_seconds, p.high_seconds],
            "kernel_seconds": p and p.kernel_seconds,
            "matmul_seconds": p and p.matmul_seconds,
            "memory_seconds": p and p.memory_seconds,
            "exposed_seconds": p and p.exposed_seconds,
            "phases": p and {name: list(times) for name, times in p.phases.items()},
            "tokens_per_second_per_device": p and p.tokens_per_second_per_device,
            "mfu": p and p.mfu,
        }
