"""Corpora for `jaxtrain prepare`, and its command as a process of its own."""

import gzip
import json
import random
import subprocess
import sys

import pyarrow as pa
from array_record.python import array_record_module
from pyarrow import parquet

WORDS = ("the", "of", "na\u00efve", "cat", "<|endoftext|>", "sat", "", "on\n\n", "a", "mat,")
WORDS += ("12345", "...", "\u20ac", "don't\tif", "x:\n", "", "", "", "y")


def text(seed, words=200):
    rng = random.Random(seed)
    lines = ("".join(f"{rng.choice(WORDS)} " for _ in range(9)).strip() for _ in range(words // 9))
    return "\n".join(lines) + "\n"


def array_record(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def corpus(folder):
    """Writes files of all formats; returns [(relative path, texts)] in the order of the names."""
    (folder / "d").mkdir(parents=True)
    documents = {
        "a.txt": [text("a", 20000)],  # cut into several shards
        "b.jsonl": [text(f"b{i}", 40) for i in range(300)],
        "c.jsonl.gz": [text(f"c{i}", 40) for i in range(100)],
        "d/e.jsonl.zst": [text(f"e{i}", 40) for i in range(100)],
        "d/f.parquet": [text(f"f{i}", 40) for i in range(200)],
        "g.txt": [text("g", 30)],
        "h.txt": [text("h", 12000)],
        "i.array_record": [text(f"i{i}", 40) for i in range(100)],
    }
    for name, texts in documents.items():
        path = folder / name
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
        if name.endswith(".parquet"):
            parquet.write_table(pa.table({"text": texts}), path, row_group_size=30)
        elif name.endswith(".array_record"):
            array_record(path, [text.encode() for text in texts])
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines))
        elif name.endswith(".zst"):
            path.write_bytes(pa.Codec("zstd").compress(lines).to_pybytes())
        else:
            path.write_bytes(lines if name.endswith(".jsonl") else texts[0].encode())
    return sorted(documents.items())


def start(*words, **options):
    """Starts `jaxtrain prepare`."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "prepare", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def prepare(*words):
    """Runs it to its end; returns (exit code, standard output, standard error)."""
    process = start(*words)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def contents(folder):
    """{relative path: bytes} of all files of a directory."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
