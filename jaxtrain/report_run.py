"""The files of a run as the report needs them."""

import dataclasses
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.metrics import is_evaluation, read_records
from jaxtrain.throughput import transfer_share


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, read from its workdir. Every file may be missing."""

    name: str
    train: list[dict[str, Any]]
    """Records of training steps, in order."""
    evals: list[dict[str, Any]]
    """Records of evaluations, in order."""
    config: Mapping[str, Any]
    """config.json"""
    run: Mapping[str, Any]
    """run.json"""
    audit: Mapping[str, Any]
    """audit.json"""
    missing: list[str]
    """Files that are not there or cannot be read, with the reason."""
    tasks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Records of tasks of lm-eval, in order."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The resolved configuration, nested."""
        return self.config.get("config") or {}

    @property
    def environment(self) -> Mapping[str, Any]:
        return {**(self.config.get("versions") or {}), **(self.run.get("environment") or {})}

    @property
    def describe(self) -> Mapping[str, Any]:
        """What the experiment says about its model and data."""
        return self.run.get("describe") or {}

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.train + self.evals), default=0)

    def references(self) -> list[tuple[str, float]]:
        """The facts that a loss can be compared with."""
        return [
            (name, float(value))
            for name, value in self.describe.items()
            if is_number(value)
            and any(word in name.lower() for word in ("entropy", "loss", "baseline"))
        ]

    def steps_covered(self) -> list[int]:
        """For each training record, the number of steps that its means are over."""
        steps = [record["step"] for record in self.train]
        gaps = [max(after - before, 1) for before, after in itertools.pairwise(steps)]
        if not steps:
            return []
        # The first record has none before it: as many as usual, but not more than there were.
        usual = round(statistics.median(gaps)) if gaps else steps[0]
        return [max(min(steps[0], usual), 1), *gaps]

    @functools.cached_property
    def step_parts(self) -> list[dict[str, float]]:
        """For each training record with times, seconds per step by what they are spent on."""
        parts = []
        for record in self.train:
            step = positive(record.get("step_seconds"))
            wait = min(positive(record.get("input_wait_seconds")), step)
            host = min(positive(record.get("host_seconds")), step - wait)
            transfer = wait * transfer_share(record)
            parts.append(
                {
                    "compute": step - wait - host,
                    "input wait": wait - transfer,
                    "transfer wait": transfer,
                    "logging/host": host,
                }
            )
        return parts

    @functools.cached_property
    def time_parts(self) -> dict[str, float]:
        """Seconds of the whole run by what they were spent on; empty parts are left out."""
        total: dict[str, float] = {}
        for steps, parts in zip(self.steps_covered(), self.step_parts, strict=True):
            for name, seconds in parts.items():
                total[name] = total.get(name, 0.0) + steps * seconds
        records = [*self.train, *self.evals, self.run]
        total["evaluation"] = sum(positive(r.get("eval_seconds")) for r in records)
        total["checkpoint"] = sum(positive(r.get("checkpoint_seconds")) for r in records)
        total["compile"] = positive(self.run.get("compile_seconds"))
        rest = positive(self.run.get("wall_seconds")) - sum(total.values())
        total["other"] = max(rest, 0.0)
        return {name: seconds for name, seconds in total.items() if seconds > 0}


def read_run(workdir: str | Path) -> Run:
    """Reads what is there."""
    workdir, missing = Path(workdir), []

    def read_json(name: str) -> dict[str, Any]:
        try:
            content = json.loads((workdir / name).read_bytes())
            if not isinstance(content, dict):
                raise ValueError
        except FileNotFoundError:
            missing.append(f"{name} (not there)")
        except ValueError:
            missing.append(f"{name} (not a JSON object)")
        else:
            return content
        return {}

    records = sorted(read_records(workdir / "metrics.jsonl"), key=lambda record: record["step"])
    if not records:
        missing.append("metrics.jsonl (no records)")
    return Run(
        name=workdir.resolve().name,
        train=[record for record in records if not record.get("eval")],
        evals=[record for record in records if is_evaluation(record)],
        config=read_json("config.json"),
        run=read_json("run.json"),
        audit=read_json("audit.json"),
        missing=missing,
        tasks=[record for record in records if "task" in record],
    )


def is_number(value: Any) -> bool:
    """A finite number, and not a truth value."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, since JSON holds integers that no float does.
    return is_numeric and abs(value) <= sys.float_info.max


def positive(value: Any) -> float:
    return float(value) if is_number(value) and value > 0 else 0.0
