"""`jaxtrain export-hf DIR --workdir=WORKDIR`: the model of a run in the format of Hugging Face.

    jaxtrain export-hf models/mine --workdir=runs/tuned
    jaxtrain export-hf models/mine --workdir=runs/tuned --ema
    jaxtrain export-hf models/adapter --workdir=runs/tuned --adapter

DIR is new. It gets config.json, generation_config.json, safetensors in files of 5 GB with an index,
and the tokenizer's files if the run began with an imported model: names, dtypes and layout are then
those of the original. What LoRA trained is merged into the weights; with --adapter it alone is
written, as PEFT reads it. A run that is killed leaves no DIR.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain import tree
from jaxtrain.config import Config, OptimizerConfig, RunConfig, field, from_dict, override
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf import adapters, tables
from jaxtrain.hf.configs import CONFIG, differences, load_json, read_config, write_config
from jaxtrain.hf.files import SHARD_BYTES, Wanted, write_file, write_text, write_weights
from jaxtrain.hf.importing import one_directory
from jaxtrain.hf.keep import COPIED, GENERATION, Kept, kept
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.output_files import scratch_path, sync_directory, writing
from jaxtrain.progress import setup_logging
from jaxtrain.units import nbytes

_log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """What --flags set."""

    workdir: str = field("", help="directory of the run")
    step: int = field(-1, minimum=-1, help="checkpoint to take; -1: the newest")
    ema: bool = field(False, help="the moving average of the parameters instead of the last ones")
    adapter: bool = field(False, help="what LoRA trained alone, as PEFT reads it")
    shard_bytes: int = field(
        SHARD_BYTES, unit="bytes", minimum=1, used_when={"adapter": (False,)}, help="largest file"
    )
    mesh: str = override(RunConfig, "mesh", "fsdp:-1")


def run(words: Sequence[str]) -> None:
    """The command; see the module's docstring."""
    config, directory = one_directory("export-hf", words, ExportConfig, __doc__)
    setup_logging()
    print(export_model(directory, config))


def export_model(directory: Path, config: ExportConfig) -> str:
    """Writes the model of a run, or its adapter; returns what was done, in words.

    Raises:
        ConfigError: for a DIR that is there, a model that no architecture computes, and an adapter
            of a run without LoRA.
        CheckpointError: when the workdir holds no run, or none with a transformer.
    """
    if not config.workdir:
        raise ConfigError("jaxtrain export-hf needs --workdir, the directory of the run.")
    if os.path.lexists(directory):
        raise ConfigError(f"DIR={directory} is there already; name a new directory.")
    workdir = Path(config.workdir).expanduser()
    run = read_run(workdir)
    if config.adapter and not run.lora.rank:
        raise ConfigError(
            f"adapter=true is for runs with LoRA, and workdir={workdir} has lora.rank=0; leave out "
            "--adapter to write its model."
        )
    content, origin = describe(run.config, workdir, run.max_length)
    model_type = content["model_type"]
    where = {"mesh": config.mesh, "step": config.step, "ema": config.ema}
    if config.adapter:
        params, _ = _load(config.workdir, run, **where, adapter=True)
        tensors = adapters.adapter_tensors(model_type, params)
        found = adapters.adapters(model_type, params)
        base = origin.source if origin else ""
        content = adapters.adapter_config(model_type, found, run.lora, base=base)
    else:
        params, _ = load_merged(config.workdir, run, **where)
        tensors = tensors_of(params, run.config, model_type, origin)
    with _whole(directory) as scratch:
        if config.adapter:
            _write_json(scratch / adapters.ADAPTER_CONFIG, content)
            write_file(scratch / adapters.ADAPTER, tensors)
        else:
            _write_description(scratch, content, origin)
            write_weights(scratch, tensors, shard_bytes=config.shard_bytes)
    dtypes = sorted({tensor.dtype for tensor in tensors})
    size = nbytes(sum(tensor.num_bytes for tensor in tensors))
    kind = f"adapter of {model_type}" if config.adapter else model_type
    return f"{directory}: {kind}, {len(tensors)} tensors in {'/'.join(dtypes)}, {size}"


class TrainedModel(NamedTuple):
    """What a run says of its model."""

    config: TransformerConfig
    lora: LoraConfig
    """Of rank 0 where nothing was adapted."""
    freeze: str
    """Pattern of the parameters that stayed as they were."""
    max_length: int
    """Tokens that it was trained on at a time."""


def read_run(workdir: Path) -> TrainedModel:
    """The model of a run, by its config.json."""
    path = workdir / CONFIG
    if not path.is_file():
        raise CheckpointError(f"workdir={workdir} holds no run: there is no {CONFIG}.")
    values = load_json(path).get("config", {})
    if not isinstance(values.get("model"), dict) or "num_layers" not in values["model"]:
        raise CheckpointError(f"workdir={workdir} is no run of a transformer ({path}).")
    config = from_dict(TransformerConfig, values["model"], source=str(path))
    return TrainedModel(
        config,
        from_dict(LoraConfig, values.get("lora", {}), source=str(path)),
        values.get("optimizer", {}).get("freeze", ""),
        values.get("data", {}).get("sequence_length", config.max_length),
    )


