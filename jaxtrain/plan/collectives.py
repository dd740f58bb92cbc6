"""Recognises collectives in the forms in which compilers launch them.

all-gather                            waits until it is done
all-gather-start ... all-gather-done  runs beside what is launched between them
async-start ... async-done            the same, around a computation that holds the collective
fusion ... fusion (TPU)               the same: two fusions hold copies of one collective, beside
                                      a custom call that names their part; fusions between them
                                      hold further copies, and compute while it runs
"""

import re
from typing import NamedTuple

from jaxtrain.plan.hlo import Computation, Instruction, Module

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "ragged-all-to-all", "recv", "reduce-scatter", "send",
)  # fmt: skip
"""Opcodes that move data between devices; their time is that of links, not of memory."""

_TPU_ROLES = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


class Part(NamedTuple):
    """What an instruction does for a collective."""

    kind: str
    """E.g. `all-gather`."""
    role: str
    """`start`, `done`, `update` (between them), or `whole`: waits until it is done."""
    chain: str
    """The same for the start and the end of one collective of a computation."""
    computation: Computation
    instruction: Instruction
    """The collective itself, in its computation."""


def part_of(module: Module, computation: Computation, instruction: Instruction) -> Part | None:
    """The part of an instruction that is launched by itself; None if it is no collective's."""
    opcode = instruction.opcode
    if opcode == "fusion":
        return _tpu_part(module, instruction)
    inside, inner = computation, instruction
    if opcode in ("async-start", "async-done", "async-update") and instruction.called:
        inside = module.called(instruction)[0]
        inner = inside.root
    role = next((r for r in ("start", "done", "update") if opcode.endswith(f"-{r}")), "whole")
    kind = inner.opcode.removesuffix("-start").removesuffix("-done")
    if kind not in COLLECTIVES:
        return None
    return Part(kind, role, _start_of(computation, instruction), inside, inner)


def _start_of(computation: Computation, instruction: Instruction) -> str:
    """Name of the start of what `instruction` ends, or its own."""
    while instruction.opcode.endswith(("-done", "-update")):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction.name


def _tpu_part(module: Module, fusion: Instruction) -> Part | None:
    if "kind=kCustom" not in fusion.rest:
        return None
    body = module.called(fusion)[0]
    target = body.root.attributes.get("custom_call_target", "").strip('"')
    held = [i for i in body.instructions.values() if i.opcode in COLLECTIVES]
    if target not in _TPU_ROLES or not held:
        return None
    chain = re.search(r'chain_id="(\d+)"', held[0].rest)
    name = f"chain {chain[1]}" if chain else f"channel {held[0].attributes.get('channel_id')}"
    return Part(held[0].opcode, _TPU_ROLES[target], name, body, held[0])
