"""Predicts the speed of published training runs and compares it with what was measured there.

    python scripts/plan_published.py [NAME ...]        without names: all of them

Needs the extra plan (`bash scripts/setup.sh plan`). Every run is planned by
`experiments/train_lm.py --plan` in a process of its own, 20 to 60 seconds each on 2 cores, into
runs/plan_published/NAME; docs/plan_published.md is made of those that are there. The last line is
JSON; ends with 1 if a prediction is further from the measurement than `jaxtrain.plan.cost.RANGE`,
but for those of runs with old attention kernels.
"""

import datetime
import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import stamp

from jaxtrain.plan import cost

ROOT = pathlib.Path(__file__).parents[1]
PLANS = ROOT / "runs" / "plan_published"
PAGE = ROOT / "docs" / "plan_published.md"


HELD_OUT, OLD_ATTENTION = "held out", "old attention"


class Run(NamedTuple):
    """A run that somebody measured."""

    model: str
    target: str
    sequence_length: int
    rows: int
    """Of a micro-batch on each device."""
    accumulate_steps: int
    remat: str
    """What comes nearest to the source's."""
    tokens_per_second: int
    """Per device, as published."""
    use: str
    """`chosen on it`: the efficiencies were; `held out`: it tests them; `old attention`: it ran an
    attention kernel that the formula does not know."""
    source: int


# MPT: GPT-2 without biases, d_model, heads and layers from the source's configurations.
_MPT = {
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}
RUNS = {
    "llama-8b-8": Run("llama3-8b", "h100-96:1x8", 8192, 2, 1, "full", 6667, "chosen on it", 1),
    "llama-8b-128": Run("llama3-8b", "h100-96:16x8", 8192, 2, 1, "full", 6514, "chosen on it", 1),
    "mpt-7b-a100": Run("mpt-7b", "a100-80:1x8", 2048, 6, 2, "dots", 4641, "chosen on it", 2),
    "mpt-7b": Run("mpt-7b", "h100:1x8", 2048, 6, 1, "dots", 10643, "chosen on it", 2),
    "mpt-1b": Run("mpt-1b", "h100:1x8", 2048, 14, 1, "dots", 45455, "held out", 2),
    "mpt-3b-64": Run("mpt-3b", "h100:8x8", 2048, 6, 3, "dots", 22525, "held out", 2),
    "mpt-13b-64": Run("mpt-13b", "h100:8x8", 2048, 2, 1, "dots", 4800, "held out", 2),
    "mpt-30b-16": Run("mpt-30b", "h100:2x8", 2048, 10, 3, "full", 2263, "held out", 2),
    "mpt-70b-64": Run("mpt-70b", "h100:8x8", 2048, 8, 4, "full", 1039, "held out", 2),
    "mpt-7b-8k": Run("mpt-7b", "h100:1x8", 8192, 8, 2, "full", 6935, "old attention", 2),
    "mpt-7b-32k": Run("mpt-7b", "h100:1x8", 32768, 2, 2, "full", 3318, "old attention", 2),
    "mpt-7b-8k-a100": Run("mpt-7b", "a100-80:1x8", 8192, 8, 2, "full", 3206, "held out", 2),
    "mpt-7b-32k-a100": Run("mpt-7b", "a100-80:1x8", 32768, 2, 2, "full", 1672, "old attention", 2),
    "mpt-3b-a100": Run("mpt-3b", "a100-80:1x8", 2048, 10, 2, "dots", 10811, "held out", 2),
    "mpt-13b-a100": Run("mpt-13b", "a100-80:1x8", 4096, 10, 3, "full", 2060, "held out", 2),
    "mpt-7b-a100-128": Run("mpt-7b", "a100-40:16x8", 2048, 18, 1, "full", 3623, "held out", 2),
}
"""Name -> run; bfloat16, fused attention, AdamW and fully sharded parameters all of them."""


