"""Numbers as people read them: the progress display and the report share these.

Pure functions of plain numbers; None and non-finite values have a text as well, so that a
display never fails on a bad value.
"""

import math


def number(value: float | None) -> str:
    """A metric with four significant digits: 2.413, 0.03125, 9.80e-05, 1234."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"


def count(value: float | None) -> str:
    """A count, short: 950, 12.3k, 1.24M, 8.03B."""
    if value is None or not math.isfinite(value):
        return number(value)
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,999 must not become "1000k": compare what three digits would show.
        if abs(value) >= limit * 0.9995:
            return f"{_three_digits(value / limit)}{suffix}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def several(number: int, noun: str) -> str:
    """A number of things: 1 file, 2 files, 1,024 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def nbytes(value: float | None) -> str:
    """A size in bytes with binary units: 512 B, 1.50 KiB, 12.3 GiB."""
    if value is None or not math.isfinite(value):
        return number(value)
    for power, suffix in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power * 0.9995:
            return f"{_three_digits(value / 1024**power)} {suffix}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """A short time with its unit: 420 us, 41.5 ms, 3.21 s; from two minutes on as `clock`."""
    if value is None or not math.isfinite(value):
        return number(value)
    if value >= 119.5:
        return clock(value)
    if value == 0:
        return "0 s"
    if value >= 0.9995:
        return f"{_three_digits(value)} s"
    if value >= 0.9995e-3:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{value * 1e6:.0f} us"


def clock(value: float | None) -> str:
    """A duration as a clock shows it: 0:07, 12:30, 5:04:03, 2d 03:04:05."""
    if value is None or not math.isfinite(value):
        return "-:--"
    whole = max(0, round(value))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}:{second:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
