"""What a language model trains on: one source, or a mixture of several by `--data.mixture`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.data.held_out import HeldOut
from jaxtrain.data.mix import MixedDataset
from jaxtrain.data.mixture_flag import parse_mixture
from jaxtrain.data.pack import PackedDataset
from jaxtrain.data.shards import ShardInfo
from jaxtrain.data.text import TextInfo, text_datasets
from jaxtrain.data.text_config import TextDataConfig, refuse_unread_options
from jaxtrain.data.token_info import TokenInfo
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import DataError, JaxtrainError

LmDataset = TextDataset | PackedDataset | MixedDataset | HeldOut


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureInfo(TokenInfo):
    """What was found in the sources of a mixture."""

    parts: Mapping[str, TokenInfo]
    shares: str
    """In percent."""

    @property
    def flag(self) -> str:
        return "data.mixture"

    def summary(self) -> str:
        return (
            f"mixture of {self.shares}; {self.train_tokens:,} training and {self.eval_tokens:,}"
            f" validation tokens; tokenizer {self.tokenizer}"
        )

    def facts(self, held_out: Any) -> dict[str, Any]:
        """Those of the mixture, and under `NAME (SOURCE)` what differs between its sources."""
        facts = super().facts(None)
        parts = held_out.parts if held_out is not None else {}
        for name, part in self.parts.items():
            own = part.facts(parts.get(name))
            facts |= {f"{key} ({name})": own[key] for key in own if key not in _COMMON}
        return facts


_COMMON = ("vocab_size", "tokenizer", "tokenizer_hash")


def lm_datasets(
    config: TextDataConfig,
) -> tuple[LmDataset, LmDataset | None, TextInfo | ShardInfo | MixtureInfo]:
    """Returns (training rows, validation rows or None, what was found) of a source or a mixture.

    Each source of a mixture is cut into rows, packed and held out as it would be alone, and goes
    through epochs of its own.

    Raises:
        DataError: for a source that cannot be used, and for sources of different tokenizers.
        ConfigError: for options that nothing would read.
    """
    sources = parse_mixture(config.mixture)
    if not sources:
        return text_datasets(config)
    refuse_unread_options(config, [source for _, source in sources.values()])
    options = {"mixture": "", "json_field": config.json_field, "on_bad_bytes": config.on_bad_bytes}
    train, held_out, infos = {}, {}, {}
    for name, (_, source) in sources.items():
        try:
            train[name], rows, infos[name] = text_datasets(
                config.replace(source=source, **options), is_alone=False
            )
        except JaxtrainError as error:
            raise type(error)(f"{error} (source {name!r} of data.mixture)") from error
        if rows is not None:
            held_out[name] = rows
    _require_one_tokenizer(infos)
    weights = {name: weight for name, (weight, _) in sources.items()}
    mixed = MixedDataset(train, weights, name="training mixture")
    info = MixtureInfo(
        source=config.mixture,
        train_tokens=sum(info.train_tokens for info in infos.values()),
        eval_tokens=sum(info.eval_tokens for info in infos.values()),
        vocab_size=max(info.vocab_size for info in infos.values()),
        tokenizer=next(iter(infos.values())).tokenizer,
        parts=infos,
        shares=mixed.mixture.summary(),
    )
    together = HeldOut(held_out, weights, name="validation mixture") if held_out else None
    return mixed, together, info


def _require_one_tokenizer(infos: Mapping[str, TokenInfo]) -> None:
    (first, expected), *others = infos.items()
    for name, info in others:
        if info.tokenizer_id != expected.tokenizer_id:
            raise DataError(
                f"sources {first!r} and {name!r} of data.mixture are not of one tokenizer: they"
                f" have {_describe(expected)} and {_describe(info)}; give both to jaxtrain prepare"
                f" with the same --tokenizer"
            )


def _describe(info: TokenInfo) -> str:
    hash_, end = info.tokenizer_id
    return (
        f"{info.tokenizer} ({info.vocab_size} tokens, hash {hash_[:8]}, documents end with {end})"
    )
