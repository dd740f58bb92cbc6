"""Runs the scripts of experiments/ for the tests: in this process, or in one of their own."""

import contextlib
import functools
import importlib
import io
import json
import logging
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import processes

from jaxtrain import evaluation as evaluating
from jaxtrain import flags, loop
from jaxtrain.metrics import read_records

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "experiments").glob("*.py"))

# As when a script is run: one may import another.
sys.path.insert(0, str(ROOT / "experiments"))

TINY = (
    "--model.num_layers=2",
    "--model.embed_dim=32",
    "--model.mlp_dim=64",
    "--data.sequence_length=32",
    "--global_batch_size=8",
)
"""Flags of train_lm with which it compiles in a second or two."""


@contextlib.contextmanager
def light_compilation() -> Iterator[None]:
    """XLA compiles faster meanwhile, to slower programs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def write_text(path: Path, num_lines: int = 400) -> Path:
    """Writes text that is the same on every machine."""
    path.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}\n" for n in range(num_lines)))
    return path


class Ended(NamedTuple):
    """How a script ended."""

    code: int
    out: str
    err: str
    """Standard error, the log included."""
    seconds: float
    config: Any = None
    """What it was configured with; None in a process of its own."""

    @property
    def error(self) -> str:
        """The message at the end of standard error; nothing was compiled before it."""
        before, found, message = self.err.rpartition("error: ")
        assert found, self.err
        # One line, or a list of which each line is indented.
        assert all(line.startswith("  ") for line in message.splitlines()[1:]), self.err
        assert "Traceback" not in self.err
        assert "compiled in" not in before
        return message.rstrip("\n")


def run(name: str, *words: Any, num_devices: int = 8) -> Ended:
    """Runs a script in this process, as if the machine had the first `num_devices` devices.

    XLA leaves most optimisations out, so that it compiles three times as fast.
    """
    out, err, parsed = io.StringIO(), io.StringIO(), []
    parse, make_mesh = flags.parse, loop.make_mesh

    def noting_parse(*args: Any, **kwargs: Any) -> Any:
        parsed.append(parse(*args, **kwargs))
        return parsed[-1]

    devices = jax.devices()[:num_devices]
    main = importlib.import_module("jaxtrain.main")
    logger, handler = logging.getLogger("jaxtrain"), logging.StreamHandler(err)
    patches = [
        mock.patch.object(sys, "argv", [f"{name}.py", *map(str, words)]),
        mock.patch.object(flags, "parse", noting_parse),
        *(
            mock.patch.object(module, "make_mesh", functools.partial(make_mesh, devices=devices))
            for module in (loop, evaluating)
        ),
        mock.patch.object(jax, "device_count", return_value=num_devices),
        # It would start the tests again.
        mock.patch.object(main, "restart_with_huge_pages", return_value="on"),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ]
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(light_compilation())
        for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            os.environ.pop(variable, None)  # an earlier run of this process may have set it
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        try:
            runpy.run_path(str(ROOT / "experiments" / f"{name}.py"), run_name="__main__")
        except SystemExit as leaving:
            code = leaving.code
        else:
            raise AssertionError(f"{name} did not exit with a code")
    seconds = time.perf_counter() - begin
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue(), seconds, parsed[-1] if parsed else None)


def succeed(name: str, *words: Any, num_devices: int = 8) -> Ended:
    """`run`, which must end with 0."""
    ended = run(name, *words, num_devices=num_devices)
    assert ended.code == 0, ended.err
    return ended


def start(*words: Any, is_optimized: bool = False, **options: Any) -> Ended:
    """Runs `python WORDS` in a process of its own, which finds one CPU device.

    Args:
        *words: a script of experiments/ by its name, or what else Python takes; arguments.
        is_optimized: whether XLA compiles as it does for a user.
        **options: of `subprocess.run`.
    """
    first, *rest = map(str, words)
    if first in SCRIPTS:
        first = str(ROOT / "experiments" / f"{first}.py")
    environment = dict(processes.environment(), PYTHONWARNINGS="error")
    if not is_optimized:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    begin = time.perf_counter()
    process = subprocess.run(
        [sys.executable, first, *rest],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **{"timeout": processes.TIMEOUT, **options},
    )
    seconds = time.perf_counter() - begin
    return Ended(process.returncode, process.stdout, process.stderr, seconds)


def train_records(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are steps."""
    return [r for r in read_records(workdir / "metrics.jsonl") if not r.get("eval")]


def eval_records(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are evaluations."""
    return [r for r in read_records(workdir / "metrics.jsonl") if r.get("eval")]


def evaluation(ended: Ended) -> dict[str, Any]:
    """What `--evaluate` printed."""
    return json.loads(ended.out)
