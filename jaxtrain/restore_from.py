"""Where a run begins that has no checkpoint of its own: another run's, a model's, or nothing."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import checkpoint_files as files
from jaxtrain.agreement import from_primary
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import RunConfig
from jaxtrain.errors import CheckpointError
from jaxtrain.hf.configs import is_model_directory
from jaxtrain.hf.keep import pass_on
from jaxtrain.start import Start, newest_record, restore_newest, start_at
from jaxtrain.state import start_average
from jaxtrain.tree import path_str

_logger = logging.getLogger("jaxtrain")

IMPORTED = "imported_from"
"""In the origin of a checkpoint: the directory of the model that it was imported from."""

_ALL_BUT_PARAMS = "^(opt_state|ema_params|step$|key$)|/lora_[ab]$"


def begin_elsewhere(config: RunConfig, abstract: Any, init: Callable[[], Any] | None) -> Start:
    """Begins from what `checkpoint.restore_from` names, or else from the initial values.

    Raises:
        CheckpointError: where nothing serves.
    """
    options = config.checkpoint
    if not options.restore_from:
        if options.restore_step >= 0:
            raise CheckpointError(
                f"checkpoint.restore_step={options.restore_step}, but there is no checkpoint in "
                f"{config.workdir or 'a run without workdir'}; give --checkpoint.restore_from, or "
                "the --workdir of a run that has some."
            )
        _logger.info("no checkpoint yet: starting from the initial values")
        return Start(batch_sizes=((0, config.global_batch_size),))
    path = files.absolute(options.restore_from, "checkpoint.restore_from")
    if from_primary(lambda: is_model_directory(path)):
        from jaxtrain.hf import importing  # brings the transformer, which not every run has

        state = importing.begin_from(path, config, abstract, init)
        origin = {"restore_from": absolute_source(options.restore_from)}
        return start_at(config, 0, state, {}, origin)
    directory, named_step = files.locate(options.restore_from, "checkpoint.restore_from")
    source = Checkpointer(directory, read_only=True)
    step = options.restore_step if options.restore_step >= 0 else named_step
    steps = from_primary(source.committed_steps) if step is None else [step]
    partial = options.partial_restore
    is_imported = from_primary(lambda: _is_imported(source, steps))
    if is_imported and not partial:
        partial = _ALL_BUT_PARAMS
    # A base of LoRA may be kept in fewer bits than the checkpoint has.
    found = from_primary(lambda: _dtypes(source, steps))
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _as_found(leaf, found.get(f"params/{path_str(path)}", "")),
        abstract.params,
    )
    step, state, host = restore_newest(
        source, steps, abstract.replace(params=wanted), partial=partial, initial=init
    )
    params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), state.params, abstract.params)
    state = state.replace(params=params)
    if is_imported and state.ema_params is not None:
        state = state.replace(ema_params=start_average(state.params, abstract.ema_params))
    from_primary(lambda: pass_on(directory.parent, config.workdir))
    begins_at = int(np.asarray(state.step))
    _logger.info("restored step %d from %s; the run begins at step %d", step, directory, begins_at)
    origin = {"restore_from": absolute_source(options.restore_from)}
    return start_at(config, begins_at, state, host if begins_at == step else {}, origin)


def _dtypes(source: Checkpointer, steps: Sequence[int]) -> dict[str, str]:
    """Path -> dtype of the arrays of the newest step that can be read."""
    for step in sorted(steps, reverse=True):
        try:
            return {name: array.dtype for name, array in source.manifest(step).arrays.items()}
        except files.BrokenCheckpointError:
            continue
    return {}


def _as_found(leaf: jax.ShapeDtypeStruct, dtype: str) -> jax.ShapeDtypeStruct:
    """A parameter as it is read: in float32 if the checkpoint has more bits than the run keeps."""
    is_longer = dtype == "float32" and leaf.dtype == jnp.bfloat16
    return leaf.update(dtype=jnp.float32) if is_longer else leaf


def _is_imported(source: Checkpointer, steps: Sequence[int]) -> bool:
    """Whether a checkpoint is what `jaxtrain import-hf` wrote: parameters and nothing else."""
    _, host = newest_record(source, steps) if steps else (0, {})
    return IMPORTED in host.get("origin", {})


def absolute_source(path: str) -> str:
    """A `checkpoint.restore_from` as the origin of a run records it."""
    return str(files.absolute(path, "checkpoint.restore_from"))
