"""Counts what one device computes and moves through its memory in one call of a program.

Floating-point operations are those of matrix units, read from the compiled program, so what remat
computes again is in them and what fusing removed is not:

    matrix product   2 x (elements of the result) x (size of the contracted dims)
    convolution      2 x (batch x output features x input features of a group) x (positions at
                     which kernel and input overlap)
    fused attention  forward 2, backward 5 matrix products of 2 B N T S H each, halved under a
                     causal mask (B rows, N heads, T queries, S keys, H head dim)

Elementwise operations are not counted: they cost memory traffic, not matrix units.

Memory traffic is what kernels read and write, each operand and result once. A kernel that slices
an operand reads the slice; one that updates a slice in place writes the slice. What stays in
caches between two kernels is counted as traffic.
"""

import dataclasses
import functools
import json
import math
import re
from typing import NamedTuple

import numpy as np

from jaxtrain.plan.collectives import COLLECTIVES, part_of
from jaxtrain.plan.hlo import Array, Computation, Instruction, Module

# These launch nothing, or launch what `Module.walk` visits by itself.
_FREE = {
    "add-dependency", "after-all", "bitcast", "call", "call-start", "conditional", "constant",
    "domain", "get-tuple-element", "opt-barrier", "parameter", "partition-id", "replica-id",
    "tuple", "while",
}  # fmt: skip
_SAME_ELEMENTS = {"bitcast", "convert", "copy", "negate", "reshape", "transpose"}


class Flops(NamedTuple):
    """Operations of one kernel on matrix units."""

    kind: str
    """`matmul`, `attention` or `convolution`."""
    dtype: str
    """Of the operands, as HLO spells it."""
    count: float


class Kernel(NamedTuple):
    """What one launch of an instruction costs."""

    flops: tuple[Flops, ...]
    num_bytes: int
    """Read from and written to memory."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Totals of one device in one call of the program."""

    flops: dict[str, float]
    """Kind -> operations on matrix units."""
    memory_bytes: float
    num_launches: int
    """Kernels, each as often as it runs."""
    unknown_loops: tuple[str, ...]
    """Loops counted once because the compiler does not know how often they turn."""

    @property
    def total_flops(self) -> float:
        """All kinds together."""
        return sum(self.flops.values())


def count(module: Module) -> Work:
    """Counts the whole program; loops as often as they turn."""
    flops: dict[str, float] = {}
    memory_bytes, num_launches, unknown = 0.0, 0, {}
    for site in module.walk():
        computation, instruction = site.computation, site.instruction
        if instruction.opcode == "while" and module.turns(computation, instruction) is None:
            unknown[instruction.name] = None
        kernel = kernel_of(module, computation, instruction)
        if kernel is None:
            continue
        num_launches += site.times
        memory_bytes += site.times * kernel.num_bytes
        for part in kernel.flops:
            flops[part.kind] = flops.get(part.kind, 0.0) + site.times * part.count
    return Work(flops, memory_bytes, num_launches, tuple(unknown))


def kernel_of(module: Module, computation: Computation, instruction: Instruction) -> Kernel | None:
    """What one launch costs; None for what is free, a collective, or only waits for its start."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return None
    if part_of(module, computation, instruction) is not None:
        return None
    return Kernel(
        tuple(flops_of(module, computation, instruction)),
        _bytes_of(module, computation, instruction),
    )


# ---------------------------------------------------------------------------------------------
# Floating-point operations
# ---------------------------------------------------------------------------------------------


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> list[Flops]:
    """Matrix operations of one launch, those inside a fusion included."""
    opcode = instruction.opcode
    if opcode in ("fusion", "fusion-start", "async-start"):
        return [
            flops
            for body in module.called(instruction)
            for inner in body.instructions.values()
            for flops in flops_of(module, body, inner)
        ]
    operands = [computation.instructions[name].arrays for name in instruction.operands]
    if opcode == "dot":
        lhs = operands[0][0]
        contracted = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
        return [_matmul(instruction.arrays[0], lhs, contracted)]
    if opcode == "convolution":
        return [_convolution(instruction, operands[0][0], operands[1][0], instruction.arrays[0])]
    if opcode == "custom-call":
        return _custom_call(instruction, [arrays[0] for arrays in operands if arrays])
    return []


def _custom_call(instruction: Instruction, operands: list[Array]) -> list[Flops]:
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if target.startswith(("__cublas$", "__onednn$matmul")):
        contracted = _gemm_contraction(instruction) or (len(operands[0].dims) - 1,)
        return [_matmul(instruction.arrays[0], operands[0], contracted)]
    if target.startswith("__cudnn$conv"):
        # Image, kernel and result of the forward convolution, whichever of them this one makes.
        first, second, made = operands[0], operands[1], instruction.arrays[0]
        image, kernel, result = {
            "__cudnn$convBackwardInput": (made, second, first),
            "__cudnn$convBackwardFilter": (first, made, second),
        }.get(target, (first, second, made))
        return [_convolution(instruction, image, kernel, result)]
    if target.startswith("__cudnn$fmha"):
        return [_attention(instruction, target, operands)]
    return []


def _matmul(result: Array, lhs: Array, contracted: tuple[int, ...]) -> Flops:
    count = 2.0 * result.size
    for dim in contracted:
        count *= lhs.dims[dim]
    return Flops("matmul", lhs.dtype, count)


def _gemm_contraction(instruction: Instruction) -> tuple[int, ...]:
    found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.rest)
    return _numbers(found[1]) if found else ()


def _attention(instruction: Instruction, target: str, operands: list[Array]) -> Flops:
    """cuDNN's fused attention: scores [B, N, T, S] stand in its configuration."""
    found = re.search(
        r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*(\[[^\]]*\])', instruction.rest
    )
    if found is None:
        raise ValueError(f"no shape of scores in {instruction.name} = {target}")
    scores = math.prod(int(n) for n in json.loads(found[1]))
    products = 5 if "Backward" in target else 2
    share = 0.5 if re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', instruction.rest) else 1.0
    count = products * 2.0 * scores * operands[0].dims[-1] * share
    return Flops("attention", operands[0].dtype, count)


