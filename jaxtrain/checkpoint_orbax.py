"""Between us and orbax: the only module that knows it."""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import checkpoint_files as files
from jaxtrain.checkpoint_tree import is_key

# A replicated array is divided among its replicas for writing only if each gets this much: every
# division costs a compilation and a copy.
_MIN_REPLICA_SLICE_BYTES = 64 * 2**20


def preload() -> None:
    """Imports orbax, which takes a second or two, now and not inside of the training loop."""
    _orbax()


def open_writer(on_complete: Callable[[], None]) -> Any:
    """What writes steps, without a `CheckpointManager`.

    Old steps are ours to delete (see `checkpoint`). And where one process cannot write its part,
    its manager says so after it has waited for the others, which wait for it, for 20 minutes.

    Args:
        on_complete: called when all files of a step are complete, before the rename that commits
            them.
    """
    ocp = _orbax()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeSave, _handler())
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(handler_registry=registry),
        async_options=ocp.AsyncOptions(
            post_finalization_callback=on_complete,
            # In the background a failure leaves threads that wait for minutes, and the process
            # cannot end meanwhile.
            create_directories_asynchronously=False,
        ),
    )


def begin_save(
    writer: Any, path: Path, arrays: Mapping[str, Any], record: Mapping[str, Any]
) -> None:
    """Begins to write a step: arrays by path, and a JSON record; returns when they are safe."""
    ocp = _orbax()
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), host=ocp.args.JsonSave(record))
    writer.save(path, args=args)


def read(
    directory: Path, wanted: Mapping[str, Any], arrays: Mapping[str, files.Array]
) -> dict[str, Any]:
    """Reads arrays by path into the shardings of `wanted`."""
    ocp = _orbax()
    targets, restore_args, values = {}, {}, {}
    for name, leaf in wanted.items():
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_key(leaf):
            struct = jax.eval_shape(jax.random.key_data, struct)
        if isinstance(leaf, np.ndarray):
            restore_args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
            if not leaf.size:
                values[name] = np.zeros(leaf.shape, leaf.dtype)
        else:
            sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            restore_args[name] = ocp.ArrayRestoreArgs(
                sharding=sharding, global_shape=struct.shape, dtype=struct.dtype
            )
            if not np.prod(struct.shape):
                values[name] = jax.device_put(np.zeros(struct.shape, struct.dtype), sharding)
        targets[name] = struct
    targets = {name: struct for name, struct in targets.items() if name not in values}
    args = ocp.args.PyTreeRestore(
        targets,
        restore_args={name: restore_args[name] for name in targets},
        partial_restore=True,
    )
    try:
        # Each process for itself: one that fails must not leave the others waiting.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={jax.process_index()}
        )
        with contextlib.closing(
            ocp.Checkpointer(_handler(), multiprocessing_options=alone)
        ) as reader:
            values |= reader.restore(directory / "state", args=args) if targets else {}
    except (ValueError, OSError, KeyError) as error:
        raise files.BrokenCheckpointError(
            f"checkpoint step {directory.name} in {directory.parent} cannot be read: "
            f"{files.cause(error)}."
        ) from error
    for name, leaf in wanted.items():
        if is_key(leaf):
            values[name] = jax.random.wrap_key_data(values[name], impl=arrays[name].key_impl)
    return values


def _handler() -> Any:
    """How arrays are written: uncompressed, since trained weights hardly shrink.

    Compression took 2 to 4 times as long and 2 GB of memory for a state of 1.5 GB; without it a
    save took 7 MB.
    """
    ocp = _orbax()
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_MIN_REPLICA_SLICE_BYTES,
        # Nobody needs the mesh that wrote a checkpoint.
        enable_write_sharding_file=False,
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


@functools.cache
def _orbax() -> Any:
    """Imports orbax, and keeps the stack dumps of a failed save, up to one an array, from the user.

    The cause of the failure is in our own error.
    """
    import orbax.checkpoint as ocp

    def is_wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        places = (f"{os.sep}orbax{os.sep}", f"{files.UNFINISHED}{os.sep}")
        return places[0] not in record.pathname and not any(place in message for place in places)

    logging.getLogger("absl").addFilter(is_wanted)
    # "Task exception was never retrieved", "Future exception was never retrieved"
    logging.getLogger("asyncio").addFilter(is_wanted)
    hook = sys.unraisablehook

    def show_unraisable(unraisable: Any) -> None:
        # TensorStore reports to an event loop that orbax closed at the first failure.
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = show_unraisable
    return ocp
