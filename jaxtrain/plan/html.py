"""plan.html: a plan on one page, from `plan.json` alone, in the style of the run's report.

The page is self-contained: inline SVG and CSS, no JavaScript, nothing fetched. `page` takes what
`Plan.to_json` returns, or what a `plan.json` holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jaxtrain
from jaxtrain import report_tables, units
from jaxtrain.charts import stacked_bar
from jaxtrain.mesh import format_sizes
from jaxtrain.report_run import Run

_WIDTH = 1030  # in pixels, of a chart as wide as the page
_HEIGHT = 34

_CLASSES = {
    "parameters": ("s1", "stored, as the layout splits them"),
    "ema_parameters": ("s6", "their moving average"),
    "gradients": ("s2", "summed in float32"),
    "optimizer_state": ("s4", "moments and counters"),
    "model_state": ("s8", "what the model carries besides parameters"),
    "batch": ("s7", "the rows of a step"),
    "activations_and_temporaries": ("s3", "kept for the backward pass, and work space"),
    "reserve": ("s5", "gaps between temporaries"),
}
_PHASES = {
    "forward": "s1",
    "loss": "s6",
    "remat": "s3",
    "backward": "s4",
    "update": "s7",
}
_WAIT = "s2"
_FREE = "s9"
_HIDDEN = "s8"


def page(plan: Mapping[str, Any]) -> str:
    """The whole page."""
    style = Path(jaxtrain.__file__).with_name("report.css").read_text(encoding="ascii")
    sections = (
        _header(plan),
        _tiles(plan),
        _flags(plan),
        _warnings(plan),
        _ranking(plan),
        _memory(plan),
        _step(plan),
        _layout(plan),
    )
    title = escape(f"plan for {plan['target']}")
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} - jaxtrain</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Made by jaxtrain from the compiled step; nothing ran. "
        "Times are predictions: docs/planning.md has the formula and how far it was off.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


# Upper part ----------------------------------------------------------------------------------


def _header(plan: Mapping[str, Any]) -> str:
    pill = '<span class="pill good">fits</span>'
    if not plan["fits"]:
        pill = '<span class="pill bad">does not fit</span>'
    if plan["fused_attention"] is False:
        pill += '<span class="pill warn">unfused attention</span>'
    if plan["is_estimate"]:
        pill += '<span class="pill warn">estimate</span>'
    facts = [plan["description"], *_choice(plan["flags"])]
    text = " &middot; ".join(escape(fact) for fact in facts)
    return f'<h1>plan for {escape(plan["target"])}</h1>\n<p class="lead">{pill}{text}</p>'


def _choice(flags: Sequence[str]) -> list[str]:
    """The flags without dashes, as facts."""
    return [flag.removeprefix("--").replace("_", " ").replace("=", " ", 1) for flag in flags]


def _tiles(plan: Mapping[str, Any]) -> str:
    shown = []
    if plan["step_seconds"]:
        low, high = (units.seconds(value) for value in plan["step_seconds_range"])
        shown.append(("Step", units.seconds(plan["step_seconds"]), f"between {low} and {high}"))
    if rate := plan["tokens_per_second_per_device"]:
        per_day = units.count(rate * plan["num_devices"] * 86_400)
        note = f"per device; {per_day} tokens per day"
        shown.append(("Throughput", f"{units.count(rate)} tokens/s", note))
    if plan["mfu"]:
        shown.append(("Utilisation", f"{plan['mfu']:.1%}", "of the devices' peak FLOP/s"))
    peak, has = plan["peak_bytes_per_device"], plan["device_bytes"]
    share = f"{peak / has:.0%} of {units.nbytes(has)}" if has else ""
    shown.append(("Memory per device", units.nbytes(peak), share))
    uses = ", ".join(f"{name} {units.nbytes(size)}" for name, size in plan["host_memory"].items())
    shown.append(("Memory per host", units.nbytes(plan["host_bytes"]), uses))
    if plan["min_hosts"]:
        note = f"of {plan['devices_per_host']} devices, at this batch and length"
        shown.append(("Hosts at least", str(plan["min_hosts"]), note))
    tiles = "".join(_tile(*tile) for tile in shown)
    return f'<div class="tiles" style="--columns:{len(shown)}">{tiles}</div>'


def _tile(name: str, text: str, note: str) -> str:
    value, _, unit = text.partition(" ")
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}{small}</div>'
        f'<div class="more">{escape(note)}</div></div>'
    )


def _flags(plan: Mapping[str, Any]) -> str:
    return f"<h2>Flags to copy</h2>\n<pre><code>{escape(' '.join(plan['flags']))}</code></pre>"


def _warnings(plan: Mapping[str, Any]) -> str:
    if not plan["warnings"]:
        return ""
    rows = "".join(
        f'<tr><td class="key"><b class="warn">{escape(warned["kind"].replace("_", " "))}</b></td>'
        f"<td>{escape(warned['text'])}</td></tr>"
        for warned in plan["warnings"]
    )
    return f"<h2>Warnings</h2>\n<table>{rows}</table>"


def _ranking(plan: Mapping[str, Any]) -> str:
    if not plan["ranking"]:
        return ""
    slowest = max(ranked["step_seconds"] or 0.0 for ranked in plan["ranking"]) or 1.0
    columns = {
        "": "number", "choice": "key", "step": "number", "memory per device": "number",
        "why": "note",
    }  # fmt: skip
    rows = []
    for place, ranked in enumerate(plan["ranking"], start=1):
        step, peak = ranked["step_seconds"] or 0.0, ranked["peak_bytes_per_device"]
        has = ranked["device_bytes"] or 1
        style = "" if ranked["fits"] else ' class="bad"'
        names = ", ".join(_choice(ranked["choice"]))
        rows.append(
            (
                str(place),
                escape(names),
                f"{units.seconds(step)}{_meter(step / slowest)}",
                f"<span{style}>{units.nbytes(peak)}</span>{_meter(peak / has)}",
                escape(ranked["reason"]),
            )
        )
    return (
        "<h2>Ranked meshes</h2>\n"
        f"<p>{plan['num_considered']} combinations of mesh, remat and micro-batches were estimated,"
        f" {len(plan['ranking'])} compiled for the target.</p>"
        f"{_table(columns, rows)}{_estimates(plan)}"
    )


def _estimates(plan: Mapping[str, Any]) -> str:
    columns = {
        "mesh": "", "remat": "", "micro-batches": "number", "step": "number",
        "memory per device": "number",
    }  # fmt: skip
    rows = (
        (
            format_sizes(row["mesh"]),
            escape(row["remat"]),
            str(row["accumulate_steps"]),
            units.seconds(row["step_seconds"]),
            units.nbytes(row["bytes_per_device"]),
        )
        for row in plan["estimates"]
    )
    return (
        "<details><summary>the fastest of the estimates (not compiled)</summary>"
        f"{_table(columns, rows)}</details>"
    )


def _meter(share: float) -> str:
    return f'<span class="meter"><i style="width:{min(share, 1.0):.0%}"></i></span>'


# Memory --------------------------------------------------------------------------------------


def _memory(plan: Mapping[str, Any]) -> str:
    peak, has = plan["peak_bytes_per_device"], plan["device_bytes"]
    parts = [(_said(name), _CLASSES[name][0], size) for name, size in plan["memory"].items()]
    if has > peak:
        parts.append(("free", _FREE, has - peak))
    bar = stacked_bar(parts, width=_WIDTH, height=_HEIGHT, limit=has)
    rows = "".join(
        _row(_said(name), _CLASSES[name][0], units.nbytes(size), size / peak, _CLASSES[name][1])
        for name, size in plan["memory"].items()
    )
    style = "" if peak <= has else ' class="bad"'
    return (
        "<h2>Memory of a device</h2>\n"
        f'<figure class="card">{bar}'
        f"<figcaption>The bar is what the run has of a device: {escape(plan['device_text'])}."
        f'</figcaption><div class="wide"><table class="memory"><tr><th></th>'
        f'<th class="number">bytes</th><th class="number">share</th><th></th></tr>{rows}'
        f'<tr class="total"><td>peak</td><td class="number"><span{style}>{units.nbytes(peak)}'
        f'</span></td><td></td><td class="note">of {units.nbytes(has)}</td></tr></table></div>'
        f"</figure>\n{_buffers(plan)}"
    )


def _buffers(plan: Mapping[str, Any]) -> str:
    if not plan["buffers"]:
        return ""
    columns = {"bytes": "number", "array": "key", "class": "", "line": "", "scope": "note"}
    rows = (
        (
            units.nbytes(buffer["num_bytes"]),
            f"<code>{escape(buffer['shape'])}</code>",
            escape(_said(buffer["memory_class"])),
            f"<code>{escape(buffer['source'] or '-')}</code>",
            f"<code>{escape(buffer['op_name'])}</code>",
        )
        for buffer in plan["buffers"]
    )
    return (
        "<details><summary>the largest temporaries at the peak, and the code they are from"
        f"</summary>{_table(columns, rows)}</details>"
    )


# Time ----------------------------------------------------------------------------------------


def _step(plan: Mapping[str, Any]) -> str:
    step = plan["step_seconds"]
    if not step:
        return ""
    phases = [name for name in _PHASES if name in plan["phases"]]
    parts = []
    for name in phases:
        kernels, waits = plan["phases"][name]
        parts += [(name, _PHASES[name], kernels), ("waiting", _WAIT, waits)]
    parts = [part for part in parts if part[2] > 0]
    lanes = [("all work", stacked_bar(parts, width=_WIDTH, height=_HEIGHT, limit=step))]
    for axis, time in plan["communication"].items():
        hidden = max(time["seconds"] - time["exposed_seconds"], 0.0)
        links = [("hidden", _HIDDEN, hidden), ("exposed", _WAIT, time["exposed_seconds"])]
        bar = stacked_bar(links, width=_WIDTH, height=18, limit=step)
        lanes.append((f"communication over {axis}", bar))
    figures = "".join(f"<h3>{escape(name)}</h3>{bar}" for name, bar in lanes)
    rows = "".join(
        _row(name, _PHASES[name], units.seconds(kernels), kernels / step, _waits(waits))
        for name, (kernels, waits) in ((name, plan["phases"][name]) for name in phases)
    )
    exposed = plan["exposed_seconds"]
    rows += _row("waiting", _WAIT, units.seconds(exposed), exposed / step, "exposed communication")
    return (
        "<h2>Time of a step</h2>\n"
        f'<figure class="card timeline">{figures}<div class="wide"><table class="time">'
        f'<tr><th></th><th class="number">time</th><th class="number">share</th><th></th></tr>'
        f"{rows}"
        f'<tr class="total"><td>step</td><td class="number">{units.seconds(step)}</td><td></td>'
        f'<td class="note">{_kernels(plan)}</td></tr></table></div></figure>\n{_links(plan)}'
    )


def _waits(seconds: float) -> str:
    return f"and {units.seconds(seconds)} of waiting for communication" if seconds > 1e-6 else ""


def _kernels(plan: Mapping[str, Any]) -> str:
    return (
        f"matrix units {units.seconds(plan['matmul_seconds'])}, memory traffic"
        f" {units.seconds(plan['memory_seconds'])}, of which the larger counts in each kernel"
    )


def _links(plan: Mapping[str, Any]) -> str:
    if not plan["communication"]:
        return ""
    columns = {
        "communication over": "", "sent by a device": "number", "time": "number",
        "exposed": "number",
    }  # fmt: skip
    rows = (
        (
            escape(axis),
            units.nbytes(time["bytes_sent_per_device"]),
            units.seconds(time["seconds"]),
            units.seconds(time["exposed_seconds"]),
        )
        for axis, time in plan["communication"].items()
    )
    return _table(columns, rows, style="wide below")


def _layout(plan: Mapping[str, Any]) -> str:
    name = f"plan for {plan['target']}"
    return report_tables.layout(Run(name, [], [], {}, {}, plan["audit"], []))


def _table(
    columns: Mapping[str, str], rows: Iterable[Sequence[str]], *, style: str = "wide"
) -> str:
    """A table of cells that are HTML already.

    Args:
        columns: name -> class of its cells.
        rows: one cell for each column.
        style: class of the box around it.
    """

    def cell(tag: str, text: str, kind: str) -> str:
        return f'<{tag} class="{kind}">{text}</{tag}>' if kind else f"<{tag}>{text}</{tag}>"

    # Over numbers a name stands to the right as they do.
    head = (cell("th", name, kind * (kind == "number")) for name, kind in columns.items())
    lines = ["".join(head)]
    lines += ["".join(map(cell, ["td"] * len(row), row, columns.values())) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="{style}"><table>{body}</table></div>'


def _row(name: str, style: str, value: str, share: float, note: str) -> str:
    return (
        f'<tr><td class="key"><span class="swatch {style}"></span>{escape(name)}</td>'
        f'<td class="number">{value}</td><td class="number">{share:.1%}</td>'
        f'<td class="note">{escape(note)}</td></tr>'
    )


def _said(name: str) -> str:
    return name.replace("_", " ")
