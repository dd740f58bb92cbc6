"""`jaxtrain eval`: tasks of lm-eval, answered by the model of a run or of Hugging Face.

    jaxtrain eval --workdir=runs/tuned --tasks=arc_easy,hellaswag
    jaxtrain eval --model=models/SmolLM2-135M --tasks=mine --task_path=tasks/

Needs the extra: bash scripts/setup.sh eval, or pip install 'jaxtrain[eval]'. Results are printed,
and those of a run go into its metrics.jsonl and report.html. A task whose data is a local file
needs no network (docs/evaluating.md).
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain import flags
from jaxtrain.config import Config, RunConfig, field, override
from jaxtrain.errors import ConfigError
from jaxtrain.output_files import replace_file
from jaxtrain.progress import setup_logging

__all__ = ["EvalConfig", "evaluate", "run"]

_FACTS = ("ema", "limit", "apply_chat_template")
"""Flags that the records of results bear where they are set."""

_log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Config):
    """What --flags set."""

    workdir: str = field("", help="directory of the run")
    step: int = field(-1, minimum=-1, help="checkpoint to take; -1: the newest")
    ema: bool = field(False, help="the moving average of the parameters instead of the last ones")
    model: str = field("", help="instead of a run: directory of a model of Hugging Face")
    tasks: str = field("", help="names of tasks and groups, with commas between; * is any letters")
    task_path: str = field(
        "", help="folders with task files of your own, with commas between; beside lm-eval's"
    )
    num_fewshot: int = field(
        -1, minimum=-1, help="examples before each question; -1: as the task says"
    )
    limit: int = field(0, minimum=0, help="questions of each task, to try it; 0: all")
    apply_chat_template: bool = field(
        False, help="put questions as a user of a chat would, in the model's chat template"
    )
    max_length: int = field(
        0,
        unit="tokens",
        minimum=0,
        help="that the model reads at a time; 0: what it was trained on",
    )
    global_batch_size: int = field(
        0, unit="rows", minimum=0, help="answered at a time; 0: 8 for each batch shard"
    )
    precision: str = field(
        "",
        choices=("", "float32", "bfloat16"),
        help="of the computation; empty: that of the run, float32 for a model of Hugging Face",
    )
    record: bool = field(
        True, help="write results into metrics.jsonl and report.html of the run, if it is one"
    )
    output: str = field("", help="file for everything that lm-eval returns, as JSON")
    mesh: str = override(RunConfig, "mesh", "fsdp:-1")


def run(words: Sequence[str]) -> None:
    """The command; see the module's docstring."""
    config, paths = flags.parse_with_paths("eval", words, EvalConfig, __doc__)
    if paths:
        raise ConfigError(f"jaxtrain eval takes flags as --name=value; got {' '.join(paths)}")
    setup_logging()
    print(evaluate(config))


def evaluate(config: EvalConfig) -> str:
    """Answers the tasks and writes what was asked for; returns the table of results.

    Raises:
        ConfigError: without the extra; for flags, tasks or a model that cannot work.
        CheckpointError: when the workdir holds no run, or another process uses it.
    """
    names = _listed(config.tasks)
    if bool(config.workdir) == bool(config.model):
        raise ConfigError(
            f"jaxtrain eval needs either --workdir, the directory of a run, or --model, that of a "
            f"model of Hugging Face; got workdir={config.workdir!r} and model={config.model!r}."
        )
    if not names:
        raise ConfigError("jaxtrain eval needs --tasks, names with commas between.")
    if config.model and (config.ema or config.step >= 0):
        raise ConfigError(
            f"--ema and --step choose a checkpoint of a run; model={config.model} has one set of "
            "weights. Leave them out."
        )
    require_extra()
    from jaxtrain import run_lock
    from jaxtrain.evals.answers import Answers
    from jaxtrain.evals.harness import open_tasks, run_tasks
    from jaxtrain.evals.results import table, task_records

    manager = open_tasks(names, _folders(config.task_path))
    is_recorded = config.record and bool(config.workdir)
    with run_lock.hold(_existing(config.workdir)) if is_recorded else contextlib.nullcontext():
        subject = _open(config)
        _log.info("%s: context of %d tokens", subject.name, subject.max_length)
        if config.apply_chat_template:
            subject.template()  # refused now rather than after the other requests
        results = run_tasks(
            Answers(subject, global_batch_size=config.global_batch_size),
            manager,
            names,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
        )
        facts = {name: getattr(config, name) for name in _FACTS if getattr(config, name)}
        records = task_records(results, subject.step, facts)
        if config.output:
            text = json.dumps(results, indent=1, default=str)
            replace_file(Path(config.output).expanduser(), text.encode() + b"\n")
        if is_recorded:
            _record(Path(config.workdir).expanduser(), records)
    return table(records)


def require_extra() -> None:
    """Sees that lm-eval is installed.

    Raises:
        ConfigError: saying how to install it.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "jaxtrain eval needs lm-eval, which is not installed; install it with "
            "bash scripts/setup.sh eval, or pip install 'jaxtrain[eval]'."
        )


def _open(config: EvalConfig) -> Any:
    from jaxtrain.checkpoint_files import absolute
    from jaxtrain.evals.subject import open_directory, open_run

    if config.model:
        return open_directory(
            absolute(config.model, "model"),
            mesh=config.mesh,
            precision=config.precision,
            max_length=config.max_length,
        )
    return open_run(
        config.workdir,
        step=config.step,
        ema=config.ema,
        mesh=config.mesh,
        precision=config.precision,
        max_length=config.max_length,
    )


def _record(workdir: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes records into the files of a run that is not going on."""
    from jaxtrain.metrics import JsonlWriter
    from jaxtrain.report import write_report
    from jaxtrain.run_files import Writers
    from jaxtrain.tensorboard import TensorBoardWriter

    writers = [JsonlWriter(workdir / "metrics.jsonl"), TensorBoardWriter(workdir / "tensorboard")]
    with Writers(writers) as writer:
        for record in records:
            writer.write(record)
    _log.info("report: %s", write_report(workdir))


def _existing(workdir: str) -> str:
    """A directory that holds a run: locking makes one that is absent."""
    from jaxtrain.hf.exporting import read_run

    read_run(Path(workdir).expanduser())
    return workdir


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _folders(text: str) -> list[str]:
    folders = _listed(text)
    for folder in folders:
        if not os.path.isdir(os.path.expanduser(folder)):
            raise ConfigError(
                f"task_path={folder} must be a folder with task files; there is none."
            )
    return [os.path.abspath(os.path.expanduser(folder)) for folder in folders]
