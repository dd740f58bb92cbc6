"""What a run says and records about its tokens, wherever they come from."""

import abc
import dataclasses
from typing import Any

from jaxtrain.data.tokenizing import ByteTokenizer
from jaxtrain.errors import ConfigError

_COUNTED_TOKENS = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenInfo(abc.ABC):
    """What was found in a source."""

    source: str
    train_tokens: int
    """Targets."""
    eval_tokens: int
    vocab_size: int = ByteTokenizer.vocab_size
    tokenizer: str = ByteTokenizer.name

    @property
    def flag(self) -> str:
        """That names the source."""
        return "data.source"

    @property
    def tokenizer_id(self) -> tuple[str, int]:
        """Hash of the tokenizer, and the token that ends documents."""
        return ByteTokenizer.hash, ByteTokenizer.end_of_document

    @abc.abstractmethod
    def summary(self) -> str:
        """One line for the log."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a model whose vocabulary does not hold every token of the source.

        Raises:
            ConfigError: with both sizes.
        """
        if vocab_size < self.vocab_size:
            raise ConfigError(
                f"model.vocab_size={vocab_size} is smaller than the {self.vocab_size} tokens of "
                f"{self.flag}={self.source} (tokenizer {self.tokenizer}); use "
                f"--model.vocab_size={self.vocab_size} or more."
            )

    def facts(self, held_out: Any) -> dict[str, Any]:
        """What a run records; entropies where tokens are bytes, and counting them takes seconds.

        Args:
            held_out: the validation rows; None: there are none.
        """
        facts: dict[str, Any] = {
            "data": self.summary(),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "train_tokens": self.train_tokens,
            "eval_tokens": self.eval_tokens,
        }
        is_bytes = self.tokenizer == ByteTokenizer.name
        if is_bytes and held_out is not None and 2 < held_out.num_tokens <= _COUNTED_TOKENS:
            for order in (1, 2):
                entropy = held_out.conditional_entropy(order)
                facts[f"validation_entropy_order_{order}"] = entropy
        return facts
