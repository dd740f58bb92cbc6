"""A window of steps in jax's profiler, for `--profile=START:STOP`.

The trace holds exactly the steps START to STOP-1 of the run, named "train" and numbered, and the
`jax.named_scope` names of the code inside them.
"""

import atexit
import contextlib
import logging
import re
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError

_logger = logging.getLogger(__name__)


def parse_profile_window(text: str) -> tuple[int, int]:
    """Reads "10:15" as (10, 15): the steps 10 to 14, as in a Python slice.

    Raises:
        ConfigError: anything else than START:STOP with 0 <= START < STOP.
    """
    match = re.fullmatch(r"([0-9]+):([0-9]+)", text.strip())
    if match and int(match[1]) < int(match[2]):
        return int(match[1]), int(match[2])
    raise ConfigError(
        f"profile={text!r} is not START:STOP with 0 <= START < STOP; "
        "for example --profile=10:15 records the steps 10 to 14"
    )


class ProfileWindow:
    """Records a window of steps into `workdir/profile`.

    In the loop:

        window = ProfileWindow(config.profile, config.workdir)
        try:
            for index in range(first, num_steps):
                window.step(index, state)
                with window.annotate(index):
                    state, metrics = train_step(state, batch)
        finally:
            window.close()

    Args:
        text: "START:STOP", or "" for no window.
        workdir: the run's directory.
    """

    def __init__(self, text: str, workdir: str | Path) -> None:
        self.directory = Path(workdir) / "profile"
        # With no window no step is ever reached, and `step` stays one comparison.
        self._start, self._stop = parse_profile_window(text) if text else (-1, -1)
        self._first = self._last = -1  # steps recorded so far
        self._is_done = not text

    @property
    def is_recording(self) -> bool:
        return self._first >= 0 and not self._is_done

    def step(self, index: int, pending: Any = None) -> None:
        """Call before the step `index` is dispatched.

        Args:
            index: index of the step about to be dispatched, 0 the first of the run.
            pending: arrays of the step before (its state). At both ends of the window they are
                waited for, so that the trace holds the whole of its steps and no part of others.
        """
        if self._is_done:
            return
        if self.is_recording and index >= self._stop:
            self._end(pending)
        elif not self.is_recording and self._start <= index < self._stop:
            self._begin(index, pending)
        if self.is_recording:
            self._last = index

    def annotate(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Marks the dispatch of a step, so that the profiler's viewer knows the step's bounds."""
        if not self.is_recording:
            return contextlib.nullcontext()
        import jax

        return jax.profiler.StepTraceAnnotation("train", step_num=index)

    def close(self, pending: Any = None) -> None:
        """Ends a trace that is still running; says so if the window was never reached."""
        if self.is_recording:
            self._end(pending)
        elif not self._is_done:
            self._is_done = True
            _logger.warning(
                "profile=%d:%d recorded nothing: this process ran none of these steps",
                self._start,
                self._stop,
            )

    def _begin(self, index: int, pending: Any) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        # Tracing every Python call would slow the loop down and show that instead.
        options.python_tracer_level = 0
        jax.block_until_ready(pending)
        try:
            jax.profiler.start_trace(self.directory, profiler_options=options)
        except RuntimeError as error:  # a trace of the user's own; the run is worth more
            self._is_done = True
            _logger.warning("profile=%d:%d is skipped: %s", self._start, self._stop, error)
            return
        atexit.register(self._end)  # a sys.exit past the loop's finally block
        self._first = index

    def _end(self, pending: Any = None) -> None:
        import jax

        self._is_done = True
        atexit.unregister(self._end)
        try:
            jax.block_until_ready(pending)
        finally:  # a step that failed: the trace still ends
            jax.profiler.stop_trace()
        steps = f"{self._first} to {self._last}" if self._last > self._first else f"{self._first}"
        _logger.info(
            "profile of step %s is in %s; open it with `uvx xprof --logdir %s`, "
            "or load its .trace.json.gz into https://ui.perfetto.dev",
            steps,
            _newest_trace(self.directory),
            self.directory,
        )


def _newest_trace(directory: Path) -> Path:
    """Folder of the trace just written: the profiler makes one named after the time."""
    folders = sorted((directory / "plugins" / "profile").glob("*/"))
    return folders[-1] if folders else directory
