"""The report's lower half: tasks, the layout of the state, environment and configuration."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxtrain import units
from jaxtrain.metrics import TASK_FACTS, task_metrics
from jaxtrain.report_run import Run, is_number

_ASKED = ("num_fewshot", "samples", "step")


def tasks(run: Run) -> str:
    """Results of `jaxtrain eval`; of the same question at the same step the newest."""
    newest = {}
    for record in run.tasks:
        facts = [(name, record.get(name)) for name in TASK_FACTS if name != "samples"]
        newest[tuple(facts)] = record
    rows = []
    for record in sorted(newest.values(), key=lambda record: str(record["task"])):
        name = f"<code>{escape(str(record['task']))}</code>"
        notes = [f"limit {record['limit']}"] if "limit" in record else []
        notes += [name for name in ("ema", "apply_chat_template") if record.get(name)]
        asked = "".join(f'<td class="number">{record.get(fact, "-")}</td>' for fact in _ASKED)
        for metric, value, error in task_metrics(record):
            spread = f" &plusmn; {units.number(error)}" if is_number(error) else ""
            rows.append(
                f'<tr><td>{name}</td><td class="key">{escape(metric)}</td>'
                f'<td class="number">{units.number(value)}{spread}</td>{asked}'
                f'<td class="note">{escape(", ".join(notes))}</td></tr>'
            )
    if not rows:
        return ""
    heads = "".join(f'<th class="number">{name}</th>' for name in ("shots", "questions", "step"))
    return (
        '<h2>Tasks</h2>\n<div class="wide"><table><tr><th>task of lm-eval</th><th>metric</th>'
        f'<th class="number">value</th>{heads}<th></th></tr>{"".join(rows)}</table></div>'
    )


def layout(run: Run) -> str:
    """Memory per device and the sharding table."""
    rows = run.audit.get("rows") or []
    memory = run.run.get("memory") or {}
    if not rows and not memory:
        return ""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("path", "")).partition("/")[0], []).append(row)
    tables = []
    for name, members in groups.items():
        size = sum(row.get("bytes_per_device") or 0 for row in members)
        arrays = "1 array" if len(members) == 1 else f"{len(members)} arrays"
        title = f"{escape(name)}: {arrays}, {units.nbytes(size)} per device"
        is_open = " open" if name == "params" or len(groups) == 1 else ""
        tables.append(
            f"<details{is_open}><summary>{title}</summary>{_sharding_table(members)}</details>"
        )
    return (
        f"<h2>Layout and memory</h2>\n{_layout_line(run)}"
        f'<div class="two">{_memory_table(memory)}</div>\n{"".join(tables)}'
    )


def _layout_line(run: Run) -> str:
    share = run.audit.get("replicated_share")
    if share is None:
        return ""
    state, total = run.audit.get("bytes_per_device"), run.audit.get("total_bytes")
    style = "good" if share <= 0.02 else "warn"
    return (
        f"<p>Train state: {units.nbytes(total)} in all, {units.nbytes(state)} on each device; "
        f'<b class="{style}">{share:.1%}</b> is replicated although a rule could shard it.</p>'
    )


def _memory_table(memory: Mapping[str, Any]) -> str:
    meanings = {
        "argument": "state and batch that go into a step",
        "output": "state and metrics that come out",
        "alias": "outputs written over inputs (donated), counted twice above",
        "temp": "activations, gradients and other temporaries",
        "generated_code": "the program",
        "peak": "the most that is in use at one moment",
        "total": "argument + output - alias + temp",
    }
    rows = [
        f'<tr{" class=total" * (name == "total")}><td class="key">{escape(name)}</td>'
        f'<td class="number">{units.nbytes(size)}</td>'
        f'<td class="note">{escape(meanings.get(name, ""))}</td></tr>'
        for name, size in memory.items()
        if is_number(size)
    ]
    if not rows:
        return ""
    return (
        '<div class="wide"><table><tr><th>memory of the compiled step</th>'
        f'<th class="number">per device</th><th></th></tr>{"".join(rows)}</table></div>'
    )


def _sharding_table(rows: Sequence[Mapping[str, Any]]) -> str:
    largest = max((row.get("bytes_per_device") or 0 for row in rows), default=0) or 1
    lines = []
    for row in rows:
        size = row.get("bytes_per_device") or 0
        axes = row.get("logical_axes")
        why = escape(str(row.get("why", "")))
        if row.get("is_needlessly_replicated"):
            why = f'<b class="warn">replicated, could be sharded</b>: {why}'
        shape = ", ".join(map(str, row.get("shape") or ()))
        lines.append(
            f"<tr><td><code>{escape(str(row.get('path', '')).partition('/')[2] or row['path'])}"
            f'</code></td><td class="key"><code>{escape(str(row.get("dtype", "")))}[{shape}]</code>'
            f"</td><td>{escape(' '.join(str(axis or '-') for axis in axes) if axes else '-')}</td>"
            f"<td><code>{escape(str(row.get('spec', '')))}</code></td>"
            f'<td class="number">{units.nbytes(size)}<span class="meter">'
            f'<i style="width:{size / largest:.0%}"></i></span></td>'
            f'<td class="note">{why}</td></tr>'
        )
    return (
        '<div class="wide"><table><tr><th>array</th><th>shape</th><th>logical axes</th>'
        '<th>spec</th><th class="number">per device</th><th>why</th></tr>'
        f"{''.join(lines)}</table></div>"
    )


def setup(run: Run) -> str:
    """What the experiment says about itself, its configuration, its environment."""
    changed, rest = _configuration(run)
    environment = {k: v for k, v in run.environment.items() if k != "command"}
    pairs = [("model and data", run.describe), ("environment", environment)]
    columns = "".join(f"<div>{_pairs(title, them.items())}</div>" for title, them in pairs if them)
    if not columns and not changed and not rest:
        return ""
    parts = ["<h2>Setup</h2>"]
    if command := run.environment.get("command"):
        parts.append(f"<pre><code>{escape(str(command))}</code></pre>")
    if changed:
        parts.append(_changed_table(changed))
    if rest:
        title = "the rest of the configuration" if changed else "configuration"
        parts.append(
            f"<details{'' if changed else ' open'}><summary>{title} ({len(rest)} fields)</summary>"
            f'<div class="two">{_columns(rest)}</div></details>'
        )
    if columns:
        parts.append(f'<div class="two below">{columns}</div>')
    return "\n".join(parts)


def _configuration(run: Run) -> tuple[list[tuple[str, Any, Any]], list[tuple[str, Any]]]:
    """(path, value, default) of the fields that differ from their defaults; the other fields."""
    defaults = run.config.get("changed") or {}
    changed, rest = [], []
    for path, value in _flat(run.fields):
        if path in defaults:
            changed.append((path, value, defaults[path]))
        else:
            rest.append((path, value))
    return changed, rest


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _changed_table(changed: Iterable[tuple[str, Any, Any]]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(path)}</code></td><td><code>{_value(value)}</code></td>"
        f'<td class="note"><code>{_value(default)}</code></td></tr>'
        for path, value, default in changed
    )
    return (
        '<div class="wide below"><table><tr><th>changed from the default</th><th>value</th>'
        f"<th>default</th></tr>{rows}</table></div>"
    )


def _columns(fields: Sequence[tuple[str, Any]]) -> str:
    half = (len(fields) + 1) // 2
    return "".join(_pairs("", part) for part in (fields[:half], fields[half:]) if part)


def _pairs(title: str, pairs: Iterable[tuple[str, Any]]) -> str:
    head = f'<tr><th colspan="2">{escape(title)}</th></tr>' if title else ""
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td><code>{_value(value)}</code></td></tr>"
        for name, value in pairs
    )
    return f"<table>{head}{rows}</table>"


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) and value else json.dumps(value))
