"""The text of `--help`: every flag with its default, unit and choices, by group; the presets."""

import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from jaxtrain.fields import Config, Leaf, leaves, sections
from jaxtrain.resolve import layer
from jaxtrain.values import show

_COLUMN = 36
_GENERAL = (
    ("--config=FILE", "values from a JSON file, e.g. the config.json of a run; flags win over it"),
    ("--flagfile=FILE", "more flags from a text file, one a line"),
    ("--help", "this text"),
)


def help_text(
    program: str,
    template: Config,
    presets: Mapping[str, Mapping[str, Any]],
    own_flags: Sequence[flags.Flag[Any]] = (),
    description: str = "",
    width: int | None = None,
) -> str:
    """Lays out the help for a terminal of `width` columns; None: the present one, 80 to 100."""
    width = width or min(100, max(80, shutil.get_terminal_size((100, 0)).columns - 1))
    lines = [f"Usage: {os.path.basename(program)} [--flag=value ...]"]
    if description.strip():
        lines += ["", textwrap.dedent(description).strip()]
    lines += _section("general", [*_presets_flags(presets), *_GENERAL], width)
    for title, group in _groups(template).items():
        lines += _section(
            title, [(_flag(x.path, x.type is bool, x.value), _help(x)) for x in group], width
        )
    for section, choices in presets.items():
        lines += ["", f"presets of --{section}"]
        lines += _preset_lines(template, section, choices, width)
    if own_flags:
        rows = [
            (_flag(flag.name, flag.boolean, flag.default), flag.help or "") for flag in own_flags
        ]
        lines += _section("defined by this experiment or a library", rows, width)
    return "\n".join(lines)


def _groups(template: Config) -> dict[str, list[Leaf]]:
    """Run-level fields by their `group`, then one group per section."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves(template):
        section = leaf.path.rpartition(".")[0]
        groups.setdefault(section or leaf.meta.group or "experiment", []).append(leaf)
    nested = {path for path, _ in sections(template)}
    return dict(sorted(groups.items(), key=lambda item: item[0] in nested))


def _section(title: str, rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    lines = ["", title]
    for flag, text in rows:
        wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
        # A flag that is too long for its column has a line of its own.
        if len(flag) + 4 > _COLUMN:
            lines.append(f"  {flag}")
        else:
            lines.append(f"  {flag}".ljust(_COLUMN) + wrapped.pop(0))
        lines += [" " * _COLUMN + line for line in wrapped]
    return [line.rstrip() for line in lines]


def _presets_flags(presets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for section, choices in presets.items():
        yield f"--{section}=NAME", f"a preset of the {section}: {', '.join(choices)}"


def _flag(name: str, is_switch: bool, default: Any) -> str:
    if is_switch:
        return f"--[no]{name}"
    return f"--{name}={'' if default is None else show(default)}"


def _help(leaf: Leaf) -> str:
    facts = [leaf.unit] if leaf.unit else []
    if leaf.type is bool:
        facts.append(f"default {show(leaf.value)}")
    if leaf.meta.repeated:
        facts.append("may be given several times")
    if leaf.choices:
        facts.append(" | ".join(show(choice) for choice in leaf.choices))
    return f"{leaf.help} ({'; '.join(facts)})" if facts else leaf.help


def _preset_lines(
    template: Config, section: str, choices: Mapping[str, Any], width: int
) -> Iterator[str]:
    """One line a preset: what it changes from the defaults, as far as the line goes."""
    defaults = {leaf.path: leaf.value for leaf in leaves(template)}
    longest = max(len(name) for name in choices)
    for name, preset in choices.items():
        values = layer(template, {section: preset}, [])
        changed = [
            f"{path.removeprefix(f'{section}.')}={show(value)}"
            for path, value in values.items()
            if value != defaults[path]
        ]
        line = f"  {name:<{longest}}  {' '.join(changed) or 'the defaults'}"
        yield line if len(line) <= width else f"{line[: width - 4].rpartition(' ')[0]} ..."
