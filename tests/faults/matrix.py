"""Every fault in every phase of a run of two processes, and how the run has to end.

`TABLE` states what is expected of each meaningful cell, `EMPTY` why the others mean nothing.
`run_cell` runs one in real processes, with real signals and disks, and gives the same command
again: the run must end as if nothing had happened, bit for bit. `test_matrix.py` runs 20 cells,
`scripts/fault_matrix.py` all.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import clusters
import looping
import numpy as np

from jaxtrain import ExitCode
from jaxtrain.phases import BUDGETS, Phase

KILL, TERM, STOP, RAISE, EXIT = "kill -9", "SIGTERM", "SIGSTOP", "exception", "os._exit"
FULL, READ_ONLY, SLOW, CACHE = "full disk", "read-only disk", "slow disk", "broken cache entry"
FAULTS = (KILL, TERM, STOP, RAISE, EXIT, FULL, READ_ONLY, SLOW, CACHE)
# The moment of `toy_run.py` that is the phase, and the guardian's word for it.
PHASES = {
    "start-up": ("build 1", Phase.START),
    "compile": ("compile 1", Phase.COMPILE),
    "step": ("step 3", Phase.TRAIN_STEP),
    "evaluation": ("evaluate 1", Phase.EVALUATION),
    "save": ("save_started 1", Phase.SAVE),
    "restore": ("restore_started 1", Phase.RESTORE),
}
TARGETS = (0, 1)

STALL_SECONDS = 4
END_SECONDS = 10
"""From a fault until the last process has ended, where nothing has to be waited for."""
START_SECONDS = 60
LEAVE_SECONDS = 90
"""Who leaves after an error waits for the save in flight, at most 60 s (`checkpoint`)."""
DISK_SECONDS = 20
"""A save that cannot be written is not waited for."""
_FOR_EVER = 200
_FLAGS = ("--mesh=data:-1", "--num_cpu_devices=1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A fault in a phase on a process, and what has to come of it."""

    fault: str
    phase: str
    target: int
    at: str
    """TOY_AT of the target; empty: the fault is there before the run begins."""
    codes: tuple[int, int]
    """Exit code of the target, and of the other process."""
    seconds: float = END_SECONDS
    """From the fault to the end of the last process."""
    words: tuple[str, ...] = ()
    """What both say."""
    target_words: tuple[str, ...] = ()
    """What the target says besides."""

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, process {self.target}"


