"""`jaxtrain import-hf DIR --workdir=WORKDIR`: a checkpoint of a model of Hugging Face.

    jaxtrain import-hf models/SmolLM2-135M --workdir=runs/smol
    python experiments/train_lm.py --model=models/SmolLM2-135M --workdir=runs/tuned \\
        --checkpoint.restore_from=runs/smol

DIR holds config.json and model.safetensors, or several files with an index. All of it is checked
before a weight is read; a run that is killed leaves no checkpoint, and the same command again
makes it. Architectures: GPT-2, Llama, Mistral, Qwen 2, Qwen 3, OLMo 2, Gemma 2, Gemma 3 (text).
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import checkpoint_files, flags
from jaxtrain.config import Config, RunConfig, dump, field, override, to_dict, versions
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf import keep
from jaxtrain.hf.configs import differences
from jaxtrain.hf.load import Source, describe_load, load_params, opening_model
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.progress import setup_logging

__all__ = ["ImportConfig", "begin_from", "import_model", "one_directory", "run"]

_log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig(Config):
    """What --flags set."""

    workdir: str = field("", help="directory of the run to make; train, sample, export from it")
    mesh: str = override(RunConfig, "mesh", "fsdp:-1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportedRun(RunConfig):
    """What the workdir of an import says of itself."""

    model: TransformerConfig = field(default_factory=TransformerConfig)


def run(words: Sequence[str]) -> None:
    """The command; see the module's docstring."""
    config, directory = one_directory("import-hf", words, ImportConfig, __doc__)
    setup_logging()
    print(import_model(directory, config))


def one_directory[C: Config](
    command: str, words: Sequence[str], config_class: type[C], description: str | None
) -> tuple[C, Path]:
    """Flags, and the only argument of a command: DIR."""
    config, paths = flags.parse_with_paths(command, words, config_class, description)
    if len(paths) != 1:
        raise ConfigError(
            f"jaxtrain {command} takes one DIR, and flags as --name=value; got "
            f"{' '.join(words) or 'nothing'}"
        )
    return config, checkpoint_files.absolute(paths[0], "DIR")


def import_model(directory: Path, config: ImportConfig) -> str:
    """Makes the checkpoint; returns what was done, in words.

    Raises:
        ConfigError: for flags, or a model, that cannot work.
        CheckpointError: for files that are absent or damaged, and a workdir that is in use.
    """
    from jaxtrain import run_lock
    from jaxtrain.checkpoint import Checkpointer
    from jaxtrain.data.order import ORDER_VERSION
    from jaxtrain.mesh import make_mesh
    from jaxtrain.output_files import replace_file
    from jaxtrain.restore_from import IMPORTED

    if not config.workdir:
        raise ConfigError("jaxtrain import-hf needs --workdir, the directory of the run to make.")
    mesh = make_mesh(config.mesh)
    with opening_model(directory) as source, run_lock.hold(config.workdir):
        workdir = checkpoint_files.absolute(config.workdir, "workdir")
        if (
            checkpoint_files.scan(workdir / "checkpoints").whole
            or (workdir / "metrics.jsonl").exists()
        ):
            raise CheckpointError(f"workdir={workdir} holds a run; give another --workdir.")
        _log.info("%s", describe_load(source))
        state = _params_only(source, mesh)
        imported = ImportedRun(workdir=str(workdir), model=source.config)
        keep.keep(directory, workdir, prefix=source.prefix, dtypes=source.dtypes())
        replace_file(workdir / "config.json", dump(imported, versions=versions()).encode())
        record = {
            "samples_seen": 0,
            "batch_sizes": [],
            "order_version": ORDER_VERSION,
            "origin": {IMPORTED: str(directory)},
            "config": to_dict(imported),
            "versions": versions(),
        }
        with contextlib.closing(Checkpointer(workdir / "checkpoints")) as checkpointer:
            checkpointer.save(0, state, record)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return (
        f"{workdir}: {source.architecture.model_type}, {len(source.weights.tensors)} tensors, "
        f"{num_params:,} parameters with padding"
    )


def begin_from(
    directory: Path, config: RunConfig, abstract: Any, init: Callable[[], Any] | None
) -> Any:
    """The state of a run that begins with a model of Hugging Face, at step 0.

    Args:
        directory: of the model.
        config: of the run; `config.model` must be the model's.
        abstract: the train state as `jax.ShapeDtypeStruct` with shardings.
        init: makes the state with its initial values.

    Raises:
        ConfigError: when the run's model is another one, with the flags that make it the same.
        CheckpointError: for files that are absent or damaged.
    """
    from jaxtrain.agreement import from_primary, together

    # LoRA's A and B are not in a file: they begin at their initial values.
    from jaxtrain.models.functional import deep_merge
    from jaxtrain.models.lora import without_adapters, without_base
    from jaxtrain.state import start_average

    ours = getattr(config, "model", None)
    if not isinstance(ours, TransformerConfig) or init is None:
        raise ConfigError(
            f"checkpoint.restore_from={directory} is a model of Hugging Face, which only a run "
            "with a transformer in its field `model` begins with."
        )
    options = config.checkpoint
    if options.partial_restore or options.restore_step >= 0:
        raise ConfigError(
            f"checkpoint.partial_restore and checkpoint.restore_step are for checkpoints of a run; "
            f"{directory} is a model of Hugging Face. Make a run of it with jaxtrain import-hf."
        )
    with together():
        with opening_model(directory) as source:
            if flags_that_differ := differences(ours, source.config):
                raise ConfigError(
                    f"checkpoint.restore_from={directory} holds another model than this run's; "
                    f"give --model={directory}, or {' '.join(flags_that_differ)}"
                )
            _log.info("%s", describe_load(source))
            state = init()
            adapters = without_base(state.params)
            state = state.replace(params=None, ema_params=None)
            params = load_params(source, without_adapters(abstract.params))
            params = deep_merge(params, adapters)
            ema = start_average(params, abstract.ema_params)
    if config.workdir:
        workdir = Path(config.workdir).expanduser()
        from_primary(
            lambda: keep.keep(directory, workdir, prefix=source.prefix, dtypes=source.dtypes())
        )
    return state.replace(params=params, ema_params=ema)


def _params_only(source: Source, mesh: Any) -> Any:
    """A train state of the model without an optimizer."""
    import optax

    from jaxtrain.models.transformer import transformer
    from jaxtrain.state import placed_state

    abstract = placed_state(transformer(source.config), optax.identity(), mesh)
    others = abstract.replace(params=None)
    zeros = jax.tree.map(
        lambda leaf: jax.device_put(
            jax.random.key(0)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype),
            leaf.sharding,
        ),
        others,
    )
    return zeros.replace(params=load_params(source, abstract.params))
