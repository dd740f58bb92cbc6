"""The model that is asked: a run's, or one of Hugging Face, with what it reads and ends with."""

import dataclasses
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxtrain.config import from_dict
from jaxtrain.data.chat import ChatTemplate
from jaxtrain.data.examples import open_model_tokenizer
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.data.shards import shard_roots
from jaxtrain.data.text import tokenizer_of
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.tokenizing import Tokenizer, configured_token, open_tokenizer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf.configs import CONFIG, load_json
from jaxtrain.hf.exporting import load_merged, read_run
from jaxtrain.hf.keep import FOLDER, GENERATION, kept_tokenizer
from jaxtrain.hf.load import load_params, opening_model
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import Model, Params
from jaxtrain.models.transformer import transformer
from jaxtrain.models.transformer_checks import check_length
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.state import placed_state

__all__ = ["Subject", "open_directory", "open_run"]

_CONTEXTS = ("n_positions", "max_position_embeddings")
_DEFAULT_CONTEXT = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with its parameters on a mesh, and its tokenizer."""

    name: str
    model: Model
    params: Params
    mesh: Mesh
    tokenizer: Tokenizer
    max_length: int
    """Tokens that it reads at a time."""
    folder: Path | None
    """Directory of the tokenizer's files; None for bytes and tokenizers of shards."""
    template_place: str = ""
    """Where its chat template is; "": it has none."""
    step: int = 0
    """Of the checkpoint."""

    @property
    def prefix(self) -> int:
        """The token before a text that nothing stands before."""
        text = configured_token(self.folder, "bos_token") if self.folder else ""
        tokens = self.tokenizer.encode_marked(text)[0].tolist() if text else []
        if len(tokens) == 1:
            return tokens[0]
        return (*self.tokenizer.beginning, self.tokenizer.end_of_document)[0]

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        path = self.folder and self.folder / GENERATION
        said = load_json(path).get("eos_token_id") if path and path.is_file() else None
        others = said if isinstance(said, list) else [] if said is None else [said]
        return frozenset([self.tokenizer.end_of_document, *others])

    def template(self) -> ChatTemplate:
        """Its chat template.

        Raises:
            ConfigError: if it has none.
        """
        way_out = "leave out --apply_chat_template, or take a model that was trained on chats"
        if not self.template_place:
            raise ConfigError(f"{self.name} has no chat template; {way_out}")
        return ChatTemplate.read(self.template_place, way_out)


def open_run(
    workdir: str, *, step: int, ema: bool, mesh: str, precision: str, max_length: int
) -> Subject:
    """The model of a run.

    Args:
        workdir: of the run; only read.
        step: which checkpoint; -1: the newest.
        ema: whether to take the moving average.
        mesh: any; it need not be that of the run.
        precision: of the computation; "": that of the run.
        max_length: tokens that it reads at a time; 0: what it was trained on.

    Raises:
        CheckpointError: when the directory holds no run, or none with a transformer.
        ConfigError: for a mesh or a length that cannot work.
    """
    path = Path(workdir).expanduser()
    run = read_run(path)
    trained_length = run.max_length
    values = load_json(path / CONFIG)["config"]
    tokenizer, template_place, folder = _tokenizer_of(workdir, values.get("data", {}))
    content = path / FOLDER / CONFIG
    if content.is_file():
        trained_length = _context(load_json(content), trained_length)
    length = _checked_length(run.config, max_length or trained_length)
    params, found = load_merged(workdir, run, mesh=mesh, step=step, ema=ema)
    return Subject(
        name=str(workdir),
        model=transformer(run.config, precision=precision or values["precision"]),
        params=params,
        mesh=make_mesh(mesh),
        tokenizer=tokenizer,
        max_length=length,
        folder=folder,
        template_place=template_place,
        step=found,
    )


def open_directory(directory: Path, *, mesh: str, precision: str, max_length: int) -> Subject:
    """A model of Hugging Face.

    Args:
        directory: with config.json, safetensors files and tokenizer.json.
        mesh: over all devices.
        precision: of the computation; "": float32.
        max_length: tokens that it reads at a time; 0: as config.json says.

    Raises:
        CheckpointError: for files that are absent or damaged.
        ConfigError: for a model that is not supported, and a length that cannot work.
    """
    import optax

    tokenizer = open_tokenizer(str(directory))
    placed = make_mesh(mesh)
    with opening_model(directory) as source:
        context = _context(load_json(directory / CONFIG), _DEFAULT_CONTEXT)
        length = _checked_length(source.config, max_length or context)
        model = transformer(source.config, precision=precision or "float32")
        params = load_params(source, placed_state(model, optax.identity(), placed).params)
    return Subject(
        name=str(directory),
        model=model,
        params=params,
        mesh=placed,
        tokenizer=tokenizer,
        max_length=length,
        folder=directory,
        template_place=str(directory),
    )


def _tokenizer_of(workdir: str, data: dict[str, Any]) -> tuple[Tokenizer, str, Path | None]:
    """(tokenizer of a run, where its chat template is, directory of the tokenizer's files)."""
    path = Path(workdir).expanduser()
    kept = str(path / FOLDER) if (path / FOLDER).is_dir() else ""
    source = str(path / CONFIG)
    if "chat_template" in data:  # fine-tuned on examples
        config = from_dict(ExamplesConfig, data, source=source)
        tokenizer, place = open_model_tokenizer(config, kept)
        folder = Path(place).expanduser() if place else None
        if folder is not None and folder.is_file():
            folder = folder.parent
        return tokenizer, config.chat_template or place, folder
    tokenizer = kept_tokenizer(workdir)
    if "json_field" in data:  # trained on text
        config = from_dict(TextDataConfig, data, source=source)
        # An imported model that has been trained on shards since speaks their tokens.
        if tokenizer is None or config.mixture or shard_roots(config.source):
            return tokenizer_of(config), "", None
    if tokenizer is None:
        raise CheckpointError(
            f"workdir={workdir} holds no tokenizer: neither its data nor {FOLDER}/ has one. Import "
            "the model from a directory with a tokenizer.json."
        )
    return tokenizer, kept, Path(kept)


def _context(content: dict[str, Any], default: int) -> int:
    """Tokens that a model of Hugging Face reads at a time, as its config.json says."""
    found = (content.get(name) for name in _CONTEXTS)
    return next((size for size in found if isinstance(size, int)), default)


def _checked_length(config: TransformerConfig, length: int) -> int:
    check_length(config, length)
    return length
