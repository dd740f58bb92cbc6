"""What a compiled step needs of a device's memory, by class, and of a host's.

    peak = parameters + optimizer state + model state + batch     arguments, known from the layout
         + gradients + activations and temporaries                alive at the peak
         + reserve                                                gaps between the temporaries

The peak is the compiler's. The program updates the state in place, so outputs add nothing but the
metrics. Temporaries share one block; what of it is not alive at the moment of the peak is the
reserve: the price of arranging them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxtrain.compile import CompiledStep
from jaxtrain.host import memory_bytes
from jaxtrain.mesh import factor_over_nodes
from jaxtrain.plan import buffers, hlo
from jaxtrain.plan.origin import Origin, origin, short_source
from jaxtrain.plan.targets import Target
from jaxtrain.program import TrainProgram
from jaxtrain.rules import as_axes
from jaxtrain.tree import named_leaves, partition
from jaxtrain.units import nbytes

CLASSES: tuple[str, ...] = (
    "parameters",
    "ema_parameters",
    "gradients",
    "optimizer_state",
    "model_state",
    "batch",
    "activations_and_temporaries",
    "reserve",
)
"""Classes of device memory, in the order of the table."""

_STATE_CLASSES = {
    "params": "parameters",
    "ema_params": "ema_parameters",
    "opt_state": "optimizer_state",
}
_NUM_SHOWN = 12
_FLOAT_BYTES = 4
_PROCESS_BYTES = 610 * 2**20
"""Python and the packages: resident memory after the imports, on CPU."""
_COMPILER_BYTES = 290 * 2**20
"""What compiling adds to it and leaves behind: resident memory grew by 220 to 430 MiB beyond the
arrays in the first three steps, on CPU (docs/plan_reality.md)."""
_BATCHES_AHEAD = 4
"""Batches on a host at most: two that wait, one that is read, one on its way to the devices."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array at the peak."""

    num_bytes: int
    memory_class: str
    shape: str
    """As HLO writes it, without the layout."""
    op_name: str
    """The scopes it comes from."""
    source: str
    """`file:line` of the model's code; empty where XLA does not say."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device."""

    classes: Mapping[str, int]
    """Name of `CLASSES` -> bytes; those without bytes are left out."""
    peak_bytes: int
    """What the compiler says."""
    buffers: tuple[Buffer, ...]
    """The largest temporaries at the peak."""


def argument_classes(program: TrainProgram, batch: Mapping[str, Any]) -> dict[str, int]:
    """Bytes per device of what goes into a step, by class."""
    classes = dict.fromkeys(CLASSES, 0)
    for field in dataclasses.fields(program.abstract):
        name = _STATE_CLASSES.get(field.name, "model_state")
        classes[name] += _local_bytes(getattr(program.abstract, field.name))
    classes["batch"] = _local_bytes(dict(batch))
    return classes


