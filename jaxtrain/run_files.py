"""The files of a run besides its checkpoints: config.json, run.json, audit.json, metrics."""

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import RunConfig, changed, dump, versions
from jaxtrain.errors import OutputError
from jaxtrain.layout_audit import Audit
from jaxtrain.metrics import (
    JsonlWriter,
    Writer,
    cut_after,
    is_evaluation,
    read_records,
)
from jaxtrain.output_files import replace_file, set_aside
from jaxtrain.report_run import is_number, positive
from jaxtrain.tensorboard import TensorBoardWriter

__all__ = [
    "Writers",
    "evaluated_step",
    "last_metrics",
    "open_writers",
    "write_end",
    "write_report",
    "write_start",
]

_logger = logging.getLogger("jaxtrain")

_RUN = "run.json"
_AMOUNTS = {"step", "eval", "samples", "tokens", "mfu"}
_TIMES = ("wall_seconds", "checkpoint_seconds")


class Writers:
    """All writers of a run as one; without a workdir and writers it drops what it is given.

    A context: the end closes all, and a failure to close hides no error that ended the block.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            _logger.warning("%s", failure)

    def write(self, record: Mapping[str, Any]) -> None:
        """Gives a record to every writer."""
        for writer in self._writers:
            writer.write(record)

    def flush(self) -> None:
        """Makes all records durable."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """Closes every writer, also after one of them failed; raises the first failure."""
        failures = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                failures.append(error)
        self._writers = []
        if failures:
            raise failures[0]


def open_writers(
    config: RunConfig, step: int, extra: Sequence[Writer], *, is_primary: bool
) -> Writers:
    """Opens metrics.jsonl and TensorBoard, cut to the step that the run begins from.

    Only the primary process writes; the others get writers that drop everything.
    """
    if not is_primary:
        return Writers(())
    if not config.workdir:
        return Writers(extra)
    workdir = Path(config.workdir)
    path = workdir / "metrics.jsonl"
    if not config.checkpoint.overwrite:
        _keep_lost_records(path, step)
    if dropped := cut_after(path, step):
        _logger.info("metrics.jsonl: %d records after step %d are written anew", dropped, step)
    return Writers(
        [JsonlWriter(path), TensorBoardWriter(workdir / "tensorboard", step + 1), *extra]
    )


def _keep_lost_records(path: Path, step: int) -> None:
    """Copies records that are about to be dropped though their checkpoint was once committed.

    After a kill, what is dropped is written anew and the same; but if checkpoints were moved away
    or lost, the records may be all that is left of a run. A later checkpoint was committed if two
    later saves went by (a save waits for the one before), or if the run has ended in order, which
    is known of a start from nothing only.
    """
    dropped = [record for record in read_records(path, is_quiet=True) if record["step"] > step]
    trained = [record for record in dropped if not record.get("eval")]
    # The first record after a save has its seconds: that of `step` itself does not count.
    later = trained[1:] if step else trained
    saves = sum(positive(record.get("checkpoint_seconds")) > 0 for record in later)
    has_ended = step == 0 and positive(_read_run(path.parent).get("wall_seconds")) > 0
    if not dropped or not (saves > 1 or has_ended):
        return
    number = 1
    while os.path.lexists(copy := path.with_name(f"{path.name}.bak-{number}")):
        number += 1
    replace_file(copy, path.read_bytes())
    _logger.warning(
        "%s holds records up to step %d, but the checkpoints after step %d are gone; it is cut to "
        "step %d, and the file as it was is kept as %s",
        path,
        max(record["step"] for record in dropped),
        step,
        step,
        copy,
    )


def evaluated_step(config: RunConfig, step: int) -> int:
    """The last step up to `step` that metrics.jsonl holds an evaluation of; 0 if there is none.

    An evaluation that a signal cut short is done by the next start, after the checkpoint of its
    step, so the checkpoint does not know of it.
    """
    if not config.workdir or step == 0:
        return 0
    records = read_records(Path(config.workdir) / "metrics.jsonl", is_quiet=True)
    steps = (record["step"] for record in records if is_evaluation(record))
    return max((found for found in steps if found <= step), default=0)


def last_metrics(config: RunConfig, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What metrics.jsonl holds of a run that ended at a step.

    Returns:
        (metrics of that step, the last evaluation), as `FitResult` has them; {} without a record.
    """
    if not config.workdir:
        return {}, {}
    records = read_records(Path(config.workdir) / "metrics.jsonl")
    trained = [r for r in records if not r.get("eval") and r["step"] == step]
    evaluated = [r for r in records if is_evaluation(r) and r["step"] <= step]
    metrics = {
        name: value
        for name, value in (trained[-1] if trained else {}).items()
        if name not in _AMOUNTS and not name.endswith(("_seconds", "_per_second"))
    }
    found = evaluated[-1] if evaluated else {}
    return metrics, {name: value for name, value in found.items() if name not in ("step", "eval")}


