"""Making token shards as a plan has it: by several processes, going on after a kill."""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config import versions
from jaxtrain.data.counts import Counts, parse_on_error
from jaxtrain.data.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    UNFINISHED,
    Manifest,
    checksum_of,
)
from jaxtrain.data.prepare_plan import Plan
from jaxtrain.data.prepare_pool import Pool
from jaxtrain.data.prepare_worker import PLAN, documents_of, dtype_of, load_tokenizer, record_path
from jaxtrain.data.tokenizing import Tokenizer, bpe_size, train_bpe
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.file_lock import lock_file
from jaxtrain.output_files import replace_file, writing
from jaxtrain.units import nbytes, several

_LOCK = "lock"
_TRAINED_BYTES = 2**28
_NAMED_PROBLEMS = 5

_log = logging.getLogger("jaxtrain")


class BeingPreparedError(ConfigError):
    """Another process prepares the same directory."""


def make_shards(
    out: str,
    plan: Plan,
    tokenizer: Tokenizer | None,
    *,
    name: str,
    workers: int = 0,
    on_error: str = "stop",
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Manifest:
    """Does what a plan says, or what is missing of it; returns the manifest.

    Args:
        out: directory of the shards.
        plan: of what they hold.
        tokenizer: None: one is trained.
        name: of the tokenizer, for the manifest.
        workers: processes; 0: one for each core.
        on_error: "stop", or "skip:N".
        on_progress: called with the number of tokens now and then; what it raises ends the
            preparation, which can go on later.
    """
    skipped_limit = parse_on_error(on_error)
    if _is_done(out, plan):
        _log.info("%s is prepared already; there is nothing to do", out)
        shutil.rmtree(Path(out, UNFINISHED), ignore_errors=True)
        return Manifest.read(out)
    folder = Path(out, UNFINISHED)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_file(
        folder / _LOCK,
        lambda holder: BeingPreparedError(f"OUT={out} is being prepared by {holder}; let it end"),
    ):
        # Who held the lock until now may have come to the end.
        if not _is_done(out, plan):
            _keep_plan(out, plan)
            if not Path(out, TOKENIZER).exists():
                data = (
                    tokenizer.save()
                    if tokenizer
                    else _train(plan, skip_bad=skipped_limit is not None)
                )
                if data:
                    replace_file(Path(out, TOKENIZER), data)
            records = _make_all(out, plan, workers or _num_cores(), skipped_limit, on_progress)
            plan.require_unchanged_files()
            _write_manifest(out, plan, name, load_tokenizer(out, plan), records)
    shutil.rmtree(Path(out, UNFINISHED), ignore_errors=True)
    return Manifest.read(out)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _is_done(out: str, plan: Plan) -> bool:
    """Whether `out` holds these shards already; refuses one that holds anything else."""
    path = Path(out, MANIFEST)
    if Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"OUT={out} must be a directory; it is a file")
    if path.exists():
        made = json.loads(path.read_bytes())
        if made.get("preparation") != plan.identity:
            raise ConfigError(
                f"OUT={out} holds shards of other sources, flags or another tokenizer; name another"
                f" directory, or delete this one"
            )
        # Their names and sizes are those of then. The contents of those that were written since:
        for source, (file, relative, _, changed) in zip(made["sources"], plan.files, strict=True):
            if changed > path.stat().st_mtime_ns and checksum_of(file) != source["hash"]:
                raise ConfigError(
                    f"OUT={out} holds shards of {relative} as it was; delete it, or name another"
                    f" directory"
                )
        return True
    if Path(out).is_dir() and os.listdir(out) and not Path(out, UNFINISHED).is_dir():
        raise ConfigError(
            f"OUT={out} is not empty, and holds no preparation to go on with; name a new directory"
            f" as the last path"
        )
    return False


def _keep_plan(out: str, plan: Plan) -> None:
    """Writes the plan, or sees that the one that is there is the same."""
    path = Path(out, UNFINISHED, PLAN)
    if not path.exists():
        replace_file(path, plan.to_json())
        return
    if difference := Plan.from_json(path.read_bytes()).difference(plan):
        raise ConfigError(
            f"OUT={out} holds the beginning of another preparation ({difference}); run that one"
            f" again, or delete {out}"
        )


