"""From layers of values to one configuration, back to JSON, and the difference of two.

A layer is a flat dict, dotted path -> checked value. Presets, files and flags each make one;
`build` lays them over the defaults. All functions report every offender at once.
"""

import contextlib
import dataclasses
import json
import platform
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.fields import Config, leaves, sections
from jaxtrain.values import (
    check,
    coerce,
    did_you_mean,
    join_problems,
    show_filled,
    show_given,
)

_PACKAGES = (
    *("jaxtrain", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu"),
    *("flax", "optax", "orbax-checkpoint", "grain", "numpy", "absl-py"),
)
# What `summary` always shows, changed or not.
_ESSENTIALS = (
    "workdir",
    "num_steps",
    "global_batch_size",
    "accumulate_steps",
    "mesh",
    "precision",
    "seed",
    "optimizer.name",
    "optimizer.learning_rate",
)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, lists and scalars that JSON can hold."""
    result: dict[str, Any] = {}
    for leaf in leaves(config):
        *parents, name = leaf.path.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = list(leaf.value) if isinstance(leaf.value, tuple) else leaf.value
    return result


def from_dict[C: Config](cls: type[C], mapping: Mapping[str, Any], *, source: str) -> C:
    """A configuration with the values of `mapping`, defaults elsewhere.

    Args:
        cls: the class to make.
        mapping: nested as `to_dict` makes it; keys may also be dotted paths.
        source: where the mapping comes from, for messages.

    Raises:
        ConfigError: names every unknown key, wrong type and value out of range.
    """
    problems: list[str] = []
    values = layer(cls(), mapping, problems)
    if problems:
        raise ConfigError(join_problems(source, problems))
    return build(cls(), values)


def replace_paths[C: Config](config: C, changes: Mapping[str, Any]) -> C:
    """A copy of `config` with other values at some dotted paths."""
    problems: list[str] = []
    values = layer(config, changes, problems)
    if problems:
        raise ConfigError(join_problems("", problems))
    return build(config, values)


def layer(config: Config, mapping: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Checks `mapping` against the fields of `config` and flattens it; appends to `problems`."""
    by_path = {leaf.path: leaf for leaf in leaves(config)}
    section_paths = {path for path, _ in sections(config)}
    values: dict[str, Any] = {}
    for path, raw in _flatten(mapping, section_paths):
        leaf = by_path.get(path)
        given = f"{path}={_brief(raw)}"
        if path in values:
            problems.append(f"{path} is given twice")
        elif path in section_paths:
            problems.append(f"{given} must hold the fields of {path}, by name")
        elif leaf is None:
            hint = did_you_mean(path, [*by_path, *section_paths])
            problems.append(f"{given} is not a field{hint}")
        else:
            try:
                values[path] = coerce(leaf.type, raw)
                check(leaf.meta, values[path])
            except ValueError as error:
                problems.append(f"{path}={_brief(raw, leaf.type)} {error}")
    return values


def _brief(value: Any, hint: Any = str) -> str:
    text = show_given(hint, value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _flatten(
    mapping: Mapping[str, Any], section_paths: set[str], prefix: str = ""
) -> list[tuple[str, Any]]:
    flat = []
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        if isinstance(value, Config):
            value = to_dict(value)
        if path in section_paths and isinstance(value, Mapping):
            flat += _flatten(value, section_paths, f"{path}.")
        else:
            flat.append((path, value))
    return flat


def build[C: Config](template: C, values: Mapping[str, Any]) -> C:
    """`template` with the checked `values` of one or several layers laid over it."""
    problems: list[str] = []
    config = _build(template, values, "", problems)
    if problems:
        raise ConfigError(join_problems("", problems))
    return config


def _build[C: Config](
    template: C, values: Mapping[str, Any], prefix: str, problems: list[str]
) -> C:
    arguments = {}
    for f in dataclasses.fields(template):
        old, path = vars(template)[f.name], f"{prefix}{f.name}"
        if isinstance(old, Config):
            arguments[f.name] = _build(old, values, f"{path}.", problems)
        else:
            arguments[f.name] = values.get(path, old)
    try:
        return type(template)(**arguments)
    except ConfigError as error:
        # Single values were checked before, so this is a rule of the class across its fields.
        problems.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
        return template


# Files


def dump(config: Config, **records: Mapping[str, Any]) -> str:
    """The text of a `config.json`: the configuration, and records beside it (versions, ...)."""
    return json.dumps({"config": to_dict(config), **records}, indent=2) + "\n"


def changed(config: Config) -> dict[str, Any]:
    """Dotted path -> default, of every field that differs from it.

    The default is that of the configuration's own class, so what an experiment declares with
    another one is not a change; what a preset sets is.
    """
    return {leaf.path: leaf.default for leaf in leaves(config) if leaf.value != leaf.default}


def versions() -> dict[str, str]:
    """Versions of everything a run stands on, for `config.json` and `jaxtrain version`."""
    from importlib import metadata  # slow to import, and no flag needs it

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def load(path: str, config: Config, problems: list[str]) -> dict[str, Any]:
    """The layer in a JSON file: a `config.json` of ours, or only the fields.

    Args:
        path: of the file.
        config: an instance of the class to be made.
        problems: is appended to.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=_no_duplicates)
        if not isinstance(content, dict):
            raise ValueError("must hold one JSON object")
    except OSError as error:
        problems.append(f"config file {path} cannot be read: {error.strerror}")
        return {}
    except ValueError as error:
        problems.append(f"config file {path} is not a JSON configuration: {error}")
        return {}
    found: list[str] = []
    fields = content.pop("config", content)
    if not isinstance(fields, dict):
        found.append(f"config={_brief(fields)} must hold the fields, by name")
        fields = {}
    elif fields is not content:
        # Beside "config" stand records such as versions. A field there would be ignored.
        names = vars(config)
        for name, value in content.items():
            if name in names or not isinstance(value, dict):
                found.append(f"{name} must stand inside of 'config'")
    values = layer(config, fields, found)
    problems += [f"config file {path}: {problem}" for problem in found]
    return values


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is given twice")
    return result


# Resume


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field whose value is not the one the run was saved with."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {show_filled(self.old)} -> {show_filled(self.new)}"


def resume_differences(
    saved: Mapping[str, Any], config: Config
) -> tuple[list[Difference], list[Difference]]:
    """Compares a saved configuration with the one of a run that resumes it.

    A field that the saved configuration does not know yet counts as saved with its default. One
    that no longer exists is reported as free to change, with None as its new value.

    Args:
        saved: what `to_dict` made when the run was saved.
        config: the present one.

    Returns:
        (differences that forbid to resume, differences that are allowed).
    """
    old = dict(_flatten(saved, {path for path, _ in sections(config)}))
    fixed, free = [], []
    for leaf in leaves(config):
        before = old.pop(leaf.path, leaf.default)
        before = tuple(before) if isinstance(before, list) else before
        if before != leaf.value:
            kind = free if leaf.on_resume == "free" else fixed
            kind.append(Difference(leaf.path, before, leaf.value))
    free += [Difference(path, value, None) for path, value in old.items()]
    return fixed, free


# For the eye


def summary(config: Config, *, width: int = 100) -> str:
    """The essentials, and what differs from the defaults (given in brackets)."""
    defaults = changed(config)
    shown, others = [], []
    for leaf in leaves(config):
        text = f"{leaf.path}={show_filled(leaf.value)}"
        if leaf.path in _ESSENTIALS:
            shown.append(text)
        elif leaf.path in defaults:
            others.append(f"{text} ({show_filled(leaf.default)})")
    lines = []
    for title, parts in (("config", shown), ("changed", others)):
        if parts:
            text = f"{title:<8}{'  '.join(parts)}"
            wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
            wrap.subsequent_indent = " " * 8
            lines += wrap.wrap(text)
    return "\n".join(lines)
