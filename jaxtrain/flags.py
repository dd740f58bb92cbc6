"""Command-line flags made from a configuration class, on absl flags.

Precedence, lowest first: defaults of the class, presets (`--model=NAME`), the file of `--config`,
flags. Every value given is checked, also one that a later layer replaces, and all problems are
reported in one `ConfigError`.

Each parse has a `FlagValues` of its own, in which our flags hold plain text; absl's own types
would take `--num_steps=1e3` to mean an error without a hint and `--rate=nan` to be fine. Flags
that an experiment defines by itself with absl are parsed along.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jaxtrain.errors import ConfigError
from jaxtrain.fields import Config, Leaf, leaves
from jaxtrain.flaghelp import help_text
from jaxtrain.resolve import build, layer, load
from jaxtrain.values import check, did_you_mean, join_problems, nearest, parse_text

Presets = Mapping[str, Mapping[str, Any]]
"""Section -> name -> values: a `Config` of that section, or a mapping of its fields."""

_logger = logging.getLogger("jaxtrain")
_HELP_NAMES = ("help", "helpfull", "helpshort")
# Handled by absl before and while it parses; they need no definition.
_ABSL_NAMES = ("flagfile", "undefok")


def parse[C: Config](
    argv: Sequence[str],
    config_class: type[C],
    *,
    presets: Presets | None = None,
    flag_values: flags.FlagValues | None = None,
    description: str = "",
) -> C:
    """The configuration that a command line asks for.

    Args:
        argv: program name, then arguments. Of a flag given twice the last one counts, unless the
            field is `repeated`: then each gives one element.
        config_class: its fields are the flags.
        presets: section -> name -> values; `{"model": {"tiny": {"num_layers": 2}}}` makes
            `--model=tiny`.
        flag_values: flags that the experiment defined by itself; None: absl's global ones. They
            are marked as parsed.
        description: printed by `--help`.

    Raises:
        ConfigError: with every problem found.
        SystemExit: with code 0, after printing, if help was asked for.
    """
    own_flags = flags.FLAGS if flag_values is None else flag_values
    template = config_class()
    parser = _Parser(template, presets or {}, own_flags)
    problems = parser.read(argv)
    if parser.wants_help():
        print(help_text(argv[0], template, parser.presets, parser.own, description))
        raise SystemExit(0)
    values = parser.layers(problems)
    if problems:
        raise ConfigError(join_problems("", problems))
    own_flags.mark_as_parsed()
    return build(template, values)


def parse_with_paths[C: Config](
    command: str, words: Sequence[str], config_class: type[C], description: str | None
) -> tuple[C, list[str]]:
    """What a `jaxtrain` command is given: (its flags, which begin with -, and all else)."""
    options = [word for word in words if word.startswith("-")]
    paths = [word for word in words if not word.startswith("-")]
    argv = [f"jaxtrain {command}", *options]
    return parse(argv, config_class, description=description or ""), paths


class _Alias(flags.Flag[str]):
    """A second name of a flag: what it is given goes to the other one, the last one counts."""

    def __init__(self, name: str, target: flags.Flag[str], *, negated: bool = False):
        self._target, self._negated = target, negated
        super().__init__(flags.ArgumentParser(), None, name, None, "", boolean=negated)

    def parse(self, argument: str) -> None:
        if self._negated:
            if argument != "true":
                raise flags.IllegalFlagValueError(f"--{self.name} takes no value")
            argument = "false"
        self._target.parse(argument)


class _Collected(flags.Flag[Any]):
    """A flag that may be given several times; its value is the list of what it was given."""

    def parse(self, argument: str) -> None:
        self.value = [*(self.value or []), argument]
        self.present += 1


class _Parser:
    """The flags of one configuration class: defined, read as text, turned into values."""

    def __init__(self, template: Config, presets: Presets, own_flags: flags.FlagValues):
        self.template = template
        self.presets = presets
        self._leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in leaves(template)}
        self._flags = flags.FlagValues()
        # Otherwise absl stops at the first stray word and takes no flag after it.
        self._flags.set_gnu_getopt(True)
        for name in _HELP_NAMES:
            self._define(name, boolean=True)
        for name in ("config", *presets):
            self._define(name)
        for path, leaf in self._leaves.items():
            repeated = leaf.meta.repeated
            flag = self._define(path, boolean=leaf.type is bool, repeated=repeated)
            section, _, name = path.rpartition(".")
            negated = f"{section}.no{name}"
            if section and leaf.type is bool and negated not in self._leaves:
                self._flags[negated] = _Alias(negated, flag, negated=True)
            if section and name == "name" and section not in presets:
                self._flags[section] = _Alias(section, flag)
        self.own = self._adopt(own_flags)

    def _define(
        self, name: str, *, boolean: bool = False, repeated: bool = False
    ) -> flags.Flag[Any]:
        if name in self._flags:
            raise TypeError(f"a configuration field cannot have the name {name}")
        text: flags.ArgumentParser[str] = flags.ArgumentParser()
        kind = _Collected if repeated else flags.Flag
        flag = kind(text, None, name, None, "", boolean=boolean)
        self._flags[name] = flag
        return flag

    def _adopt(self, own_flags: flags.FlagValues) -> list[flags.Flag[Any]]:
        """Takes in the flags that the experiment defined by itself; returns them."""
        found = {}
        for name in own_flags:
            flag = own_flags[name]
            # A flag is also listed under its short name. Help is ours.
            if name != flag.name or name in (*_HELP_NAMES, *_ABSL_NAMES):
                continue
            if name in self._flags:
                owner = own_flags.find_module_defining_flag(name)
                raise TypeError(f"{owner} defines --{name}, which the configuration has too")
            found[name] = flag
        for name, flag in found.items():
            self._flags[name] = flag
        return list(found.values())

    def read(self, argv: Sequence[str]) -> list[str]:
        """Reads the text of every flag; returns what is wrong with the words as such."""
        try:
            _, *words = self._flags(argv, known_only=True)
        except (flags.Error, ValueError) as error:
            return [str(error)]
        problems = []
        names = [name for name in self._flags if name not in _HELP_NAMES]
        after_unknown = False
        for word in words:
            name, has_value, value = word.lstrip("-").partition("=")
            if word.startswith("-") and name:
                problems.append(f"{word} is not a flag{self._meant(name, names)}")
                after_unknown = not has_value
                continue
            # The value of an unknown flag before it is no error of its own.
            if not after_unknown:
                hint = "flags are written --name=value"
                if value and nearest(name, names):
                    hint = f"did you mean --{nearest(name, names)}={value}?"
                elif word.lower() in ("true", "false", "yes", "no"):
                    hint = f"switches are written --name, --noname or --name={word.lower()}"
                problems.append(f"{word!r} is a stray word; {hint}")
            after_unknown = False
        return problems

    def _meant(self, name: str, names: Sequence[str]) -> str:
        inside = [path for path in self._leaves if path.startswith(f"{name}.")]
        if inside:
            return f", {name} is a section: --{', --'.join(inside[:3])}, ..."
        bare = name.removeprefix("no")
        near = nearest(name, names) or nearest(bare, names)
        return f"; did you mean --{near}?" if near else "; --help lists them"

    def wants_help(self) -> bool:
        return any(self._flags[name].value == "true" for name in _HELP_NAMES)

    def layers(self, problems: list[str]) -> dict[str, Any]:
        """The values of presets, file and flags, the later ones over the earlier ones."""
        preset: dict[str, Any] = {}
        for section, choices in self.presets.items():
            name = self._flags[section].value or ""
            if name in choices:
                preset |= layer(self.template, {section: choices[name]}, problems)
            elif self._flags[section].present:
                rule = f"must be one of {', '.join(choices)}{did_you_mean(name, choices)}"
                problems.append(f"--{section}={name} {rule}")
        path = self._flags["config"].value
        file = {} if path is None else load(path, self.template, problems)
        lost = [key for key, value in preset.items() if file.get(key, value) != value]
        if lost:
            chosen = ", ".join(f"--{section}" for section in self.presets)
            _logger.warning("%s overrides %s of %s", path, ", ".join(lost), chosen)
        return preset | file | self._given(problems)

    def _given(self, problems: list[str]) -> dict[str, Any]:
        values = {}
        for path, leaf in self._leaves.items():
            text = self._flags[path].value
            if text is None:
                continue
            try:
                if leaf.meta.repeated:
                    values[path] = tuple(parse_text(str, one) for one in text)
                else:
                    values[path] = parse_text(leaf.type, text)
                check(leaf.meta, values[path])
            except ValueError as error:
                problems.append(f"--{path}={text} {error}")
        return values
