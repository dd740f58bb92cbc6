"""How far the clocks of two processes are apart, found by some round trips of a line each."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

ASK = b'{"ask": "clock"}'
"""A line without its end, to which `answer` is the answer."""
# The quickest one counts; the first ones wait for the other side to look.
_NUM_ROUND_TRIPS = 8


def answer() -> bytes:
    """A line with the time of this clock."""
    return json.dumps({"clock": time.time()}).encode() + b"\n"


def compare(connection: socket.socket, answers: Iterator[dict[str, Any]]) -> dict[str, float]:
    """Asks the other side for its time.

    Args:
        connection: to it.
        answers: what comes from it, parsed.

    Returns:
        `clock_skew_seconds`, how far this clock is ahead, and `round_trip_seconds`, half of which
        the skew may be off.

    Raises:
        OSError: if the other side hangs up.
    """
    found = []
    for _ in range(_NUM_ROUND_TRIPS):
        began, sent = time.monotonic(), time.time()
        connection.sendall(ASK + b"\n")
        message = next(answers, None)
        if message is None:
            raise ConnectionResetError("it hung up")
        round_trip = time.monotonic() - began
        found.append((round_trip, sent + round_trip / 2 - message["clock"]))
    round_trip, skew = min(found)
    return {"clock_skew_seconds": skew, "round_trip_seconds": round_trip}
