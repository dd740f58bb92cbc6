"""The guardian of a training process: a small parent that nothing in its child can silence.

In a run of several processes the command that was typed becomes a guardian (`guarding`), which
starts the command again as its child. So jax is not in the guardian's memory, and an abort in C++,
a held interpreter lock or SIGSTOP do not stop it.

The guardians meet at the coordinator's address and stay connected, in a star around that of process
0. Then each starts its child, and JAX takes over the port. Every two seconds each says how far its
child is, in 100 bytes. The guardian of process 0 decides what has happened (`verdict`) and tells
all; each prints it, ends its child, and leaves. Whose connection to process 0 breaks decides alone.
"""

import abc
import contextlib
import dataclasses
import functools
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxtrain.errors import ConfigError, ExitCode, JaxtrainError
from jaxtrain.launch import meeting, verdict
from jaxtrain.launch.child import Child
from jaxtrain.launch.decision import parse_address
from jaxtrain.launch.stragglers import Stragglers
from jaxtrain.launch.verdict import Member, Verdict
from jaxtrain.phases import Phase
from jaxtrain.progress import setup_logging
from jaxtrain.standard_streams import silence_lost_terminal
from jaxtrain.stop_signals import SAME_SIGNAL_SECONDS, STOP_SIGNALS, heard_signals

_logger = logging.getLogger("jaxtrain")

