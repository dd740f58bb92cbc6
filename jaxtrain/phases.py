"""What a training process tells its guardian: at which step it is, and in which phase.

    report(Phase.TRAIN_STEP, 4812)

One line on a pipe, about 2 us; nothing where there is no guardian. A pipe that is full drops the
line: whoever trains never waits for whoever watches.
"""

import enum
import faulthandler
import os
import signal

__all__ = ["BUDGETS", "GUARDIAN", "STACKS_SIGNAL", "Phase", "is_guarded", "report", "report_exit"]

GUARDIAN = "JAXTRAIN_GUARDIAN"
"""Variable of the environment: pid of the guardian, descriptors of the pipe and of the stacks."""
STACKS_SIGNAL = signal.SIGQUIT
"""Makes a guarded process write down where each of its threads is, whatever it is doing."""


class Phase(enum.StrEnum):
    """What a process is busy with; the same on all processes of a run, more or less."""

    START = "start"
    """Imports, meeting the others, building model and data."""
    COMPILE = "compile"
    RESTORE = "restore"
    INPUT = "input"
    """Waiting for the next batch."""
    TRAIN_STEP = "train_step"
    EVALUATION = "evaluation"
    SAVE = "save"
    END = "end"
    """The report, and what the experiment does at the end."""
    LEAVE = "leave"
    """All are done; from here on an exit is no surprise."""


BUDGETS = {
    Phase.START: 6,
    Phase.COMPILE: 6,
    Phase.RESTORE: 6,
    Phase.INPUT: 1,
    Phase.TRAIN_STEP: 1,
    Phase.EVALUATION: 1,  # each batch is a change
    Phase.SAVE: 3,
    Phase.END: 6,
    Phase.LEAVE: 1,
}
"""How long a phase may last without a change, as a multiple of `stall_timeout_seconds`."""


class _Line:
    """The way to the guardian."""

    def __init__(self) -> None:
        self._count = self._step = 0
        self._busy_seconds = 0.0
        pid, _, descriptors = os.environ.get(GUARDIAN, "").partition(":")
        # A program that a guarded process starts inherits the variable, and is not meant.
        self.is_open = bool(descriptors) and pid == str(os.getppid())
        if self.is_open:
            self._pipe, stacks = map(int, descriptors.split(":"))
            faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)

    def write(self, phase: Phase, step: int | None, busy_seconds: float) -> None:
        self._count += 1
        if step is not None:
            self._step = step
        if busy_seconds:
            self._busy_seconds = busy_seconds
        self.send(f"{self._count} {self._step} {self._busy_seconds:.6f} {phase.value}\n")

    def send(self, text: str) -> None:
        try:
            os.write(self._pipe, text.encode())
        except OSError:
            return  # full, or the guardian is gone, and takes this process along


_line = _Line()


def is_guarded() -> bool:
    """Whether this process is the child of a guardian."""
    return _line.is_open


def report(phase: Phase, step: int | None = None, busy_seconds: float = 0.0) -> None:
    """Tells the guardian what this process does from now on.

    Args:
        phase: of the run.
        step: the optimizer step that it is at; None: as before.
        busy_seconds: how long it has waited for neither devices nor others, since the run began.
    """
    if _line.is_open:
        _line.write(phase, step, busy_seconds)


def report_exit(code: int) -> None:
    """Tells the guardian that this process is about to end, and with which code."""
    if _line.is_open:
        _line.send(f"exit {code}\n")
