"""Which arrays a compiled program holds when it needs the most memory, from XLA's own dump.

XLA lays all temporaries into one block; how it does so stands in no public data structure of JAX
for devices that are not attached (`serialized_buffer_assignment_proto` is empty there). It does
write two text files where `xla_dump_to` names a directory, on every platform: the buffer assignment
(each value with its allocation, offset and size) and the live ranges (when in the schedule each
value is alive). The list of values at the peak that the latter ends with is not used: it belongs to
another moment than that of the most memory. The formats are those of `BufferAssignment::ToString`
and `HloLiveRange::ToString` (xla/service/buffer_assignment.cc, xla/hlo/utils/hlo_live_range.cc).
"""

import dataclasses
import heapq
import pathlib
import re
from typing import NamedTuple

_Key = tuple[str, tuple[int, ...]]
"""Name of an instruction, and which element of its result."""

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+), (.*)")
_VALUE = re.compile(r"\s*value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)")
_RANGE = re.compile(r"\s+(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_NUM_MOMENTS = 64
"""Moments that are looked at closely, those with the most bytes when shared ones count twice."""


class Value(NamedTuple):
    """One array of the program, where it lives."""

    instruction: str
    """Name of the HLO instruction that makes it."""
    index: tuple[int, ...]
    """Which element of a tuple."""
    shape: str
    """As HLO writes it, e.g. `f32[32,512]{1,0}`."""
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Memory of one compiled program, on one device."""

    temp_bytes: int
    """Of the block that all temporaries share."""
    at_peak: tuple[Value, ...]
    """The temporaries that are alive at the peak, largest first; no bytes are in two of them."""
    text: str
    """The program, every instruction under the name that the values bear. `compiled.as_text()`
    leaves out the names of what runs beside other work."""

    @property
    def live_bytes(self) -> int:
        """Bytes of temporaries at the peak; the rest of `temp_bytes` are gaps between them."""
        return sum(value.num_bytes for value in self.at_peak)


def read_dump(directory: pathlib.Path, platform: str) -> Assignment | None:
    """Reads what XLA wrote about the last program; None where it wrote nothing of the kind.

    Args:
        directory: the `xla_dump_to` of the compilation.
        platform: of the devices. Colours of memory other than the default are on-chip memories of
            a TPU, which do not count, and memory of collectives on a GPU, which does.
    """
    assignments = sorted(directory.glob("*-buffer-assignment.txt"))
    ranges = sorted(directory.glob("*-live-range.txt"))
    programs = sorted(directory.glob("*after_optimizations.txt"))
    if not assignments or not ranges or not programs:
        return None
    temp_bytes, values = _temporaries(assignments[-1].read_text(), all_colors=platform == "gpu")
    alive = _most_alive(values, _live_ranges(ranges[-1].read_text()))
    text = programs[-1].read_text()
    return Assignment(temp_bytes, tuple(alive), text)


def _temporaries(text: str, *, all_colors: bool) -> tuple[int, dict[_Key, Value]]:
    """Bytes of the blocks of temporaries, and their values."""
    total, values, base = 0, {}, -1
    for line in text.splitlines():
        if line.startswith("allocation "):
            found = _ALLOCATION.match(line)
            is_counted = all_colors or (found is not None and "color" not in found[3])
            if found and is_counted and "preallocated-temp" in found[3]:
                base, total = total, total + int(found[2])
            else:
                base = -1
        elif base >= 0 and (found := _VALUE.match(line)):
            name, index = _split_index(found[1])
            values[name, index] = Value(name, index, found[4], base + int(found[3]), int(found[2]))
    return total, values


def _live_ranges(text: str) -> dict[_Key, tuple[int, int]]:
    """First and last moment of the schedule at which each value is alive."""
    ranges = {}
    for line in text.splitlines():
        found = _RANGE.match(line)
        if found:
            ranges[found[1], _index(found[2])] = int(found[3]), int(found[4])
    return ranges


def _most_alive(values: dict[_Key, Value], ranges: dict[_Key, tuple[int, int]]) -> list[Value]:
    """The values at the moment when they cover the most bytes, largest first."""
    changes: dict[int, int] = {}
    for key in values.keys() & ranges.keys():
        start, end = ranges[key]
        changes[start] = changes.get(start, 0) + values[key].num_bytes
        changes[end + 1] = changes.get(end + 1, 0) - values[key].num_bytes
    moments, total = [], 0
    for moment in sorted(changes):
        total += changes[moment]
        moments.append((total, moment))
    best: list[Value] = []
    for _, moment in heapq.nlargest(_NUM_MOMENTS, moments):
        alive = [
            values[key]
            for key in values.keys() & ranges.keys()
            if ranges[key][0] <= moment <= ranges[key][1]
        ]
        alive.sort(key=lambda value: (-value.num_bytes, value.offset))
        alive = _without_overlap(alive)
        best = max(best, alive, key=lambda found: sum(value.num_bytes for value in found))
    return best


def _without_overlap(values: list[Value]) -> list[Value]:
    """Leaves out values that share the bytes of a larger one, as the elements of a loop do."""
    kept: list[Value] = []
    taken: list[tuple[int, int]] = []
    for value in values:
        start, end = value.offset, value.offset + value.num_bytes
        if all(end <= low or high <= start for low, high in taken):
            kept.append(value)
            taken.append((start, end))
    return kept


def _split_index(name: str) -> tuple[str, tuple[int, ...]]:
    name, brace, index = name.partition("{")
    return name, _index(brace + index)


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("{}").split(",") if part)
