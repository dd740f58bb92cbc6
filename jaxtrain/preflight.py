"""What `fit` refuses before it compiles, although only a later part of the run would notice."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.agreement import require_same
from jaxtrain.config import RunConfig, leaves
from jaxtrain.data.load import abstract_batch
from jaxtrain.data.sources import Dataset, parts_of
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.evaluate import reached, require_masked
from jaxtrain.models.functional import Model
from jaxtrain.sharding import ShardingRules
from jaxtrain.state import TrainState
from jaxtrain.step import make_eval_step

_WRITER_METHODS = ("write", "flush", "close")
# Flags that may differ between the processes of a run.
_OF_A_PROCESS = {
    *("launcher", "coordinator", "num_processes", "process_id", "process_per"),
    *("init_timeout_seconds", "workdir", "checkpoint.restore_from", "compilation_cache_dir"),
}


def check_writers(writers: Any) -> None:
    """Refuses what cannot take records, before the first one.

    Raises:
        ConfigError: naming what was given and what it lacks.
    """
    if not isinstance(writers, Sequence) or isinstance(writers, str):
        raise ConfigError(f"writers is a list of writers; got {_name(writers)}: writers=[...].")
    for writer in writers:
        lacking = [name for name in _WRITER_METHODS if not callable(getattr(writer, name, None))]
        if isinstance(writer, type) and not lacking:
            raise ConfigError(f"writers takes objects, got the class {_name(writer)}: call it.")
        if lacking:
            raise ConfigError(
                f"a writer has the methods {', '.join(_WRITER_METHODS)}; {_name(writer)} lacks "
                f"{', '.join(lacking)}."
            )


def require_same_run(
    config: RunConfig, data_fingerprint: str, batch: Mapping[str, jax.Array]
) -> None:
    """Checks that all processes are about to train the same, before the first compilation.

    Args:
        config: of the run; what says which process this is may differ, and how files are reached.
        data_fingerprint: of the training data.
        batch: the first one.
    """
    facts = {leaf.path: leaf.value for leaf in leaves(config) if leaf.path not in _OF_A_PROCESS}
    facts["the training data's fingerprint"] = data_fingerprint
    for name, array in batch.items():
        facts[f"batch[{name!r}]"] = f"{array.dtype}{list(array.shape)}"
    require_same(facts)


def check_segments(
    model: Model, state: TrainState, batch: Mapping[str, jax.Array], accumulate_steps: int
) -> None:
    """Refuses packed rows for a model that does not look at which documents they hold.

    The model is traced, not compiled, and only for rows that have "segment_ids".

    Args:
        model: from `as_model`.
        state: abstract.
        batch: the first one.
        accumulate_steps: of the run.

    Raises:
        ConfigError: if nothing that the model returns depends on the segments.
    """
    if "segment_ids" not in batch:
        return
    first_dim = int(accumulate_steps > 1)
    rows = {
        name: jax.ShapeDtypeStruct(array.shape[first_dim:], array.dtype)
        for name, array in batch.items()
    }

    def outputs(params: Any, model_state: Any, rows: Any) -> Any:
        return model.apply(params, model_state, rows, key=jax.random.key(0), train=False)[0]

    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        (state.params, state.model_state),
    )
    jaxpr = jax.make_jaxpr(outputs)(*abstract, rows).jaxpr
    others = jax.tree.map(lambda _: False, abstract)
    is_segments = jax.tree.leaves((*others, {name: name == "segment_ids" for name in rows}))
    if not any(reached(jaxpr, is_segments)):
        raise ConfigError(
            "the rows are packed, and the model does not read batch['segment_ids']: its documents "
            "would see each other; let its attention compare the ids, or give rows without them "
            "(PackedDataset(..., cross_document_attention=True))."
        )


def check_evaluation(
    model: Model,
    loss_fn: Callable[..., Any],
    data: Dataset,
    *,
    train_batch: Mapping[str, Any],
    config: RunConfig,
    state: TrainState,
    mesh: Mesh,
    rules: ShardingRules,
) -> None:
    """Refuses what the first evaluation could not do; one row is read, nothing is compiled.

    Args:
        model: from `as_model`.
        loss_fn: (outputs, batch, params) -> Sums.
        data: to be evaluated.
        train_batch: arrays of a training batch, by name.
        config: of the run.
        state: abstract.
        mesh: where the batches go.
        rules: of the layout.

    Raises:
        DataError: for other arrays than those of the training data.
        ConfigError: for a loss that would count padding.
    """
    batch_size = config.global_batch_size // config.accumulate_steps
    batch = abstract_batch(data, mesh, rules=rules, global_batch_size=batch_size)
    if missing := [repr(name) for name in train_batch if name not in batch]:
        given = ", ".join(name for name in batch if name != "loss_mask")
        raise DataError(
            f"eval_data has no {', '.join(missing)}, only {given}; give it every array that "
            "train_data has."
        )
    other = [
        f"{name!r} is {batch[name].dtype}, not {array.dtype}"
        for name, array in train_batch.items()
        if name != "loss_mask" and batch[name].dtype != array.dtype
    ]
    if other:
        raise DataError(
            f"eval_data must have the dtypes of train_data: {', '.join(other)}; prepare both the "
            "same way."
        )
    if any(len(part) % batch_size for part in parts_of(data).values()):
        eval_step = make_eval_step(model, loss_fn, mesh, rules)
        require_masked(eval_step, state.params, state.model_state, batch)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__
