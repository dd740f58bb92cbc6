"""The report's upper half: headline, curves, and where the time went."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from jaxtrain import units
from jaxtrain.charts import Series, line_chart, stacked_areas, stacked_bar
from jaxtrain.progress import extra_metrics, rate_name
from jaxtrain.report_run import Run, is_number
from jaxtrain.throughput import limiting

_WIDTH = 1030  # in pixels, of a chart as wide as the page

_STYLES = {
    "compute": "s1",
    "input wait": "s3",
    "transfer wait": "s4",
    "logging/host": "s5",
    "evaluation": "s6",
    "checkpoint": "s7",
    "compile": "s8",
    "other": "s9",
}

_MEANINGS = {
    "compute": "the devices compute, or the step is being dispatched to them",
    "input wait": "the next batch is still being read",
    "transfer wait": "the next batch is on its way to the devices",
    "logging/host": "Python around the step: logging, writers, hooks",
    "evaluation": "passes over the evaluation data",
    "checkpoint": "saves that held the loop up; the rest of a save passes beside the steps",
    "compile": "compiling the steps, once",
    "other": "start, restore, and what no record accounts for",
}

_ADVICE = {
    "compute": "The devices are the limit, as they should be.",
    "input": "Steps wait for batches that are still being read: more input workers "
    "(--data.num_workers), faster storage or less work per row would make the run faster.",
    "transfer": "Steps wait for batches on their way to the devices: fewer or narrower features "
    "would make the run faster.",
    "logging/host": "Python around the step holds the devices up: log less often "
    "(--log_every_steps), or do less in hooks and writers.",
}


def header(run: Run) -> str:
    """Name, state and the one line that says what ran where."""
    num_steps = run.fields.get("num_steps")
    bad = sum(not is_number(record.get("loss")) for record in run.train)
    if not run.train and not run.evals:
        pill = "" if run.tasks else '<span class="pill warn">no records</span>'
    elif num_steps is None:
        pill = ""
    elif run.last_step < num_steps:
        pill = '<span class="pill warn">not finished</span>'
    else:
        pill = '<span class="pill good">finished</span>'
    if bad:
        text = f"{bad} logged {'loss' if bad == 1 else 'losses'} not finite"
        pill += f'<span class="pill bad">{text}</span>'
    facts = [f"step {run.last_step:,}" + (f" of {num_steps:,}" if num_steps else "")]
    if devices := run.environment.get("devices"):
        facts.append(str(devices))
    if mesh := run.audit.get("mesh"):
        sizes = [f"{axis}:{size}" for axis, size in mesh.items() if size != 1]
        facts.append("mesh " + ",".join(sizes) if sizes else "one device")
    if precision := run.fields.get("precision"):
        facts.append(str(precision))
    text = " &middot; ".join(escape(fact) for fact in facts)
    return f'<h1>{escape(run.name)}</h1>\n<p class="lead">{pill}{text}</p>'


# Tiles ---------------------------------------------------------------------------------------


def tiles(run: Run) -> str:
    """The numbers one looks for first."""
    shown = [*_quality_tiles(run), *_speed_tiles(run)]
    if not shown:
        return ""
    num_columns = max(_even_columns(len(shown), 6), 4)
    return f'<div class="tiles" style="--columns:{num_columns}">{"".join(shown)}</div>'


def _quality_tiles(run: Run) -> list[str]:
    shown = []
    evals = [record for record in run.evals if is_number(record.get("loss"))]
    train = [record for record in run.train if is_number(record.get("loss"))]
    if evals:
        last, best = evals[-1], min(evals, key=lambda record: record["loss"])
        notes = [f"at step {last['step']:,}"]
        if best["loss"] < last["loss"]:
            notes.append(f"best {units.number(best['loss'])} at step {best['step']:,}")
        below = [(value, name) for name, value in run.references() if last["loss"] < value]
        if below:
            value, name = min(below)
            notes.append(f"{units.number(value - last['loss'])} below {name}")
        if is_number(last.get("rows")):
            notes.append(f"{last['rows']:,.0f} rows")
        shown.append(_tile("Evaluation loss", units.number(last["loss"]), "; ".join(notes)))
        shown += [
            _tile(f"Evaluation {name}", units.number(last[name]), f"at step {last['step']:,}")
            for name in extra_metrics(last)
        ]
    if train:
        note = f"at step {train[-1]['step']:,}"
        shown.append(_tile("Training loss", units.number(train[-1]["loss"]), note))
    return shown


def _speed_tiles(run: Run) -> list[str]:
    shown, last = [], run.train[-1] if run.train else {}
    rate = rate_name(last)
    if rates := _numbers(run.train, rate):
        paces = _numbers(run.train, "step_seconds")
        note = f"median; {units.seconds(statistics.median(paces))} a step" if paces else "median"
        unit = rate.removesuffix("_per_second") + "/s"
        shown.append(_tile("Throughput", units.count(statistics.median(rates)), note, unit))
    if mfus := _numbers(run.train, "mfu"):
        note = "median, of the devices' peak FLOP/s"
        shown.append(_tile("Utilisation", f"{statistics.median(mfus):.1%}", note))
    seen = [(name, last[name]) for name in ("tokens", "samples") if is_number(last.get(name))]
    if seen:
        name, value = seen[0]
        note = f"{last['samples']:,} rows" if len(seen) == 2 else ""
        shown.append(_tile(f"{name.capitalize()} seen", units.count(value), note))
    if parts := run.time_parts:
        compiling = parts.get("compile")
        note = f"{units.seconds(compiling)} of it compiling" if compiling else ""
        shown.append(_tile("Time", units.clock(sum(parts.values())), note))
    total, state = (run.run.get("memory") or {}).get("total"), run.audit.get("bytes_per_device")
    if size := total or state:
        note = f"{units.nbytes(state)} of it train state" if total and state else "train state"
        value, _, unit = units.nbytes(size).partition(" ")
        shown.append(_tile("Memory per device", value, note, unit))
    return shown


def _tile(name: str, value: str, note: str = "", unit: str = "") -> str:
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}{small}</div>'
        f'<div class="more">{escape(note)}</div></div>'
    )


def _numbers(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if is_number(record.get(name))]


# Curves --------------------------------------------------------------------------------------


def loss(run: Run) -> str:
    """The loss over the steps, linear and logarithmic."""
    series = [_series(run.train, "loss", "training", "s1")]
    series.append(_series(run.evals, "loss", "evaluation", "s2", markers=True))
    series = [one for one in series if one.finite()]
    if not series:
        return ""
    values = [y for one in series for _, y in one.finite()]
    room = (max(values) - min(values)) or abs(values[0])
    # One that is far from the loss would flatten the curve; it is listed under "model and data".
    references = [
        (name, value)
        for name, value in run.references()
        if min(values) - room <= value <= max(values) + room
    ]
    height, common = 400, {"references": references, "labels": True}
    y_range, above = _focus(series, [value for _, value in references])
    linear = line_chart(
        series,
        width=_WIDTH,
        height=height,
        y_range=y_range,
        description="loss over the steps",
        **common,
    )
    if above:
        note = f"The first steps, up to {units.number(above)}, are above the frame."
        linear += f"<figcaption>{note}</figcaption>"
    points = [point for one in series for point in one.finite()]
    if any(y <= 0 for _, y in points) or sum(x > 0 for x, _ in points) < 2:
        return f'<h2>Loss</h2>\n<figure class="card">{linear}</figure>'
    log = line_chart(
        series,
        width=_WIDTH,
        height=height,
        log=True,
        description="loss over the steps, both axes logarithmic",
        **common,
    )
    return (
        '<h2>Loss</h2>\n<figure class="card tabs">'
        '<input type="radio" name="loss" id="loss-linear" checked>'
        '<label for="loss-linear">linear</label>'
        '<input type="radio" name="loss" id="loss-log"><label for="loss-log">logarithmic</label>'
        f'<div class="pane">{linear}</div><div class="pane">{log}</div></figure>'
    )


def _focus(
    series: Sequence[Series], extra: Sequence[float]
) -> tuple[tuple[float, float] | None, float | None]:
    """The range of y without the steep first steps, and the largest value that it leaves out."""
    points = [point for one in series for point in one.finite()]
    end, highest = max(x for x, _ in points), max(y for _, y in points)
    low = min([*(y for _, y in points), *extra])
    high = max([*(y for x, y in points if x >= 0.02 * end), *extra])
    if highest - low < 1.25 * (high - low) or len(points) < 20:
        return None, None
    room = 0.05 * (high - low)
    return (low - room, high + room), highest


def _series(
    records: Sequence[dict[str, Any]], name: str, label: str, style: str, markers: bool = False
) -> Series:
    points = [
        (float(record["step"]), float(record[name]))
        for record in records
        if isinstance(record.get(name), int | float)
    ]
    return Series(label, style, points, markers)


def curves(run: Run) -> str:
    """Everything else that the records hold, small."""
    names = dict.fromkeys(name for record in run.train[-1:] for name in extra_metrics(record))
    names |= dict.fromkeys(name for record in run.evals[-1:] for name in extra_metrics(record))
    charts = [(name, name, units.number) for name in names]
    rate = rate_name(run.train[-1] if run.train else {})
    charts += [
        ("grad_norm", "gradient norm", units.number),
        ("param_norm", "parameter norm", units.number),
        ("learning_rate", "learning rate", units.number),
        (rate, rate.replace("_", " "), units.count),
        ("mfu", "utilisation (MFU)", lambda value: f"{value:.1%}"),
    ]
    drawn = []
    for name, title, text in charts:
        series = [_series(run.train, name, "training", "s1")]
        series.append(_series(run.evals, name, "evaluation", "s2", markers=True))
        if any(len(one.finite()) > 1 for one in series):
            drawn.append((series, title, text))
    if not drawn:
        return ""
    num_columns = _even_columns(len(drawn), 3)
    width = _WIDTH // num_columns - 30
    cards = "".join(
        f'<figure class="card"><h3>{escape(title)}</h3>'
        f"{line_chart(series, width=width, height=170, format_y=text, description=title)}</figure>"
        for series, title, text in drawn
    )
    return f'<div class="small" style="--columns:{num_columns}">{cards}</div>'


def _even_columns(count: int, most: int) -> int:
    """Columns for as few rows as possible, as even as possible."""
    return math.ceil(count / math.ceil(count / most))


# Time ----------------------------------------------------------------------------------------


def time(run: Run) -> str:
    """Where the time of the run went, and what limits a step."""
    parts = run.time_parts
    total = math.fsum(parts.values())
    if not total:
        return ""
    bar = stacked_bar(
        [(name, _STYLES[name], seconds) for name, seconds in parts.items()],
        width=_WIDTH,
        height=34,
    )
    rows = "".join(
        f'<tr><td class="key"><span class="swatch {_STYLES[name]}"></span>{name}</td>'
        f'<td class="number">{units.seconds(seconds)}</td>'
        f'<td class="number">{seconds / total:.1%}</td><td class="note">{_MEANINGS[name]}</td></tr>'
        for name, seconds in parts.items()
    )
    verdict = _verdict(run)
    return (
        f"<h2>Where the time went</h2>\n{verdict}\n"
        f'<figure class="card">{bar}<div class="wide"><table class="time">'
        f'<tr><th></th><th class="number">time</th><th class="number">share</th><th></th></tr>'
        f'{rows}<tr class="total"><td>total</td><td class="number">{units.seconds(total)}</td>'
        f"<td></td><td></td></tr></table></div></figure>\n{_step_over_time(run)}"
    )


def _verdict(run: Run) -> str:
    names = ("step", "input_wait", "host", "read", "h2d")
    means = {}
    for name in (f"{name}_seconds" for name in names):
        if values := _numbers(run.train, name):
            means[name] = statistics.fmean(values)
    if "step_seconds" not in means:
        return ""
    limit = limiting(means)
    style = "good" if limit == "compute" else "warn"
    return f'<p><b class="{style}">Limited by {limit}.</b> {_ADVICE[limit]}</p>'


def _step_over_time(run: Run) -> str:
    steps = [float(record["step"]) for record in run.train]
    parts = run.step_parts
    if len(steps) < 3 or not any(any(part.values()) for part in parts):
        return ""
    series = [
        Series(name, _STYLES[name], [(x, part[name]) for x, part in zip(steps, parts, strict=True)])
        for name in parts[0]
        if any(part[name] for part in parts)
    ]
    chart = stacked_areas(series, width=_WIDTH, height=190, format_y=units.seconds)
    card = f'<figure class="card"><h3>time of a step</h3>{chart}</figure>'
    return f'<div class="small" style="--columns:1">{card}</div>'
