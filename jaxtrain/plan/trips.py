"""How often a loop turns, worked out where XLA does not say.

XLA writes `known_trip_count` for loops that count, but its own rewriting (a first iteration taken
out of a pipelined loop) can lose it. The counter is still there: its start, the bound that the
condition compares it with, and the step that the body adds.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxtrain.plan.hlo import Computation, Instruction, Module

_SAME_VALUE = {"bitcast", "convert", "copy", "reshape"}


class _Scalar(NamedTuple):
    """A scalar of integers: `constant` (value), `element` of a loop's state (value: its index),
    or an operation on others."""

    kind: str
    value: int = 0
    operands: tuple["_Scalar | None", ...] = ()


def counted_turns(module: "Module", computation: "Computation", loop: "Instruction") -> int | None:
    """Turns of a `while` that counts up from a constant to a constant; None for any other."""
    condition, body = module.called(loop)
    test = _scalar(module, condition, condition.root)
    if test is None or test.kind not in ("LT", "LE"):
        return None
    counter, bound = test.operands
    if counter is None or counter.kind != "element" or bound is None or bound.kind != "constant":
        return None
    init = computation.instructions[loop.operands[0]]
    start = _element(module, computation, init, counter.value)
    step = _element(module, body, body.root, counter.value)
    if start is None or start.kind != "constant" or step is None or step.kind != "add":
        return None
    added = [part.value for part in step.operands if part is not None and part.kind == "constant"]
    if counter not in step.operands or len(added) != 1 or added[0] <= 0:
        return None
    end = bound.value + (test.kind == "LE")
    return max(math.ceil((end - start.value) / added[0]), 0)


def _element(module, computation, value, index: int) -> _Scalar | None:
    if value.opcode != "tuple":
        return None
    return _scalar(module, computation, computation.instructions[value.operands[index]])


def _scalar(module, computation, value, arguments=()) -> _Scalar | None:
    """What an instruction computes; `arguments` are those of the fusion it stands in."""
    operands = [computation.instructions[name] for name in value.operands]

    def inner(operand) -> _Scalar | None:
        return _scalar(module, computation, operand, arguments)

    if value.opcode == "constant":
        return _Scalar("constant", int(value.literal)) if value.literal.isdigit() else None
    if value.opcode == "parameter":
        number = int(value.literal)
        return arguments[number] if number < len(arguments) else None
    if value.opcode == "get-tuple-element" and operands[0].opcode == "parameter":
        return _Scalar("element", int(value.attributes["index"]))
    if value.opcode in _SAME_VALUE:
        return inner(operands[0])
    if value.opcode == "fusion":
        body = module.called(value)[0]
        return _scalar(module, body, body.root, tuple(inner(operand) for operand in operands))
    if value.opcode in ("add", "compare"):
        kind = value.attributes.get("direction", "add")
        return _Scalar(kind, 0, tuple(inner(operand) for operand in operands))
    return None
