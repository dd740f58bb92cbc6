"""Slurm's compressed lists: `gpu-a-[001-003,7],login` and `2(x3),1`."""

import itertools
import re

from jaxtrain.errors import ConfigError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str, name: str = "the node list") -> list[str]:
    """Expands a node list; zeros in front of a number stay as they are written, none are invented.

    Args:
        text: names, separated by commas; brackets hold numbers and ranges, several may stand in
            one name.
        name: where the text comes from, for errors.

    Raises:
        ConfigError: for anything else.
    """
    nodes = []
    for part in _split(text, name):
        pieces = _BRACKETS.split(part)  # plain, inside of brackets, plain, ...
        choices = [
            _numbers(piece, name, text) if i % 2 else [piece] for i, piece in enumerate(pieces)
        ]
        nodes += ["".join(choice) for choice in itertools.product(*choices)]
    if not all(nodes):
        raise ConfigError(f"{name}={text!r} has an empty name; it must be like node[01-03],login")
    return nodes


def expand_counts(text: str, name: str) -> list[int]:
    """Expands the numbers of tasks of each node, such as `2(x3),1`.

    Args:
        text: as in SLURM_STEP_TASKS_PER_NODE.
        name: where it comes from, for errors.

    Raises:
        ConfigError: for anything else.
    """
    counts = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"{name}={text!r} must be numbers of tasks, like 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str, name: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ConfigError(f"{name}={text!r} has brackets that do not match")
    return parts


def _numbers(inside: str, name: str, text: str) -> list[str]:
    numbers = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("", "")
        if not found or int(first) > int(last):
            raise ConfigError(
                f"{name}={text!r} has [{inside}] where numbers and ranges must stand, like"
                f" [01-03,7]"
            )
        numbers += [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return numbers
