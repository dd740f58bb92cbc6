"""What lm-eval asks, as tokens: a continuation after its context, or a long text in windows.

Texts become tokens as lm-eval's own adapter of transformers makes them, so that results can be
compared: special tokens that are written out are special, and what the tokenizer's file puts before
a text is put before it. Nothing here needs jax.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.data.tokenizing import Tokenizer
from jaxtrain.errors import ConfigError, DataError

__all__ = ["Coder", "Pair", "bucket", "cut", "windows"]


class Pair(NamedTuple):
    """A continuation to score; neither part is empty."""

    context: list[int]
    continuation: list[int]


class Coder:
    """Text to the tokens of a model, and back."""

    def __init__(self, tokenizer: Tokenizer, prefix: int) -> None:
        """Takes a tokenizer.

        Args:
            tokenizer: of the model.
            prefix: token that stands for an empty context, and before a long text.
        """
        self.tokenizer = tokenizer
        self.prefix = prefix

    def encode(self, text: str, *, is_beginning: bool = True) -> list[int]:
        """The tokens of a text; where it is a beginning, with what the tokenizer puts there."""
        tokens = self.tokenizer.encode_marked(text)[0].tolist()
        beginning = list(self.tokenizer.beginning) if is_beginning else []
        # A chat template has written it out.
        return tokens if tokens[: len(beginning)] == beginning else beginning + tokens

    def pair(self, context: str, continuation: str) -> Pair:
        """Context and continuation, encoded in one piece and then parted.

        Spaces at the end of the context go to the continuation: most tokenizers have words with the
        space before them.

        Raises:
            DataError: for a continuation that adds no token.
        """
        before = context.rstrip()
        after = context[len(before) :] + continuation
        if before:
            whole, first = self.encode(before + after), self.encode(before)
            parted = Pair(first, whole[len(first) :])
        else:
            tokens = self.encode(after, is_beginning=False)
            parted = Pair([self.prefix], tokens)
            if len(tokens) > 1 and tokens[0] == self.prefix:  # written out
                parted = Pair(tokens[:1], tokens[1:])
        if not parted.continuation:
            raise DataError(
                f"a continuation must add tokens to its context; {continuation!r} adds none to "
                f"{context[-40:]!r}. Change doc_to_target or doc_to_choice of the task."
            )
        return parted

    def windows(self, text: str, max_length: int) -> list[Pair]:
        """A long text in pieces that fit; see the function."""
        return windows(self.encode(text, is_beginning=False), self.prefix, max_length)


def windows(tokens: Sequence[int], prefix: int, max_length: int) -> list[Pair]:
    """Cuts a long text so that each token is scored once.

    Only the first window begins at the prefix. The last one is as long as the others, and scores
    what they left.

    Args:
        tokens: of the text, without the prefix.
        prefix: token before the text.
        max_length: tokens that the model reads at a time.
    """
    # The token before tokens[i] is whole[i].
    whole = [prefix, *tokens]
    pairs = []
    for begin in range(0, len(tokens), max_length):
        end = min(begin + max_length, len(tokens))
        context = whole[max(end - max_length, 0) : begin + 1]
        pairs.append(Pair(context, list(tokens[begin:end])))
    return pairs


def cut(pair: Pair, max_length: int) -> tuple[list[int], list[int]]:
    """(what the model reads, the token that follows each), the context cut on the left to fit.

    The continuation is the end of the second list.

    Raises:
        ConfigError: for a continuation that is too long by itself.
    """
    if len(pair.continuation) > max_length:
        raise ConfigError(
            f"a continuation of {len(pair.continuation)} tokens does not fit max_length="
            f"{max_length}; raise --max_length if the model was trained on more."
        )
    tokens = (pair.context + pair.continuation)[-(max_length + 1) :]
    return tokens[:-1], tokens[1:]


def bucket(length: int, most: int, least: int = 64) -> int:
    """A power of two, at least `least`, that holds a length: few programs serve all lengths.

    Args:
        length: at most `most`.
        most: returned where the power of two is larger.
        least: power of two.
    """
    return min(max(1 << (length - 1).bit_length(), least), most)