def describe(
    config: TransformerConfig, workdir: Path, max_length: int
) -> tuple[dict[str, Any], Kept | None]:
    """(config.json of the export, what the run keeps of the model it began with)."""
    origin = kept(workdir)
    if origin is None:
        return write_config(config, max_length=max_length), None
    content = load_json(origin.folder / CONFIG)
    _, theirs = read_config(content, str(origin.folder / CONFIG))
    if changed := differences(theirs, config):
        raise CheckpointError(
            f"{origin.folder / CONFIG} is of another model than that of the run, which has "
            f"{' '.join(changed)}."
        )
    return content, origin


def tensors_of(
    params: Any, config: TransformerConfig, model_type: str, origin: Kept | None
) -> list[Wanted]:
    """The tensors of a model; each is made when it is written, from one layer at a time.

    Args:
        params: on any mesh whose devices this process has.
        config: of the model.
        model_type: as in config.json.
        origin: what the model was imported from; None: all in float32.
    """
    leaves = dict(tree.named_leaves(params))
    prefix = tables.prefix_of(model_type) if origin is None else origin.prefix
    placed = tables.placed(
        model_type, tables.shapes_of(params), vocab_size=config.vocab_size, prefix=prefix
    )
    dtypes: Mapping[str, str] = {} if origin is None else origin.dtypes
    wanted = []
    for piece in placed:
        make = functools.partial(_tensor, leaves, config.vocab_size, piece)
        wanted.append(Wanted(piece.name, dtypes.get(piece.name, "F32"), piece.shape, make))
    head = tables.HEAD.name
    if config.tie_embeddings and head in dtypes:  # the original had a copy
        embedding = next(tensor for tensor in wanted if tensor.name.endswith(_EMBEDDINGS))
        wanted.append(embedding._replace(name=head, dtype=dtypes[head]))
    return wanted


_EMBEDDINGS = ("wte.weight", "embed_tokens.weight")


@jax.jit
def _layer_of(stacked: jax.Array, layer: int) -> jax.Array:
    """One layer; the number is an argument, or each would be compiled by itself."""
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def _tensor(leaves: Mapping[str, Any], vocab_size: int, piece: tables.Placed) -> np.ndarray:
    parts = []
    for path in piece.rule.paths:
        leaf = leaves[path] if piece.layer is None else _layer_of(leaves[path], piece.layer)
        parts.append(piece.rule.view(np.ascontiguousarray(np.asarray(leaf)), vocab_size))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, 0 if piece.rule.form.is_transposed else -1)


@contextlib.contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """Where to write a directory that gets its name when all of it is on the disk."""
    scratch = scratch_path(directory)
    with writing(directory):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    try:
        yield scratch
        with writing(directory):
            sync_directory(scratch)
            os.rename(scratch, directory)
            sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_description(scratch: Path, content: Mapping[str, Any], origin: Kept | None) -> None:
    """All files but the weights."""
    if origin is None:
        _write_json(scratch / CONFIG, content)
        _write_json(scratch / GENERATION, {"_from_model_config": True})
        return
    for name in COPIED:
        if (origin.folder / name).is_file():
            text = (origin.folder / name).read_bytes()
            with writing(scratch / name):
                (scratch / name).write_bytes(text)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def load_merged(
    workdir: str, run: TrainedModel, *, mesh: str, step: int, ema: bool
) -> tuple[Any, int]:
    """(parameters of a run, the step of the checkpoint that they are of).

    What LoRA trained is merged into the kernels.

    Args:
        workdir: of the run; only read.
        run: from `read_run`.
        mesh: any; it need not be that of the run.
        step: which checkpoint; -1: the newest.
        ema: whether to take the moving average.
    """
    from jaxtrain.models.lora import merge

    params, found = _load(workdir, run, mesh=mesh, step=step, ema=ema, adapter=False)
    return merge(params, run.lora), found


def _load(
    workdir: str, run: TrainedModel, *, mesh: str, step: int, ema: bool, adapter: bool
) -> tuple[Any, int]:
    """The same before merging; with `adapter` what LoRA trained alone."""
    import optax

    from jaxtrain import resume
    from jaxtrain.mesh import make_mesh
    from jaxtrain.models.lora import without_base
    from jaxtrain.models.transformer import transformer
    from jaxtrain.optim import frozen_mask
    from jaxtrain.state import abstract_state, placed_state

    model = transformer(run.config, lora=run.lora)
    params = abstract_state(model, optax.identity()).params
    frozen = frozen_mask(OptimizerConfig(freeze=run.freeze), params, model.frozen)
    abstract = placed_state(model, optax.identity(), make_mesh(mesh), ema=ema, frozen=frozen)
    if ema:  # what does not train has no average
        abstract = abstract.replace(params=tree.partition(abstract.params, frozen)[0])
    if adapter:
        abstract = abstract.replace(params=without_base(abstract.params))
        if ema:
            abstract = abstract.replace(ema_params=without_base(abstract.ema_params))
    state, _, found = resume.load(workdir, abstract, step=step)
    return tree.merge(state.ema_params, state.params) if ema else state.params, found
