"""Text that a language model generates: batches of prompts, stop strings, tokens per second.

Tokens come in pieces (`models.decoding`). After each the text so far is looked at: a row is cut at
its first stop string, and needs no more tokens then.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxtrain.data.tokenizing import Tokenizer
from jaxtrain.errors import ConfigError
from jaxtrain.models.decoding import prepared
from jaxtrain.models.functional import Model, Params
from jaxtrain.models.sample import start
from jaxtrain.prompts import Prompt
from jaxtrain.units import several

__all__ = ["Speed", "answer", "cut"]


@dataclasses.dataclass
class Speed:
    """How long all batches together took, compilation apart."""

    num_rows: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated, without those that reading the prompts gave, the first of each row."""
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        rows = several(self.num_rows, "row")
        parts = [
            f"{tokens:,} {what} in {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"
            for tokens, what, seconds in (
                (self.prompt_tokens, "tokens of prompts", self.prefill_seconds),
                (self.tokens, "generated after their first", self.decode_seconds),
            )
        ]
        return (
            f"{rows}: prefill {parts[0]}; decode {parts[1]}; compiled in {self.compile_seconds:.1f}"
            " s besides"
        )


def answer(
    model: Model,
    params: Params,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    stop_strings: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    batch_size: int = 16,
    **draws: Any,
) -> tuple[list[str], Speed]:
    """What follows each prompt, up to `num_tokens` tokens, a stop token or a stop string.

    Args:
        model: has `decode` and `init_cache`.
        params: its parameters.
        prompts: their lengths may differ.
        tokenizer: of the model.
        num_tokens: at most, for each.
        stop_strings: an answer ends before the first of them.
        stop_tokens: an answer ends before the first of them.
        batch_size: how many prompts are continued at once; no answer depends on it.
        **draws: temperature, top_k, top_p and seed of `models.sample.generate`.

    Returns:
        (texts, how long it took).

    Raises:
        ConfigError: for an empty stop string, and what `generate` refuses.
    """
    if not all(stop_strings):
        raise ConfigError("a stop string is empty; give at least one character.")
    texts: list[str] = []
    speed = Speed(num_rows=len(prompts), prompt_tokens=sum(len(one.tokens) for one in prompts))
    begin = time.perf_counter()
    ready = prepared(model, params)
    speed.compile_seconds = time.perf_counter() - begin
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        rows = [_Row(prompt, tokenizer, stop_strings, stop_tokens) for prompt in batch]
        decoding = start(
            model, params, [prompt.tokens for prompt in batch],
            num_tokens=num_tokens, stop_tokens=stop_tokens, first_row=first, ready=ready, **draws,
        )  # fmt: skip
        pieces = [decoding.read()]
        while True:
            for number, (row, tokens) in enumerate(zip(rows, pieces[-1].tolist(), strict=True)):
                row.add(tokens)
                if row.has_ended:
                    decoding.finish(number)
            if decoding.is_done:
                break
            pieces.append(decoding.go_on())
        texts += [row.text for row in rows]
        speed.tokens += sum(row.num_tokens - 1 for row in rows)
        speed.compile_seconds += decoding.seconds.compile
        speed.prefill_seconds += decoding.seconds.prefill
        speed.decode_seconds += decoding.seconds.decode
    return texts, speed


def cut(text: str, stop_strings: Sequence[str]) -> tuple[str, bool]:
    """(what stands before the first of the stop strings, whether there is one)."""
    places = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class _Row:
    """One answer while it grows."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        stop_tokens: Sequence[int],
    ):
        self._prompt, self._tokenizer = prompt.tokens, tokenizer
        self._stop_strings, self._stop_tokens = stop_strings, frozenset(stop_tokens)
        self._tokens: list[int] = []
        self.text, self.has_ended, self.num_tokens = "", False, 0

    def add(self, tokens: Sequence[int]) -> None:
        """Takes a piece; what comes after the end of the answer is no part of it."""
        if self.has_ended:
            return
        for token in tokens:
            self.num_tokens += 1
            if token in self._stop_tokens:
                self.has_ended = True
                break
            self._tokens.append(token)
        # Behind its prompt: tokenizers that mark the beginning of words write none at the start.
        before = self._tokenizer.decode(self._prompt)
        whole = self._tokenizer.decode([*self._prompt, *self._tokens])
        is_behind = whole.startswith(before)
        text = whole[len(before) :] if is_behind else self._tokenizer.decode(self._tokens)
        self.text, is_cut = cut(text, self._stop_strings)
        self.has_ended |= is_cut
