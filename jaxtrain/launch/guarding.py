"""How a command becomes the guardian of itself, before it has loaded anything."""

import dataclasses
import json
import logging
import os
import signal
import sys
from typing import Protocol

from jaxtrain import phases
from jaxtrain.host import enable_huge_pages, reason_against_restart
from jaxtrain.launch.evidence import LauncherConfig, decide_for
from jaxtrain.launch.guardian import Settings
from jaxtrain.stop_signals import STOP_SIGNALS

_logger = logging.getLogger("jaxtrain")

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The package is found where it was, installed or not. -P, since a module of the user's directory
# must not stand in for one of Python's.
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    " from jaxtrain.launch.guardian import main; main()"
)


class GuardianConfig(LauncherConfig, Protocol):
    """The fields of a run's configuration that are read here."""

    @property
    def guardian(self) -> bool: ...
    @property
    def huge_pages(self) -> str: ...
    @property
    def init_timeout_seconds(self) -> float: ...
    @property
    def stall_timeout_seconds(self) -> float: ...


def become_guardian(config: GuardianConfig) -> None:
    """Makes this process the guardian of the same command; returns where there is to be none.

    A single process has none, and neither has what cannot be executed again (`host`).

    Raises:
        ConfigError: for evidence that is incomplete or contradictory.
    """
    if not config.guardian or phases.is_guarded():
        return
    decision = decide_for(config)
    if decision.num_processes == 1:
        return
    reason = reason_against_restart() if sys.platform == "linux" else "it needs Linux"
    if reason:
        _logger.warning("guardian: none, %s", reason)
        return
    settings = Settings(
        process_id=decision.process_id,
        num_processes=decision.num_processes,
        coordinator=decision.coordinator,
        init_timeout_seconds=config.init_timeout_seconds,
        stall_timeout_seconds=config.stall_timeout_seconds,
    )
    if config.huge_pages == "auto":
        enable_huge_pages(os.environ)  # for the child, which need not restart for them
    words = [json.dumps(dataclasses.asdict(settings)), sys.executable, *sys.orig_argv[1:]]
    # A signal that comes before the guardian can take it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-c", _START, _ROOT, *words])
