"""Measures what jaxtrain's loop costs over a training step written by hand in JAX.

    python scripts/bench_step.py

Ours is `jaxtrain.fit` as it is: loader thread, metrics fetched every step, non-finite guard,
gradient norm, clipping, learning rate schedule, records every 10 steps into metrics.jsonl and
TensorBoard. The other side is `bare_step.py` with the same model and the same maths: the fastest of
its variants, found first. No side evaluates or saves.

How they take turns: `fit` runs in the main thread and calls `on_step` at every step boundary. Every
so many steps the hook waits until all arrays of the process are ready, which ends our block, lets
the other side do as many steps, waits for it, and returns, which begins our next block. So both
sides do the same number of steps from idle to idle, in one process with one allocator. A block of
either side begins with steps that are not counted: the memory of its temporaries is not what the
other side left, and faulting it in anew is a tenth of a step. A block of ours is divided by the
mean of the bare blocks before and after it, and the median of these ratios is the result. What
flatters us: up to two batches of a block are read before it. What does not: our pipeline fills and
drains once per block.

`python_overhead_ms` is found the same way, with a model of a few numbers but as many arrays as
nano: processor time of the main thread for a step of `fit`, less that for a bare call of the same
step. Both sides sleep for 2 ms after each step, in place of a device at work. In that time the
loader's thread makes the next batch, which takes it 0.5 ms, as it does in a run; steps of no work
would wait for it, and share with it the interpreter's lock. `python_overhead_wall_ms` is the same
difference in wall time.

The gain of huge pages needs two processes, since glibc reads its tunables when a process starts.
They take turns block by block, too.

The last line is JSON. With 2 cores it takes about 15 minutes.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import bare_step
import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain
from jaxtrain import CheckpointConfig, RunConfig, optim
from jaxtrain.config import Config, field
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.host import restart_with_huge_pages
from jaxtrain.losses import lm_loss
from jaxtrain.main import run_tool
from jaxtrain.models.transformer import TransformerConfig, transformer

WARMUP_STEPS = 3
LEAD_STEPS = 2
"""At the beginning of a block, not counted."""
OVERHEAD_STEPS = 200
DEVICE_SECONDS = 0.002
"""Slept in place of a device's work when Python is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A size to compare at."""

    name: str
    model: TransformerConfig
    batch_size: int
    sequence_length: int
    steps_per_block: int


