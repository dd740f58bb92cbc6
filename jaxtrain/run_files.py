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

from jaxtrain.config import RunConfig, dump, versions
from jaxtrain.layout_audit import Audit
from jaxtrain.metrics import JsonlWriter, TensorBoardWriter, Writer, cut_after, replace_file

__all__ = ["Writers", "open_writers", "write_report", "write_start"]

_logger = logging.getLogger("jaxtrain")


class Writers:
    """All writers of a run as one; without a workdir and writers it drops what it is given."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

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
    if dropped := cut_after(path, step):
        _logger.info("metrics.jsonl: %d records after step %d are written anew", dropped, step)
    return Writers(
        [JsonlWriter(path), TensorBoardWriter(workdir / "tensorboard", step + 1), *extra]
    )


def write_start(
    config: RunConfig, *, layout: Audit, describe: Mapping[str, Any], **facts: Any
) -> None:
    """Writes what is known at the start of a run.

    `config.json`: the resolved configuration and the versions, to be given back with `--config`;
    `audit.json`: where every parameter lives; `run.json`: `describe`, the environment, and facts
    of the compiled step.
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
    run = {"describe": dict(describe), "environment": environment, **facts}
    replace_file(workdir / "config.json", dump(config, versions=versions()).encode())
    for name, content in (("audit.json", layout.to_json()), ("run.json", run)):
        replace_file(workdir / name, (json.dumps(content, indent=1) + "\n").encode())


def write_report(config: RunConfig) -> None:
    """Writes report.html from the files of the run; a failure costs a warning, not the run."""
    from jaxtrain import report

    try:
        path = report.write_report(config.workdir)
    except Exception as error:
        _logger.warning("the report could not be written: %s", error)
    else:
        _logger.info("report: %s", path)
