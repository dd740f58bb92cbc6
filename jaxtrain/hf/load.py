"""Reading a model of Hugging Face: every check before the first weight, then tensor by tensor.

    with opening_model(directory) as source:        # reads headers, checks everything
        params = load_params(source, abstract)      # straight into the layout of a mesh

Parameters of layers are stacked: each is filled layer by layer on the devices, so that the host
holds one tensor of one layer at a time. Every process reads what it needs from the files itself.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.errors import CheckpointError
from jaxtrain.hf import tables
from jaxtrain.hf.architectures import Architecture
from jaxtrain.hf.configs import CONFIG, load_json, read_model_config
from jaxtrain.hf.files import DTYPES, Weights, first, opening
from jaxtrain.models.functional import Params
from jaxtrain.models.transformer import transformer
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.tree import named_leaves
from jaxtrain.units import nbytes

_BLOCK_BYTES = 16 * 2**20
"""How much of a file is copied at a time."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A model in a directory that can be read as it is."""

    directory: Path
    architecture: Architecture
    config: TransformerConfig
    weights: Weights
    prefix: str
    """Of names in the body."""
    placed: tuple[tables.Placed, ...]
    """The tensors, without a copy of tied embeddings."""
    shapes: dict[str, tuple[int, ...]]
    """Path -> shape of every parameter."""

    def dtypes(self) -> dict[str, str]:
        """Dtype in the file of every tensor to export again, a copy of the embedding included."""
        tensors = self.weights.tensors
        return {name: tensors[name].dtype for name in tensors if not _is_ignored(name)}


@contextlib.contextmanager
def opening_model(directory: Path) -> Iterator[Source]:
    """Opens a model and checks all of it but the values.

    Args:
        directory: with config.json and safetensors files.

    Raises:
        ConfigError: for a config.json that asks for what is not supported.
        CheckpointError: for files that are absent or damaged; for tensors that are missing, not
            expected, or of another shape or dtype.
    """
    architecture, config = read_model_config(directory)
    with opening(directory) as weights:
        abstract, _ = jax.eval_shape(transformer(config).init, jax.random.key(0))
        shapes = tables.shapes_of(abstract)
        prefix = tables.prefix_of(architecture.model_type)
        if not any(name.startswith(prefix) for name in weights.tensors):
            prefix = ""
        placed = tuple(
            tables.placed(
                architecture.model_type, shapes, vocab_size=config.vocab_size, prefix=prefix
            )
        )
        source = Source(directory, architecture, config, weights, prefix, placed, shapes)
        _require_fit(source)
        _require_equal_head(source)
        yield source


def largest_tensor(source: Source) -> tuple[str, int]:
    """(name, bytes in float32, padding included) of the largest tensor that the host will hold."""
    sizes = {
        path: 4 * math.prod(shape[1:] if path.startswith(tables.STACKED) else shape)
        for path, shape in source.shapes.items()
    }
    path = max(sizes, key=lambda path: sizes[path])
    return next(p.name for p in source.placed if path in p.rule.paths), sizes[path]


def describe_load(source: Source) -> str:
    """What will be read, and the memory it takes, in words."""
    name, size = largest_tensor(source)
    stored = sum(
        math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize
        for tensor in source.weights.tensors.values()
        if tensor.dtype in DTYPES
    )
    params = 4 * sum(math.prod(shape) for shape in source.shapes.values())
    return (
        f"{source.architecture.model_type} of {source.directory}: {len(source.weights.tensors)} "
        f"tensors, {nbytes(stored)}; parameters in float32 {nbytes(params)} on all devices "
        f"together; host memory at most {nbytes(size + 2 * _BLOCK_BYTES)} besides "
        f"(largest tensor: {name})"
    )


def load_params(source: Source, abstract: Params) -> Params:
    """Reads all parameters into the layout and the dtype that are asked for.

    Args:
        source: from `opening_model`.
        abstract: parameters of `transformer(source.config)` (the padding of the vocabulary may be
            another one) as `jax.ShapeDtypeStruct` with shardings; those of LoRA left out.
    """
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for placed in source.placed:
        for part, path in enumerate(placed.rule.paths):
            pieces[path].append(_Piece(placed, part))
    leaves = []
    for path, leaf in named_leaves(abstract):
        read = functools.partial(_read, source, shape=leaf.shape)
        leaves.append(_fill(leaf, pieces[path], read))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