def memory_of(
    step: CompiledStep,
    program: TrainProgram,
    batch: Mapping[str, Any],
    assignment: buffers.Assignment | None,
) -> Memory:
    """Divides the peak of a compiled step into classes.

    Args:
        step: the compiled step.
        program: what it was compiled from.
        batch: the abstract batch.
        assignment: from `buffers.read_dump`. Without one all temporaries are one class, and the
            gradients are estimated at the size of the parameters that train.
    """
    classes = argument_classes(program, batch)
    peak = peak_bytes(step)
    left = max(peak - sum(classes.values()), 0)
    if assignment is None:
        classes["gradients"] = min(left, gradient_bytes(program))
        classes["activations_and_temporaries"] = left - classes["gradients"]
        return Memory(_without_zeros(classes), peak, ())
    module = hlo.parse(assignment.text)
    makers = {
        instruction.name: (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    gradient_shapes = _gradient_shapes(program)
    found = []
    for value in assignment.at_peak:
        shape, made, op_name = value.shape.partition("{")[0], Origin("", ""), ""
        if value.instruction in makers:
            computation, maker = makers[value.instruction]
            made = origin(module, computation, maker, value.index)
            op_name = maker.op_name or made.op_name
        name = _class_of(shape, op_name, gradient_shapes)
        classes[name] += value.num_bytes
        if len(found) < _NUM_SHOWN and value.instruction in makers:
            line = short_source(made.source)
            found.append(Buffer(value.num_bytes, name, shape, made.op_name, line))
    # What the assignment does not name: metrics, constants, and scalars of the program.
    classes["reserve"] = max(assignment.temp_bytes - assignment.live_bytes, 0)
    rest = left - sum(value.num_bytes for value in assignment.at_peak) - classes["reserve"]
    if rest > 0:
        classes["activations_and_temporaries"] += rest
    else:
        classes["reserve"] = max(classes["reserve"] + rest, 0)
    return Memory(_without_zeros(classes), peak, tuple(found))


def gradient_bytes(program: TrainProgram, *, is_whole: bool = False) -> int:
    """Bytes of the gradients on one device, in float32; `is_whole`: on all of them, each once."""
    return _FLOAT_BYTES * sum(
        math.prod(leaf.shape if is_whole else leaf.sharding.shard_shape(leaf.shape))
        for _, leaf in _trained(program)
    )


def peak_bytes(step: CompiledStep) -> int:
    """The most that one device holds at a time, as the compiler says."""
    stats: Any = step.compiled.memory_analysis()
    if stats is None:
        return 0
    # On CPU the compiler's peak leaves the temporaries out.
    arguments = step.memory["argument"]
    peak = int(stats.peak_memory_in_bytes)
    is_whole = peak > arguments + step.memory["temp"] // 2
    return peak if is_whole else step.memory["total"]


@dataclasses.dataclass(frozen=True)
class Available:
    """What a device has for a program."""

    num_bytes: int
    text: str
    """Where the figure comes from."""


def available(target: Target, memory_fraction: float, num_communicators: int) -> Available:
    """What the run will have of a device: its pool, and no more than runtime and buffers leave.

    JAX takes `memory_fraction` of a GPU's memory at the start and allocates from it. The context
    of the process and the buffers of communicators are outside of the pool, in the rest; if they
    do not fit there, they limit the pool. On TPUs there is no pool, and the runtime's own share is
    taken off; simulated devices share the memory of the machine.
    """
    kind = target.kind
    total = kind.memory_bytes
    if kind.platform == "cpu":
        total = memory_bytes() // target.num_devices
        return Available(total, f"the memory of this machine over {target.num_devices} devices")
    outside = kind.context_bytes + num_communicators * kind.communicator_bytes
    if kind.platform == "tpu":
        text = f"{nbytes(total)} less {nbytes(outside)} of the runtime"
        return Available(total - outside, text)
    pool = int(total * memory_fraction)
    text = f"{memory_fraction:g} of {nbytes(total)}, the pool of the run"
    if pool + outside <= total:
        return Available(
            pool, f"{text}; context and communicators ({nbytes(outside)}) fit beside it"
        )
    text = (
        f"{nbytes(total)} less {nbytes(outside)} of context and {num_communicators} communicators"
    )
    return Available(max(total - outside, 0), f"{text}: a pool of {memory_fraction:g} is too large")


def host_memory(
    program: TrainProgram, batch: Mapping[str, Any], data: Any, target: Target
) -> dict[str, int]:
    """Bytes on one host, by use.

    `save` and `restore` are copies of what the host's devices hold, every shard once: a save copies
    it before the run goes on, a restore reads it before it is placed. They do not come at the same
    time; on CPU neither copies. Devices that live in the host's memory come on top of this, see
    `with_devices`.
    """
    rows = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in batch.values())
    uses = {
        "process": _PROCESS_BYTES,
        "compiler": _COMPILER_BYTES,
        "data": int(getattr(data, "num_bytes", 0)),
        "batches": _BATCHES_AHEAD * -(-rows // target.num_hosts),
    }
    state = jax.tree.leaves(program.abstract)
    if target.kind.platform != "cpu":
        uses["save"] = uses["restore"] = sum(_host_bytes(leaf, target) for leaf in state)
    return uses


def with_devices(uses: Mapping[str, int], needs: Memory, target: Target) -> dict[str, int]:
    """Adds what devices hold that have no memory but the host's."""
    if target.kind.platform != "cpu":
        return dict(uses)
    return {**uses, "devices": needs.peak_bytes * target.devices_per_host}


def host_total(uses: Mapping[str, int]) -> int:
    """The most that a host needs at a time: saving and restoring do not coincide."""
    copies = [size for name, size in uses.items() if name in ("save", "restore")]
    return sum(uses.values()) - sum(copies) + max(copies, default=0)


def _local_bytes(tree: Any) -> int:
    """Bytes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shard = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shard) * _itemsize(leaf.dtype)
    return total


def _host_bytes(leaf: Any, target: Target) -> int:
    """Bytes of the different shards on the devices of one host."""
    sizes = factor_over_nodes(leaf.sharding.mesh.shape, target.devices_per_host)
    axes = [axis for entry in leaf.sharding.spec for axis in as_axes(entry) or ()]
    num_shards = math.prod(sizes[axis][1] for axis in axes)
    return num_shards * math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf.dtype)


def _itemsize(dtype: Any) -> int:
    """Bytes of an element; a random key is two words of 32 bits."""
    return 8 if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize


def _trained(program: TrainProgram) -> list[tuple[str, Any]]:
    """(path, leaf) of the parameters that have a gradient."""
    _, trained = partition(program.abstract.params, program.frozen)
    return named_leaves(trained)


def _gradient_shapes(program: TrainProgram) -> set[tuple[int, ...]]:
    """Shapes in which gradients of parameters appear on a device, dims sorted and without ones.

    As they are stored, and whole along the mesh axes that split the batch; of stacked layers also
    those of a single one.
    """
    shapes = set()
    for path, leaf in _trained(program):
        stored = leaf.sharding.shard_shape(leaf.shape)
        num_shards = leaf.sharding.mesh.shape["fsdp"]
        gathered = list(stored)
        for dim, entry in enumerate(leaf.sharding.spec):
            gathered[dim] *= num_shards if "fsdp" in (as_axes(entry) or ()) else 1
        for shape in (stored, gathered):
            shapes.add(_sorted(shape))
            if path.startswith("layers/"):
                shapes.add(_sorted(shape[1:]))
    return {shape for shape in shapes if len(shape) > 0}


def _sorted(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def _class_of(shape: str, op_name: str, gradient_shapes: set[tuple[int, ...]]) -> str:
    """A temporary is a gradient if it has the shape of one and comes from the backward pass.

    Or from the loss, which makes its own gradient in the forward pass. What a loop carries, sums
    over micro-batches for one, often has no name that tells; there float32 has to do.
    """
    array = hlo.parse_arrays(shape)[0] if "[" in shape else None
    if array is None or _sorted(array.dims) not in gradient_shapes or "/optimizer/" in op_name:
        return "activations_and_temporaries"
    is_backward = "transpose(" in op_name
    is_of_loss = "jvp(loss)" in op_name and array.dtype == "f32"
    is_carried = "jvp(" not in op_name and array.dtype == "f32"
    is_gradient = is_backward or is_of_loss or is_carried
    return "gradients" if is_gradient else "activations_and_temporaries"


def _without_zeros(classes: Mapping[str, int]) -> dict[str, int]:
    return {name: classes[name] for name in CLASSES if classes[name]}
