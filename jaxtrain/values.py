"""Single values of a configuration: shown, read from text, checked; and words for what is wrong.

The functions raise ValueError with a rule ("must be at least 1 steps"); the caller, who knows
the name of the field and where the value came from, makes the sentence.
"""

import dataclasses
import difflib
import math
import operator
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

_SCALARS = (bool, int, float, str)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meta:
    """What a field knows besides its name, type and default; see `field`."""

    help: str = ""
    unit: str = ""
    group: str = ""
    choices: tuple[Any, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    on_resume: Literal["fixed", "free"] = "fixed"
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    pattern: bool = False
    repeated: bool = False
    used_when: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, tuple):
        return ",".join(show(v) for v in value)
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def show_filled(value: Any) -> str:
    """`show` for a place where an empty text would not be seen."""
    return show(value) or "''"


def show_given(hint: Any, value: Any) -> str:
    """`show` of a value from Python or JSON: in quotes if it is text where none is wanted."""
    return repr(value) if isinstance(value, str) and hint is not str else show(value)


def coerce(hint: Any, value: Any) -> Any:
    """`value` as the type `hint`, if that loses nothing; else ValueError with the rule."""
    item = _item_type(hint)
    if item is not None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError("must be a list")
        return tuple(coerce(item, v) for v in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
    elif hint is str:
        if not isinstance(value, str):
            raise ValueError("must be text")
    elif hint is int:
        if not is_number or value != value or value in (math.inf, -math.inf) or value % 1:
            raise ValueError("must be a whole number")
        value = int(value)
    else:
        if not is_number or not math.isfinite(value):
            raise ValueError("must be a finite number")
        value = float(value)
    return value


def _item_type(hint: Any) -> Any:
    """The element type of `tuple[T, ...]`, None for a scalar; TypeError for anything else."""
    if hint in _SCALARS:
        return None
    match typing.get_args(hint):
        case (item, tail) if typing.get_origin(hint) is tuple and tail is ... and item in _SCALARS:
            return item
    raise TypeError(f"a Config field is bool, int, float, str or tuple[one of them, ...]: {hint}")


def parse_text(hint: Any, text: str) -> Any:
    """The value that `text` from a command line means; else ValueError with the rule."""
    item = _item_type(hint)
    if item is not None:
        return tuple(parse_text(item, part.strip()) for part in text.split(",") if part.strip())
    if hint is str:
        if text.startswith("--"):
            raise ValueError("looks like a flag; the value before it is missing")
        return text
    if hint is bool:
        lowered = text.lower()
        if lowered not in ("true", "t", "yes", "1", "false", "f", "no", "0"):
            raise ValueError("must be true or false")
        return lowered in ("true", "t", "yes", "1")
    try:
        return int(text) if hint is int else coerce(float, float(text))
    except ValueError:
        pass
    rule = "must be a whole number" if hint is int else "must be a finite number"
    if re.fullmatch(r"[-+]?\d+,\d+", text):
        rule += "; a comma is not a decimal point"
    if hint is int:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(rule) from None
        if math.isfinite(number) and number == int(number):
            if "e" not in text.lower():
                return int(number)
            rule += f" written out; use {int(number)}"
    raise ValueError(rule)


def check(meta: Meta, value: Any) -> None:
    """Raises ValueError with the rule if `value` breaks the limits in `meta`."""
    for v in value if isinstance(value, tuple) else (value,):
        if isinstance(v, str) and v in meta.refused:
            raise ValueError(f"is not available: {meta.refused[v]}")
        if meta.choices and v not in meta.choices:
            names = [show(choice) for choice in meta.choices]
            raise ValueError(f"must be one of {', '.join(names)}{did_you_mean(str(v), names)}")
        limits = (
            ("at least", meta.minimum, operator.ge),
            ("at most", meta.maximum, operator.le),
            ("greater than", meta.above, operator.gt),
            ("less than", meta.below, operator.lt),
        )
        for words, limit, holds in limits:
            if limit is not None and not holds(v, limit):
                raise ValueError(f"must be {words} {limit}{meta.unit and f' ({meta.unit})'}")
        if meta.pattern:
            try:
                re.compile(v)
            except re.error as error:
                raise ValueError(f"must be a regular expression: {error}") from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest of `names`, or ''."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The most likely meaning of a misspelt dotted `name`, or ''."""
    names = list(names)
    section, _, last = name.lower().replace("-", "_").rpartition(".")
    siblings = [other for other in names if other.rpartition(".")[0] == section]
    # A right section is kept: `optimizer.lr` is looked for among the optimizer's fields first.
    for candidates in (siblings, names):
        score, best = max(
            ((_likeness(last, other), other) for other in candidates), default=(0, "")
        )
        if score >= 0.68:
            return best
    return ""


def _likeness(name: str, path: str) -> float:
    """How well `name` fits the last part of `path`: by letters, by initials, by one word."""
    last = path.rpartition(".")[2].lower()
    words = last.split("_")
    if name == "".join(word[:1] for word in words) or f"_{name}_" in f"_{last}_":
        return 0.9
    by_word = max(difflib.SequenceMatcher(None, name, word).ratio() for word in words)
    return max(difflib.SequenceMatcher(None, name, last).ratio(), by_word - 0.1)


def join_problems(source: str, problems: Sequence[str]) -> str:
    """One sentence for one problem, a list for several."""
    if len(problems) == 1:
        return f"{source}: {problems[0]}" if source else problems[0]
    head = f"{source}: {len(problems)} problems" if source else f"{len(problems)} problems"
    return "\n  ".join([f"{head}:", *problems])
