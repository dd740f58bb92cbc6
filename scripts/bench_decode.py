"""Measures the time of a token against the time to read the parameters, as ratios in one run.

    python scripts/bench_decode.py

A model of SmolLM2-135M's sizes (30 layers of 576, 9 heads, 3 key/value heads, MLP of 1,536, tied
vocabulary of 49,152: 134.5 million parameters) with random values, in float32, generates at batch
size 1 behind a prompt of 32 tokens. A token reads every parameter once, and can be no faster than
that: the other side reads an array of as many bytes on the same cores, as fast as it can: the
fastest of

- `sum`: NumPy's sum of a part of it in as many threads as there are cores;
- `dot`: the product of each part with itself in the BLAS of NumPy, in as many threads;
- `xla`: a compiled sum over the rows of a matrix.

The sides take turns, block by block: a block of ours is 32 tokens, divided by the mean of the
blocks of reading before and after it. The median of these ratios is the result. Draws at
temperature 0.8 with top-p 0.95 are measured in the same way, and `batch_gain`: how many more tokens
a second 8 rows give than one.

The last line is JSON. With 2 cores it takes about 3 minutes.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config, field
from jaxtrain.host import cores_at_hand
from jaxtrain.main import run_tool
from jaxtrain.models.decoding import PIECE
from jaxtrain.models.sample import start
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.units import nbytes

PROMPT = 32
ROWS = 8
SMOL = TransformerConfig(
    vocab_size=49_152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, mlp_dim=1536,
    tie_embeddings=True, rope_theta=100_000.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Flags of this script."""

    blocks: int = field(9, minimum=3, help="blocks of each side")
    num_layers: int = field(SMOL.num_layers, minimum=1, help="of the model")


def main(config: BenchConfig) -> None:
    """Prints a line for each side, then one line of JSON."""
    model = transformer(SMOL.replace(num_layers=config.num_layers))
    params = jax.block_until_ready(jax.jit(model.init)(jax.random.key(0))[0])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    read, name, seconds = fastest_reading(size)
    print(f"{nbytes(size)} read by {name}: {size / seconds / 1e9:.1f} GB/s", flush=True)
    result: dict[str, Any] = {
        "cores": cores_at_hand(),
        "load": os.getloadavg()[0],
        "parameter_bytes": size,
        "read_by": name,
        "read_gb_per_second": size / seconds / 1e9,
    }
    greedy = Generating(model, params, rows=1, blocks=config.blocks, temperature=0)
    drawn = Generating(model, params, rows=1, blocks=config.blocks, temperature=0.8, top_p=0.95)
    batch = Generating(model, params, rows=ROWS, blocks=config.blocks, temperature=0)
    reads: list[float] = [read()]
    for _ in range(config.blocks):
        for side in (greedy, drawn, batch):
            side.block()
            reads.append(read())
    for label, side, offset in (("greedy", greedy, 0), ("drawn", drawn, 1), ("batch", batch, 2)):
        around = [statistics.mean(pair) for pair in itertools.pairwise(reads)][offset::3]
        ratios = [ours / limit for ours, limit in zip(side.seconds, around, strict=True)]
        middle = statistics.median(side.seconds)
        result[f"token_ms_{label}"] = 1e3 * middle
        result[f"ratio_{label}"] = statistics.median(ratios)
        result[f"ratio_{label}_quartiles"] = statistics.quantiles(ratios, n=4)[::2]
        result[f"compile_seconds_{label}"] = side.compile_seconds
        print(f"{label}: {1e3 * middle:.1f} ms a token, {result[f'ratio_{label}']:.3f} of reading")
    gains = [ROWS * one / many for one, many in zip(greedy.seconds, batch.seconds, strict=True)]
    result["batch_gain"] = statistics.median(gains)
    result["prefill_tokens_per_second"] = PROMPT / greedy.prefill_seconds
    print(json.dumps({key: rounded(value) for key, value in result.items()}))


class Generating:
    """One side of ours: a batch that goes on, block by block."""

    def __init__(self, model: Any, params: Any, *, rows: int, blocks: int, **draws: float):
        prompts = np.random.default_rng(0).integers(0, SMOL.vocab_size, (rows, PROMPT))
        num_tokens = 1 + (blocks + 1) * PIECE
        self._decoding = start(model, params, list(prompts), num_tokens=num_tokens, **draws)
        self._decoding.read()
        self._decoding.go_on()
        self.prefill_seconds = self._decoding.seconds.prefill
        self.compile_seconds = self._decoding.seconds.compile
        self.seconds: list[float] = []
        """For a token of every row, by block."""

    def block(self) -> None:
        """Generates a piece and notes its time."""
        begin = time.perf_counter()
        tokens = self._decoding.go_on()
        self.seconds.append((time.perf_counter() - begin) / tokens.shape[1])


def fastest_reading(size: int) -> tuple[Callable[[], float], str, float]:
    """(reads that many bytes and says the seconds, its name, the median of them)."""
    cores = cores_at_hand()
    array = np.ones(size // 4, np.float32)
    parts = np.array_split(array, cores)
    pool = concurrent.futures.ThreadPoolExecutor(cores)
    matrix = jnp.asarray(array[: array.size // 4096 * 4096].reshape(-1, 4096))
    compiled = jax.jit(lambda matrix: jnp.sum(matrix, axis=0)).lower(matrix).compile()
    sides = {
        "sum": lambda: list(pool.map(np.sum, parts)),
        "dot": lambda: list(pool.map(lambda part: np.dot(part, part), parts)),
        "xla": lambda: compiled(matrix).block_until_ready(),
    }

    def seconds(side: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        side()
        return time.perf_counter() - begin

    times = {name: [seconds(side) for _ in range(6)][1:] for name, side in sides.items()}
    middles = {name: statistics.median(values) for name, values in times.items()}
    name = min(middles, key=lambda name: middles[name])
    # Of several, like the tokens of a block.
    return lambda: statistics.mean(seconds(sides[name]) for _ in range(8)), name, middles[name]


def rounded(value: Any) -> Any:
    """Four digits are more than a machine repeats."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_tool(BenchConfig, main)
