"""Charts as inline SVG, drawn from lists of points: no JavaScript, no image, no dependency.

Colours and fonts come from the page's style sheet (`report.css`) through class names, so a chart
follows the light and the dark scheme. A column under the pointer shows its values by CSS alone.
"""

import dataclasses
import itertools
import math
import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from html import escape

from jaxtrain import units
from jaxtrain.chart_scales import (
    Frame,
    Point,
    column_means,
    columns_of,
    nearest,
    padded,
    path,
    smoothed,
    thinned,
    ticks,
)

_MAX_READOUTS = 120


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a chart.

    Args:
        name: shown at its end.
        style: class in the style sheet, "s1" to "s7".
        points: (x, y) in the order of x; a y may be non-finite.
        markers: draw the points themselves, joined; else a smoothed line in the band of its values.
    """

    name: str
    style: str
    points: Sequence[Point]
    markers: bool = False

    def finite(self) -> list[Point]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]


def line_chart(
    series: Sequence[Series],
    *,
    width: int,
    height: int,
    log: bool = False,
    references: Sequence[tuple[str, float]] = (),
    format_y: Callable[[float], str] = units.number,
    y_range: tuple[float, float] | None = None,
    labels: bool = False,
    description: str = "",
) -> str:
    """Lines over the step.

    Args:
        series: at least one with a finite point; others are left out.
        width: in pixels; the chart shrinks with the page.
        height: in pixels.
        log: both axes logarithmic; then points that are not positive are left out.
        references: (name, y) of dashed lines across.
        format_y: text of a value.
        y_range: instead of the range of the values; what lies outside is clipped.
        labels: name each line at its end.
        description: what a screen reader says.
    """
    if log:
        keep = [[(x, y) for x, y in s.points if x > 0 and not y <= 0] for s in series]
        series = [dataclasses.replace(s, points=p) for s, p in zip(series, keep, strict=True)]
    series = [s for s in series if s.finite()]
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.finite()] + [y for _, y in references]
    frame = _framed(
        Frame(
            width,
            height,
            padded(min(xs), max(xs), 0.0, log),
            y_range or padded(min(ys), max(ys), 0.04, log),
            log_x=log,
            log_y=log,
            right=104 if labels else 16,
        ),
        format_y,
    )
    parts = [_axes(frame, format_y)]
    clip = f"c{zlib.crc32(f'{description} {log}'.encode()):x}"
    inner = [_line(frame, s) for s in series]
    inner += [_reference(frame, name, y, series, format_y) for name, y in references]
    box = (
        f'x="{frame.left}" y="{frame.top - 6}" width="{width - frame.left - frame.right + 6}" '
        f'height="{height - frame.top - frame.bottom + 7}"'
    )
    parts.append(f'<clipPath id="{clip}"><rect {box}/></clipPath>')
    parts.append(f'<g clip-path="url(#{clip})">{"".join(inner)}</g>')
    parts += [_bad_values(frame, s) for s in series]
    if labels:
        parts.append(_end_labels(frame, series, format_y))
    parts.append(_readouts(frame, series, format_y))
    return _svg(width, height, "".join(parts), description)


def stacked_areas(
    series: Sequence[Series], *, width: int, height: int, format_y: Callable[[float], str]
) -> str:
    """Areas on top of each other; all series have the same x."""
    xs = [x for x, _ in series[0].points]
    rows = [[x, *(s.points[i][1] for s in series)] for i, x in enumerate(xs)]
    columns = column_means(rows)
    totals = [sum(column[1:]) for column in columns]
    # One slow step (a pause of the machine) must not flatten all others.
    top = min(max(totals), 3 * statistics.median(totals)) or 1.0
    x_range = padded(columns[0][0], columns[-1][0], 0.0, False)
    frame = _framed(Frame(width, height, x_range, (0, 1.06 * top)), format_y)
    below, parts = [0.0] * len(columns), [_axes(frame, format_y)]
    for index, s in enumerate(series, start=1):
        above = [low + column[index] for low, column in zip(below, columns, strict=True)]
        edges = [
            [(column[0], min(y, frame.y_range[1])) for column, y in zip(columns, ys, strict=True)]
            for ys in (above, below)
        ]
        outline = path(frame, edges[0] + edges[1][::-1])
        parts.append(f'<path class="area {s.style}" d="{outline}Z"/>')
        below = above
    means = [
        dataclasses.replace(s, points=[(column[0], column[index]) for column in columns])
        for index, s in enumerate(series, start=1)
    ]
    parts.append(_readouts(frame, means, format_y))
    return _svg(width, height, "".join(parts), "time of a step over the run")


def stacked_bar(
    parts: Sequence[tuple[str, str, float]],
    *,
    width: int,
    height: int,
    limit: float = 0.0,
) -> str:
    """One horizontal bar of (name, style, size) parts; shares are of all of them.

    With a `limit` the width stands for it; parts that exceed it are drawn behind a line.
    """
    total = sum(size for _, _, size in parts) or 1.0
    scale = max(total, limit)
    at, drawn = 0.0, []
    for name, style, size in parts:
        length = width * size / scale
        box = f'x="{at:.1f}" y="0" width="{max(length - 1, 0.5):.1f}" height="{height}"'
        title = f"<title>{escape(name)} {size / total:.1%}</title>"
        drawn.append(f'<rect class="fill {style}" {box}>{title}</rect>')
        label = f"{name} {size / total:.0%}"
        if len(label) * 6.8 + 16 < length:
            place = f'x="{at + 10:.1f}" y="{height / 2 + 4:.1f}"'
            drawn.append(f'<text class="inside" {place}>{escape(label)}</text>')
        at += length
    if 0 < limit < 0.999 * total:
        x = width * limit / total
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    summary = ", ".join(f"{name} {size / total:.0%}" for name, _, size in parts)
    return _svg(width, height, "".join(drawn), summary)


# Parts of a chart ----------------------------------------------------------------------------


def _svg(width: int, height: int, content: str, description: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
        f"{content}</svg>"
    )


def _framed(frame: Frame, format_y: Callable[[float], str]) -> Frame:
    """The frame with room on the left for the longest text of the y axis."""
    longest = max(len(_tick_text(value, format_y)) for value in _y_ticks(frame))
    return dataclasses.replace(frame, left=16 + 7 * longest)


def _y_ticks(frame: Frame) -> list[float]:
    num_ticks = max(3, (frame.height - frame.bottom - frame.top) // 50)
    return ticks(*frame.y_range, frame.log_y, num_ticks)


def _axes(frame: Frame, format_y: Callable[[float], str]) -> str:
    parts = []
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    for value in _y_ticks(frame):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        text = escape(_tick_text(value, format_y))
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}">{text}</text>')
    for value in ticks(*frame.x_range, frame.log_x, max(2, (right - frame.left) // 120)):
        if value != round(value):
            continue  # there is no half step
        x = frame.x(value)
        text = _tick_text(value, units.count)
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{text}</text>')
    parts.append(
        f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="tick" x="{right}" y="{frame.height - 2}">step</text>'
    )
    return "".join(parts)


def _line(frame: Frame, series: Series) -> str:
    points = series.finite()
    if series.markers:
        dots = "".join(
            f'<circle cx="{frame.x(points[i][0]):.1f}" cy="{frame.y(points[i][1]):.1f}" r="3"/>'
            for i in thinned([x for x, _ in points], 60)
        )
        columns = [points[i] for i in thinned([x for x, _ in points])]
        return (
            f'<path class="line {series.style}" d="{path(frame, columns)}"/>'
            f'<g class="dots {series.style}">{dots}</g>'
        )
    columns = columns_of(points, frame)
    band = [(x, high) for x, _, _, high in columns] + [(x, low) for x, _, low, _ in columns[::-1]]
    means = smoothed([mean for _, mean, _, _ in columns])
    line = [(column[0], mean) for column, mean in zip(columns, means, strict=True)]
    parts = ""
    if len(columns) < len(points):
        parts = f'<path class="band {series.style}" d="{path(frame, band)}Z"/>'
    elif len(columns) > 2:
        parts = f'<path class="raw {series.style}" d="{path(frame, points)}"/>'
    if len(line) == 1:
        (x, y) = line[0]
        dot = f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>'
        return f'<g class="dots {series.style}">{dot}</g>'
    return f'{parts}<path class="line {series.style}" d="{path(frame, line)}"/>'


def _reference(
    frame: Frame, name: str, y: float, series: Sequence[Series], format_y: Callable[[float], str]
) -> str:
    """A dashed line; its name stands at the end that is farther from the curves."""
    at, right = frame.y(y), frame.width - frame.right
    room = [math.inf, math.inf]
    for s in series:
        for i in thinned([x for x, _ in s.points]):
            point_x, point_y = s.points[i]
            share = (frame.x(point_x) - frame.left) / (right - frame.left)
            if math.isfinite(point_y) and not 0.25 < share < 0.75:
                end = round(share)
                room[end] = min(room[end], abs(frame.y(point_y) - at))
    side = f'class="start reference" x="{frame.left + 6}"'
    if room[1] >= min(room[0], 20):
        side = f'class="reference" x="{right - 6}"'
    return (
        f'<line class="reference" x1="{frame.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text {side} y="{at - 5:.1f}">{escape(name)} {escape(format_y(y))}</text>'
    )


def _bad_values(frame: Frame, series: Series) -> str:
    """A cross at the top for each value that is not a number, 50 at most."""
    bad = [(x, y) for x, y in series.points if not math.isfinite(y)]
    return "".join(
        f'<text class="bad" x="{frame.x(x):.1f}" y="{frame.top + 4}">&#215;'
        f"<title>{escape(series.name)} at step {x:.0f}: {y}</title></text>"
        for x, y in bad[:50]
    )


def _end_labels(frame: Frame, series: Sequence[Series], format_y: Callable[[float], str]) -> str:
    ends = sorted((frame.y(s.finite()[-1][1]), i) for i, s in enumerate(series))
    # Each label takes 30 pixels; none may leave the plot.
    lowest = frame.height - frame.bottom - 12
    ys = [max(y, frame.top + 10) for y, _ in ends]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + 30)
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], lowest - 30 * (len(ys) - 1 - i))
    x = frame.width - frame.right + 10
    return "".join(
        f'<text class="end {series[i].style}" x="{x}" y="{y:.1f}">{escape(series[i].name)}'
        f'<tspan x="{x}" dy="14">{escape(format_y(series[i].finite()[-1][1]))}</tspan></text>'
        for y, (_, i) in zip(ys, ends, strict=True)
    )


def _readouts(frame: Frame, series: Sequence[Series], format_y: Callable[[float], str]) -> str:
    """Columns that show their values while the pointer is in them."""
    longest = max(series, key=lambda s: len(s.points))
    xs = [longest.points[i][0] for i in thinned([x for x, _ in longest.points], _MAX_READOUTS)]
    edges = [frame.x(x) for x in xs]
    bounds = [frame.left, *((a + b) / 2 for a, b in itertools.pairwise(edges))]
    bounds.append(frame.width - frame.right)
    bottom, parts = frame.height - frame.bottom, []
    for i, x in enumerate(xs):
        values = ""
        for s in series:
            point_x, y = nearest(s.points, x)
            # The nearest evaluation may be far away.
            where = "" if bounds[i] <= frame.x(point_x) <= bounds[i + 1] else f" at {point_x:.0f}"
            text = escape(f"{s.name} {format_y(y)}{where}")
            values += f'<tspan dx="12" class="{s.style}">{text}</tspan>'
        parts.append(
            f'<g class="hit"><rect x="{bounds[i]:.1f}" y="{frame.top}" '
            f'width="{max(bounds[i + 1] - bounds[i], 0):.1f}" height="{bottom - frame.top}"/>'
            f'<line x1="{edges[i]:.1f}" x2="{edges[i]:.1f}" y1="{frame.top}" y2="{bottom}"/>'
            f'<text x="{frame.left + 4}" y="{frame.height - 2}">step {x:.0f}{values}</text></g>'
        )
    return "".join(parts)


def _tick_text(value: float, format_y: Callable[[float], str]) -> str:
    """The format of values without the zeros that a round number does not need."""
    return re.sub(
        r"\.(\d*?)0+(?!\d)", lambda zeros: f".{zeros[1]}" * bool(zeros[1]), format_y(value)
    )
