"""Reads optimised HLO, the text of a compiled program (`compiled.as_text()`).

A program is a set of computations. One is the entry; others are bodies of loops, which run as
often as the loop turns, and the insides of fusions, which are one kernel. Instructions stand in
the order in which they are launched. The text is parsed by hand: jaxlib's own objects do not tell
operands and attributes, and the protocol buffer's definition is not published as a package.

The grammar is that of `HloModule::ToString` of XLA (xla/hlo/ir/hlo_instruction.cc).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxtrain.plan.trips import counted_turns

ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the dtypes whose name does not say it."""


class Array(NamedTuple):
    """Dtype (as HLO spells it, e.g. `bf16`) and dims of an array; tuples are lists of these."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self.size * item_bits(self.dtype) // 8


@functools.cache
def item_bits(dtype: str) -> int:
    """Bits of one element, read off the name: `bf16` 16, `f8e4m3fn` 8, `s4` 4."""
    if dtype in ITEM_BITS:
        return ITEM_BITS[dtype]
    digits = re.match(r"(?:bf|[fsuc])(\d+)", dtype)
    if digits is None:
        raise ValueError(f"unknown HLO dtype {dtype!r}; add it to jaxtrain.plan.hlo.ITEM_BITS")
    return int(digits[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """What it makes; of nested tuples the leaves in order."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    is_root: bool
    rest: str
    """The text behind the operands."""
    literal: str = ""
    """What stands between the parentheses of a constant or a parameter."""

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Name -> text, e.g. `dimensions` -> `{0}`."""
        return _split_attributes(self.rest)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, in order; of a loop condition and body."""
        return tuple(
            name.strip(" %")
            for group in re.findall(_CALLED, self.rest)
            for name in group.strip("{}").split(",")
            if name.strip()
        )

    @functools.cached_property
    def op_name(self) -> str:
        """The scopes it comes from, e.g. `jit(step)/.../attention/dot_general`."""
        found = re.search(r'\bop_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all it makes."""
        return sum(array.num_bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The one whose result is that of the computation."""
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """In the order of the arguments."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda parameter: int(parameter.literal)))

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """Name -> instructions that read it."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(found) for name, found in users.items()}

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        """What an instruction reads."""
        return tuple(
            array for name in instruction.operands for array in self.instructions[name].arrays
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program of one device; all devices run it (SPMD)."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    frames: dict[int, str]
    """stack_frame_id -> `file:line` of the innermost frame."""
    _turns: dict[str, int | None] = dataclasses.field(default_factory=dict)

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction calls."""
        return [self.computations[name] for name in instruction.called]

    def source(self, instruction: Instruction) -> str:
        """`file:line` that traced an instruction; empty where XLA does not say."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        if found:
            return self.frames.get(int(found[1]), "")
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.rest)
        return f"{found[1]}:{found[2]}" if found else ""

    def walk(self) -> Iterator["Site"]:
        """Every instruction that is launched by itself, with how often: not inside fusions."""
        yield from self._walk(self.entry, 1, ())

    def _walk(self, computation: Computation, times: int, loops: tuple[Instruction, ...]):
        for instruction in computation.instructions.values():
            yield Site(computation, instruction, times, loops)
            for body, turns in self.inside(computation, instruction):
                is_loop = instruction.opcode == "while"
                inner = (*loops, instruction) if is_loop else loops
                yield from self._walk(body, times * turns, inner)

    def turns(self, computation: Computation, loop: Instruction) -> int | None:
        """How often a `while` of a computation turns; None where nobody can say."""
        if loop.name not in self._turns:
            found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
            self._turns[loop.name] = (
                int(found[1]) if found else counted_turns(self, computation, loop)
            )
        return self._turns[loop.name]

    def inside(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Computation, int]]:
        """(computation, times) that one run of an instruction launches step by step.

        A loop runs its body as often as it turns (once where that is not known), a `conditional`
        is counted as its longest branch, a `call` as what it calls.
        """
        if instruction.opcode == "while":
            turns = self.turns(computation, instruction)
            return [(self.called(instruction)[1], 1 if turns is None else turns)]
        if instruction.opcode == "conditional":
            return [(max(self.called(instruction), key=lambda c: len(c.instructions)), 1)]
        if instruction.opcode in ("call", "call-start"):
            return [(self.called(instruction)[0], 1)]
        if instruction.opcode == "async-start":
            wrapped = self.called(instruction)[0]
            return self.inside(wrapped, wrapped.root)
        return []


class Site(NamedTuple):
    """An instruction where it runs."""

    computation: Computation
    instruction: Instruction
    times: int
    """How often it runs in one call of the program."""
    loops: tuple[Instruction, ...]
    """The loops around it, outermost first."""


# ---------------------------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------------------------

_CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|true_computation|false_computation"
    r"|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\](){},]')


def parse(text: str) -> Module:
    """Parses the text of an optimised program.

    Raises:
        ValueError: when the text is not an HLO module.
    """
    header, _, _ = text.partition("\n")
    if not header.startswith("HloModule "):
        raise ValueError(f"the text is not an HLO module, it begins with {header[:40]!r}")
    computations: dict[str, Computation] = {}
    entry, instructions = None, {}
    for line in text.splitlines():
        if line.startswith(" "):
            instruction = _parse_instruction(line)
            if instruction is not None:
                instructions[instruction.name] = instruction
        elif line.endswith("{") and (found := _HEADER.match(line)):
            instructions = {}
            computations[found[2]] = Computation(found[2], instructions)
            entry = computations[found[2]] if found[1] else entry
    if entry is None:
        raise ValueError("the HLO module has no ENTRY computation")
    partitions = re.search(r"num_partitions=(\d+)", header)
    replicas = re.search(r"replica_count=(\d+)", header)
    num_devices = int(partitions[1]) if partitions else int(replicas[1]) if replicas else 1
    name = header.removeprefix("HloModule ").split(",")[0]
    return Module(name, computations, entry, num_devices, _parse_frames(text))


def _parse_instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, shape, opcode = found.groups()
    end = _closing(line, found.end())
    inside = line[found.end() : end]
    is_literal = opcode in ("constant", "parameter")
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=parse_arrays(shape),
        operands=() if is_literal else tuple(_OPERAND.findall(inside)),
        is_root=root is not None,
        rest=line[end + 1 :],
        literal=inside if is_literal else "",
    )


@functools.lru_cache(maxsize=1 << 14)
def parse_arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape such as `(f32[2,3]{1,0}, s32[])`."""
    # A dynamic dim is written `<=8` and takes its largest size.
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.replace("<=", "").split(",") if n))
        for dtype, dims in _ARRAY.findall(shape)
    )