def _expect(fault: str, phase: str, target: int) -> Cell | None:
    """The cell, or None where it means nothing."""
    if _why_empty(fault, phase, target):
        return None
    moment, word = PHASES[phase]
    name = f"process {target} ("
    cell = {"fault": fault, "phase": phase, "target": target}
    if fault == KILL:
        words = (name, "was killed by signal 9 at step", f"in {word}; the others are stopped")
        codes = (ExitCode.PEER_LOST, ExitCode.PEER_LOST)
        return Cell(**cell, at=f"{moment} kill", codes=codes, words=words)
    if fault == TERM:
        codes = (ExitCode.PREEMPTED, ExitCode.PREEMPTED)
        return Cell(
            **cell, at=f"{moment} ask", codes=codes, target_words=("SIGTERM: ",), seconds=30
        )
    if fault == STOP:
        budget = STALL_SECONDS * BUDGETS[word]
        words = (name, f"stands still at step {_step(phase)} in {word}, stopped by a signal")
        return Cell(
            **cell,
            at=f"{moment} stop",
            codes=(ExitCode.STALLED, ExitCode.STALLED),
            seconds=budget + END_SECONDS,
            words=words,
            target_words=("stacks of process", "toy_run.py"),
        )
    if fault == EXIT:
        words = (name, f"ended with exit code 17 at step {_step(phase)} in {word}")
        return Cell(**cell, at=f"{moment} exit", codes=(17, ExitCode.PEER_LOST), words=words)
    if fault == RAISE:
        if phase in ("start-up", "evaluation", "restore"):
            # Where all are at the same place, all learn of it and say it themselves.
            return Cell(**cell, at=f"{moment} raise", codes=(1, 1), words=("RuntimeError: a bug",))
        words = (name, f"ended with exit code 1 at step {_step(phase)} in {word}")
        return Cell(
            **cell,
            at=f"{moment} raise",
            codes=(1, ExitCode.PEER_LOST),
            seconds=LEAVE_SECONDS if phase == "save" else 20,
            words=words,
            target_words=("RuntimeError: a bug",),
        )
    if fault == SLOW:
        slow = {"start-up": "config 1", "step": "write 3", "evaluation": "write 6"}
        at = f"{slow.get(phase, moment)} slow"
        return Cell(**cell, at=at, codes=(0, 0), seconds=START_SECONDS)
    if fault == CACHE:
        said = ("the compile cache in", "had a broken entry for", "deleted, compiling anew")
        return Cell(**cell, at="", codes=(0, 0), seconds=START_SECONDS, target_words=said)
    codes = (ExitCode.UNUSABLE, ExitCode.UNUSABLE)
    if fault == READ_ONLY:
        return Cell(
            **cell,
            at="" if phase == "start-up" else "step 3 protect",
            codes=codes,
            seconds=DISK_SECONDS,
            words=("Read-only file system",)
            if phase == "start-up"
            else ("process 0 (", "ended with exit code 4 at step 5 in save"),
        )
    return Cell(**cell, at=f"{moment} fill", codes=codes, seconds=DISK_SECONDS)


def _step(phase: str) -> str:
    """The step at which the moment of a phase comes; the first save is that of step 5."""
    return {"start-up": "0", "compile": "0", "restore": "0", "step": "4"}.get(phase, "5")


def _why_empty(fault: str, phase: str, target: int) -> str:
    """Why a cell means nothing; empty if it means something."""
    if fault in (KILL, TERM, STOP, RAISE, EXIT):
        return ""
    if fault == CACHE:
        if phase != "compile":
            return "only a compilation reads the cache"
        return "JAX keeps the programs of process 0 only" if target else ""
    if phase == "compile":
        return "nothing of the run is read or written while it compiles"
    if fault == SLOW:
        if target == 1 and phase not in ("save", "restore"):
            return "only process 0 writes then"
        return ""
    if phase == "restore":
        return "nothing is written then; what is written first is the start-up's"
    if fault == READ_ONLY and phase in ("step", "evaluation"):
        return "metrics.jsonl is open, and a disk with open files does not become read-only"
    if target == 1 and phase != "save":
        return "only process 0 writes then, and both have the same disk"
    return ""


_ALL = tuple(itertools.product(FAULTS, PHASES, TARGETS))
TABLE = tuple(cell for place in _ALL if (cell := _expect(*place)))
EMPTY = {place: why for place in _ALL if (why := _why_empty(*place))}


def make_whole(workdir: Path) -> None:
    """Lets a run of two processes come to its end undisturbed."""
    codes, outputs = clusters.finished(workdir, *_FLAGS, num_processes=2, script=clusters.TOY)
    assert codes == [0, 0], "\n".join(outputs)


