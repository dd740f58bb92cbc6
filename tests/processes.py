"""Runs of the toy in processes of their own, watched by what they print."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
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


def wait_until(is_so, *, every=0.1):
    """Returns when `is_so()`, which is asked every so many seconds."""
    deadline = time.monotonic() + TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(every)


class Programs:
    """The compile cache of one run: what earlier runs of these tests compiled, and room for more.

    A third of the processor time of a start of the toy is compilation. JAX does not write entries
    in one go, so a run that may be killed, or a process beside it, must not write where another
    reads: each has a directory of its own, and what a run compiled is passed on when it ended well.
    """

    shared: Path | None = None
    """Of all workers; set by conftest.py."""

    def __init__(self):
        self._own = tempfile.TemporaryDirectory(prefix="programs", ignore_cleanup_errors=True)
        self.variables = {
            "JAX_COMPILATION_CACHE_DIR": self._own.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        assert self.shared is not None
        link_all(self.shared, Path(self._own.name))

    def pass_on(self):
        assert self.shared is not None
        link_all(Path(self._own.name), self.shared)

    def close(self):
        self._own.cleanup()


def link_all(source, target):
    """Puts every file of one directory into another as well; those that are there stay."""
    for path in source.iterdir():
        with contextlib.suppress(FileExistsError):
            os.link(path, target / path.name)


def state_of(pid):
    """The kernel's letter for what a process does; "" if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def assert_gone(*pids):
    """They end, within seconds: a kill is certain to come, but not when."""
    deadline = time.monotonic() + 20
    while any(state_of(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Run:
    """A running toy: what it says, and a way to talk back."""

    def __init__(
        self, workdir, *flags, at="", script="faults/toy_run.py", variables=None, prefix=()
    ):
        self._programs = Programs()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(TESTS / script), f"--workdir={workdir}", *flags],
            env={**environment(at), **self._programs.variables, **(variables or {})},
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
        code = self.process.wait(TIMEOUT)
        if code == 0:
            self._programs.pass_on()
        return code

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
        self._programs.close()


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
