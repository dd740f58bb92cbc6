"""The signals that ask a run to save and leave."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP comes of a terminal that is closed."""

SAME_SIGNAL_SECONDS = 0.5
"""Those that come so soon after the first are copies of it: a batch system may send one to the
whole step and to each process, and a guardian hands its own on."""


def heard_signals() -> list[signal.Signals]:
    """Those of them that this process takes: not SIGHUP where `nohup` has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not is_ignored]