TICK_SECONDS = 1.0
_SAY_SECONDS = 2.0
_HASTY_SECONDS = 0.1
_LATE_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a guardian knows of its run; JSON on its command line."""

    process_id: int
    num_processes: int
    coordinator: str
    init_timeout_seconds: float
    stall_timeout_seconds: float


def main() -> NoReturn:
    """Guards one process; its arguments are `Settings` and the command. Exits with the code of the
    child, or with that of the verdict.
    """
    setup_logging()
    settings = Settings(**json.loads(sys.argv[1]))
    make = _Hub if settings.process_id == 0 else _Spoke
    try:
        code = make(settings, sys.argv[2:]).run()
    except JaxtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(int(code))


class _Link:
    """A connection to another guardian, over which lines of JSON go."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received = b""

    def send(self, message: Mapping[str, Any]) -> None:
        # What does not fit is lost: whoever reads nothing for so long is lost itself.
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None when the connection is broken."""
        try:
            received = self.connection.recv(2**16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [json.loads(line) for line in lines]


class _Guardian(abc.ABC):
    """What the guardians of all processes do."""

    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        self.settings, self._command = settings, command
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        self._has_met = False
        self._last_signal = 0.0
        self.verdict: Verdict | None = None
        self._is_hasty = False

    def run(self) -> int:
        with self._signals, self._wakeup, self._selector:
            for number in heard_signals():
                signal.signal(number, self._hear)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            try:
                return self._guard()
            finally:
                signal.set_wakeup_fd(-1)

    def _guard(self) -> int:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            everybody, connections = self._meet()
        except meeting.ToldError as error:
            print(f"jaxtrain: {error} before all have met: all leave", file=sys.stderr)
            return ExitCode.PREEMPTED
        if self.settings.process_id:
            _logger.setLevel(logging.WARNING)
        self.child = Child(self._command)
        now = time.monotonic()
        self.members = [Member(i, str(who["host"]), now, now) for i, who in enumerate(everybody)]
        self.me = self.members[self.settings.process_id]
        self.links = {i: _Link(connection) for i, connection in connections.items()}
        for i, link in self.links.items():
            on_message = functools.partial(self._on_link, i)
            self._selector.register(link.connection, selectors.EVENT_READ, on_message)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self.child.fd, selectors.EVENT_READ, self._on_end)
        try:
            return self._watch()
        finally:
            self.child.end()
            connections = [link.connection for link in self.links.values()]
            meeting.hang_up(connections, after_them=self.settings.process_id == 0)

    def _meet(self) -> tuple[list[dict[str, Any]], dict[int, socket.socket]]:
        host, port = parse_address(self.settings.coordinator, "coordinator")
        me = {
            "process_id": self.settings.process_id,
            "num_processes": self.settings.num_processes,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "is_guardian": True,
        }
        timeout = self.settings.init_timeout_seconds
        met = meeting.meet_and_stay(host, port, me, timeout_seconds=timeout, check=check_guarded)
        self._has_met = True
        return met

    def _hear(self, number: int, frame: object) -> None:
        del frame
        if not self._has_met:
            name = f"process {self.settings.process_id} ({socket.gethostname()}, pid {os.getpid()})"
            raise meeting.ToldError(f"{signal.Signals(number).name} to {name}")

    def _watch(self) -> int:
        next_tick = next_word = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_tick:
                if now - next_tick > _LATE_SECONDS:
                    self._forgive(now)
                next_tick = now + (_HASTY_SECONDS if self._is_hasty else TICK_SECONDS)
                if self.me.code is None:
                    self._look()
                if now >= next_word:
                    next_word = now + _SAY_SECONDS
                    self.me.state = self.child.state()
                    self.say()
                self.decide(now)
            if self.verdict is not None:
                return self._leave(self.verdict)
            if self.me.is_gone and self.may_leave():
                return self.me.code or 0
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                key.data()

    def _look(self) -> None:
        """Takes in what the child has reported."""
        self.child.read()
        me, child = self.me, self.child
        me.heard = time.monotonic()
        me.pid, me.step, me.phase, me.count = child.pid, child.step, child.phase, child.count
        me.busy_seconds, me.changed = child.busy_seconds, child.changed
        if child.announced is not None:
            self._end(child.announced)

    def _forgive(self, now: float) -> None:
        """This guardian was stopped, or its machine slept: it cannot say who was silent."""
        for member in self.members:
            member.heard = now
            member.changed = max(member.changed, now - TICK_SECONDS)

    def _on_signals(self) -> None:
        silence_lost_terminal()
        for number in self._signals.recv(64):
            now = time.monotonic()
            if self.me.told and now - self._last_signal < SAME_SIGNAL_SECONDS:
                continue
            self._last_signal = now
            self.me.told += 1
            if self.me.told == 1:
                self.child.signal(number)
                continue
            text = "again: the process is ended at once; the last committed checkpoint stands"
            print(f"jaxtrain: {signal.Signals(number).name} {text}", file=sys.stderr)
            self._look()
            self.child.end()
            self._end(128 + number)

    def _on_end(self) -> None:
        self._selector.unregister(self.child.fd)
        code = self.child.wait()
        if self.me.code is None:
            self._look()
        if self.me.code is None:
            self._end(code)
        if self.me.has_ended_well:
            self.me.is_gone = True
            self.say()

    def _end(self, code: int) -> None:
        self.me.code = code
        if not self.me.has_ended_well:
            self.fail(self.me)

    def fail(self, member: Member) -> None:
        """Notes that a process has failed; the guardian of process 0 hears of it at once."""
        if not member.failed:
            member.failed = time.monotonic()
            self._is_hasty = True
            if member is self.me:
                self.say()

    def _leave(self, found: Verdict) -> int:
        if found.text:
            print(f"error: {found.text}", file=sys.stderr, flush=True)
        if self.settings.process_id in found.stuck:
            stacks = self.child.stacks() or "it does not answer\n"
            title = f"stacks of process {self.settings.process_id} (pid {self.child.pid}):\n"
            print(title + stacks, end="", file=sys.stderr, flush=True)
        return verdict.exit_code(self.me, found)

    def _on_link(self, process_id: int) -> None:
        link = self.links[process_id]
        messages = link.receive()
        if messages is None:
            self.lose(self.members[process_id], "the connection to its guardian broke")
            return
        for message in messages:
            self.members[process_id].heard = time.monotonic()
            self.hear(self.members[process_id], message)

    def lose(self, member: Member, why: str) -> None:
        """Nothing will be heard any more of a process."""
        if link := self.links.pop(member.process_id, None):
            self._selector.unregister(link.connection)
            link.connection.close()
        if not member.is_gone:
            member.lost = member.lost or why
            self.fail(member)

    def lose_silent(self, members: Sequence[Member], now: float) -> None:
        for member in members:
            if not member.is_gone and now - member.heard > verdict.LOST_SECONDS:
                self.lose(member, f"its guardian was silent for {verdict.LOST_SECONDS:g} s")

    # What differs between process 0 and the others

    @abc.abstractmethod
    def say(self) -> None:
        """Says how the child is."""

    @abc.abstractmethod
    def hear(self, member: Member, message: Mapping[str, Any]) -> None:
        """Takes a message of another guardian."""

    @abc.abstractmethod
    def decide(self, now: float) -> None:
        """Looks whether anything is wrong."""

    def may_leave(self) -> bool:
        """Whether nobody needs this guardian, whose child has ended well."""
        return True


class _Spoke(_Guardian):
    """The guardian of a process other than 0: it reports, and obeys."""

    def say(self) -> None:
        me = self.me
        message = {
            "p": me.pid,
            "n": me.count,
            "s": me.step,
            "f": me.phase,
            "a": round(time.monotonic() - me.changed, 1),
            "t": me.state,
            "b": round(me.busy_seconds, 3),
        }
        if me.code is not None:
            message |= {"code": me.code, "told": me.told, "gone": me.is_gone}
        if 0 in self.links:
            self.links[0].send(message)

    def hear(self, member: Member, message: Mapping[str, Any]) -> None:
        member.pid, member.step, member.phase = message["p"], message["s"], Phase(message["f"])
        if "verdict" in message:
            self.verdict = Verdict(**message["verdict"])

    def decide(self, now: float) -> None:
        first = self.members[0]
        self.lose_silent([first], now)
        # Process 0 decides, unless it is lost.
        if first.lost:
            self.verdict = verdict.judge([first, self.me], now)


class _Hub(_Guardian):
    """The guardian of process 0: it hears all, and decides."""

    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        super().__init__(settings, command)
        self._stragglers = Stragglers()

    def say(self) -> None:
        message = {"p": self.me.pid, "s": self.me.step, "f": self.me.phase}
        if self.verdict is not None:
            message["verdict"] = dataclasses.asdict(self.verdict)
        for process_id, link in self.links.items():
            # Not before it has spoken: it may still be reading the words of the meeting.
            if self.members[process_id].pid or self.verdict is not None:
                link.send(message)

    def hear(self, member: Member, message: Mapping[str, Any]) -> None:
        member.pid, member.count, member.step = message["p"], message["n"], message["s"]
        member.phase, member.state = Phase(message["f"]), message["t"]
        member.changed = member.heard - message["a"]
        member.busy_seconds = message["b"]
        if "code" in message:
            member.code, member.told = message["code"], message["told"]
            member.is_gone = message["gone"]
            if not member.has_ended_well:
                self.fail(member)

    def decide(self, now: float) -> None:
        self.lose_silent(self.members[1:], now)
        self.verdict = verdict.judge(self.members, now) or verdict.find_stall(
            self.members, now, self.settings.stall_timeout_seconds
        )
        if self.verdict is not None:
            self.say()
            return
        for level, line in self._stragglers.look(self.members, now):
            _logger.log(level, line)

    def may_leave(self) -> bool:
        return all(member.is_gone for member in self.members)


def check_guarded(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Checks, on process 0, that guardians meet guardians.

    Raises:
        ConfigError: naming the process that has none.
    """
    for who in everybody:
        if not who.get("is_guardian"):
            raise ConfigError(
                f"process {who['process_id']} on {who['host']} has no guardian and process 0 has"
                f" one; give --noguardian to all processes or to none"
            )
