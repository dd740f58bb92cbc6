"""What lm-eval found, as records of metrics.jsonl and as a table to print."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import units
from jaxtrain.metrics import task_metrics

__all__ = ["table", "task_records"]


def task_records(
    results: Mapping[str, Any], step: int, facts: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One record for each task and group.

    Args:
        results: what `simple_evaluate` returned.
        step: of the checkpoint.
        facts: what else the records say, of `jaxtrain.metrics.TASK_FACTS`.
    """
    records = []
    for task, values in results["results"].items():
        metrics = {
            _metric(name): float(value)
            for name, value in values.items()
            if "," in name and isinstance(value, int | float)
        }
        if not metrics:
            continue
        record = {"step": step, "eval": True, "task": task}
        if task in results.get("versions", {}):
            record["task_version"] = str(results["versions"][task])
        if task in results.get("n-shot", {}):
            record["num_fewshot"] = int(results["n-shot"][task])
        if task in results.get("n-samples", {}):
            record["samples"] = int(results["n-samples"][task]["effective"])
        records.append(record | dict(facts) | metrics)
    return records


def _metric(name: str) -> str:
    """acc,none is acc; acc_stderr,strict-match is acc,strict-match_stderr."""
    name, _, chosen = name.partition(",")
    is_error = name.endswith("_stderr")
    name = name.removesuffix("_stderr") + ("" if chosen == "none" else f",{chosen}")
    return name + "_stderr" * is_error


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The metrics of records, one to a line."""
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "+-", "shots", "questions")]
    for record in records:
        shown = [str(record.get(name, "-")) for name in ("num_fewshot", "samples")]
        for number, (metric, value, error) in enumerate(task_metrics(record)):
            task = record["task"] if number == 0 else ""
            rows.append((task, metric, units.number(value), units.number(error), *shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        texts, numbers = row[:2], row[2:]
        cells = [f"{text:<{width}}" for text, width in zip(texts, widths, strict=False)]
        cells += [f"{text:>{width}}" for text, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
