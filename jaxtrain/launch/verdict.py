"""What guardians conclude from what they know of the processes: who failed first, who hangs.

Pure functions of `Member`s and the time; `guardian` feeds them.
"""

import dataclasses
import signal
from collections.abc import Sequence

from jaxtrain.errors import ExitCode
from jaxtrain.launch.meeting import format_ids
from jaxtrain.phases import BUDGETS, Phase
from jaxtrain.stop_signals import STOP_SIGNALS

LOST_SECONDS = 7.0
"""Who says nothing for so long is lost."""
GATHER_SECONDS = 0.5
"""After the first failure: what fails next may be the cause of it."""
FELLOW_SECONDS = 5.0
"""What fails on one process mostly fails on all; they may end by themselves, in their own words."""

_ORDERLY = (ExitCode.OK, ExitCode.PREEMPTED)
# The same command again fails again: all end with the code that says so.
_LASTING = (ExitCode.CONFIG, ExitCode.NONFINITE, ExitCode.UNUSABLE)
# Which failure is the cause of the others, the first one first.
_KILLED, _EXITED, _ABORTED, _BEREFT = range(4)


@dataclasses.dataclass
class Member:
    """A process of the run."""

    process_id: int
    host: str
    heard: float
    """When its guardian last said something."""
    changed: float
    """When its step or phase last changed."""
    pid: int = 0
    step: int = 0
    phase: Phase = Phase.START
    count: int = 0
    """How often step or phase have changed: all processes make the same changes."""
    state: str = "R"
    """The kernel's letter; T: stopped by a signal."""
    busy_seconds: float = 0.0
    code: int | None = None
    """Its exit code, once it has ended or is about to; negative for a signal."""
    told: int = 0
    """How often it was told to end by a signal."""
    lost: str = ""
    """Why nothing is heard of it any more."""
    is_gone: bool = False
    """It ended, and its guardian has said goodbye."""
    failed: float = 0.0
    """When its failure became known."""

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"at step {self.step} in {self.phase}"

    @property
    def has_ended_well(self) -> bool:
        return self.code in _ORDERLY and self.phase == Phase.LEAVE

    @property
    def was_told_alone(self) -> bool:
        """Whether a signal ended it that the others have not seen, and that asked for nothing else.

        Before it has met the others, or where nothing is to be saved, a process does not wait for
        them.
        """
        if self.code == ExitCode.PREEMPTED:
            return self.phase == Phase.START
        return self.told == 1 and self.code is not None and is_by_request(self.code)

    @property
    def rank(self) -> int:
        """The lower, the more likely it is the cause of what others suffer."""
        if self.lost:
            return _KILLED
        assert self.code is not None
        if self.code < 0 or self.code > 128:
            return _ABORTED if abs(self.code) % 128 == signal.SIGABRT else _KILLED
        return _BEREFT if self.code == ExitCode.PEER_LOST else _EXITED

    @property
    def fate(self) -> str:
        """What became of it, in words."""
        if self.lost:
            return f"was lost {self.place}: {self.lost}"
        if self.told > 1:
            return f"was told twice to end, and was ended {self.place}"
        assert self.code is not None
        if self.code < 0:
            return f"was killed by signal {-self.code} {self.place}"
        if self.code == ExitCode.PEER_LOST:
            return f"lost its connection to another process {self.place}"
        return f"ended with exit code {self.code} {self.place}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the run ends."""

    text: str
    """For all to print; empty where each has said it by itself."""
    code: int
    """Exit code of those that have none of their own."""
    stuck: Sequence[int] = ()
    """The processes whose stacks are wanted."""
    is_loss: bool = False
    """Whether a process was killed or lost: what goes wrong on the others comes of that."""


def is_by_request(code: int) -> bool:
    """Whether an exit code is that of a process that SIGTERM, SIGINT or SIGHUP has ended."""
    return code in {n for s in STOP_SIGNALS for n in (-s, 128 + s)}


def exit_code(member: Member, verdict: Verdict) -> int:
    """What a guardian leaves with: the code of its child where that is one, else the verdict's."""
    code = member.code
    if code is None or code < 0 or member.was_told_alone:
        return verdict.code
    if code in _ORDERLY and not member.has_ended_well:
        code = ExitCode.ERROR
    return verdict.code if verdict.is_loss and code == ExitCode.ERROR else code


def judge(members: Sequence[Member], now: float) -> Verdict | None:
    """The verdict on a run in which something failed; None where nothing has, or too lately."""
    failed = [member for member in members if member.failed]
    if not failed or now < min(member.failed for member in failed) + GATHER_SECONDS:
        return None
    cause = min(failed, key=lambda member: (member.rank, member.failed))
    if cause.was_told_alone:
        return Verdict(f"{cause} was told to end {cause.place}; all leave", ExitCode.PREEMPTED)
    if cause.rank in (_EXITED, _BEREFT):
        waiting = [member for member in members if member.code is None and not member.lost]
        if waiting and now < cause.failed + FELLOW_SECONDS:
            return None
        codes = {member.code for member in failed}
        if not waiting and len(codes) == 1 and cause.rank == _EXITED and cause.code:
            return Verdict("", cause.code)
    is_lasting = cause.rank == _EXITED and cause.code in _LASTING
    code = cause.code if is_lasting and cause.code else ExitCode.PEER_LOST
    text = f"{cause} {cause.fate}; the others are stopped"
    return Verdict(text, code, is_loss=cause.rank == _KILLED)


def find_stall(members: Sequence[Member], now: float, stall_seconds: float) -> Verdict | None:
    """The verdict on a run that stands still.

    All wait for the one that has come least far, so nothing is wrong as long as that one moves, or
    is in a phase that may take its time.
    """
    present = [member for member in members if member.code is None and not member.lost]
    if not present or stall_seconds <= 0:
        return None
    stopped = [member for member in present if member.state in "tT"]
    least = min(member.count for member in present)
    stuck = stopped or [member for member in present if member.count == least]
    latest = max(stuck, key=lambda member: member.changed)
    budget = stall_seconds * BUDGETS[latest.phase]
    if now - latest.changed < budget:
        return None
    if len(stuck) == 1:
        who = f"{latest} stands still"
    else:
        who = f"processes {format_ids([member.process_id for member in stuck])} stand still"
    why = ", stopped by a signal" if stopped else ""
    text = (
        f"{who} {latest.place}{why}, for {now - latest.changed:.0f} s; in {latest.phase}"
        f" stall_timeout_seconds={stall_seconds:g} allows {budget:g} s; all are ended"
    )
    return Verdict(text, ExitCode.STALLED, tuple(member.process_id for member in stuck))
