"""Measures how fast token shards are read, and how fast they are made, as ratios in one run.

    python scripts/bench_input.py

Reading: rows of 1,024 tokens, 32 at a time, from one shard of 100 million tokens in a random
order, as the arrays of a batch ({"tokens", "targets", "loss_mask"}). Beside it three lines of NumPy
that make tokens and targets of the same rows:

- `rows`: a slice of the map for each row, stacked;
- `gather`: one index array for the whole batch;
- `bare`: a slice for each row, stacked, and nothing else: no targets, no int32.

Reading in workers: batches of a dataset whose read computes for 20 ms in Python, taken as fast as
they come, with as many workers as `--data.num_workers` would take at most (the cores but one) and
with two that share them, against the loader's thread; and of one whose read waits for 20 ms, as for
a network.

Cached: all rows of compressed JSON lines (.gz) that `--data.cache_dir` has unpacked, in a random
order, against reading the file from its begin to its end in Python (gzip, json), in bytes of text.

Decoding: training batches of JPEG files of 256 x 256 in class folders, read by two input workers
and by the threads of one process, against Pillow alone, one file after the other, times the number
of workers or threads (at most the cores).

Making: `jaxtrain prepare` of a corpus, start and end included, against the tokenizer library
alone: `encode_batch` of the same texts, already in memory, with its own threads
on the same cores.

The sides take turns, block by block; a ratio is the median over the blocks of theirs by ours in
time, so above 1 is faster than the other side. The last line is JSON.
"""

import dataclasses
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxtrain.config import Config, field
from jaxtrain.data.files import find_files
from jaxtrain.data.image_files import num_threads
from jaxtrain.data.images import ImageDataConfig, image_datasets
from jaxtrain.data.order import sample_indices
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.tokenizing import train_bpe
from jaxtrain.data.windows import TextDataset
from jaxtrain.host import cores_at_hand
from jaxtrain.main import run_tool

