"""Chat templates: conversations to text, and which of it the assistant says.

The template is Jinja, as Hugging Face's `tokenizer_config.json` (`chat_template`) or the file
`chat_template.jinja` beside it holds it; it is rendered in Jinja's sandbox, with the filters and
tags that transformers gives it. Where it marks the assistant's turns with {% generation %} ...
{% endgeneration %}, these are the targets. Elsewhere a turn is what rendering with it adds to
rendering without it and with the prompt for an answer; a template that writes earlier turns anew
(e.g. without their reasoning) needs the markers.

A template sees no date: rows must not depend on the day.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.errors import ConfigError, DataError

__all__ = ["ROLES", "ChatTemplate", "Rendered"]

ROLES = ("system", "user", "assistant")

# Noncharacters of Unicode: never in text that is interchanged.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_WAY_OUT = "give one with --data.chat_template=FILE, or train on records of prompt and completion"
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]
    """Begin and end of what the assistant says, in characters."""


class ChatTemplate:
    """A chat template, ready to be rendered."""

    def __init__(self, source: str, name: str, special: Mapping[str, str] | None = None) -> None:
        """Compiles a template.

        Args:
            source: Jinja.
            name: in messages.
            special: names of special tokens in the template -> their texts, e.g. bos_token.

        Raises:
            ConfigError: if it is no template.
        """
        import jinja2

        self.name = name
        self._special = dict(special or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template {name} is not Jinja: {error}") from error
        tags = (token for _, kind, token in environment.lex(source) if kind == "name")
        self.has_markers = "generation" in tags

    @classmethod
    def read(cls, path: str, way_out: str = _WAY_OUT) -> "ChatTemplate":
        """The template in a file, or in the directory of a model of Hugging Face.

        Args:
            path: of the file or directory.
            way_out: what to do where there is none, for the error.

        Raises:
            ConfigError: naming where a template was looked for.
        """
        place = Path(path).expanduser()
        if place.is_file() and place.name != _CONFIG_FILE:
            return cls(place.read_text("utf-8"), str(place), _special_of(place.parent))
        folder = place if place.is_dir() else place.parent
        if (folder / _TEMPLATE_FILE).is_file():
            return cls.read(str(folder / _TEMPLATE_FILE))
        template = _config_of(folder).get("chat_template")
        if isinstance(template, list):  # several by name
            template = {one.get("name"): one.get("template") for one in template}.get("default")
        if not isinstance(template, str):
            raise ConfigError(
                f"{path} has no chat template: neither {_TEMPLATE_FILE} nor chat_template in "
                f"{_CONFIG_FILE}; {way_out}"
            )
        return cls(template, str(folder / _CONFIG_FILE), _special_of(folder))

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text to let the assistant answer to."""
        return self._render(messages, True).replace(_BEGIN, "").replace(_END, "")

    def begun(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text to let the assistant go on with what the last message says."""
        text = self._render(messages, False).replace(_BEGIN, "").replace(_END, "")
        said = messages[-1]["content"].rstrip()
        return text[: text.rindex(said) + len(said)] if said in text else text

    def render(self, messages: Sequence[Mapping[str, str]]) -> Rendered:
        """Renders a whole conversation.

        Args:
            messages: each with role (of `ROLES`) and content; checked by `check_messages`.

        Raises:
            DataError: for a conversation that the template refuses, or turns that it hides.
        """
        marked = self._render(messages, False)
        if self.has_markers:
            return _unmark(marked)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], True)
            after = self._render(messages[: number + 1], False)
            if not (after.startswith(before) and marked.startswith(after)):
                raise DataError(
                    f"chat template {self.name} writes a conversation anew after later turns, so "
                    f"that message {number} cannot be found in it; mark what the assistant says in "
                    "the template with {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return Rendered(marked, spans)

    def _render(self, messages: Sequence[Mapping[str, str]], asks: bool) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=asks, **self._special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"chat template {self.name} refuses it: {error}") from error


def check_messages(messages: Any, *, needs_answer: bool = True) -> str:
    """What is wrong with the messages of a record; "" if nothing is.

    `needs_answer`: to learn from, there is one of the assistant.
    """
    if not isinstance(messages, list) or not messages:
        return "has no list of messages"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f"has message {number} without text in 'content'"
        if message.get("role") not in ROLES:
            return (
                f"has the role {message.get('role')!r} in message {number}; roles are "
                f"{', '.join(ROLES)}"
            )
        if _BEGIN in message["content"] or _END in message["content"]:
            return f"has U+FDD0 or U+FDD1 in message {number}, which are no characters"
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
        return "has no message of the assistant, so there is nothing to learn from it"
    return ""


# Inside


def _unmark(marked: str) -> Rendered:
    """Takes the marks out of a text."""
    pieces, spans, length = [], [], 0
    for part in marked.split(_BEGIN):
        said, mark, rest = part.partition(_END)
        if mark:
            spans.append((length, length + len(said)))
        pieces += [said, rest]
        length += len(said) + len(rest)
    return Rendered("".join(pieces), spans)


def _environment() -> Any:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: puts marks around what is inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / _CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _special_of(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and so on, by name."""
    found = {}
    for name, value in _config_of(folder).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
