"""Standard output and error that nobody takes any more: closed, or of a terminal that is gone."""

import contextlib
import os
import select
import stat
import sys
from typing import TextIO


def open_missing() -> None:
    """Gives a process that was started with a closed output one that leads nowhere.

    Else the next file or pipe that is opened would get its number.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def silence(fd: int) -> None:
    """Lets what is written to a descriptor from now on, and what is still buffered, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def silence_lost_terminal() -> None:
    """Silences what went to a terminal that is gone: every print to it would raise."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):  # closed: nothing goes there
            # What was a terminal is still a device, but no terminal.
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                silence(fd)


def has_no_reader(stream: TextIO) -> bool:
    """Whether it is a pipe whose reader has gone."""
    poller = select.poll()
    poller.register(stream, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))