def run_cell(cell: Cell, directory: Path, whole: Path, *, has_restart: bool = True) -> float:
    """Runs a cell, and the same command again.

    Args:
        cell: of the table.
        directory: an empty one.
        whole: of a run that nobody disturbed.
        has_restart: False: what comes after the fault is left out.

    Returns:
        Seconds from the fault to the end of the last process.
    """
    workdir = directory / "run"
    if cell.phase == "restore":
        shutil.copytree(whole, workdir)
        shutil.rmtree(workdir / "checkpoints" / "10")
    with _disk(cell, workdir) as disk:
        own = _caches(cell, directory) if cell.fault == CACHE else [[], []]
        variables: list[dict[str, str]] = [
            {"TOY_DISK": str(disk), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            for _ in TARGETS
        ]
        places = [[*a, *b] for a, b in zip(clusters.flags_of(2), own, strict=True)]
        variables[cell.target]["TOY_AT"] = cell.at
        limit = STALL_SECONDS if cell.fault == STOP else _FOR_EVER
        with clusters.started(
            workdir,
            *_FLAGS,
            f"--stall_timeout_seconds={limit}",
            num_processes=2,
            places=places,
            variables=variables,
            script=clusters.TOY,
        ) as runs:
            seconds, codes = _follow(cell, runs)
            output = "\n".join(run.output for run in runs)
            target = runs[cell.target]
            assert (codes[cell.target], codes[1 - cell.target]) == cell.codes, output
            assert seconds < cell.seconds, f"{seconds:.1f} s\n{output}"
            for word in cell.words:
                assert all(word in run.output for run in runs), f"{word!r} is not said\n{output}"
            for word in cell.target_words:
                assert word in target.output, f"{word!r} is not said\n{output}"
        if disk is not None:
            remount(disk, "rw")
            (disk / "filler").unlink(missing_ok=True)
        if has_restart:
            _require_same_end(workdir, whole)
    return seconds


def _follow(cell: Cell, runs) -> tuple[float, list[int]]:
    """Sends the signal if there is one to send, and waits for the end."""
    target = runs[cell.target]
    begin = time.monotonic()
    if cell.at:
        target.wait_for(f"at {cell.at.rpartition(' ')[0]}")
        begin = time.monotonic()
    if cell.fault == TERM:
        target.signal(signal.SIGTERM)
        target.wait_for("SIGTERM: ")
        target.answer()
    codes = [run.end() for run in runs]
    return time.monotonic() - begin, codes


def _require_same_end(workdir: Path, whole: Path) -> None:
    codes, outputs = clusters.finished(workdir, *_FLAGS, num_processes=2, script=clusters.TOY)
    assert codes == [0, 0], "\n".join(outputs)
    assert looping.records(workdir) == looping.records(whole)
    found, expected = np.load(workdir / "final.npz"), np.load(whole / "final.npz")
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name


@contextlib.contextmanager
def _disk(cell: Cell, workdir: Path):
    """A file system of 3 MB where the cell needs one."""
    if cell.fault not in (FULL, READ_ONLY):
        yield None
        return
    # The lock of a run is open for writing: only a disk of the checkpoints can become read-only.
    is_late = cell.fault == READ_ONLY and cell.phase == "save"
    disk = workdir / "checkpoints" if is_late else workdir.parent / "disk"
    disk.mkdir(parents=True)
    mount(disk, "-t", "tmpfs", "-o", "size=3m")
    try:
        if not is_late:
            (disk / "run").mkdir()
            workdir.symlink_to(disk / "run")
        if cell.fault == READ_ONLY and not is_late:
            remount(disk, "ro")
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(disk: Path, *words: str) -> None:
    subprocess.run(["mount", *words, "tmpfs", str(disk)], check=True, capture_output=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, capture_output=True)


def needs_root(cell: Cell) -> bool:
    """Whether a cell mounts a file system, and this user must not."""
    return cell.fault in (FULL, READ_ONLY) and os.geteuid() != 0


def _caches(cell: Cell, directory: Path) -> list[list[str]]:
    """Flags for a compile cache of each process; that of the target is broken."""
    paths = [directory / "cache0", directory / "cache1"]
    codes, outputs = clusters.finished(
        directory / "first",
        *_FLAGS,
        f"--compilation_cache_dir={paths[0]}",
        num_processes=2,
        variables=[{"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}] * 2,
        script=clusters.TOY,
    )
    assert codes == [0, 0], "\n".join(outputs)
    shutil.copytree(paths[0], paths[1])
    # Of other programs, JAX only warns, which is an error in tests.
    entries = list(paths[cell.target].glob("*step*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(b"broken")
    return [[f"--compilation_cache_dir={path}"] for path in paths]
