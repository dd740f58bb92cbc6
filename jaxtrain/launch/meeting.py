"""The first meeting of the processes of a run, before JAX joins them.

JAX waits for absent processes in C++, in silence, and ends the process with a stack dump when they
do not come. So the processes meet here first, at the port that JAX takes over: process 0 listens,
the others connect, compare clocks with it, and introduce themselves with a line of JSON. While some
are absent process 0 tells everybody which, and all print it. When all are there each gets
everybody's introduction. Guardians meet in the same way, and stay connected (`meet_and_stay`).

Nothing is secret here, and nobody is authenticated: like JAX's own port, this one has to be out of
reach of strangers.
"""

import contextlib
import dataclasses
import ipaddress
import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.errors import ConfigError, PeerError
from jaxtrain.launch import clocks

_logger = logging.getLogger("jaxtrain")

REPORT_SECONDS = 30.0
"""How often the absent processes are named."""
_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
# Of an introduction, and of everybody's; whatever else connects is not read for ever.
_MAX_LINE_BYTES = 2**26

Introduction = Mapping[str, Any]
"""What a process says of itself, as JSON; `process_id`, `num_processes`, `host` and `pid`, at
least. Added are `address`, from which it came, and what `clocks.compare` found."""


class ToldError(Exception):
    """A process was told to end before all had met; its text says which, and by what.

    What a signal handler raises during a meeting. Every process that has come then raises it.
    """


@dataclasses.dataclass
class _Guest:
    """A connection to process 0."""

    connection: socket.socket
    address: str
    received: bytes = b""
    introduction: dict[str, Any] | None = None