def _convolution(instruction: Instruction, image: Array, kernel: Array, result: Array) -> Flops:
    """Counts only positions inside the image, as XLA writes other products as convolutions with
    much padding (the rule of XLA's HloCostAnalysis::GetConvolutionFlops)."""
    labels = instruction.attributes["dim_labels"]
    image_labels, kernel_labels, result_labels = re.split(r"_|->", labels)
    window = _window(instruction.attributes.get("window", "{}"))
    positions = 1
    for index, label in enumerate(sorted(c for c in result_labels if c.isdigit())):
        positions *= _valid_positions(
            image.dims[image_labels.index(label)],
            kernel.dims[kernel_labels.index(label)],
            result.dims[result_labels.index(label)],
            *(values[index] if values else default for values, default in window),
        )
    batch = image.dims[image_labels.index("b")]
    batch //= int(instruction.attributes.get("batch_group_count", 1))
    inputs = kernel.dims[kernel_labels.index("i")]
    outputs = result.dims[result_labels.index("f")]
    return Flops("convolution", image.dtype, 2.0 * batch * inputs * outputs * positions)


def _window(text: str):
    """(values, default) of stride, low padding, image dilation and kernel dilation."""
    fields = dict(re.findall(r"(\w+)=([\dx_\-]+)", text))

    def values(name: str) -> list[int]:
        return [int(n.split("_")[0]) for n in fields.get(name, "").split("x") if n]

    return [(values("stride"), 1), (values("pad"), 0), (values("lhs_dilate"), 1),
            (values("rhs_dilate"), 1)]  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def _valid_positions(
    image, kernel, result, stride, padding, image_dilation, kernel_dilation
) -> int:
    at = (
        np.arange(result)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilation - padding
    )
    inside = (at >= 0) & (at % image_dilation == 0) & (at // image_dilation < image)
    return int(inside.sum())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


# ---------------------------------------------------------------------------------------------
# Memory traffic
# ---------------------------------------------------------------------------------------------


def _bytes_of(module: Module, computation: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in ("fusion", "fusion-start"):
        body = module.called(instruction)[0]
        read = sum(
            parameter.arrays[0].num_bytes * _share_read(module, body, parameter)
            for parameter in body.parameters
            if parameter.arrays
        )
        return int(read) + _written(body, body.root)
    operands = [computation.instructions[name] for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        return 2 * operands[1].num_bytes
    if opcode in ("dynamic-slice", "slice", "copy-start"):
        return 2 * instruction.arrays[0].num_bytes
    if opcode == "gather":
        return 2 * instruction.num_bytes + operands[1].num_bytes
    if opcode == "scatter":
        return 3 * operands[-1].num_bytes + operands[1].num_bytes
    if opcode == "async-start":
        return sum(operand.num_bytes for operand in operands)
    return sum(operand.num_bytes for operand in operands) + instruction.num_bytes


def _share_read(module: Module, body: Computation, value: Instruction) -> float:
    """Share of an array that a fusion reads: less than 1 where all its users only cut from it."""
    elements, size = 0.0, max(value.arrays[0].size, 1)
    for user in body.users.get(value.name, ()):
        is_first = user.operands[0] == value.name
        if user.opcode in ("dynamic-slice", "slice") or (user.opcode == "gather" and is_first):
            elements += user.arrays[0].size
        elif user.opcode == "dynamic-update-slice" and is_first:
            pass  # Updated in place.
        elif user.opcode in COLLECTIVES or (value.opcode, user.opcode) == ("parameter", "tuple"):
            pass  # Handed on, while a collective writes it (TPU).
        elif user.opcode == "scatter" and is_first:
            elements += body.instructions[user.operands[-1]].arrays[0].size
        elif user.opcode in _SAME_ELEMENTS:
            elements += size * _share_read(module, body, user)
        elif user.opcode == "fusion":
            inner = module.called(user)[0]
            inside = inner.parameters[user.operands.index(value.name)]
            elements += size * _share_read(module, inner, inside)
        else:
            return 1.0
        if elements >= size:
            return 1.0
    # A root that is the parameter itself, or a copy of it, has no user.
    return elements / size if body.users.get(value.name) else 1.0


def _written(body: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes."""
    if root.opcode == "tuple":
        parts = [body.instructions[name] for name in root.operands]
        handed_on = ("parameter", *COLLECTIVES)
        return sum(_written(body, part) for part in parts if part.opcode not in handed_on)
    source = root
    while source.opcode in _SAME_ELEMENTS and source.operands:
        source = body.instructions[source.operands[0]]
    if source.opcode == "dynamic-update-slice":
        return body.instructions[source.operands[1]].num_bytes
    if source.opcode == "scatter":
        return body.instructions[source.operands[-1]].num_bytes
    return root.num_bytes