def flags(run: Run) -> list[str]:
    """Of the run, as `experiments/train_lm.py` takes them."""
    hosts, per_host = map(int, run.target.partition(":")[2].split("x"))
    rows = hosts * per_host * run.rows * run.accumulate_steps
    words = [f"--model={run.model}"]
    if run.model in _MPT:
        layers, width, heads = _MPT[run.model]
        words = ["--model=gpt2", "--model.vocab_size=50368", "--nomodel.use_bias"]
        words += [f"--model.num_layers={layers}", f"--model.embed_dim={width}"]
        words += [f"--model.num_heads={heads}", f"--model.mlp_dim={4 * width}"]
        words += [f"--model.max_length={run.sequence_length}"]
    return [
        *(f"--plan={run.target}", f"--mesh=fsdp:{hosts * per_host}", *words),
        *(f"--data.sequence_length={run.sequence_length}", f"--global_batch_size={rows}"),
        *(f"--accumulate_steps={run.accumulate_steps}", f"--remat={run.remat}"),
        "--precision=bfloat16",
    ]


def plan(name: str) -> None:
    """Plans a run; what it says goes into its directory."""
    directory = PLANS / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").unlink(missing_ok=True)
    script = str(ROOT / "experiments" / "train_lm.py")
    with open(directory / "log", "w") as log:
        words = [sys.executable, script, f"--workdir={directory}", *flags(RUNS[name])]
        # Ends with 2 when it does not fit; what came out is read from the file.
        subprocess.run(words, stdout=log, stderr=log, cwd=ROOT, check=False)
    (directory / "flags.json").write_text(json.dumps(flags(RUNS[name])))


def error(name: str, planned: dict[str, Any]) -> float:
    """Of the prediction, as a share of the measurement."""
    return planned["tokens_per_second_per_device"] / RUNS[name].tokens_per_second - 1


def row(name: str, planned: dict[str, Any]) -> str:
    """A run's line of the table."""
    run = RUNS[name]
    cells = [
        *(f"`{name}`", run.model, run.target, str(run.source)),
        f"{run.accumulate_steps} x {run.rows} of {run.sequence_length:,}",
        run.remat,
        f"{run.tokens_per_second:,}",
        f"{planned['tokens_per_second_per_device']:,.0f}",
        f"{error(name, planned):+.0%}",
        run.use,
        "" if planned["fits"] else "does not fit",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    names = sys.argv[1:] or list(RUNS)
    if unknown := set(names) - set(RUNS):
        sys.exit(f"error: there is no run {', '.join(unknown)}; the runs are {', '.join(RUNS)}")
    for name in names:
        plan(name)
        print(name, flush=True)
    plans = {}
    for name in RUNS:
        path = PLANS / name / "plan.json"
        if path.exists() and json.loads((path.parent / "flags.json").read_text()) == flags(
            RUNS[name]
        ):
            plans[name] = json.loads(path.read_text())
    errors = {name: error(name, planned) for name, planned in plans.items()}
    known = {name: abs(found) for name, found in errors.items() if RUNS[name].use != OLD_ATTENTION}
    held_out = [found for name, found in known.items() if RUNS[name].use == HELD_OUT]
    head = [
        "# How fast would published runs be?",
        "",
        f"Made by `python scripts/plan_published.py`, {datetime.date.today()}, commit"
        f" {stamp.commit()}.",
        "What is compared and what differs from the sources is in [planning.md](planning.md).",
        "",
        "| run | model | target | source | rows per device | remat | published | predicted | error"
        " | | |",
        "|" + "---|" * 11,
    ]
    PAGE.write_text("\n".join([*head, *(row(*item) for item in plans.items())]) + "\n")
    result = {
        "runs": len(plans),
        "largest_error": max(known.values(), default=None),
        "largest_error_held_out": max(held_out, default=None),
        "failed": [name for name in names if name not in plans],
    }
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}))
    sys.exit(bool(result["failed"]) or (result["largest_error"] or 0) > cost.RANGE - 1)


if __name__ == "__main__":
    main()