CASES = {
    case.name: case
    for case in (
        Case(
            name="nano",
            model=TransformerConfig(),
            batch_size=32,
            sequence_length=128,
            steps_per_block=12,
        ),
        Case(
            name="384",
            model=TransformerConfig(num_layers=6, embed_dim=384, num_heads=6, mlp_dim=1024),
            batch_size=4,
            sequence_length=256,
            steps_per_block=6,
        ),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Flags of this script."""

    blocks: int = field(15, minimum=3, help="blocks of each side")
    worker: str = field(
        "",
        choices=("", *CASES),
        help="how the script calls itself: measure our step at this size, a block per input line",
    )


def main(config: BenchConfig) -> None:
    """Prints a table, then one line of JSON."""
    if config.worker:
        work(CASES[config.worker], config.blocks)
        return
    huge_pages = restart_with_huge_pages()
    logging.getLogger("jaxtrain").setLevel(logging.WARNING)
    print(f"load {os.getloadavg()[0]:.1f}, huge pages: {huge_pages}", flush=True)
    result: dict[str, Any] = {"load": os.getloadavg()[0], "huge_pages": huge_pages}
    for case in CASES.values():
        result |= compare(case, config.blocks)
    overhead = python_overhead(config.blocks)
    for name, values in overhead.items():
        result[name] = statistics.median(values)
        result[f"{name}_quartiles"] = quartiles(values)
    result["huge_pages_gain"] = None
    if huge_pages == "on":
        gains = huge_pages_gain(CASES["384"], config.blocks)
        result["huge_pages_gain"] = statistics.median(gains)
        result["huge_pages_gain_quartiles"] = quartiles(gains)
    print(json.dumps({name: rounded(value) for name, value in result.items()}))


# ---------------------------------------------------------------------------------------------
# Ours and the bare step, in turns
# ---------------------------------------------------------------------------------------------


def compare(case: Case, blocks: int) -> dict[str, Any]:
    """Times `fit` against the fastest bare variant."""
    data, model = text_of(case), transformer(case.model)
    sizes = bare_step.Sizes(
        num_layers=case.model.num_layers,
        embed_dim=case.model.embed_dim,
        num_heads=case.model.num_heads,
        mlp_dim=case.model.mlp_dim,
        vocab_size=case.model.padded_vocab_size,
    )
    rows = np.arange(4 * case.batch_size).reshape(4, -1)
    batches = [data.read(indices) for indices in rows]
    fastest, bare = bare_step.fastest(sizes, batches, case.steps_per_block)
    config = RunConfig(global_batch_size=case.batch_size)
    turns = Turns(bare, blocks, case.steps_per_block)
    turns.run(model, lm_loss(model), data, config)
    print(
        f"{case.name}: bare {1e3 * statistics.median(turns.bare):.1f} ms (least "
        f"{1e3 * min(turns.bare):.1f}), ours {1e3 * statistics.median(turns.ours):.1f} ms (least "
        f"{1e3 * min(turns.ours):.1f}), load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    ratios = [ours / bare for ours, bare in turns.pairs()]
    return {
        f"ratio_{case.name}": statistics.median(ratios),
        f"ratio_{case.name}_quartiles": quartiles(ratios),
        f"ratio_{case.name}_of_least": min(turns.ours) / min(turns.bare),
        f"step_ms_{case.name}": 1e3 * statistics.median(turns.ours),
        f"bare_{case.name}": fastest,
    }


class Turns:
    """Runs `fit` and lets another side do as many steps, block by block.

    Args:
        bare: the other side.
        blocks: of ours; the other side does one more.
        steps: per block.
        pause: seconds to sleep after each of our steps.
    """

    def __init__(
        self, bare: bare_step.Steps, blocks: int, steps: int, *, pause: float = 0.0
    ) -> None:
        self._bare, self._blocks, self._steps, self._pause = bare, blocks, steps, pause
        self._begin = self._thread_begin = 0.0
        self.ours: list[float] = []
        """Seconds per step, by block."""
        self.bare: list[float] = []
        self.ours_thread: list[float] = []
        """Processor seconds of the main thread per step, by block."""
        self.bare_thread: list[float] = []

    def run(self, model: Any, loss_fn: Any, data: Any, config: RunConfig) -> None:
        """Fills `ours` and `bare`."""
        # The hook for step s comes when step s + 1 has been dispatched.
        num_steps = WARMUP_STEPS + self._blocks * (LEAD_STEPS + self._steps) + 1
        with tempfile.TemporaryDirectory() as workdir:
            config = config.replace(
                workdir=workdir, num_steps=num_steps, checkpoint=CheckpointConfig(every_steps=0)
            )
            jaxtrain.fit(model, loss_fn, data, config=config, on_step=self._on_step)

    def pairs(self) -> list[tuple[float, float]]:
        """(ours, mean of the bare blocks around it) by block."""
        return _pairs(self.ours, self.bare)

    def thread_pairs(self) -> list[tuple[float, float]]:
        """The same for the processor time of the main thread."""
        return _pairs(self.ours_thread, self.bare_thread)

    def _on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        del metrics
        if self._pause:
            time.sleep(self._pause)
        place = (step - WARMUP_STEPS) % (LEAD_STEPS + self._steps)
        if step < WARMUP_STEPS or place not in (0, LEAD_STEPS):
            return
        thread = time.thread_time()
        # The state of the loop is not ours to see, but it is among these.
        jax.block_until_ready(jax.live_arrays())
        if place == 0:
            if step > WARMUP_STEPS:
                self.ours.append((time.perf_counter() - self._begin) / self._steps)
                self.ours_thread.append((thread - self._thread_begin) / self._steps)
            self._bare(LEAD_STEPS)
            begin, thread = time.perf_counter(), time.thread_time()
            self._bare(self._steps)
            self.bare.append((time.perf_counter() - begin) / self._steps)
            self.bare_thread.append((time.thread_time() - thread) / self._steps)
        time.sleep(0.01)  # the loader's thread makes the batches that it may be ahead
        self._begin, self._thread_begin = time.perf_counter(), time.thread_time()


def _pairs(ours: list[float], bare: list[float]) -> list[tuple[float, float]]:
    means = [(before + after) / 2 for before, after in itertools.pairwise(bare)]
    return list(zip(ours, means, strict=True))


# ---------------------------------------------------------------------------------------------
# Python around the step
# ---------------------------------------------------------------------------------------------


def python_overhead(blocks: int) -> dict[str, list[float]]:
    """Milliseconds per step that `fit` takes above a bare call of the same step, by block."""
    case = CASES["nano"]
    nano, _ = jax.eval_shape(transformer(case.model).init, jax.random.key(0))

    def init(key: jax.Array) -> tuple[Any, Any]:
        del key
        return jax.tree.map(lambda leaf: jnp.ones((1,) * leaf.ndim), nano), {}

    def apply(params, model_state, batch, *, key, train) -> tuple[jax.Array, Any]:
        del batch, key, train
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)), model_state

    def loss_fn(outputs: jax.Array, batch: Any, params: Any) -> Any:
        del params
        mask_BT = batch["loss_mask"]
        return {"loss": (jnp.sum(outputs * mask_BT), jnp.sum(mask_BT))}

    # Batches as large as nano's: the loader's thread has as much to do.
    data = text_of(case)
    config = RunConfig(global_batch_size=case.batch_size)
    bare = same_step(init, apply, loss_fn, data, config)
    turns = Turns(bare, blocks, OVERHEAD_STEPS, pause=DEVICE_SECONDS)
    turns.run((init, apply), loss_fn, data, config)
    print(
        f"Python: bare call {1e3 * statistics.median(turns.bare_thread):.3f} ms of processor time, "
        f"ours {1e3 * statistics.median(turns.ours_thread):.3f} ms",
        flush=True,
    )
    return {
        "python_overhead_ms": [1e3 * (ours - bare) for ours, bare in turns.thread_pairs()],
        "python_overhead_wall_ms": [1e3 * (ours - bare) for ours, bare in turns.pairs()],
    }


def same_step(init: Any, apply: Any, loss_fn: Any, data: Any, config: RunConfig) -> bare_step.Steps:
    """The step that `fit` compiles, called in a bare loop."""
    mesh = jaxtrain.make_mesh(config.mesh)
    abstract, _ = jax.eval_shape(init, jax.random.key(0))
    tx = optim.make_optimizer(config.optimizer, abstract, num_steps=config.num_steps)
    schedule = optim.learning_rate_schedule(config.optimizer, config.num_steps)
    state = jaxtrain.init_state((init, apply), tx, mesh)
    batch = jaxtrain.shard_batch(data.read(np.arange(config.global_batch_size)), mesh)
    step = jax.jit(
        jaxtrain.make_train_step((init, apply), loss_fn, tx, mesh, learning_rate=schedule),
        donate_argnums=0,
    )

    def steps(num_steps: int) -> None:
        nonlocal state
        for _ in range(num_steps):
            state, metrics = step(state, batch)
            time.sleep(DEVICE_SECONDS)
        jax.block_until_ready((state, metrics))

    steps(2)
    return steps


# ---------------------------------------------------------------------------------------------
# Huge pages
# ---------------------------------------------------------------------------------------------


def huge_pages_gain(case: Case, blocks: int) -> list[float]:
    """How much faster our step is with huge pages: time without / time with - 1, by block."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker(case, blocks, tunable=value)) for value in (0, 1)]
        without, with_them = ([] for _ in workers)
        for _ in range(blocks):
            for seconds, process in zip((without, with_them), workers, strict=True):
                process.stdin.write("\n")
                process.stdin.flush()
                seconds.append(float(process.stdout.readline()))
    print(
        f"huge pages: off {1e3 * statistics.median(without):.1f} ms, on "
        f"{1e3 * statistics.median(with_them):.1f} ms",
        flush=True,
    )
    return [off / on - 1 for off, on in zip(without, with_them, strict=True)]


@contextlib.contextmanager
def worker(case: Case, blocks: int, *, tunable: int) -> Iterator[subprocess.Popen]:
    """This script in a process of its own, idle until it is sent a line."""
    command = [sys.executable, __file__, f"--worker={case.name}", f"--blocks={blocks}"]
    environment = dict(os.environ, GLIBC_TUNABLES=f"glibc.malloc.hugetlb={tunable}")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            process.stdout.readline()  # compiled
            yield process
            process.wait()
        finally:
            process.kill()


def work(case: Case, blocks: int) -> None:
    """Answers every line with the seconds per step of a block of ours."""
    logging.getLogger("jaxtrain").setLevel(logging.WARNING)
    model, data = transformer(case.model), text_of(case)
    turns: Turns

    def wait(num_steps: int) -> None:
        if num_steps == LEAD_STEPS:
            return
        print(turns.ours[-1] if turns.ours else "ready", flush=True)
        if len(turns.ours) < blocks:
            sys.stdin.readline()

    turns = Turns(wait, blocks, case.steps_per_block)
    turns.run(model, lm_loss(model), data, RunConfig(global_batch_size=case.batch_size))


def text_of(case: Case) -> Any:
    """The training data: rows of the standard library's source."""
    return text_datasets(TextDataConfig(sequence_length=case.sequence_length))[0]


def quartiles(values: list[float]) -> list[float]:
    """First and third."""
    first, _, third = statistics.quantiles(values, n=4)
    return [first, third]


def rounded(value: Any) -> Any:
    """Four digits are more than a machine repeats."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    run_tool(BenchConfig, main)
