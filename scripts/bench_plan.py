"""Compares plans with reality: memory and meshes on this machine's CPU, both on its GPU.

    python scripts/bench_plan.py [memory] [meshes] [gpu]

Without words: `memory` and `meshes`. Every run is
`experiments/train_lm.py` in a process of its own. What is compared:

- `memory`: the predicted peak of the device, which on CPU is memory of the process, and what the
  plan of the host adds for batches and the compiler, with the rise of the peak of the process's
  resident memory from after its imports to after step 3.
- `meshes`: which mesh `--plan=here --mesh=auto` takes of 8 simulated devices, with the times of
  steps measured on it and on others, in turns.
- `gpu`: predicted peak and step time of gpt2 and llama3.2-1b with what the GPU measures.

Results go to docs/plan_reality.md, those of parts that did not run stay as they are there. The last
line is JSON. On 2 cores `memory` takes about 10 minutes, `meshes` half an hour.
"""

import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import stamp

from jaxtrain import units

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "experiments" / "train_lm.py"
PAGE = ROOT / "docs" / "plan_reality.md"
MEMORY = {
    "gpt2, 2 rows of 256": ("--model=gpt2", "--data.sequence_length=256", "--global_batch_size=2"),
    "gpt2, 4 rows of 512, remat full": (
        "--model=gpt2", "--data.sequence_length=512", "--global_batch_size=4", "--remat=full",
    ),
    "gpt2 in bfloat16, EMA, 4 micro-batches": (
        "--model=gpt2", "--data.sequence_length=256", "--global_batch_size=4",
        "--accumulate_steps=4", "--precision=bfloat16", "--optimizer.ema_decay=0.99",
    ),
    "8 layers of width 1,536, 4 rows of 256": (
        "--model.num_layers=8", "--model.embed_dim=1536", "--model.num_heads=12",
        "--model.mlp_dim=4096", "--data.sequence_length=256", "--global_batch_size=4",
    ),
    "qwen3-0.6b, 1 row of 256, remat dots": (
        "--model=qwen3-0.6b", "--data.sequence_length=256", "--global_batch_size=1",
        "--remat=dots",
    ),
}  # fmt: skip
"""What it is -> flags; a state of 1 GB or more each."""
MESHES = (
    *("fsdp:8", "data:8", "tensor:8", "data:2,fsdp:4", "data:4,fsdp:2"),
    *("fsdp:4,tensor:2", "data:4,tensor:2", "data:2,tensor:4", "data:2,fsdp:2,tensor:2"),
)
MESH_FLAGS = (
    "--num_cpu_devices=8", "--model.num_layers=4", "--model.embed_dim=512", "--model.num_heads=8",
    "--model.mlp_dim=1536", "--data.sequence_length=128", "--global_batch_size=32",
)  # fmt: skip
MESH_STEPS, MESH_ROUNDS = 6, 3
GPU = {
    "gpt2, 8 rows of 1,024": ("--model=gpt2", "--data.sequence_length=1024"),
    "llama3.2-1b, 8 rows of 2,048": ("--model=llama3.2-1b", "--data.sequence_length=2048"),
}
GPU_FLAGS = ("--global_batch_size=8", "--precision=bfloat16", "--remat=dots")


WATCHED = f"""
import dataclasses, json, resource, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_lm
import jax, jaxtrain
from jaxtrain.main import main
jaxtrain.fit
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def build(config):
    experiment = train_lm.build(config)
    before, ends, memory = peak(), [], {{}}
    def on_step(step, metrics):
        ends.append(time.perf_counter())
        if step == 3:
            memory.update(jax.devices()[0].memory_stats() or {{}}, before=before, after=peak())
        if step == config.num_steps:
            times = [end - begin for begin, end in zip(ends[2:], ends[3:])]
            print(json.dumps({{**memory, "seconds": times}}), flush=True)
    return dataclasses.replace(experiment, on_step=on_step, eval_data=None, on_end=None)
main(train_lm.LmConfig, build, presets={{"model": train_lm.PRESETS}})
"""
"""The experiment, saying at its end what it took: bytes until step 3, seconds of later steps."""


def plan(*flags: str) -> dict[str, Any]:
    """`plan.json` of a run on the devices at hand."""
    with tempfile.TemporaryDirectory() as workdir:
        _run(str(SCRIPT), f"--workdir={workdir}", "--plan=here", *flags)
        return json.loads(pathlib.Path(workdir, "plan.json").read_text())


def measure(*flags: str) -> dict[str, Any]:
    """What a run of its own took; nothing is saved."""
    said = _run("-c", WATCHED, "--workdir=", *flags)
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    return json.loads(line)


