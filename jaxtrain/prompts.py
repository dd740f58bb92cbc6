"""What a language model is asked to go on from: texts, or messages in the words of its template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data.chat import ChatTemplate, check_messages
from jaxtrain.data.tokenizing import Tokenizer
from jaxtrain.errors import ConfigError, DataError

__all__ = ["Prompt", "chat_prompt", "make_prompts", "read_prompts", "text_prompt"]

_JSON_LINES = (".jsonl", ".ndjson")
_NAMED = 5

Asked = str | Sequence[Mapping[str, str]]
"""A text, or messages with role and content."""


class Prompt(NamedTuple):
    """A prompt as the model gets it."""

    shown: str
    """What stands before the answer where people read it."""
    tokens: list[int]


def text_prompt(text: str, tokenizer: Tokenizer, beginning: Sequence[int] = ()) -> Prompt:
    """A text to go on from, behind the tokens that begin texts."""
    if not text:
        raise ConfigError("prompt is empty; give at least one character to go on from.")
    (tokens,) = tokenizer.encode([text.encode()])
    return Prompt(text, [*beginning, *map(int, tokens)])


def chat_prompt(
    messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, template: ChatTemplate
) -> Prompt:
    """Messages to answer to, as the template writes them, prompt for the answer included."""
    tokens, _, _ = tokenizer.encode_marked(template.prompt(messages))
    return Prompt(f"{messages[-1]['content']}\n", tokens.tolist())


def make_prompts(
    asked: Sequence[Asked],
    tokenizer: Tokenizer,
    *,
    beginning: Sequence[int] = (),
    template: ChatTemplate | None = None,
) -> list[Prompt]:
    """Prompts of texts or messages; with a template a text is a message of the user.

    Raises:
        ConfigError: for messages without a template, and empty texts.
        DataError: for messages that the template refuses.
    """
    prompts = []
    for one in asked:
        if template is not None:
            messages = [{"role": "user", "content": one}] if isinstance(one, str) else one
            prompts.append(chat_prompt(messages, tokenizer, template))
        elif isinstance(one, str):
            prompts.append(text_prompt(one, tokenizer, beginning))
        else:
            raise ConfigError("messages are rendered with a chat template; give --chat.")
    return prompts


def read_prompts(path: str) -> list[Asked]:
    """What a file asks: a text in every line that is not empty, or JSON lines (.jsonl).

    A record is {"prompt": "..."}, or {"messages": [{"role": ..., "content": ...}, ...]}.

    Raises:
        DataError: for a file that cannot be read, or lines that ask nothing, with their numbers.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"prompts_file={path} cannot be read: {reason}.") from error
    asked: list[Asked] = []
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        one, problem = _parse(line) if file.suffix in _JSON_LINES else (line, "")
        asked.append(one)
        problems += [f"{path}:{number} {problem}"] if problem else []
    if problems:
        more = len(problems) - _NAMED
        raise DataError("; ".join(problems[:_NAMED] + ([f"and {more} more"] if more > 0 else [])))
    if not asked:
        raise DataError(f"prompts_file={path} holds no prompts.")
    return asked


def _parse(line: str) -> tuple[Asked, str]:
    """(what a record asks, what is wrong with it or "")."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON ({error})"
    if not isinstance(record, dict):
        return "", f"is {type(record).__name__}, not an object"
    if "messages" in record:
        return record["messages"], check_messages(record["messages"], needs_answer=False)
    if not isinstance(record.get("prompt"), str):
        return "", f"has no text in 'prompt', and no messages (it has: {', '.join(record) or '-'})"
    return record["prompt"], ""