def meet(
    host: str,
    port: int,
    me: Introduction,
    *,
    timeout_seconds: float,
    check: Callable[[Sequence[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Waits for all processes of the run.

    Args:
        host: of process 0.
        port: on it.
        me: what this process says of itself.
        timeout_seconds: how long the others are waited for.
        check: called on process 0 with all introductions, while all others still wait; a
            `ConfigError` from it is raised on every process, and so does what it adds to an
            introduction reach every process.

    Returns:
        Everybody's introduction, by process id.

    Raises:
        ToldError: when it was raised on one process that had come; on every one of those.
        PeerError: when some did not come, naming them; on every process that did.
        ConfigError: when two have the same id or other ideas of their number, or from `check`; on
            every process.
    """
    everybody, connections = meet_and_stay(
        host, port, me, timeout_seconds=timeout_seconds, check=check
    )
    hang_up(connections.values(), after_them=me["process_id"] == 0)
    return everybody


def meet_and_stay(
    host: str,
    port: int,
    me: Introduction,
    *,
    timeout_seconds: float,
    check: Callable[[Sequence[dict[str, Any]]], None],
) -> tuple[list[dict[str, Any]], dict[int, socket.socket]]:
    """Like `meet`, and the connections stay open; nobody listens at the port any more.

    Returns:
        Everybody's introduction, and the connections by process id: to all others on process 0, to
        process 0 on the others.
    """
    if me["process_id"] == 0:
        return _Host(host, port, me, timeout_seconds, check).wait()
    return _visit(host, port, me, timeout_seconds)


def hang_up(connections: Iterable[socket.socket], *, after_them: bool) -> None:
    """Closes connections; process 0 lets the others do it first.

    Who closes first keeps the connection lingering for a minute, and that must not be the port
    which the next run listens at.
    """
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            while after_them and connection.recv(2**16):
                pass
        connection.close()


def wait_for_listener(host: str, port: int, timeout_seconds: float) -> None:
    """Waits until somebody listens; whoever connects in vain first waits a second to try again."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return
        except OSError:
            time.sleep(_RETRY_SECONDS / 5)


class _Host:
    """Process 0 of the meeting."""

    def __init__(
        self,
        host: str,
        port: int,
        me: Introduction,
        timeout_seconds: float,
        check: Callable[[Sequence[dict[str, Any]]], None],
    ) -> None:
        self._num_processes = me["num_processes"]
        self._timeout_seconds = timeout_seconds
        self._check = check
        self._began = time.monotonic()
        clock = {"clock_skew_seconds": 0.0, "round_trip_seconds": 0.0}
        self._present: dict[int, dict[str, Any]] = {0: {**me, "address": "", **clock}}
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(host, port)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def wait(self) -> tuple[list[dict[str, Any]], dict[int, socket.socket]]:
        try:
            self._wait_for_all()
            everybody = [self._present[i] for i in range(self._num_processes)]
            self._check(everybody)
        except (ConfigError, PeerError) as error:
            self._tell({"error": str(error), "is_config": isinstance(error, ConfigError)})
            self._close()
            raise
        except ToldError as error:
            self._tell({"told": str(error)})
            self._close()
            raise
        except BaseException:
            self._close()
            raise
        # JAX listens here next: who connects from now on must reach it and not us.
        self._selector.unregister(self._listener)
        self._listener.close()
        self._tell({"everybody": everybody})
        self._selector.close()
        connections: dict[int, socket.socket] = {}
        for guest in self._guests.values():
            if guest.introduction is None:
                guest.connection.close()
            else:
                connections[guest.introduction["process_id"]] = guest.connection
        return everybody, connections

    def _wait_for_all(self) -> None:
        reported = self._began
        while len(self._present) < self._num_processes:
            now = time.monotonic()
            if now - self._began > self._timeout_seconds:
                raise PeerError(self._absent_text())
            if now - reported > REPORT_SECONDS:
                reported = now
                absent = [i for i in range(self._num_processes) if i not in self._present]
                _say_absent(absent, self._num_processes, now - self._began)
                self._tell({"absent": absent, "seconds": now - self._began})
            for key, _ in self._selector.select(_RETRY_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(self._guests[key.fileobj])  # pyright: ignore

    def _accept(self) -> None:
        connection, address = self._listener.accept()
        connection.setblocking(False)
        text = address[0].removeprefix("::ffff:")
        self._guests[connection] = _Guest(connection, text)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, guest: _Guest) -> None:
        try:
            received = guest.connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._dismiss(guest)
            return
        *lines, guest.received = (guest.received + received).split(b"\n")
        if len(guest.received) > _MAX_LINE_BYTES:
            self._dismiss(guest)
            return
        for line in lines:
            if line == clocks.ASK:
                with contextlib.suppress(OSError):  # noticed when it is read from
                    guest.connection.send(clocks.answer())
            elif guest.introduction is not None:
                self._hear(guest, line)
            else:
                self._introduce(guest, line)
                if guest.introduction is None:
                    break

    def _hear(self, guest: _Guest, line: bytes) -> None:
        """What a guest says after its introduction: only that it was told to end."""
        try:
            told = json.loads(line)["told"]
        except (ValueError, KeyError, TypeError):
            return
        raise ToldError(f"{told}")

    def _introduce(self, guest: _Guest, line: bytes) -> None:
        try:
            introduction = json.loads(line)
            process_id = int(introduction["process_id"])
            num_processes = int(introduction["num_processes"])
        except (ValueError, KeyError, TypeError):
            _logger.warning("somebody at %s connected who is no process of a run", guest.address)
            self._dismiss(guest)
            return
        guest.introduction = {**introduction, "address": guest.address}
        if not self._present[0]["address"]:
            own = guest.connection.getsockname()[0].removeprefix("::ffff:")
            self._present[0]["address"] = own
        if num_processes != self._num_processes:
            raise ConfigError(
                f"{_name(guest.introduction)} is one of {num_processes} processes, but"
                f" {_name(self._present[0])} is one of {self._num_processes}; give all the same"
                f" num_processes"
            )
        if process_id in self._present:
            raise ConfigError(
                f"{_name(guest.introduction)} and {_name(self._present[process_id])} are both"
                f" process {process_id} of {num_processes}; give each its own process_id"
            )
        self._present[process_id] = guest.introduction

    def _dismiss(self, guest: _Guest) -> None:
        """A guest left, perhaps to come again."""
        self._selector.unregister(guest.connection)
        guest.connection.close()
        del self._guests[guest.connection]
        if guest.introduction is not None:
            _logger.warning("%s left before all had come", _name(guest.introduction))
            del self._present[guest.introduction["process_id"]]

    def _tell(self, message: Mapping[str, Any]) -> None:
        line = _line(message)
        for guest in self._guests.values():
            if guest.introduction is None:
                continue
            try:
                guest.connection.settimeout(_CONNECT_SECONDS)
                guest.connection.sendall(line)
                guest.connection.setblocking(False)
            except OSError:
                continue  # noticed when it is read from

    def _close(self) -> None:
        guests = self._guests.values()
        hang_up((g.connection for g in guests if g.introduction is None), after_them=False)
        hang_up((g.connection for g in guests if g.introduction is not None), after_them=True)
        self._listener.close()
        self._selector.close()

    def _absent_text(self) -> str:
        absent = [i for i in range(self._num_processes) if i not in self._present]
        return (
            f"{len(self._present)} of {self._num_processes} processes came within"
            f" {self._timeout_seconds:g} s (init_timeout_seconds); absent: {format_ids(absent)}."
            f" Were they started, with this coordinator, and can they reach it?"
        )


def _visit(
    host: str, port: int, me: Introduction, timeout_seconds: float
) -> tuple[list[dict[str, Any]], dict[int, socket.socket]]:
    """The meeting as the other processes see it."""
    began = reported = time.monotonic()
    deadline = began + timeout_seconds
    absent: list[int] = []
    while True:
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(
                    socket.create_connection((host, port), _CONNECT_SECONDS)
                )
                messages = _messages(connection, deadline)
                connection.sendall(_line({**me, **clocks.compare(connection, messages)}))
                stack.enter_context(_telling(connection))
                for message in messages:
                    if "everybody" in message:
                        stack.pop_all()  # it stays open
                        return message["everybody"], {0: connection}
                    if "told" in message:
                        raise ToldError(message["told"])
                    if "error" in message:
                        kind = ConfigError if message["is_config"] else PeerError
                        raise kind(message["error"])
                    absent = message["absent"]
                    _say_absent(absent, me["num_processes"], message["seconds"])
            reason = "it hung up"
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now > deadline:
            others = f"; absent at last: {format_ids(absent)}" if absent else ""
            raise PeerError(
                f"process {me['process_id']} of {me['num_processes']} did not meet process 0 at"
                f" {host} port {port} within {timeout_seconds:g} s (init_timeout_seconds):"
                f" {reason}{others}. Was it started there, and is the port open?"
            )
        if now - reported > REPORT_SECONDS:
            reported = now
            _logger.info(
                "process %d waits for process 0 at %s port %d: %s (%.0f s)",
                me["process_id"],
                host,
                port,
                reason,
                now - began,
            )
        time.sleep(_RETRY_SECONDS)


@contextlib.contextmanager
def _telling(connection: socket.socket) -> Iterator[None]:
    """Tells process 0 that this one was told to end."""
    try:
        yield
    except ToldError as error:
        with contextlib.suppress(OSError):
            connection.sendall(_line({"told": str(error)}))
        raise


def _messages(connection: socket.socket, deadline: float) -> Iterator[dict[str, Any]]:
    """Lines of process 0 until it hangs up, or until a little after the deadline."""
    received = b""
    while len(received) < _MAX_LINE_BYTES:
        # Process 0 came first and gives up first; what it says then is worth the wait.
        connection.settimeout(max(0.1, deadline + _FAREWELL_SECONDS - time.monotonic()))
        chunk = connection.recv(2**16)
        if not chunk:
            return
        *lines, received = (received + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines)


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine only."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def _listen(host: str, port: int) -> socket.socket:
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen on port {port}: {error.strerror}; give another port with"
            f" --coordinator=HOST:PORT, or end what uses it"
        ) from error


def _say_absent(absent: Sequence[int], num_processes: int, seconds: float) -> None:
    _logger.info(
        "waiting for %d of %d processes: %s (%.0f s)",
        len(absent),
        num_processes,
        format_ids(absent),
        seconds,
    )


def format_ids(ids: Sequence[int]) -> str:
    """Writes ascending numbers with ranges: 1, 3-5."""
    spans: list[list[int]] = []
    for i in ids:
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _name(introduction: Introduction) -> str:
    return f"pid {introduction['pid']} on {introduction['host']}"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
