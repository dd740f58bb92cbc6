"""Exit codes and the errors that carry them.

Each error is one sentence for the user: the rule, the values with their names, the way out.
`jaxtrain.main` prints it without a stack dump and leaves with the code of its class.
"""

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every experiment; part of the interface (README, "Exit codes")."""

    OK = 0
    """Everything owed is done: last save committed, last evaluation written."""
    ERROR = 1
    """Unexpected error; the same command may help."""
    CONFIG = 2
    """Bad flags or configuration; the same command fails again."""
    NONFINITE = 3
    """Stopped on non-finite values; the same command fails again."""
    UNUSABLE = 4
    """Checkpoint, data or disk unusable; the same command fails until that is mended."""
    PREEMPTED = 75
    """SIGTERM or SIGINT, after a committed save; the same command continues the run."""
    PEER_LOST = 76
    """A peer process was lost; the same command continues the run."""
    STALLED = 124
    """The watchdog ended a stalled run; the same command continues the run."""


class JaxtrainError(Exception):
    """Base of all errors that a user can cause or must act on."""

    exit_code: ExitCode = ExitCode.ERROR
    """What a script leaves with after this error."""


class ConfigError(JaxtrainError, ValueError):
    """A flag, a configuration value, a mesh or a layout that cannot work."""

    exit_code = ExitCode.CONFIG


class NonFiniteError(JaxtrainError, RuntimeError):
    """The run stopped because a loss, a gradient or a parameter is not finite."""

    exit_code = ExitCode.NONFINITE


class CheckpointError(JaxtrainError, RuntimeError):
    """A checkpoint is missing, broken, of another model, or could not be written."""

    exit_code = ExitCode.UNUSABLE


class DataError(JaxtrainError, ValueError):
    """Training or evaluation data is missing or unreadable."""

    exit_code = ExitCode.UNUSABLE


class OutputError(JaxtrainError, RuntimeError):
    """A file of the run could not be written: the disk is full, broken or read-only."""

    exit_code = ExitCode.UNUSABLE


class PeerError(JaxtrainError, RuntimeError):
    """Another process of the run did not come, or was lost."""

    exit_code = ExitCode.PEER_LOST
