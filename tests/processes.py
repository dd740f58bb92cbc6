"""Runs of the toy in processes of their own, watched by what they print."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).parent
TIMEOUT = 200
"""Seconds for anything that ends by itself; only a failing test waits so long."""


def environment(at=""):
    """Variables for a run with `TOY_AT=at`."""
    variables = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        PYTHONPATH=os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        PYTHONUNBUFFERED="1",
        TOY_AT=at,
    )
    if variables.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Compiling the sources of jax takes longer than all the rest, and these are many starts.
        variables["PYTHONPYCACHEPREFIX"] = str(TESTS.parent / ".cache" / "pycache")
    return variables


class Run:
    """A running toy: what it says, and a way to talk back."""

    def __init__(self, workdir, *flags, at="", script="faults/toy_run.py", variables=None):
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / script), f"--workdir={workdir}", *flags],
            env={**environment(at), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text):
        """Reads on until a line holds the text."""
        self._read(lambda line: text in line, f"waiting for {text!r}")

    def signal(self, number):
        self.process.send_signal(number)

    def answer(self):
        """Lets a thread that asks go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Waits for the end; returns the exit code."""
        self._read(lambda line: False, "waiting for the end")
        return self.process.wait(TIMEOUT)

    def _read(self, is_last, what):
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{what}, got only:\n{self.output}") from None
            if line is None:
                assert what == "waiting for the end", f"ended while {what}:\n{self.output}"
                return
            self.output += line
            if is_last(line):
                return

    def close(self):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def started(workdir, *flags, **options):
    """A run that is killed at the end of the block if it is still there."""
    run = Run(workdir, *flags, **options)
    try:
        yield run
    finally:
        run.close()


def finished(workdir, *flags, **options):
    """(exit code, output) of a run that ends by itself."""
    with started(workdir, *flags, **options) as run:
        return run.end(), run.output