def _closing(line: str, start: int) -> int:
    """Where the parenthesis closes that was opened just before `start`."""
    end = line.find(")", start)
    if line.find("(", start, end) < 0 and line.find('"', start, end) < 0:
        return end
    depth = 1
    for found in _STRUCTURE.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced parentheses in HLO: {line[:200]!r}")


def _split_attributes(rest: str) -> dict[str, str]:
    """Cuts `, a=1, b={x, y}` at the commas outside of brackets and strings."""
    cuts, depth = [], 0
    for found in _STRUCTURE.finditer(rest):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif found[0] == "," and depth == 0:
            cuts.append(found.start())
    cuts.append(len(rest))
    pieces = [rest[start + 1 : end] for start, end in itertools.pairwise(cuts)]
    pairs = [piece.strip().partition("=") for piece in pieces]
    return {name: value for name, equals, value in pairs if equals}


def _parse_frames(text: str) -> dict[int, str]:
    """The tables of file names, locations and frames that stand before the computations."""

    def table(title: str) -> str:
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return found[1] if found else ""

    files = dict(re.findall(r'^(\d+) "(.*)"$', table("FileNames"), re.MULTILINE))
    locations = {
        number: f"{files.get(file, '')}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", table("FileLocations"), re.MULTILINE
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", table("StackFrames"), re.MULTILINE)
    return {int(number): locations.get(location, "") for number, location in frames}
