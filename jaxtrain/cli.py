"""`jaxtrain COMMAND`, also `python -m jaxtrain`: small tools around a run's directory.

Training starts from an experiment script, not from here. Each command imports what it needs when
it runs.
"""

import contextlib
import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxtrain.errors import CheckpointError, ConfigError, ExitCode, JaxtrainError
from jaxtrain.standard_streams import has_no_reader, open_missing, silence
from jaxtrain.units import several
from jaxtrain.values import did_you_mean, parse_text

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Command(NamedTuple):
    arguments: str
    help: str
    run: Callable[[list[str]], None]
    has_flags: bool = False
    """Whether it has a `--help` of its own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; exits with its code.

    Args:
        argv: program name and arguments; None: those of the process.
    """
    _, *words = sys.argv if argv is None else argv
    open_missing()
    try:
        try:
            _run(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not has_no_reader(sys.stdout):
            raise
        silence(sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as `head` ends other tools
    except OSError as error:
        # One that names a file is about that file; the commands report what is in their way.
        if error.filename is not None or error.errno not in _CANNOT_WRITE:
            raise
        silence(sys.stdout.fileno())  # or the interpreter tries again when it ends
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(int(ExitCode.UNUSABLE))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(words: list[str]) -> None:
    try:
        if not words or words[0] in ("help", "--help", "-h"):
            print(_usage())
        elif words[0] not in _COMMANDS:
            hint = did_you_mean(words[0], _COMMANDS) or f"; one of {', '.join(_COMMANDS)}"
            raise ConfigError(f"{words[0]!r} is not a command{hint}")
        elif {"--help", "-h"} & set(itertools.takewhile(lambda word: word != "--", words[1:])):
            if _COMMANDS[words[0]].has_flags:
                _COMMANDS[words[0]].run(["--help"])
            print(_usage(words[0]))
        else:
            _COMMANDS[words[0]].run(words[1:])
    except JaxtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))


def _usage(name: str = "") -> str:
    if name:
        command = _COMMANDS[name]
        return f"Usage: jaxtrain {name} {command.arguments}".rstrip() + f"\n\n{command.help}"
    rows = [(f"{name} {c.arguments}", c.help) for name, c in _COMMANDS.items()]
    width = max(len(left) for left, _ in rows)
    lines = ["Usage: jaxtrain COMMAND", ""]
    lines += [f"  {left:<{width}}  {text}" for left, text in rows]
    return "\n".join(lines)


def _workdir(name: str, words: list[str]) -> str:
    """The only argument of command `name`: a directory that exists."""
    if len(words) != 1 or words[0].startswith("-"):
        given = " ".join(words) or "nothing"
        raise ConfigError(f"jaxtrain {name} takes {_COMMANDS[name].arguments}; got {given}")
    path = os.path.abspath(os.path.expanduser(words[0]))
    if not os.path.isdir(path):
        raise CheckpointError(f"WORKDIR={path} must be the directory of a run; there is none")
    return path