def write_start(
    config: RunConfig, step: int, *, layout: Audit, describe: Mapping[str, Any], **facts: Any
) -> None:
    """Writes what is known at the start of a run.

    `config.json`: the resolved configuration, to be given back with `--config`, beside it the
    versions and the defaults of the fields that were changed;
    `audit.json`: where every parameter lives; `run.json`: `describe`, the environment, and facts
    of the compiled step. Where the run is resumed (`step` > 0), the times of its earlier starts
    are kept.

    Raises:
        OutputError: when the disk refuses; nothing is trained yet.
    """
    workdir = Path(config.workdir)
    device = jax.devices()[0]
    environment = {
        "platform": platform.platform(),
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
        "cpu cores": os.cpu_count(),
        "command": " ".join(sys.orig_argv),
    }
    before = _read_run(workdir, is_needed=True) if step else {}
    times = {name: positive(before.get(name)) for name in _TIMES}
    run = {"describe": dict(describe), "environment": environment, **facts, **times}
    text = dump(config, changed=changed(config), versions=versions())
    replace_file(workdir / "config.json", text.encode())
    _write_json(workdir / "audit.json", layout.to_json())
    _write_json(workdir / _RUN, run)


def write_end(config: RunConfig, **times: float) -> None:
    """Adds the times of this start to those of the earlier ones, in `run.json`.

    All steps are saved by now: a failure costs a warning, not the run.

    Args:
        config: of the run.
        **times: `wall_seconds`, all of it, and `checkpoint_seconds`, of the saves after the last
            record, the wait for the last commit included.
    """
    path = Path(config.workdir) / _RUN
    run = _read_run(path.parent)
    total = {name: positive(run.get(name)) + times[name] for name in _TIMES}
    try:
        _write_json(path, run | total)
    except OutputError as error:
        _logger.warning("the times of this start are lost: %s", error)


def _read_run(workdir: Path, *, is_needed: bool = False) -> dict[str, Any]:
    """What `run.json` holds; nothing if it is not there or was spoilt by somebody.

    Args:
        workdir: of the run.
        is_needed: whether a file that does not say the times is set aside, with a warning.
    """
    path = workdir / _RUN
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        content = None
    run = content if isinstance(content, dict) else {}
    if is_needed and not all(is_number(run.get(name)) for name in _TIMES):
        try:
            where = f"the file as it was is {set_aside(path)}"
        except (OSError, OutputError) as error:
            where = str(error)
        _logger.warning("%s does not say how long the run took so far; %s", path, where)
    return run


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=1) + "\n").encode())


def write_report(config: RunConfig, *, only_if_stale: bool = False) -> None:
    """Writes report.html from the files of the run; a failure costs a warning, not the run.

    Args:
        config: of the run.
        only_if_stale: only if there is none that is newer than the metrics, as after a kill
            between the last checkpoint and the report.
    """
    from jaxtrain import report

    try:
        if only_if_stale and _is_current(Path(config.workdir)):
            return
        path = report.write_report(config.workdir)
    except Exception as error:
        _logger.warning("the report could not be written: %s", error)
    else:
        _logger.info("report: %s", path)


def _is_current(workdir: Path) -> bool:
    report, metrics = workdir / "report.html", workdir / "metrics.jsonl"
    return report.exists() and not (
        metrics.exists() and metrics.stat().st_mtime_ns > report.stat().st_mtime_ns
    )
