"""What a configuration class is: `Config`, `field`, and walks over the leaves.

A configuration is a frozen, keyword-only dataclass that derives from `Config`. Each field is
declared with `field(...)`, which carries its help, unit and limits, or holds a nested `Config`.
A leaf is addressed by its dotted path (`optimizer.learning_rate`).
"""

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self

from jaxtrain.errors import ConfigError
from jaxtrain.values import Meta, check, coerce, join_problems, show, show_given

_KEY = "jaxtrain"


def field(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Callable[[], Any] | None = None,
    help: str = "",
    unit: str = "",
    group: str = "",
    choices: tuple[Any, ...] = (),
    refused: Mapping[str, str] | None = None,
    on_resume: Literal["fixed", "free"] = "fixed",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    positive: bool = False,
    pattern: bool = False,
    repeated: bool = False,
    used_when: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Declares a field of a `Config`. A default is required: a configuration needs no arguments.

    Args:
        default: the value for the simplest case.
        default_factory: instead of `default`, for nested configurations: the class itself, or a
            function that makes one with other defaults.
        help: one line, as `--help` shows it.
        unit: of the number, e.g. "steps", "seconds", "rows".
        group: heading in `--help` for run-level fields; nested fields stand under their section.
        choices: the only values that are accepted.
        refused: value -> sentence, for values a user may expect and that do not exist (yet).
        on_resume: "free" if the value may change when a run is resumed.
        minimum: smallest value, included.
        maximum: largest value, included.
        above: lower limit, excluded.
        below: upper limit, excluded.
        positive: short for `above=0`.
        pattern: the text is a regular expression; it is compiled to see that it is one.
        repeated: of a tuple of texts, which may hold commas: the flag is given once for each.
        used_when: sibling field -> values with which this field is read at all. With any other
            value of the sibling, changing this field from its default is an error.

    Raises:
        TypeError: with no default, or two.
    """
    meta = Meta(
        help=help,
        unit=unit,
        group=group,
        choices=choices,
        refused=refused or {},
        on_resume=on_resume,
        minimum=minimum,
        maximum=maximum,
        above=0 if positive else above,
        below=below,
        pattern=pattern,
        repeated=repeated,
        used_when=used_when or {},
    )
    if (default is dataclasses.MISSING) == (default_factory is None):
        raise TypeError("field() takes exactly one of default and default_factory")
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata={_KEY: meta})
    return dataclasses.field(default=default, metadata={_KEY: meta})


def override(cls: type["Config"], name: str, default: Any) -> Any:
    """Declares a field of a base class again, with another default.

    class MyConfig(RunConfig):
        num_steps: int = override(RunConfig, "num_steps", 500)
    """
    (base,) = (f for f in dataclasses.fields(cls) if f.name == name)
    return dataclasses.field(default=default, metadata=base.metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration: `@dataclass(frozen=True, kw_only=True) class X(Config)`.

    A subclass with rules across fields defines `__post_init__`, calls
    `super().__post_init__()` first, and raises `ConfigError`.
    """

    _path: ClassVar[str | None] = None
    """Dotted path under which an owner holds this instance; the owner sets it."""

    def __post_init__(self) -> None:
        problems = []
        values = vars(self)
        for f in dataclasses.fields(self):
            _require_declared(type(self), f)
            value, hint, meta = values[f.name], _hints(type(self))[f.name], meta_of(f)
            if isinstance(hint, type) and issubclass(hint, Config):
                if not isinstance(value, hint):
                    problems.append(f"{f.name} must be a {hint.__name__}; got {value!r}")
                continue
            try:
                value = coerce(hint, value)
                check(meta, value)
            except ValueError as error:
                problems.append(f"{f.name}={show_given(hint, value)} {error}")
            # The only write to a frozen instance: 1 becomes 1.0 in a float field.
            object.__setattr__(self, f.name, value)
        problems = problems or unused(self)
        if problems:
            raise ConfigError(join_problems("", problems))
        for name, value in values.items():
            if isinstance(value, Config):
                _adopt(value, name)

    def replace(self, **changes: Any) -> Self:
        """`dataclasses.replace` as a method."""
        return dataclasses.replace(self, **changes)


def _adopt(config: Config, path: str) -> None:
    """Tells a nested configuration the dotted path under which its owner knows it."""
    object.__setattr__(config, "_path", path)
    for name, value in tuple(vars(config).items()):
        if isinstance(value, Config):
            _adopt(value, f"{path}.{name}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _default_of(cls: type[Config]) -> Config:
    return cls()


def meta_of(f: "dataclasses.Field[Any]") -> Meta:
    """The metadata of a field; every instance has checked that its fields have some."""
    return f.metadata[_KEY]


def _require_declared(cls: type[Config], f: "dataclasses.Field[Any]") -> None:
    """Refuses a field without metadata; one of a base class can be declared again with `override`.

    Raises:
        ConfigError: with the line to write.
    """
    if _KEY in f.metadata:
        return
    default = "..." if f.default is dataclasses.MISSING else repr(f.default)
    line = f"jaxtrain.field({default}, help=...)"
    for base in cls.__mro__[1:]:
        declared = getattr(base, "__dataclass_fields__", {}).get(f.name)
        if declared is not None and _KEY in declared.metadata:
            line = f"jaxtrain.config.override({base.__name__}, {f.name!r}, {default})"
            break
    raise ConfigError(
        f"field {f.name!r} of {cls.__name__} has no declaration; write {f.name} = {line}."
    )


def unused(config: Config) -> list[str]:
    """A sentence for each field that differs from its default although nothing reads it."""
    found = []
    values = vars(config)
    for f in dataclasses.fields(config):
        for sibling, needed in meta_of(f).used_when.items():
            if values[sibling] not in needed and values[f.name] != f.default:
                found.append(
                    f"{f.name}={show(values[f.name])} is read only with {sibling}="
                    f"{' or '.join(show(v) for v in needed)}, and {sibling} is "
                    f"{show(values[sibling])}; leave {f.name}={show(f.default)}"
                )
    return found


def inapplicable(config: Config) -> set[str]:
    """Dotted paths of the fields that `used_when` switches off with these values."""
    names = set()
    values = vars(config)
    for f in dataclasses.fields(config):
        if isinstance(values[f.name], Config):
            names |= {f"{f.name}.{path}" for path in inapplicable(values[f.name])}
        elif any(values[k] not in needed for k, needed in meta_of(f).used_when.items()):
            names.add(f.name)
    return names


# Leaves


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value of a configuration, with everything that is known about it."""

    path: str
    type: Any
    default: Any
    value: Any
    meta: Meta

    @property
    def help(self) -> str:
        return self.meta.help

    @property
    def unit(self) -> str:
        return self.meta.unit

    @property
    def choices(self) -> tuple[Any, ...]:
        return self.meta.choices

    @property
    def on_resume(self) -> str:
        return self.meta.on_resume


def leaves(config: Config | type[Config], prefix: str = "") -> Iterator[Leaf]:
    """All leaves, depth first, in the order of declaration.

    Args:
        config: a configuration, or a class (its defaults are then the values).
        prefix: put before each path.
    """
    if isinstance(config, type):
        config = _default_of(config)
    yield from _leaves(config, _default_of(type(config)), prefix)


def _leaves(config: Config, default: Config, prefix: str) -> Iterator[Leaf]:
    for f in dataclasses.fields(config):
        value, standard = vars(config)[f.name], vars(default)[f.name]
        if isinstance(value, Config):
            # An experiment may put another class of model into the field than the default one.
            if type(standard) is not type(value):
                standard = _default_of(type(value))
            yield from _leaves(value, standard, f"{prefix}{f.name}.")
        else:
            hint = _hints(type(config))[f.name]
            yield Leaf(f"{prefix}{f.name}", hint, standard, value, meta_of(f))


def sections(config: Config | type[Config], prefix: str = "") -> Iterator[tuple[str, Config]]:
    """(dotted path, nested configuration) of every section below `config`."""
    if isinstance(config, type):
        config = _default_of(config)
    for f in dataclasses.fields(config):
        value = vars(config)[f.name]
        if isinstance(value, Config):
            yield f"{prefix}{f.name}", value
            yield from sections(value, f"{prefix}{f.name}.")


# Which fields does a run read?

# Comparing, printing, validating and copying a configuration is not using it.
_BOOKKEEPING = frozenset({"__post_init__", "__eq__", "__hash__", "__repr__"})
_recorders: list[set[str]] = []


@contextmanager
def record_reads() -> Iterator[set[str]]:
    """Collects the paths of the leaves that are read meanwhile, in any thread.

    A configuration on its own (not held by another one, as after `dataclasses.replace`) is
    recorded under its class, as `ClassName.field`; `unread` understands both.
    """
    reads: set[str] = set()
    _recorders.append(reads)
    # Installed only meanwhile: in the other runs a read costs nothing.
    setattr(Config, "__getattribute__", _recorded)  # noqa: B010
    try:
        yield reads
    finally:
        _recorders.remove(reads)
        if not _recorders:
            delattr(Config, "__getattribute__")


def _recorded(self: Config, name: str) -> Any:
    value = object.__getattribute__(self, name)
    cls = object.__getattribute__(self, "__class__")
    if name in cls.__dataclass_fields__ and not isinstance(value, Config):
        caller = sys._getframe(1)
        if (
            caller.f_code.co_name not in _BOOKKEEPING
            and caller.f_globals.get("__name__") != "dataclasses"
        ):
            owner = object.__getattribute__(self, "_path")
            path = f"{cls.__name__ if owner is None else owner}.{name}".lstrip(".")
            for reads in _recorders:
                reads.add(path)
    return value


def unread(config: Config, reads: set[str]) -> list[str]:
    """Paths of the leaves of `config` that are not in `reads` although they apply."""
    classes = {path: type(section).__name__ for path, section in sections(config)}
    skipped = inapplicable(config)
    missing = []
    for leaf in leaves(config):
        owner, _, name = leaf.path.rpartition(".")
        by_class = f"{classes.get(owner, type(config).__name__)}.{name}"
        if leaf.path not in skipped and not reads & {leaf.path, by_class}:
            missing.append(leaf.path)
    return missing
