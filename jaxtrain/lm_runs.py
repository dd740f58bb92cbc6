"""A run of a language model as its directory describes it: model, parameters, text.

Whichever made it: train_lm.py, finetune_lm.py with or without LoRA, `jaxtrain import-hf`.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.config import RunConfig, from_dict
from jaxtrain.data.chat import ChatTemplate
from jaxtrain.data.examples import open_model_tokenizer
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.data.shards import shard_roots
from jaxtrain.data.text import tokenizer_of
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.tokenizing import Tokenizer, open_tokenizer
from jaxtrain.errors import CheckpointError, ConfigError, DataError
from jaxtrain.hf.keep import kept_length, kept_stop_tokens, kept_tokenizer, tokenizer_folder
from jaxtrain.models.functional import Model
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer import transformer
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.runs import load_params, read_content

__all__ = ["LmRun", "RunText", "read_lm_run"]

_log = logging.getLogger("jaxtrain")


class RunText(NamedTuple):
    """How a run's model reads and writes text."""

    tokenizer: Tokenizer
    beginning: tuple[int, ...]
    """Tokens before a text."""
    stop_tokens: tuple[int, ...]
    """Tokens that end an answer."""
    template: str
    """Where the chat template is, for `ChatTemplate.read`; empty: there is none."""

    def chat_template(self, path: str = "") -> ChatTemplate:
        """The run's, or the one in a file.

        Raises:
            ConfigError: if there is none.
        """
        place = path or self.template
        if not place:
            raise ConfigError("the run keeps no chat template; give --chat_template=FILE.")
        return ChatTemplate.read(place, "give --chat_template=FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmRun:
    """What a run's config.json says."""

    workdir: Path
    model: TransformerConfig
    lora: LoraConfig
    """Of rank 0 where nothing was adapted."""
    precision: str
    data: TextDataConfig | ExamplesConfig | None
    """None: trained on nothing here, or on data of another kind."""

    @property
    def sequence_length(self) -> int:
        """How many tokens the model has seen at a time, as far as the run knows."""
        if self.data is not None:
            return self.data.sequence_length
        return kept_length(self.workdir) or self.model.max_length

    def warn_of_length(self, prompt_tokens: int, num_tokens: int) -> None:
        """Says so if an answer would go on where the model has never been."""
        length = prompt_tokens + num_tokens
        if length > self.sequence_length:
            _log.warning(
                "prompt and num_tokens=%d make %d tokens; the model was trained on %d at a time and"
                " has not learned to go on after them",
                num_tokens, length, self.sequence_length,
            )  # fmt: skip

    def load(self, *, step: int = -1) -> tuple[Model, Any]:
        """(model, its parameters on the devices at hand); LoRA is not merged."""
        model = transformer(self.model, precision=self.precision, lora=self.lora)
        return model, load_params(model, self.workdir, step=step)

    def open_text(self) -> RunText:
        """The tokenizer, and what goes with it.

        Raises:
            DataError: if it is no longer where the run had it.
        """
        folder = tokenizer_folder("", str(self.workdir))
        template = folder
        if isinstance(self.data, ExamplesConfig):
            tokenizer, template = open_model_tokenizer(self.data, folder)
            template = self.data.chat_template or template
            is_kept = not self.data.tokenizer
        elif self.data is None:
            if not folder:
                raise DataError(
                    f"workdir={self.workdir} keeps no tokenizer; sample from a run of train_lm.py, "
                    "finetune_lm.py or jaxtrain import-hf."
                )
            tokenizer, is_kept = open_tokenizer(folder), True
        else:
            # Of a model that was imported, unless it has been trained on shards since.
            kept = None if shard_roots(self.data.source) else kept_tokenizer(str(self.workdir))
            tokenizer, is_kept = kept or tokenizer_of(self.data), kept is not None
        ends = (tokenizer.end_of_document, *(kept_stop_tokens(self.workdir) if is_kept else ()))
        beginning = tokenizer.beginning if is_kept else ()
        return RunText(tokenizer, beginning, tuple(dict.fromkeys(ends)), template)


def read_lm_run(workdir: str | Path) -> LmRun:
    """What the directory of a run says of its model.

    Raises:
        CheckpointError: if it holds no run, or none of a transformer.
    """
    path, values = read_content(workdir)
    if "num_layers" not in (values.get("model") or {}):
        raise CheckpointError(f"workdir={workdir} is no run of a transformer ({path}).")
    return LmRun(
        workdir=path.parent,
        model=from_dict(TransformerConfig, values["model"], source=str(path)),
        lora=from_dict(LoraConfig, values.get("lora", {}), source=str(path)),
        precision=values.get("precision", RunConfig.precision),
        data=_data_of(values.get("data", {}), str(path)),
    )


def _data_of(values: dict[str, Any], source: str) -> TextDataConfig | ExamplesConfig | None:
    kinds = {"tokenizer": ExamplesConfig, "packing": TextDataConfig}
    kind = next((kind for name, kind in kinds.items() if name in values), None)
    return None if kind is None else from_dict(kind, values, source=source)
