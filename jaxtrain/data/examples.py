"""Examples to fine-tune on: prompts with completions, and chats; loss on the answers only.

    {"prompt": "The capital of France is", "completion": " Paris"}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

A prompt and its completion are tokenized apart, so that the prompt has the tokens it will have when
the model is asked; the tokenizer's beginning of a text stands before them, its end of a document
behind. Messages become text by a chat template (`chat`), which is tokenized whole, with the special
tokens that it writes. What the template writes, and what an end is, is up to it.

Rows are packed (`pack`): an example sees itself only, and is never cut: those longer than a row
are left out, counted and named. Records are held out for validation by a hash of their content:
duplicates fall on one side.
"""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat import ChatTemplate, check_messages
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.data.files import find_files
from jaxtrain.data.pack import Documents, PackedDataset
from jaxtrain.data.streams import blocks
from jaxtrain.data.token_info import TokenInfo
from jaxtrain.data.tokenizing import Tokenizer, open_tokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.units import several

__all__ = ["Example", "ExamplesInfo", "examples_datasets", "read_examples", "stand_in"]

_NAMED = 5

_log = logging.getLogger(__name__)


class Example(NamedTuple):
    """One record as tokens."""

    place: str
    """file:line"""
    digest: bytes
    """Hash of the record."""
    tokens: np.ndarray
    """int32 [N]"""
    loss_mask: np.ndarray
    """float32 [N]: 1 where the token is a target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExamplesInfo(TokenInfo):
    """What `examples_datasets` found; its targets are tokens of answers."""

    num_train: int
    num_eval: int
    too_long: tuple[str, ...]
    """file:line of each that is longer than a row."""
    tokenizer_hash: str
    end_of_document: int
    packing: str
    prompt: tuple[int, ...]
    """Tokens before the first answer of a held-out example (of a training one if none is)."""

    @property
    def tokenizer_id(self) -> tuple[str, int]:
        return self.tokenizer_hash, self.end_of_document

    def summary(self) -> str:
        left_out = f"; left out {several(len(self.too_long), 'example')}" if self.too_long else ""
        return (
            f"examples from {self.source}: {self.num_train} for training and {self.num_eval} for "
            f"validation, with {self.train_tokens:,} and {self.eval_tokens:,} targets{left_out}; "
            f"{self.packing}"
        )


def examples_datasets(
    config: ExamplesConfig, tokenizer: Tokenizer, template: str = ""
) -> tuple[PackedDataset, PackedDataset | None, ExamplesInfo]:
    """Returns (training rows, validation rows or None, what was found).

    Args:
        config: with a source.
        tokenizer: of the model.
        template: where the chat template is, for `ChatTemplate.read`, unless the configuration
            names one. It is read if there are messages.

    Raises:
        ConfigError: without a source, and for messages without a template.
        DataError: for records that cannot be used, all of them with file and line; when too few
            are left.
    """
    if not config.source:
        raise ConfigError("data.source is empty; give JSON lines, e.g. --data.source=chats.jsonl")
    length = config.sequence_length
    examples = read_examples(config.source, tokenizer, config.chat_template or template)
    too_long = [one for one in examples if len(one.tokens) > length]
    if too_long:
        longest = max(len(one.tokens) for one in too_long)
        _log.warning(
            "left out %s longer than data.sequence_length=%d (the longest has %d tokens): %s",
            several(len(too_long), "example"), length, longest, _list([e.place for e in too_long]),
        )  # fmt: skip
    kept = [one for one in examples if len(one.tokens) <= length]
    train, held_out = _split(kept, config.validation_fraction)
    if not train:
        raise DataError(
            f"data.source={config.source} has no example to train on: of "
            f"{several(len(examples), 'record')} {len(too_long)} are longer than "
            f"data.sequence_length={length}, and {len(held_out)} held out"
        )
    rows = [
        PackedDataset(
            Documents.from_list((one.tokens, one.loss_mask) for one in part),
            length,
            name=f"{kind} examples of {config.source}",
            shuffle=config.shuffle,
        )
        for kind, part in (("training", train), ("validation", held_out))
        if part
    ]
    targets = [sum(int(one.loss_mask[1:].sum()) for one in part) for part in (train, held_out)]
    info = ExamplesInfo(
        source=config.source,
        train_tokens=targets[0],
        eval_tokens=targets[1],
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.hash,
        end_of_document=tokenizer.end_of_document,
        num_train=len(train),
        num_eval=len(held_out),
        too_long=tuple(one.place for one in too_long),
        packing=rows[0].summary(),
        prompt=_prompt((held_out or train)[0]),
    )
    return rows[0], rows[1] if held_out else None, info


def stand_in(config: ExamplesConfig) -> PackedDataset:
    """One row as training has them, for a plan without examples."""
    length = config.sequence_length
    row = np.zeros(length, np.int32), np.ones(length, np.float32)
    return PackedDataset(Documents.from_list([row]), length, name="a row for the plan")


def read_examples(source: str, tokenizer: Tokenizer, template: str = "") -> list[Example]:
    """All examples of a source, in the order of its files and lines.

    Args:
        source: as in `ExamplesConfig`.
        tokenizer: of the model.
        template: for messages; see `examples_datasets`.

    Raises:
        DataError: naming file and line of the first records that cannot be used.
        ConfigError: for messages without a template.
    """
    examples, problems = [], []
    chat: ChatTemplate | None = None
    for place, line in _lines(source):
        record, problem = _parse(line)
        if not problem and "messages" in record:
            chat = chat or _template(template, tokenizer)
            try:
                tokens, mask = _chat_tokens(record["messages"], chat, tokenizer)
            except DataError as error:
                problem = f"cannot be rendered: {error}"
            else:
                problem = "" if mask.any() else "has nothing that the assistant says"
        elif not problem:
            tokens, mask = _pair_tokens(record["prompt"], record["completion"], tokenizer)
        if problem:
            problems.append(f"{place} {problem}")
            continue
        digest = hashlib.blake2b(line.strip(), digest_size=8).digest()
        examples.append(Example(place, digest, tokens, mask))
    if problems:
        raise DataError(_list(problems, "; "))
    if not examples:
        raise DataError(f"data.source={source} holds no records")
    return examples


# Inside


def _lines(source: str) -> Iterator[tuple[str, bytes]]:
    """(file:line, line) of every line that is not empty."""
    for file in find_files(source):
        if not file.is_json_lines:
            raise DataError(
                f"{file.relative} is not JSON lines; name files .jsonl, .ndjson, .jsonl.gz or "
                ".jsonl.zst, with one record in each line"
            )
        number = 0
        for _, block in blocks(file, 0, file.size):
            for line in block.removesuffix(b"\n").split(b"\n"):
                number += 1
                if line.strip():
                    yield f"{file.relative}:{number}", line


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """(record, what is wrong with it or "")."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"is not JSON in UTF-8 ({error})"
    if not isinstance(record, dict):
        return {}, f"is {type(record).__name__}, not an object"
    if "messages" in record:
        return record, check_messages(record["messages"])
    for name in ("prompt", "completion"):
        if not isinstance(record.get(name), str):
            have = ", ".join(record) or "nothing"
            return record, (
                f"has no text in {name!r} (it has: {have}); a record has prompt and completion, or "
                "messages"
            )
    return record, "" if record["completion"] else "has an empty completion"


