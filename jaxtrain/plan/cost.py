"""Predicts how long a step takes, from its compiled program and three efficiencies.

One formula for every model, layout and target:

    kernel       max(operations / (M x sustained), bytes / (B x memory bandwidth))
    collective   latency of its steps + the larger of
                     bytes sent / (K x link bandwidth)                inside hosts
                     bytes that cross / (K x network bandwidth)       between hosts
    step         kernels one after the other, in the order of the schedule, plus the time that
                 they wait for collectives

M, B and K are the shares of the nominal rates that real programs reach: `MATRIX_EFFICIENCY`,
`BANDWIDTH_EFFICIENCY` and `LINK_EFFICIENCY`. How they were chosen, and what they predict for
published runs, is in docs/planning.md.

Collectives run one after the other on a stream of their own. One that starts asynchronously is
hidden until the program waits for its end; what is left of it then is exposed. Any other is
exposed whole. In a ring over hosts with g devices each, all bytes of the ring pass every host
boundary once, spread over g network ports: bytes that cross = bytes sent / g. An all-to-all
crosses with the share of the array that is meant for other hosts. A ring of n devices on h hosts
takes n - 1 steps, h - 1 of them between hosts, an all-reduce twice as many; what has no ring takes
one step.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxtrain.plan import work
from jaxtrain.plan.collectives import part_of
from jaxtrain.plan.hlo import Computation, Instruction, Module
from jaxtrain.plan.traffic import Collective

MATRIX_EFFICIENCY = 0.71
"""Share of the sustained rate that matrix products and fused attention reach in a step."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of the memory bandwidth that elementwise kernels reach."""
LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large collectives reach."""

RANGE = 1.25
"""The step takes between the prediction / RANGE and the prediction x RANGE; the errors against
published runs are smaller (docs/plan_published.md)."""

_RINGS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""Collectives that go round a ring of their devices, and how often."""

# Matrix units take 8-bit operands at twice the rate of 16-bit ones; float32 at the rate of TF32
# on GPUs, which is half, while TPUs compute it in bfloat16 passes (`Machine.float32_rate`).
_RATE_8_BIT = 2.0


class Machine(Protocol):
    """What a kind of device has (`targets.DeviceKind`); nominal rates, links one way."""

    @property
    def peak_flops(self) -> float:
        """FLOP/s of the matrix units in bfloat16, dense."""
        ...

    @property
    def sustained_flops(self) -> float:
        """FLOP/s that the best matrix products in bfloat16 reach."""
        ...

    @property
    def float32_rate(self) -> float:
        """Rate of float32 operands on the matrix units, as a share of that in bfloat16."""
        ...

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second."""
        ...

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second to devices of the same host."""
        ...

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second to devices of other hosts."""
        ...

    @property
    def link_latency(self) -> float:
        """Seconds of one step of a ring between devices of one host."""
        ...

    @property
    def network_latency(self) -> float:
        """The same between devices of two hosts."""
        ...


@dataclasses.dataclass(frozen=True)
class AxisTime:
    """Communication over one mesh axis (or several at once) in a step, of one device."""

    bytes_sent: float
    seconds: float
    exposed_seconds: float
    """Of `seconds`, those that no kernel hides."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How long a step takes, and of what."""

    step_seconds: float
    low_seconds: float
    high_seconds: float
    kernel_seconds: float
    """All kernels; the rest of the step is exposed communication."""
    matmul_seconds: float
    """Of the matrix units, had they nothing to wait for."""
    memory_seconds: float
    """Of the memory traffic, had it nothing to wait for."""
    exposed_seconds: float
    communication: Mapping[str, AxisTime]
    """By mesh axis."""
    exposed_by: Mapping[str, float]
    """Name of a collective -> its exposed seconds in a step."""
    phases: Mapping[str, tuple[float, float]]
    """`forward`, `loss`, `backward`, `remat`, `update` -> (kernel seconds, exposed seconds)."""
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    """Operations that the model needs / (step_seconds x peak): without remat, attention over the
    whole sequence (`throughput.training_flops_per_token`)."""


def predict(
    module: Module,
    collectives: Sequence[Collective],
    machine: Machine,
    *,
    tokens_per_device: float | None = None,
    flops_per_token: float | None = None,
) -> Prediction:
    """Predicts one step.

    Args:
        module: the compiled step, from `hlo.parse`.
        collectives: those of the same module, from `traffic.communication`.
        machine: what it runs on.
        tokens_per_device: tokens of a step / devices.
        flops_per_token: what the model needs for one token, forward and backward.
    """
    by_name = {collective.name: collective for collective in collectives}
    spent = _Schedule(module, machine, by_name).run(module.entry)
    axes: dict[str, AxisTime] = {}
    for collective in collectives:
        before = axes.get(collective.axis, AxisTime(0.0, 0.0, 0.0))
        axes[collective.axis] = AxisTime(
            before.bytes_sent + collective.total_bytes_sent,
            before.seconds + collective.times * link_seconds(collective, machine),
            before.exposed_seconds + spent.exposed.get(collective.name, 0.0),
        )
    step = spent.seconds
    tokens = tokens_per_device / step if tokens_per_device and step else None
    return Prediction(
        step_seconds=step,
        low_seconds=step / RANGE,
        high_seconds=step * RANGE,
        kernel_seconds=spent.kernels,
        matmul_seconds=spent.matmul,
        memory_seconds=spent.memory,
        exposed_seconds=sum(spent.exposed.values()),
        communication=axes,
        exposed_by=spent.exposed,
        phases={name: (kernels, waits) for name, (kernels, waits) in spent.phases.items()},
        tokens_per_second_per_device=tokens,
        mfu=tokens * flops_per_token / machine.peak_flops if tokens and flops_per_token else None,
    )