def _train(plan: Plan, *, skip_bad: bool) -> bytes:
    """Trains a BPE on evenly spaced units, 256 MiB at most."""
    size = bpe_size(plan.tokenizer)
    weights = [plan.weight(unit) for unit in range(len(plan.units))]
    stride = -(-sum(weights) // _TRAINED_BYTES) or 1
    reader = plan.reader(skip_bad=skip_bad)
    _log.info("training bpe:%d on %s", size, nbytes(sum(weights[::stride])))
    units = plan.units[::stride]
    data = train_bpe((text for u in units for text, _ in documents_of(plan, u, reader)), size)
    if not skip_bad:
        reader.raise_problems()
    return data


def _make_all(
    out: str, plan: Plan, workers: int, limit: int | None, on_progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Makes what is missing; returns the records of all units, in order."""
    records: dict[int, dict[str, Any]] = {}
    for unit in range(len(plan.units)):
        with contextlib.suppress(FileNotFoundError):
            records[unit] = json.loads(record_path(out, unit).read_bytes())
    missing = [unit for unit in range(len(plan.units)) if unit not in records]
    if records:
        _log.info("going on: %d of %d shards are there", len(records), len(plan.units))
    _check_skipped(records, limit)
    weights = [plan.weight(unit) for unit in range(len(plan.units))]
    done = sum(weights[unit] for unit in records)
    how = "stop" if limit is None else "skip"
    with _progress(sum(weights), done) as show:
        with Pool(out, how, min(workers, len(missing)), missing) as pool:
            for answer in pool.answers():
                if "problems" in answer:
                    raise DataError("; ".join(answer["problems"][:_NAMED_PROBLEMS]))
                if "unit" in answer:
                    records[answer["unit"]] = answer
                    done += weights[answer["unit"]]
                    _check_skipped(records, limit)
                on_progress(sum(record["shard"]["tokens"] for record in records.values()))
                show(done + sum(pool.under_way.values()), len(records), len(plan.units))
    return [records[unit] for unit in range(len(plan.units))]


def _check_skipped(records: dict[int, dict[str, Any]], limit: int | None) -> None:
    skipped = sum(record["counts"]["skipped_documents"] for record in records.values())
    if skipped > (limit or 0):
        examples = [text for unit in sorted(records) for text in records[unit]["skipped"]]
        allowed = "stop" if limit is None else f"skip:{limit}"
        raise DataError(
            f"{several(skipped, 'bad document')}, and on_error={allowed}; the first ones:"
            f" {'; '.join(examples[:_NAMED_PROBLEMS])}"
        )


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[int, int, int], None]]:
    """Gives a function that shows (bytes done, shards done, shards) on a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=total, completed=done)
        yield lambda now, shards, of: bar.update(
            task, completed=now, description=f"shard {shards} of {of}"
        )


def _write_manifest(
    out: str, plan: Plan, name: str, tokenizer: Tokenizer, records: list[dict[str, Any]]
) -> None:
    counts = Counts()
    hashes: dict[str, str] = {}
    for record in records:
        counts.add(record["counts"])
        hashes |= {str(number): digest for number, digest in record["hashes"].items()}
    if not counts.documents:
        notes = "; ".join(counts.notes()) or "no documents"
        raise DataError(f"there is no text in the sources: {notes}")
    if counts.notes():
        _log.warning("%s: %s", out, "; ".join(counts.notes()))
    installed = versions()
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "made_with": {
            "jaxtrain": installed["jaxtrain"],
            "tokenizers": importlib.metadata.version("tokenizers"),
        },
        "preparation": plan.identity,
        "dtype": dtype_of(tokenizer.vocab_size),
        "tokenizer": name,
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "documents": counts.documents,
        "tokens": sum(record["shard"]["tokens"] for record in records),
        "counts": dataclasses.asdict(counts),
        "sources": [
            {"name": relative, "size": size, "hash": hashes[str(number)]}
            for number, (_, relative, size, _) in enumerate(plan.files)
        ],
        "shards": [record["shard"] for record in records],
    }
    replace_file(Path(out, MANIFEST), json.dumps(manifest, indent=1).encode() + b"\n")
