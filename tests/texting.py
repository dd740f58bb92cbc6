"""Text files for the tests, and what is read from them."""

import os

import numpy as np

from jaxtrain.data.documents import Reader
from jaxtrain.data.files import TextFile
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig


def write(folder, contents):
    """Writes {relative path: text or bytes}; returns the folder."""
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(folder)


def read(path, *, replace=False, skip_binary=False, json_field="text"):
    reader = Reader(replace=replace, json_field=json_field, skip_binary=skip_binary)
    path = str(path)
    documents = reader.read(TextFile(path, os.path.basename(path), os.path.getsize(path)))
    return documents, reader


def load(source, **options):
    return text_datasets(TextDataConfig(source=str(source), **options))


def stream_of(dataset):
    """The targets that count, in order, after the first byte."""
    rows = dataset.read(np.arange(len(dataset)))
    first = rows["tokens"][0, :1]
    return bytes([*first, *rows["targets"][rows["loss_mask"] > 0]])


def many_files(folder, count=200, size=100):
    rng = np.random.default_rng(0)
    return write(
        folder,
        {
            **{
                f"d{i % 7}/f{i}.txt": f"{i:05d} " + "x" * int(rng.integers(size, 2 * size)) + "\n"
                for i in range(count)
            }
        },
    )