LENGTH, ROWS = 1024, 32
_EXPENSIVE_SECONDS, _WORKER_BLOCKS = 0.02, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Flags of this script."""

    tokens: int = field(100_000_000, minimum=10_000_000, help="in the shard that is read")
    batches: int = field(300, minimum=10, help="in a block of reading")
    blocks: int = field(9, minimum=1, help="of each side of reading")
    worker_batches: int = field(
        100, minimum=0, help="in a block of reading with workers; 0: without"
    )
    cached_megabytes: int = field(40, minimum=0, help="of text in compressed lines; 0: without")
    images: int = field(600, minimum=0, help="that are decoded in a block; 0: without")
    preparations: int = field(5, minimum=0, help="of each side of making; 0: only reading")
    corpus: str = field("stdlib", help="files or folders of plain text that are made into tokens")
    vocab_size: int = field(8192, minimum=257, help="of the tokenizer that makes tokens")


def main(config: BenchConfig) -> None:
    """Prints a line for each side, then one line of JSON."""
    cores = len(os.sched_getaffinity(0))
    result = {"cores": cores, "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as folder:
        result |= read(config, Path(folder))
        if config.worker_batches:
            result |= read_in_workers(config)
        if config.cached_megabytes:
            result |= read_cached(config, Path(folder))
        if config.images:
            result |= decode(config, Path(folder))
        if config.preparations:
            result |= make(config, Path(folder))
    print(json.dumps(result))


def read(config: BenchConfig, folder: Path) -> dict[str, float]:
    """Batches per second of ours, and ratios."""
    path = str(folder / "shard.bin")
    rng = np.random.default_rng(0)
    rng.integers(0, 50_000, config.tokens, np.uint16).tofile(path)
    tokens = np.asarray(np.memmap(path, np.uint16, "r"))
    dataset = TextDataset([tokens], LENGTH, paths=[path], vocab_size=50_257)
    num_rows = (config.tokens - 1) // LENGTH  # full ones: NumPy's sides have no last row
    count = config.batches * config.blocks * ROWS
    batches = sample_indices(0, num_rows, np.arange(count)).reshape(-1, config.batches, ROWS)
    offsets = np.arange(LENGTH + 1)

    def rows(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = (indices * LENGTH).tolist()
        return (
            np.stack([tokens[start : start + LENGTH] for start in starts]).astype(np.int32),
            np.stack([tokens[start + 1 : start + LENGTH + 1] for start in starts]).astype(np.int32),
        )

    def gather(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        window = tokens[indices[:, None] * LENGTH + offsets].astype(np.int32)
        return window[:, :-1], window[:, 1:]

    def bare(indices: np.ndarray) -> np.ndarray:
        return np.stack([tokens[s : s + LENGTH + 1] for s in (indices * LENGTH).tolist()])

    sides = {"ours": dataset.read, "rows": rows, "gather": gather, "bare": bare}

    def seconds(side: Callable[[np.ndarray], object], block: np.ndarray) -> float:
        return _seconds(lambda: [side(indices) for indices in block])

    # Whoever reads a page first pays for mapping it: all are mapped before, and who begins changes.
    tokens.max()
    for side in sides.values():
        seconds(side, batches[0])
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number, block in enumerate(batches):
        names = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
        for name in names:
            times[name].append(seconds(sides[name], block))
    for name in sides:
        print(f"read {name}: {config.batches / statistics.median(times[name]):,.0f} batches/s")
    return {
        "read_batches_per_second": config.batches / statistics.median(times["ours"]),
        **{
            f"read_to_{name}": _ratio(times[name], times["ours"])
            for name in sides
            if name != "ours"
        },
    }


class ExpensiveDataset:
    """Rows whose reading takes 20 ms a batch: of a core, or only of time."""

    fingerprint = "expensive"

    def __init__(self, computes: bool) -> None:
        self._computes = computes

    def __len__(self) -> int:
        return 10_000

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self._computes:
            begin = time.thread_time()
            while time.thread_time() - begin < _EXPENSIVE_SECONDS:
                pass
        else:
            time.sleep(_EXPENSIVE_SECONDS)
        return {"x": np.zeros((len(indices), LENGTH), np.float32)}


def read_in_workers(config: BenchConfig) -> dict[str, float]:
    """Batches per second with workers, by those of the loader's thread."""
    from jaxtrain.data.load import Loader
    from jaxtrain.mesh import make_mesh

    result = {}
    for name, computes in {"computed": True, "awaited": False}.items():
        counts = sorted({0, max(1, cores_at_hand() - 1), 2})
        times: dict[int, list[float]] = {count: [] for count in counts}
        for count in counts * _WORKER_BLOCKS:
            dataset = ExpensiveDataset(computes)
            with Loader(dataset, make_mesh(), global_batch_size=ROWS, num_workers=count) as loader:
                for _ in range(2 * count + 3):
                    next(loader)  # the start, and what was read ahead meanwhile

                def take(loader: Loader = loader) -> None:
                    for _ in range(config.worker_batches):
                        next(loader)

                times[count].append(_seconds(take))
        for count, found in times.items():
            rate = config.worker_batches / statistics.median(found)
            print(f"read {name}, {count} workers: {rate:,.0f} batches/s")
            if count:
                result[f"read_{name}_{count}_workers_to_thread"] = _ratio(times[0], found)
    return result


