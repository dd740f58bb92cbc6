#!/usr/bin/env bash
# Plans large runs for large machines and stores what it took: the plans too long for CI.
# Usage: bash scripts/plan_suite.sh [NAME ...]     without names: all of them, one after the other
#
# Needs the extras plan and tpu (`bash scripts/setup.sh plan tpu`). Each plan goes to
# runs/plan_suite/NAME; docs/plan_suite.md is made of those that are there. Ends with one line of
# JSON, and with 1 if a plan did not end as it should.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] || bash scripts/setup.sh plan tpu
export JAX_PLATFORMS=cpu
exec .venv/bin/python - "$@" <<'PYTHON'
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

from jaxtrain import units
from scripts.stamp import commit

ROOT = pathlib.Path("runs/plan_suite")
COMMON = ("--data.sequence_length=8192", "--precision=bfloat16")
AUTO = "--mesh=auto"
FULL = "--remat=full"
# name: (model, target, batch, flags, exit code, longest time in seconds)
CASES = {
    "8b-1x8-fsdp": ("llama3-8b", "h100:1x8", 8, ("--mesh=fsdp:8", FULL), 0, 180),
    "8b-16x8-fsdp": ("llama3-8b", "h100:16x8", 128, ("--mesh=fsdp:-1", FULL), 0, 180),
    "8b-1x8-auto": ("llama3-8b", "h100:1x8", 8, (AUTO,), 0, 600),
    "8b-32x8-auto": ("llama3-8b", "h100:32x8", 256, (AUTO,), 0, 600),
    "8b-a100-auto": ("llama3-8b", "a100-80:8x8", 64, (AUTO,), 0, 600),
    "70b-1x8-auto": ("llama3-70b", "h100:1x8", 8, (AUTO,), 2, 600),
    "70b-32x8-auto": ("llama3-70b", "h100:32x8", 256, (AUTO,), 0, 600),
    "70b-a100-auto": ("llama3-70b", "a100-80:8x8", 64, (AUTO,), 0, 600),
    "8b-v5p-auto": ("llama3-8b", "tpu-v5p:4x4x8", 128, (AUTO,), 0, 600),
    "70b-2048x8": (
        "llama3-70b", "h100:2048x8", 2048, ("--mesh=data:64,fsdp:32,tensor:8", FULL), 0, 180,
    ),
    "70b-16384x8": (
        "llama3-70b", "h100:16384x8", 16384, ("--mesh=data:512,fsdp:32,tensor:8", FULL), 0, 600,
    ),
}  # fmt: skip


def run(name):
    model, target, rows, flags, *_ = CASES[name]
    words = [f"--model={model}", f"--plan={target}", f"--global_batch_size={rows}", *flags]
    directory = ROOT / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").unlink(missing_ok=True)
    begin = time.monotonic()
    with open(directory / "log", "w") as log:
        command = [sys.executable, "experiments/train_lm.py", f"--workdir={directory}"]
        process = subprocess.Popen([*command, *words, *COMMON], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    result = {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": usage.ru_maxrss * 1024,
        "load": os.getloadavg()[1],
        "flags": words,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    (directory / "result.json").write_text(json.dumps(result))


def row(name):
    """The case's line of the table, and whether it ended as it should."""
    model, target, rows, flags, code, limit = CASES[name]
    directory = ROOT / name
    result = json.loads((directory / "result.json").read_text())
    is_good = result["code"] == code
    cells = [name, model, target, str(rows), " ".join(f"`{flag}`" for flag in flags)]
    if (directory / "plan.json").exists():
        plan = json.loads((directory / "plan.json").read_text())
        chosen = " ".join(flag.removeprefix("--") for flag in plan["choice"])
        peak, has = units.nbytes(plan["peak_bytes_per_device"]), units.nbytes(plan["device_bytes"])
        hosts = plan["min_hosts"]
        cells += [
            "fits" if plan["fits"] else "refused",
            chosen,
            f"{peak} of {has}",
            units.seconds(plan["step_seconds"]),
            "" if plan["mfu"] is None else f"{plan['mfu']:.1%}",
            str(hosts or "-"),
            str(max(len(plan["ranking"]), 1)),
        ]
    else:
        cells += ["failed", *[""] * 6]
    spent = f"{result['seconds']:.0f} s" + " (too long)" * (result["seconds"] > limit)
    cpu = f"{result['cpu_seconds']:.0f} s" if "cpu_seconds" in result else ""
    cells += [spent, cpu, f"{result['load']:.0f}", units.nbytes(result["max_rss_bytes"])]
    cells += [result["commit"], result["date"]]
    return "| " + " | ".join(cells) + " |", is_good


def reasons(name):
    plan = ROOT / name / "plan.json"
    if not plan.exists():
        return []
    ranking = json.loads(plan.read_text())["ranking"]
    refusals = [w for w in json.loads(plan.read_text())["warnings"] if w["kind"] == "does_not_fit"]
    lines = [f"{place}. {ranked['reason']}" for place, ranked in enumerate(ranking, start=1)]
    lines += [f"- {warned['text']}" for warned in refusals]
    return ["", f"**{name}**", "", *lines] if lines else []


names = sys.argv[1:] or list(CASES)
for unknown in set(names) - set(CASES):
    sys.exit(f"error: there is no plan {unknown!r}; the plans are {', '.join(CASES)}")
for name in names:
    run(name)
there = [name for name in CASES if (ROOT / name / "result.json").exists()]
rows = {name: row(name) for name in there}
machine = f"{len(os.sched_getaffinity(0))} cores"
lines = [
    "# Do large plans come out, and how long do they take?",
    "",
    f"Made by `bash scripts/plan_suite.sh` on {machine}; sequence length 8,192, bfloat16. Nothing",
    "ran: every step time is a prediction. *Compiled* counts the programs of the ranking; the",
    "search for the fewest hosts compiles up to three more. *Load* is what the machine was busy",
    "with besides: above its number of cores a plan waits for other work. A *commit* with",
    "`+changes` is the one below a tree with edits that were not committed: such a row may differ",
    "from what the commit itself gives.",
    "",
    "| name | model | target | batch | asked for | outcome | chosen | memory per device | step | of"
    " peak | fewest hosts | compiled | planned in | of it CPU | load | resident | commit | date |",
    "|" + "---|" * 18,
    *(line for line, _ in rows.values()),
    "",
    "## Why",
    *(line for name in there for line in reasons(name)),
]
pathlib.Path("docs/plan_suite.md").write_text("\n".join(lines) + "\n")
bad = [name for name, (_, is_good) in rows.items() if not is_good]
print(json.dumps({"plans": len(there), "failed": bad}))
sys.exit(bool(set(bad) & set(names)))
PYTHON
