"""docs/data.md: its `jaxtrain` commands run as they stand; its dataset reaches the devices."""

import gzip
import json
import pathlib
import re
import shlex
import sqlite3
import subprocess
import sys

import numpy as np
import preparing
import pyarrow as pa
import pytest
from pyarrow import parquet
from test_docs import code_of

from jaxtrain.data.load import Loader
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.order import sample_indices
from jaxtrain.data.sources import Dataset
from jaxtrain.mesh import make_mesh

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "data.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    texts = [preparing.text(i, 900) for i in range(8)]
    for name in ("corpus/a.txt", "corpus/b/c.py", "more1/d.txt", "more2/e.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(texts))
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(pa.table({"body": texts}), folder / "table.parquet")
    return folder


def test_the_commands_that_prepare_run(folder):
    commands = [command for command in COMMANDS if command.startswith("jaxtrain ")]
    assert len(commands) == 4
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, (command, done.stderr)
    for name in ("shards", "shards-lines", "shards-table"):
        Manifest.read(str(folder / name)).verify()
    assert Manifest.read(str(folder / "shards-lines")).documents == 8
    # The words of this corpus have no more pairs than that.
    assert 257 < Manifest.read(str(folder / "shards")).vocab_size <= 512


def test_the_dataset_of_the_page(tmp_path):
    names = {"__name__": "docs"}
    exec(code_of(PAGE), names)
    block = next(b for b in code_of(PAGE).split("\n\n\n") if "class TableDataset" in b)
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    path = str(tmp_path / "rows.db")
    rows = np.random.default_rng(0).integers(0, 99, (40, 9)).astype(np.int32)
    with sqlite3.connect(path) as table:
        table.execute("CREATE TABLE rows(id INTEGER PRIMARY KEY, tokens BLOB)")
        data = [(number, row.tobytes()) for number, row in enumerate(rows)]
        table.executemany("INSERT INTO rows VALUES (?, ?)", data)
    dataset = names["TableDataset"](path)
    assert isinstance(dataset, Dataset)
    with Loader(dataset, make_mesh("data:8"), global_batch_size=16, seed=3) as loader:
        arrays = next(loader).arrays
    wanted = rows[sample_indices(3, 40, np.arange(16))]
    np.testing.assert_array_equal(arrays["tokens"], wanted[:, :-1])
    np.testing.assert_array_equal(arrays["targets"], wanted[:, 1:])
