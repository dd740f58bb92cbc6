"""What a run keeps of the model it began with, so that an export is like the original.

    WORKDIR/hf/
      config.json, generation_config.json, tokenizer files     copies
      layout.json                                              names and dtypes of the tensors

Nothing here needs jax or the weights.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxtrain.data.tokenizing import Tokenizer, open_tokenizer
from jaxtrain.hf.configs import CONFIG, is_model_directory, load_json
from jaxtrain.output_files import replace_file, writing

FOLDER = "hf"
LAYOUT = "layout.json"
GENERATION = "generation_config.json"
COPIED = (
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class Kept(NamedTuple):
    """What a run knows of the model it began with."""

    folder: Path
    source: str
    """Directory of the model."""
    prefix: str
    """Of names in the body."""
    dtypes: Mapping[str, str]
    """Of every tensor, by name, as safetensors calls them."""


def keep(directory: Path, workdir: Path, *, prefix: str, dtypes: Mapping[str, str]) -> None:
    """Copies what an export will need from the directory of a model; what is there is replaced."""
    folder = workdir / FOLDER
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            if (directory / name).is_file():
                replace_file(folder / name, (directory / name).read_bytes())
            else:
                (folder / name).unlink(missing_ok=True)
    layout = {"source": str(directory), "prefix": prefix, "dtypes": dict(dtypes)}
    replace_file(folder / LAYOUT, json.dumps(layout, indent=1).encode() + b"\n")


def kept(workdir: Path) -> Kept | None:
    """What a run keeps; None if it did not begin with a model of Hugging Face."""
    folder = workdir / FOLDER
    if not (folder / LAYOUT).is_file():
        return None
    layout = load_json(folder / LAYOUT)
    return Kept(folder, layout["source"], layout["prefix"], layout["dtypes"])


def kept_tokenizer(workdir: str) -> Tokenizer | None:
    """The tokenizer of the model that a run began with; None if it keeps none."""
    folder = Path(workdir).expanduser() / FOLDER
    return open_tokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else None


def kept_stop_tokens(workdir: Path) -> tuple[int, ...]:
    """The tokens at which generation ends, by generation_config.json, else by config.json."""
    for name in (GENERATION, CONFIG):
        path = workdir / FOLDER / name
        ends = load_json(path).get("eos_token_id") if path.is_file() else None
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()


def kept_length(workdir: Path) -> int | None:
    """How many tokens the model that a run began with takes at a time, by its config.json."""
    path = workdir / FOLDER / CONFIG
    content = load_json(path) if path.is_file() else {}
    return content.get("max_position_embeddings", content.get("n_positions"))


def pass_on(old: Path, workdir: str) -> None:
    """Gives a new run what the run that it begins from keeps."""
    if not workdir or kept(old) is None or Path(workdir).resolve() == old.resolve():
        return
    target = Path(workdir).expanduser() / FOLDER
    with writing(target):
        shutil.copytree(old / FOLDER, target, dirs_exist_ok=True)


def tokenizer_folder(restore_from: str, workdir: str) -> str:
    """Where the tokenizer of the model lies that a run begins with; "" if nowhere.

    Args:
        restore_from: a model of Hugging Face, or a run that keeps one.
        workdir: of the run, which keeps it once it has begun.
    """
    places = [Path(place).expanduser() for place in (restore_from, workdir) if place]
    if restore_from and is_model_directory(places[0]):
        return str(places[0])
    folders = [place / FOLDER for place in places]
    return next((str(folder) for folder in folders if folder.is_dir()), "")