def _template(place: str, tokenizer: Tokenizer) -> ChatTemplate:
    if not place:
        raise ConfigError(
            f"messages need a chat template, and tokenizer {tokenizer.name} comes without one; "
            "give --data.chat_template=FILE"
        )
    return ChatTemplate.read(place)


def _pair_tokens(
    prompt: str, completion: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, loss mask) of a prompt and its completion."""
    first, second = tokenizer.encode([prompt.encode(), completion.encode()])
    before = [*tokenizer.beginning, *first]
    tokens = np.array([*before, *second, tokenizer.end_of_document], np.int32)
    return tokens, (np.arange(len(tokens)) >= len(before)).astype(np.float32)


def _chat_tokens(
    messages: list[dict[str, str]], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, loss mask) of a conversation: a token that overlaps an answer is a target."""
    text, spans = template.render(messages)
    tokens, begins, ends = tokenizer.encode_marked(text)
    mask = np.zeros(len(tokens), np.float32)
    for begin, end in spans:
        mask[(ends > begin) & (begins < end)] = 1
    return tokens, mask


def _prompt(example: Example) -> tuple[int, ...]:
    return tuple(map(int, example.tokens[: int(example.loss_mask.argmax())]))


def _split(examples: list[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(training, validation): held out are those with the smallest hashes, at least one."""
    if not fraction or not examples:
        return examples, []
    digests = sorted(one.digest for one in examples)
    last = digests[math.ceil(fraction * len(digests)) - 1]
    train = [one for one in examples if one.digest > last]
    return train, [one for one in examples if one.digest <= last]


def _list(texts: list[str], separator: str = ", ") -> str:
    more = len(texts) - _NAMED
    return separator.join([*texts[:_NAMED], *([f"and {more} more"] if more > 0 else [])])


def open_model_tokenizer(config: ExamplesConfig, folder: str) -> tuple[Tokenizer, str]:
    """(tokenizer, where its chat template is) of a run that begins with a model.

    Args:
        config: may name another one.
        folder: directory of the model's tokenizer.
    """
    place = config.tokenizer or folder
    if not place:
        raise ConfigError("there is no model to take the tokenizer of; give --data.tokenizer=PATH")
    return open_tokenizer(place), "" if place == "bytes" else place
