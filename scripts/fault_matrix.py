"""Runs every cell of the table of faults and writes docs/fault_matrix.md.

    .venv/bin/python scripts/fault_matrix.py [--quick] [--minutes=N] [WORD ...]

After each cell the same command is given again, with --quick only after those on process 0. With
--minutes no cell begins later than that, and the page says which are left. With words only the
cells whose names hold all of them run ("SIGSTOP, step"), and nothing is written. Disks that fill up
or become read-only need root; without it those cells are left out.
"""

import concurrent.futures
import datetime
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import matrix  # noqa: E402
import processes  # noqa: E402
import stamp  # noqa: E402

PAGE = ROOT / "docs" / "fault_matrix.md"


def outcome(
    cell: matrix.Cell, whole: Path, *, has_restart: bool, deadline: float
) -> tuple[str, float]:
    """("passed", "failed" or why it was left out, seconds from the fault to the end)."""
    if time.monotonic() > deadline:
        return "left out: no time", 0.0
    if matrix.needs_root(cell):
        return "left out: needs root", 0.0
    with tempfile.TemporaryDirectory() as directory:
        try:
            seconds = matrix.run_cell(cell, Path(directory), whole, has_restart=has_restart)
        except AssertionError:
            print(f"{cell}: FAILED\n{traceback.format_exc()}", flush=True)
            return "failed", 0.0
    print(f"{cell}: passed, {seconds:.1f} s", flush=True)
    return "passed", seconds


def page(found: dict[matrix.Cell, tuple[str, float]], seconds: float, *, is_quick: bool) -> str:
    """The table as Markdown."""
    again = ", after the cells on process 0," if is_quick else ""
    outcomes = [what for what, _ in found.values()]
    lines = [
        "# What happens when a process, a disk or a cache fails?",
        "",
        f"The last run of `scripts/fault_matrix.py`: commit {stamp.commit()},"
        f" {datetime.date.today().isoformat()}, {os.cpu_count()} cores, {seconds:.0f} s;"
        f" {outcomes.count('passed')} of {len(found)} cells passed. A run of two processes, under"
        f" guardians; the fault comes on one of them, in the phase. Then{again} the same command is"
        " given again, and its log and parameters are those of a run that nobody disturbed, bit for"
        " bit."
        " CI runs 20 of these cells (`tests/faults/test_matrix.py`).",
        "",
        "| fault | phase | on | exit codes (0, 1) | at most | took | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell, (what, took) in found.items():
        codes = cell.codes if cell.target == 0 else cell.codes[::-1]
        shown = ", ".join(str(int(code)) for code in codes)
        lines.append(
            f"| {cell.fault} | {cell.phase} | process {cell.target} | {shown} |"
            f" {cell.seconds:g} s | {took:.1f} s | {what} |"
        )
    lines += ["", "What is not in the table, and why:", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for (fault, phase, target), why in matrix.EMPTY.items():
        reasons.setdefault((fault, why), []).append(f"{phase} on {target}")
    lines += [f"- {fault}, {', '.join(where)}: {why}." for (fault, why), where in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    words = [word for word in sys.argv[1:] if word not in options]
    is_quick, minutes = "--quick" in options, float("inf")
    for option in options:
        if option.startswith("--minutes="):
            minutes = float(option.partition("=")[2])
        elif option != "--quick":
            sys.exit(f"{option} is neither --quick nor --minutes=N")
    cells = [cell for cell in matrix.TABLE if all(word in str(cell) for word in words)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        processes.Programs.shared = Path(directory, "programs")
        processes.Programs.shared.mkdir()
        whole = Path(directory, "whole")
        matrix.make_whole(whole)
        # Several at a time: much of a cell is waiting.
        with concurrent.futures.ThreadPoolExecutor(3) as pool:

            def run(cell: matrix.Cell) -> tuple[str, float]:
                has_restart = not (is_quick and cell.target)
                deadline = begin + 60 * minutes
                return outcome(cell, whole, has_restart=has_restart, deadline=deadline)

            outcomes = list(pool.map(run, cells))
    found = dict(zip(cells, outcomes, strict=True))
    seconds = time.monotonic() - begin
    failed = [str(cell) for cell, (what, _) in found.items() if what == "failed"]
    passed = [what for what, _ in found.values()].count("passed")
    print(f"{passed} of {len(cells)} cells passed, {seconds:.0f} s; failed: {failed}")
    if not words:
        PAGE.write_text(page(found, seconds, is_quick=is_quick))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