def read_cached(config: BenchConfig, folder: Path) -> dict[str, float]:
    """Megabytes of text per second of unpacked JSON lines, and their ratio to reading the file."""
    texts = [Path(file.path).read_text(errors="replace") for file in find_files("stdlib")]
    path = folder / "lines.jsonl.gz"
    size = 0
    with gzip.open(path, "wt") as file:
        for text in itertools.cycle(texts):
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size > config.cached_megabytes * 1e6:
                break
    data = TextDataConfig(
        source=str(path),
        cache_dir=str(folder / "cache"),
        sequence_length=LENGTH,
        validation_fraction=0,
    )
    dataset, _, _ = text_datasets(data)
    indices = sample_indices(0, len(dataset), np.arange(len(dataset)))

    def sequentially() -> None:
        with gzip.open(path) as file:
            for line in file:
                json.loads(line)["text"].encode()

    def cached() -> None:
        for batch in np.array_split(indices, -(-len(indices) // ROWS)):
            dataset.read(batch)

    times: dict[str, list[float]] = {"cached": [], "sequentially": []}
    for _ in range(_WORKER_BLOCKS):
        times["sequentially"].append(_seconds(sequentially))
        times["cached"].append(_seconds(cached))
    for name, seconds in times.items():
        rate = size / 1e6 / statistics.median(seconds)
        print(f"JSON lines .gz {name}: {rate:.1f} MB/s of {size / 1e6:.1f} MB")
    return {"cached_to_sequential": _ratio(times["sequentially"], times["cached"])}


def decode(config: BenchConfig, folder: Path) -> dict[str, float]:
    """Images per second by those of the decoder alone on as many cores."""
    from PIL import Image

    from jaxtrain.data.load import Loader
    from jaxtrain.mesh import make_mesh

    rng = np.random.default_rng(0)
    paths = []
    for number in range(config.images):
        # Coarse noise made smooth: JPEG spends on it what it spends on a photograph, about.
        coarse = Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8))
        path = folder / "images" / str(number % 10) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    source = str(folder / "images")
    dataset = image_datasets(ImageDataConfig(source=source, color="rgb", validation_fraction=0))[0]
    cores = cores_at_hand()

    def alone() -> None:
        for path in paths:
            with Image.open(path) as image:
                np.asarray(image.convert("RGB"))

    counts = (0, 2)
    by_pillow: list[float] = []
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(_WORKER_BLOCKS):
        by_pillow.append(_seconds(alone))
        for count in counts:
            with Loader(dataset, make_mesh(), global_batch_size=ROWS, num_workers=count) as loader:
                for _ in range(2 * count + 3):
                    next(loader)

                def take(loader: Loader = loader) -> None:
                    for _ in range(config.images // ROWS):
                        next(loader)

                times[count].append(_seconds(take) * config.images / (config.images // ROWS * ROWS))
    print(f"decode, Pillow alone: {config.images / statistics.median(by_pillow):,.0f} images/s")
    result = {}
    for count, seconds in times.items():
        busy = min(cores, count or num_threads())
        print(
            f"decode, {count} workers: {config.images / statistics.median(seconds):,.0f} images/s"
        )
        result[f"decode_{count}_workers_to_pillow_x{busy}"] = _ratio(by_pillow, seconds) / busy
    return result


def make(config: BenchConfig, folder: Path) -> dict[str, float]:
    """Megabytes of text per second of `jaxtrain prepare`, and its ratio to the library."""
    from tokenizers import Tokenizer

    files = find_files(config.corpus)
    texts = [Path(file.path).read_text(errors="replace") for file in files]
    size = sum(len(text.encode()) for text in texts) / 1e6
    path = folder / "tokenizer.json"
    path.write_bytes(train_bpe([text.encode() for text in texts], config.vocab_size))
    tokenizer = Tokenizer.from_file(str(path))

    def ours(number: int) -> None:
        out = f"{folder}/out{number}"
        command = [sys.executable, "-m", "jaxtrain", "prepare", config.corpus, out]
        subprocess.run([*command, f"--tokenizer={path}"], check=True, capture_output=True)

    times: dict[str, list[float]] = {"prepare": [], "library": []}
    for number in range(config.preparations):
        times["library"].append(_seconds(lambda: tokenizer.encode_batch(texts)))
        times["prepare"].append(_seconds(lambda number=number: ours(number)))
    for name, seconds in times.items():
        print(f"make {name}: {size / statistics.median(seconds):.2f} MB/s of {size:.1f} MB")
    return {
        "prepare_megabytes_per_second": size / statistics.median(times["prepare"]),
        "prepare_to_library": _ratio(times["library"], times["prepare"]),
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


if __name__ == "__main__":
    run_tool(BenchConfig, main)
