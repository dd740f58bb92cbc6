"""How a process that another has started dies with it, and what its end is called."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent dies, whatever of."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """An exit code as `subprocess` gives it, in words that follow the name of the process."""
    if code >= 0:
        return f"ended with exit code {code}"
    note = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{note}"