def _checkpoints(words: list[str]) -> None:
    step, rest = _take_step(words)
    directory = os.path.join(_workdir("checkpoints", rest), "checkpoints")
    from jaxtrain.checkpoint import Checkpointer

    with contextlib.closing(Checkpointer(directory, keep_last=1, read_only=True)) as checkpointer:
        steps = checkpointer.committed_steps()
        present = ", ".join(str(n) for n in steps) or "none"
        if not steps or step not in (None, *steps):
            wanted = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
            raise CheckpointError(f"{directory} holds no {wanted}; present: {present}")
        if step is None:
            print("\n".join(f"step {n}" for n in steps))
            return
        rows = [
            (path, f"[{','.join(str(size) for size in shape)}]", str(dtype))
            for path, shape, dtype in checkpointer.contents(step)
        ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for path, shape, dtype in rows:
        print(f"{path:<{widths[0]}}  {shape:<{widths[1]}}  {dtype}")


def _take_step(words: list[str]) -> tuple[int | None, list[str]]:
    """Takes `--step=N` or `--step N` out of the words."""
    rest, step, waiting = [], None, False
    for word in words:
        if word == "--step":
            waiting = True
            continue
        if waiting or word.startswith("--step="):
            text, waiting = word.removeprefix("--step="), False
            try:
                step = parse_text(int, text)
            except ValueError as error:
                raise ConfigError(f"--step={text} {error}") from None
        else:
            rest.append(word)
    if waiting:
        raise ConfigError("--step takes the number of a step")
    return step, rest


def _doctor(words: list[str]) -> None:
    from jaxtrain import doctor

    doctor.run(words)


def _eval(words: list[str]) -> None:
    from jaxtrain.evals import command

    command.run(words)


def _launch(words: list[str]) -> None:
    from jaxtrain.launch.local import launch

    sys.exit(launch(words))


def _prepare(words: list[str]) -> None:
    from jaxtrain.data import prepare

    prepare.run(words)


def _export_hf(words: list[str]) -> None:
    from jaxtrain.hf import exporting

    exporting.run(words)


def _import_hf(words: list[str]) -> None:
    from jaxtrain.hf import importing

    importing.run(words)


def _report(words: list[str]) -> None:
    workdir = _workdir("report", words)
    from jaxtrain.report import write_report

    print(write_report(workdir))


def _verify_hf(words: list[str]) -> None:
    from jaxtrain.hf import verifying

    verifying.run(words)


def _verify_shards(words: list[str]) -> None:
    from jaxtrain.data.manifest import Manifest

    if not words or any(word.startswith("-") for word in words):
        given = " ".join(words) or "nothing"
        raise ConfigError(f"jaxtrain verify-shards takes SHARDS ...; got {given}")
    for root in words:
        manifest = Manifest.read(root)
        manifest.verify()
        print(f"{root}: {several(len(manifest.shards), 'shard')}, all whole")


def _version(words: list[str]) -> None:
    if words:
        raise ConfigError(f"jaxtrain version takes no arguments; got {' '.join(words)}")
    from jaxtrain.config import versions

    for name, version in versions().items():
        print(name, version)


_COMMANDS = {
    "checkpoints": _Command(
        "WORKDIR [--step=N]",
        "list the checkpoints of a run, or the arrays in one of them",
        _checkpoints,
    ),
    "doctor": _Command(
        "[--workdir=DIR] [--json] [--FLAG=VALUE ...]",
        "look whether this machine, or all those of a run, can train",
        _doctor,
        has_flags=True,
    ),
    "eval": _Command(
        "--workdir=WORKDIR --tasks=NAME,... [--FLAG=VALUE ...]",
        "answer tasks of lm-eval with the model of a run, or of Hugging Face",
        _eval,
        has_flags=True,
    ),
    "export-hf": _Command(
        "DIR --workdir=WORKDIR [--ema] [--adapter] [--FLAG=VALUE ...]",
        "write the model of a run in the format of Hugging Face",
        _export_hf,
        has_flags=True,
    ),
    "import-hf": _Command(
        "DIR --workdir=WORKDIR [--FLAG=VALUE ...]",
        "make a checkpoint of a model of Hugging Face",
        _import_hf,
        has_flags=True,
    ),
    "launch": _Command(
        "--processes=N [OPTION ...] -- COMMAND ...",
        "run a command in N processes on this machine",
        _launch,
        has_flags=True,
    ),
    "prepare": _Command(
        "SOURCE ... OUT [--tokenizer=NAME] [--FLAG=VALUE ...]",
        "make token shards of text, on all cores",
        _prepare,
        has_flags=True,
    ),
    "report": _Command("WORKDIR", "write report.html again from the files of a run", _report),
    "verify-hf": _Command(
        "DIR [--python=PATH] [--FLAG=VALUE ...]",
        "see whether a model of Hugging Face is computed right, and exported as it was",
        _verify_hf,
        has_flags=True,
    ),
    "verify-shards": _Command(
        "SHARDS ...",
        "read token shards and compare their checksums",
        _verify_shards,
    ),
    "version": _Command("", "versions of jaxtrain and of what it runs on", _version),
}
