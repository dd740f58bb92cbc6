"""The arithmetic of charts: values to pixels, ticks, thinning, smoothing."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

Point = tuple[float, float]

_MAX_COLUMNS = 240  # of a drawn line; more than a screen resolves


@dataclasses.dataclass(frozen=True)
class Frame:
    """Maps values to pixels: the plot's box, its ranges, and whether they are logarithmic."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    left: int = 16
    right: int = 16
    top: int = 14
    bottom: int = 34

    def x(self, value: float) -> float:
        share = _share(value, self.x_range, self.log_x)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        share = _share(value, self.y_range, self.log_y)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def columns_of(points: Sequence[Point], frame: Frame) -> list[tuple[float, float, float, float]]:
    """(x, median, low, high) of the points in each column of pixels, at most _MAX_COLUMNS."""
    if len(points) <= _MAX_COLUMNS:
        return [(x, y, y, y) for x, y in points]
    groups: dict[int, list[Point]] = {}
    for x, y in points:
        column = int(_share(x, frame.x_range, frame.log_x) * (_MAX_COLUMNS - 0.5))
        groups.setdefault(column, []).append((x, y))
    return [
        (
            sum(x for x, _ in group) / len(group),
            statistics.median(y for _, y in group),
            min(y for _, y in group),
            max(y for _, y in group),
        )
        for _, group in sorted(groups.items())
    ]


def smoothed(values: Sequence[float]) -> list[float]:
    """Median over a window of one part in forty around each value, narrower towards the ends."""
    reach = len(values) // 80
    medians = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        medians.append(statistics.median(values[i - near : i + near + 1]))
    return medians


def column_means(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """At most _MAX_COLUMNS rows, each the mean of its share of the rows."""
    num_columns = min(len(rows), _MAX_COLUMNS)
    bounds = [round(i * len(rows) / num_columns) for i in range(num_columns + 1)]
    return [
        [math.fsum(values) / (end - begin) for values in zip(*rows[begin:end], strict=True)]
        for begin, end in itertools.pairwise(bounds)
    ]


def ticks(low: float, high: float, log: bool, count: int) -> list[float]:
    """About `count` round values in a range."""
    if log:
        decades = math.log10(high / low)
        steps = (1,) if decades > 3 else (1, 2, 5) if decades > 0.9 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        first = math.floor(math.log10(low))
        values = [s * 10.0**e for e in range(first, math.ceil(math.log10(high)) + 1) for s in steps]
        inside = [value for value in values if low <= value <= high]
        if len(inside) >= 2:
            return inside[:: max(1, round(len(inside) / (2 * count)))]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def nearest(points: Sequence[Point], x: float) -> Point:
    """The point whose x is nearest; the points are in the order of x."""
    low, high = 0, len(points) - 1
    while low < high:
        middle = (low + high) // 2
        if points[middle][0] < x:
            low = middle + 1
        else:
            high = middle
    if low and abs(points[low - 1][0] - x) < abs(points[low][0] - x):
        low -= 1
    return points[low]


def _share(value: float, bounds: tuple[float, float], log: bool) -> float:
    low, high = bounds
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def padded(low: float, high: float, pad: float, log: bool) -> tuple[float, float]:
    """The range with room around it; never empty."""
    if log:
        low, high = (low, high) if high > low * 1.0001 else (low / 1.1, high * 1.1)
        margin = (high / low) ** pad
        return low / margin, high * margin
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low - pad * (high - low), high + pad * (high - low)


def thinned(xs: Sequence[float], most: int = _MAX_COLUMNS) -> list[int]:
    """Indices of at most `most` of the values, evenly, first and last included."""
    if len(xs) <= most:
        return list(range(len(xs)))
    return sorted({round(i * (len(xs) - 1) / (most - 1)) for i in range(most)})


def path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