def _run(*words: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(
            f"error: {' '.join(words[1:])} ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


def error(predicted: float, measured: float) -> str:
    """Of a prediction, in percent of what was measured."""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def memory() -> tuple[list[str], dict[str, float]]:
    """Lines of the page, and the figures for the last line."""
    lines = [
        "| run on one CPU device | state | peak of the device | of the host | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for name, flags in MEMORY.items():
        planned = plan(*flags)
        found = measure("--num_steps=4", *flags)
        kept = ("parameters", "ema_parameters", "optimizer_state")
        state = sum(planned["memory"].get(key, 0) for key in kept)
        host = planned["host_memory"]
        peak, rise = planned["peak_bytes_per_device"], found["after"] - found["before"]
        predicted = peak + host["batches"] + host["compiler"]
        errors.append(predicted / rise - 1)
        cells = (units.nbytes(size) for size in (state, peak, predicted, rise))
        lines.append(f"| {name} | {' | '.join(cells)} | {error(predicted, rise)} |")
        print(lines[-1], flush=True)
    return lines, {"memory_largest_error": max(errors, key=abs)}


def meshes() -> tuple[list[str], dict[str, float]]:
    """The same, of 8 simulated devices."""
    chosen = plan("--mesh=auto", *MESH_FLAGS)
    first = chosen["flags"][0].removeprefix("--mesh=")
    steps = (f"--num_steps={MESH_STEPS + 3}", *MESH_FLAGS)
    names = list(dict.fromkeys((*MESHES, first)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(MESH_ROUNDS):
        for name in names:
            times[name] += measure(f"--mesh={name}", *steps)["seconds"]
    found = {name: statistics.median(each) for name, each in times.items()}
    planned = {name: plan(f"--mesh={name}", *MESH_FLAGS)["step_seconds"] for name in names}
    fastest = min(found.values())
    lines = [
        f"`--plan=here --mesh=auto` takes `{first}`.",
        "",
        "| mesh of 8 simulated devices | measured | of the fastest | predicted | of the fastest |",
        "|---|---|---|---|---|",
    ]
    best = min(planned.values())
    lines += [
        f"| `{name}` | {units.seconds(found[name])} | {found[name] / fastest:.2f} |"
        f" {units.seconds(planned[name])} | {planned[name] / best:.2f} |"
        for name in sorted(names, key=found.__getitem__)
    ]
    print("\n".join(lines), flush=True)
    return lines, {"choice_over_fastest": found[first] / fastest}


def gpu() -> tuple[list[str], dict[str, float]]:
    """The same, of one GPU."""
    lines = [
        "| run on one GPU | predicted peak | measured | error | predicted step | measured | error"
        " |",
        "|---|---|---|---|---|---|---|",
    ]
    errors = []
    for name, flags in GPU.items():
        planned = plan(*flags, *GPU_FLAGS)
        found = measure("--num_steps=13", *flags, *GPU_FLAGS)
        peaks = planned["peak_bytes_per_device"], found["peak_bytes_in_use"]
        times = planned["step_seconds"], statistics.median(found["seconds"])
        errors += [peaks[0] / peaks[1] - 1, times[0] / times[1] - 1]
        cells = (*map(units.nbytes, peaks), error(*peaks))
        cells += (*map(units.seconds, times), error(*times))
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines, {"gpu_largest_error": max(errors, key=abs)}


PARTS = {"memory": memory, "meshes": meshes, "gpu": gpu}


def main() -> None:
    names = sys.argv[1:] or ["memory", "meshes"]
    if unknown := set(names) - set(PARTS):
        sys.exit(f"error: there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    sections = {}
    if PAGE.exists():
        for section in PAGE.read_text().split("\n## ")[1:]:
            title, _, text = section.partition("\n")
            sections[title] = text.strip()
    result: dict[str, float] = {}
    commit = stamp.commit()
    for name in names:
        lines, figures = PARTS[name]()
        where = f"{datetime.date.today()}, commit {commit}, {len(os.sched_getaffinity(0))} cores"
        sections[name.capitalize()] = "\n".join([f"{where}.", "", *lines])
        result |= {key: round(value, 3) for key, value in figures.items()}
    text = [PAGE_HEAD, *(f"## {title}\n\n{body}\n" for title, body in sections.items())]
    PAGE.write_text("\n".join(text))
    print(json.dumps(result))


PAGE_HEAD = """# Do plans come true on the machine at hand?

Made by `python scripts/bench_plan.py`, whose beginning says what is measured and how.
"""


if __name__ == "__main__":
    main()
