"""20 cells of the table of faults (`matrix.py`), and that the table is whole.

There are more pairs of a fault and a phase than 20 cells hold, so these have every fault on every
process, every phase on every process, and every fault in as many phases as fit.
"""

import itertools
import os

import matrix
import pytest
from matrix import (
    CACHE,
    EMPTY,
    EXIT,
    FAULTS,
    FULL,
    KILL,
    PHASES,
    RAISE,
    READ_ONLY,
    SLOW,
    STOP,
    TABLE,
    TARGETS,
    TERM,
)

CHOSEN = [
    (KILL, "save", 0),
    (KILL, "step", 1),
    (KILL, "start-up", 1),
    (TERM, "evaluation", 0),
    (TERM, "start-up", 1),
    (STOP, "step", 0),
    (STOP, "evaluation", 1),
    (RAISE, "compile", 0),
    (RAISE, "restore", 1),
    (EXIT, "save", 1),
    (EXIT, "compile", 1),
    (EXIT, "restore", 0),
    (FULL, "start-up", 0),
    (FULL, "save", 1),
    (READ_ONLY, "save", 1),
    (READ_ONLY, "start-up", 0),
    (SLOW, "save", 0),
    (SLOW, "restore", 1),
    (CACHE, "compile", 0),
    (RAISE, "evaluation", 0),
]
CELLS = {(cell.fault, cell.phase, cell.target): cell for cell in TABLE}


def test_every_cell_is_in_the_table_or_says_why_not():
    places = set(itertools.product(FAULTS, PHASES, TARGETS))
    assert CELLS.keys() | EMPTY.keys() == places
    assert not CELLS.keys() & EMPTY.keys()
    assert all(EMPTY.values())


def test_the_cells_of_ci_have_every_fault_and_phase_on_every_process():
    assert len(CHOSEN) == len(set(CHOSEN)) == 20
    assert {(fault, target) for fault, _, target in CHOSEN} == {
        (fault, target) for fault, _, target in CELLS
    }
    assert {(phase, target) for _, phase, target in CHOSEN} == {
        (phase, target) for _, phase, target in CELLS
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    matrix.make_whole(workdir)
    return workdir


@pytest.mark.parametrize("place", CHOSEN, ids=lambda place: "-".join(map(str, place)))
def test_cell(place, tmp_path, whole):
    cell = CELLS[place]
    if matrix.needs_root(cell):
        pytest.skip(f"a file system can be mounted by root only, not by user {os.geteuid()}")
    # The script gives every command again; here it is one for each fault.
    is_first = place == next(other for other in CHOSEN if other[0] == cell.fault)
    seconds = matrix.run_cell(cell, tmp_path, whole, has_restart=is_first)
    print(f"{cell}: {seconds:.1f} s")
