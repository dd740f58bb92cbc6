"""The weights of a directory of Hugging Face: safetensors files, one or several with an index.

    weights = open_weights(directory)       # headers only
    weights.read("lm_head.weight", rows)    # a part of a tensor, as it is in the file

The files are mapped: a tensor that is not read costs nothing. Nothing here needs PyTorch: bfloat16
comes from ml_dtypes, which jax brings along.
"""

import contextlib
import dataclasses
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.hf.configs import load_json
from jaxtrain.output_files import sync, writing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest file of an export, as transformers counts."""

DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
"""Those that float32 holds without loss, by their names in safetensors."""

_NAMED = 5


class Tensor(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: str
    dtype: str
    """As safetensors names it, e.g. BF16."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a directory."""

    directory: Path
    tensors: Mapping[str, Tensor]
    """By name."""
    opened: Mapping[str, Any]

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in the dtype of the file."""
        tensor = self.tensors[name]
        try:
            return self.opened[tensor.file].get_slice(name)[part]
        except Exception as error:  # safetensors has one class of its own, and the system others
            raise CheckpointError(
                f"{self.directory / tensor.file}: tensor {name!r} cannot be read: {error}."
            ) from error

    def close(self) -> None:
        """Unmaps the files."""
        for file in self.opened.values():
            file.__exit__(None, None, None)


@contextlib.contextmanager
def opening(directory: Path) -> Iterator[Weights]:
    """`open_weights` for a `with` block."""
    weights = open_weights(directory)
    try:
        yield weights
    finally:
        weights.close()


def open_weights(directory: Path) -> Weights:
    """Opens all files of a model and reads their headers.

    Raises:
        CheckpointError: naming files that are absent or damaged, and tensors that the index and the
            files disagree about.
    """
    if (directory / SINGLE).is_file():
        names, indexed = [SINGLE], None
    else:
        indexed = _read_index(directory)
        names = sorted(set(indexed.values()))
    opened, tensors, doubled = {}, {}, []
    for name in names:
        opened[name] = file = _open(directory / name)
        for key in file.keys():  # noqa: SIM118 - not a dict
            if key in tensors:
                doubled.append(f"{key!r} in {tensors[key].file} and {name}")
            part = file.get_slice(key)
            tensors[key] = Tensor(name, part.get_dtype(), tuple(part.get_shape()))
    if doubled:
        raise CheckpointError(f"{directory}: tensors are in two files: {first(doubled)}.")
    if indexed is not None:
        _require_index(directory, indexed, tensors)
    return Weights(directory, tensors, opened)


def first(texts: Sequence[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class Wanted(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    """Its values, of any dtype; called when it is written."""

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return int(np.prod(self.shape)) * np.dtype(DTYPES[self.dtype]).itemsize


def write_weights(
    directory: Path, tensors: Sequence[Wanted], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes tensors one by one, in files of at most `shard_bytes` (or one tensor), and an index.

    All is on the disk (fsync) when it returns. One file gets no index.
    """
    shards: list[list[Wanted]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    names = [SINGLE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            },
        }
        write_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard)


def write_text(path: Path, text: str) -> None:
    """Writes a new file to the disk."""
    with writing(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        sync(file.fileno())


def write_file(path: Path, tensors: Sequence[Wanted]) -> None:
    """Writes tensors one by one into a new file; all is on the disk (fsync) when it returns."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
    with writing(path), open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            values = tensor.make()
            assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
            data = np.ascontiguousarray(values, dtype=DTYPES[tensor.dtype])
            file.write(data.reshape(-1).view(np.uint8).data)
        file.flush()
        sync(file.fileno())


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor -> file, of an index whose files are all there."""
    if not (directory / INDEX).is_file():
        present = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        shards = [name for name in present if re.search(r"-of-\d+\.safetensors$", name)]
        if shards:
            problem = f"{first(shards)} belong to an index, {INDEX}, which is absent"
        elif any(name.endswith((".bin", ".pt", ".pth", ".gguf")) for name in present):
            problem = f"there is no {SINGLE}; weights in other formats are not read, convert them"
        else:
            problem = f"there is neither {SINGLE} nor {INDEX}"
        raise CheckpointError(f"{directory} holds no weights that can be read: {problem}.")
    path = directory / INDEX
    content = load_json(path)
    index = content.get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path} must hold a weight_map, tensor -> file; it does not.")
    absent = []
    for name in sorted(set(index.values())):
        if os.path.basename(name) != name:
            raise CheckpointError(f"{path} names {name!r}, which is not a file beside it.")
        if not (directory / name).is_file():
            lost = [f"{key!r}" for key in index if index[key] == name]
            absent.append(f"{name} with {len(lost)} tensors ({first(lost)})")
    if absent:
        others = sorted(
            path.name for path in directory.glob("*.safetensors") if path.name not in index.values()
        )
        hint = f"; {first(others)}, which it does not name, is there" if others else ""
        raise CheckpointError(
            f"{path} names files that are absent: {'; '.join(absent)}{hint}. Download them again."
        )
    return index


def _require_index(
    directory: Path, index: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    problems = []
    absent = [f"{name!r} in {index[name]}" for name in index if name not in tensors]
    if absent:
        problems.append(f"tensors that are in no file: {first(absent)}")
    moved = [
        f"{name!r} in {index[name]}, it is in {tensors[name].file}"
        for name in index
        if name in tensors and tensors[name].file != index[name]
    ]
    if moved:
        problems.append(f"tensors in another file: {first(moved)}")
    if unnamed := [f"{name!r} in {tensors[name].file}" for name in tensors if name not in index]:
        problems.append(f"not all that the files hold: {first(unnamed)}")
    if problems:
        raise CheckpointError(
            f"{directory / INDEX} does not fit the files, it names {'; '.join(problems)}. "
            "Download index and files again, from one revision."
        )


def _open(path: Path) -> Any:
    import safetensors  # imported on first use

    try:
        return safetensors.safe_open(path, framework="numpy").__enter__()
    except Exception as error:  # safetensors has one class of its own, and the system others
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path} ({size:,} bytes) is cut off or damaged: {error}. Download it again."
        ) from error
