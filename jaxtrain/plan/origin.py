"""Where an array of a compiled program comes from in the model's code.

XLA stores the results of a loop over layers by `dynamic_update_slice`, in a fusion of its own, and
names it after the loop. The line that a reader looks for is the one that made what is stored, so
the array is followed to its maker through fusions, loops and operations that only move it.
"""

import functools
import pathlib
from typing import NamedTuple

from jaxtrain.plan.hlo import Computation, Instruction, Module

_MOVES = frozenset(
    (
        "dynamic_update_slice",
        "dynamic_slice",
        "broadcast_in_dim",
        "convert_element_type",
        "reshape",
        "squeeze",
        "transpose",
        "copy",
        "while",
        "scan",
        "select_n",
        "concatenate",
        "slice",
        "reduce_precision",
        "shard_map",
    )
)
"""Operations of JAX that make no new values."""

_PASSING = frozenset(
    ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done", "slice")
)
_MAX_STEPS = 24


class Origin(NamedTuple):
    """The operation that made an array."""

    op_name: str
    """The scopes it comes from; empty where XLA does not say."""
    source: str
    """`file:line` that traced it."""


def origin(
    module: Module, computation: Computation, maker: Instruction, index: tuple[int, ...] = ()
) -> Origin:
    """Follows an array to the operation that made its values.

    Args:
        module: the program.
        computation: that `maker` stands in.
        maker: the instruction that holds the array.
        index: which element, where it makes a tuple.
    """
    best = Origin(maker.op_name, module.source(maker))
    for _ in range(_MAX_STEPS):
        if maker.op_name and module.source(maker) and not _filler(computation, maker):
            best = Origin(maker.op_name, module.source(maker))
            if maker.op_name.rpartition("/")[2] not in _MOVES:
                return best
        found = _filler(computation, maker) or _step(module, computation, maker, index)
        if found is None:
            return best
        computation, maker, index = found
    return best


def short_source(source: str) -> str:
    """Shortens a path to what follows the last directory of packages or of the project."""
    path, _, line = source.rpartition(":")
    if not path:
        return source
    parts = pathlib.PurePath(path).parts
    for mark in ("site-packages", "jaxtrain", "experiments"):
        if mark in parts:
            start = len(parts) - 1 - parts[::-1].index(mark)
            return f"{'/'.join(parts[start + (mark == 'site-packages') :])}:{line}"
    return f"{'/'.join(parts[-2:])}:{line}"


def _filler(
    computation: Computation, maker: Instruction
) -> tuple[Computation, Instruction, tuple[int, ...]] | None:
    """The loop that fills an array which is only room for its results; None for any other."""
    is_room = maker.opcode == "broadcast" or "AllocateBuffer" in maker.rest
    if maker.opcode in ("fusion", "copy") and maker.operands:
        named = maker if maker.op_name else computation.instructions[maker.operands[0]]
        is_room = named.op_name.rpartition("/")[2].startswith("broadcast")
    seen = maker
    for _ in range(_MAX_STEPS):
        users = computation.users.get(seen.name, ())
        if not is_room or len(users) != 1:
            return None
        (user,) = users
        if user.opcode == "tuple":
            loops = [u for u in computation.users.get(user.name, ()) if u.opcode == "while"]
            return (computation, loops[0], (user.operands.index(seen.name),)) if loops else None
        if user.opcode not in _PASSING:
            return None
        seen = user
    return None


def _step(
    module: Module, computation: Computation, maker: Instruction, index: tuple[int, ...]
) -> tuple[Computation, Instruction, tuple[int, ...]] | None:
    """One step towards the maker; None where there is no further one."""
    opcode = maker.opcode
    if opcode == "fusion":
        return _into_fusion(module, computation, maker, index)
    if opcode == "while":
        body = module.called(maker)[1]
        return body, body.root, index
    if opcode == "tuple" and index and index[0] < len(maker.operands):
        return _operand(computation, maker, index[0], index[1:])
    if opcode == "get-tuple-element":
        return _operand(computation, maker, 0, (int(maker.attributes.get("index", "0")), *index))
    if opcode == "dynamic-update-slice":
        return _operand(computation, maker, 1, ())
    if opcode in _PASSING and maker.operands:
        return _operand(computation, maker, 0, index)
    if opcode == "parameter" and computation.name in _loop_bodies(module):
        body = _loop_bodies(module)[computation.name]
        return body, body.root, index
    if opcode == "parameter" and computation.name in _async_callers(module):
        caller, call = _async_callers(module)[computation.name]
        return _operand(caller, call, int(maker.literal), index)
    return None


@functools.lru_cache(maxsize=2)
def _loop_bodies(module: Module) -> dict[str, Computation]:
    """Name of a loop's body or condition -> its body, whose result the next turn begins with."""
    return {
        called.name: module.called(instruction)[1]
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
        for called in module.called(instruction)
    }


@functools.lru_cache(maxsize=2)
def _async_callers(module: Module) -> dict[str, tuple[Computation, Instruction]]:
    """Name of a computation that runs beside others -> what starts it."""
    return {
        called.name: (computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode in ("async-start", "call-start", "call")
        for called in module.called(instruction)
    }


def _into_fusion(
    module: Module, computation: Computation, fusion: Instruction, index: tuple[int, ...]
) -> tuple[Computation, Instruction, tuple[int, ...]] | None:
    """To the instruction inside a fusion, or to the operand that it only passes on."""
    inside = module.called(fusion)[0]
    current: tuple[Computation, Instruction, tuple[int, ...]] | None = (inside, inside.root, index)
    for _ in range(_MAX_STEPS):
        if current is None:
            return None
        _, maker, index = current
        if maker.opcode == "parameter":
            return _operand(computation, fusion, int(maker.literal), index)
        is_move = maker.op_name.rpartition("/")[2] in _MOVES
        if maker.op_name and not is_move and maker.opcode != "tuple":
            return current
        further = _step(module, inside, maker, index)
        if further is None:
            return current
        current = further
    return current


def _operand(
    computation: Computation, user: Instruction, number: int, index: tuple[int, ...]
) -> tuple[Computation, Instruction, tuple[int, ...]] | None:
    if number >= len(user.operands):
        return None
    return computation, computation.instructions[user.operands[number]], index