class _Piece(NamedTuple):
    """One parameter of one layer."""

    placed: tables.Placed
    part: int
    """Which of the parameters in the tensor."""


def _fill(
    leaf: jax.ShapeDtypeStruct, pieces: list[_Piece], read: Callable[[_Piece], np.ndarray]
) -> jax.Array:
    """One parameter on the devices."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)

    def place(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
        values = values.astype(leaf.dtype, copy=False)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    if pieces[0].placed.layer is None:
        return place(read(pieces[0]), sharding)
    of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    zeros, put = _programs(leaf, sharding)
    stacked = zeros()
    for piece in pieces:
        stacked = put(stacked, place(read(piece), of_layer), piece.placed.layer)
        # Else the host runs ahead, and holds the tensors of many layers.
        stacked.block_until_ready()
    return stacked


def _programs(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> tuple[Any, Any]:
    """Makes an empty parameter, and puts one layer into it in place."""
    zeros = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=sharding)
    put = jax.jit(
        lambda stacked, values, layer: jax.lax.dynamic_update_index_in_dim(
            stacked, values, layer, 0
        ),
        donate_argnums=0,
        out_shardings=sharding,
    )
    return zeros, put


def _read(source: Source, piece: _Piece, *, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter of one layer on the host, float32, its padding zero."""
    name, rule, layer, tensor_shape = piece.placed
    values = np.zeros(shape if layer is None else shape[1:], np.float32)
    view = rule.view(values, source.config.vocab_size)
    begin, *others = rule.part(tensor_shape, piece.part)
    row_bytes = 4 * math.prod(tensor_shape[1:])
    step = max(_BLOCK_BYTES // row_bytes, 1)
    for row in range(begin.start, begin.stop, step):
        rows = slice(row, min(row + step, begin.stop))
        target = view[rows.start - begin.start : rows.stop - begin.start]
        target[...] = source.weights.read(name, (rows, *others))
    return values


def _is_ignored(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in tables.IGNORED)


def _require_fit(source: Source) -> None:
    """Compares the tensors that there are with those of the model."""
    found, placed = source.weights.tensors, {piece.name: piece for piece in source.placed}
    head = tables.HEAD.name
    problems = []
    if missing := [repr(name) for name in placed if name not in found]:
        problems.append(f"tensors are missing: {first(missing)}")
        if head in placed and head not in found:
            said = load_json(source.directory / CONFIG).get("tie_word_embeddings")
            problems.append(
                f"without {head} the output layer must be the embedding, but tie_word_embeddings "
                f"is {'false' if said is not None else 'absent, which means false,'} in {CONFIG}"
            )
    extra = [
        repr(name)
        for name in found
        if name not in placed
        and not _is_ignored(name)
        and not (name == head and source.config.tie_embeddings)
    ]
    if extra:
        problems.append(f"tensors are not expected: {first(extra)}")
    other = [
        f"{name!r} is {list(found[name].shape)}, {list(piece.shape)} is expected"
        for name, piece in placed.items()
        if name in found and found[name].shape != piece.shape
    ]
    if other:
        problems.append(f"tensors do not fit {CONFIG}: {first(other)}")
    if wrong := [f"{n!r} ({t.dtype})" for n, t in found.items() if t.dtype not in DTYPES]:
        problems.append(
            f"tensors have a dtype that is not read: {first(wrong)}; {', '.join(DTYPES)} are"
        )
    if problems:
        raise CheckpointError(f"{source.directory}: {'; '.join(problems)}.")


def _require_equal_head(source: Source) -> None:
    """A file with tied embeddings may hold the output layer too; it has to be the same."""
    found = source.weights.tensors
    head = tables.HEAD.name
    if not source.config.tie_embeddings or head not in found:
        return
    name = next(p.name for p in source.placed if p.rule.paths == ("embed/embedding",))
    same = found[name].shape == found[head].shape
    step = max(_BLOCK_BYTES // (4 * found[name].shape[1]), 1)
    for row in range(0, found[name].shape[0], step):
        part = (slice(row, min(row + step, found[name].shape[0])), slice(0, found[name].shape[1]))
        if not same or not np.array_equal(
            source.weights.read(name, part), source.weights.read(head, part)
        ):
            raise CheckpointError(
                f"{source.directory}: tie_word_embeddings is true in {CONFIG}, but {head} and "
                f"{name} differ; set tie_word_embeddings to false if they are two."
            )