def kernel_seconds(kernel: work.Kernel, machine: Machine) -> tuple[float, float]:
    """(seconds of the matrix units, seconds of the memory) of one launch."""
    matmul = sum(part.count / _rate(part.dtype, machine) for part in kernel.flops)
    return matmul, kernel.num_bytes / (BANDWIDTH_EFFICIENCY * machine.memory_bandwidth)


def link_seconds(collective: Collective, machine: Machine) -> float:
    """How long one run of a collective takes; the formulas are in the docstring of this module."""
    n, g = collective.group_size, collective.devices_inside
    sent = collective.bytes_sent
    if n == 1:
        return 0.0
    if not collective.spans_hosts:
        inside, crosses = sent, 0.0
    elif collective.kind in ("all-to-all", "ragged-all-to-all"):
        inside = collective.num_bytes * (g - 1) / n
        crosses = collective.num_bytes * (n - g) / n
    else:
        inside, crosses = (sent if g > 1 else 0.0), sent / g
    slowest = max(inside / machine.link_bandwidth, crosses / machine.network_bandwidth)
    return _latency(collective, machine) + slowest / LINK_EFFICIENCY


def _latency(collective: Collective, machine: Machine) -> float:
    rounds = _RINGS.get(collective.kind)
    if rounds is None:
        return machine.network_latency if collective.spans_hosts else machine.link_latency
    hosts = collective.group_size // collective.devices_inside
    inside = collective.group_size - hosts
    return rounds * (inside * machine.link_latency + (hosts - 1) * machine.network_latency)


def _rate(dtype: str, machine: Machine) -> float:
    rate = MATRIX_EFFICIENCY * machine.sustained_flops
    if dtype.startswith(("f8", "s8", "u8")):
        return rate * _RATE_8_BIT
    return rate * machine.float32_rate if dtype in ("f32", "f64") else rate


# ---------------------------------------------------------------------------------------------
# The schedule
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Spent:
    """What a computation costs, all its loops included."""

    seconds: float = 0.0
    kernels: float = 0.0
    matmul: float = 0.0
    memory: float = 0.0
    exposed: dict[str, float] = dataclasses.field(default_factory=dict)
    phases: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, other: "_Spent", times: int) -> None:
        """Adds what a loop or a call costs."""
        self.seconds += times * other.seconds
        self.kernels += times * other.kernels
        self.matmul += times * other.matmul
        self.memory += times * other.memory
        for name, seconds in other.exposed.items():
            self.exposed[name] = self.exposed.get(name, 0.0) + times * seconds
        for phase, (kernels, waits) in other.phases.items():
            self.in_phase(phase, times * kernels, times * waits)

    def in_phase(self, phase: str, kernels: float, waits: float) -> None:
        """Books seconds under a phase."""
        booked = self.phases.setdefault(phase, [0.0, 0.0])
        booked[0] += kernels
        booked[1] += waits


class _Schedule:
    """Runs a program on two clocks: that of the kernels and that of the collectives."""

    def __init__(self, module: Module, machine: Machine, collectives: Mapping[str, Collective]):
        self._module = module
        self._machine = machine
        self._collectives = collectives

    def run(self, computation: Computation) -> _Spent:
        """Runs one computation from its first to its last instruction."""
        spent, phase = _Spent(), "update"
        links_free_at = 0.0
        running: dict[str, tuple[str, float]] = {}
        for instruction in computation.instructions.values():
            phase = _phase(instruction.op_name) or phase
            for body, times in self._module.inside(computation, instruction):
                spent.add(self.run(body), times)
            part = part_of(self._module, computation, instruction)
            if part is None:
                self._launch(spent, computation, instruction, phase)
            elif instruction.name in self._collectives:
                start = max(spent.seconds, links_free_at)
                collective = self._collectives[instruction.name]
                links_free_at = start + link_seconds(collective, self._machine)
                running[part.chain] = (instruction.name, links_free_at)
            if part is not None and part.role in ("done", "whole") and part.chain in running:
                self._wait(spent, *running.pop(part.chain), phase)
        return spent

    def _launch(self, spent, computation: Computation, instruction: Instruction, phase: str):
        kernel = work.kernel_of(self._module, computation, instruction)
        if kernel is None:
            return
        matmul, memory = kernel_seconds(kernel, self._machine)
        spent.matmul += matmul
        spent.memory += memory
        spent.kernels += max(matmul, memory)
        spent.seconds += max(matmul, memory)
        spent.in_phase(phase, max(matmul, memory), 0.0)

    @staticmethod
    def _wait(spent: _Spent, name: str, end: float, phase: str) -> None:
        waits = max(end - spent.seconds, 0.0)
        spent.exposed[name] = spent.exposed.get(name, 0.0) + waits
        spent.seconds += waits
        spent.in_phase(phase, 0.0, waits)


def _phase(op_name: str) -> str | None:
    """Part of the step that an `op_name` belongs to; None where it does not say."""
    if not op_name:
        return None
    if "rematted_computation" in op_name:
        return "remat"
    if "(loss)" in op_name:
        return "loss"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "update"
