"""`jaxtrain prepare SOURCE ... OUT`: text to token shards, on all cores.

    jaxtrain prepare corpus/ more.jsonl.gz tokens/ --tokenizer=bpe:8192
    python experiments/train_lm.py --data.source=tokens/ --model.vocab_size=8192

A SOURCE is a file, a folder or a glob of plain text, JSON lines (.jsonl, also .gz and .zst) or
Parquet, or stdlib. OUT is a new directory. After a kill, and after an error that has been mended,
the same command goes on where it stopped. The same sources and flags make the same bytes, whatever
the number of workers and the interruptions.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import flags
from jaxtrain.config import Config, field, versions
from jaxtrain.data import prepare_plan
from jaxtrain.data.documents import Counts
from jaxtrain.data.files import TextFile, find_files
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
from jaxtrain.data.prepare_worker import (
    PLAN,
    documents_of,
    dtype_of,
    load_tokenizer,
    record_path,
)
from jaxtrain.data.tokenizing import Tokenizer, bpe_size, open_tokenizer, train_bpe
from jaxtrain.errors import ConfigError, DataError, ExitCode
from jaxtrain.file_lock import lock_file
from jaxtrain.output_files import replace_file, writing
from jaxtrain.progress import setup_logging
from jaxtrain.units import nbytes, several

_LOCK = "lock"
_TRAINED_BYTES = 2**28
_NAMED_PROBLEMS = 5

_log = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig(Config):
    """What --flags set."""

    tokenizer: str = field(
        "bytes",
        help="bytes; a tokenizer.json, or a directory with one or with GPT-2's encoder.json and"
        " vocab.bpe; bpe:SIZE trains one on the text",
    )
    end_of_document: str = field(
        "", help="token of the tokenizer that ends documents; empty: <|endoftext|>, </s> and so on"
    )
    workers: int = field(0, minimum=0, help="processes; 0: one for each core")
    shard_bytes: int = field(
        0,
        unit="bytes",
        minimum=0,
        help="text in a shard, about; 0: a 64th of all, between 1 MiB and 512 MiB",
    )
    json_field: str = field("text", help="field of JSON or Parquet records that holds the text")
    on_bad_bytes: str = field(
        "error",
        choices=("error", "replace"),
        help="bytes that are not UTF-8: error names file, line and offset; replace counts them",
    )
    on_error: str = field(
        "stop", help="stop at a document that cannot be used; skip:N: leave out and count up to N"
    )


def run(words: Sequence[str]) -> None:
    """The command; see the module's docstring.

    Raises:
        ConfigError: for arguments that cannot work, and an OUT that holds something else.
        DataError: for text that cannot be used.
    """
    options = [word for word in words if word.startswith("-")]
    paths = [word for word in words if not word.startswith("-")]
    config = flags.parse(["jaxtrain prepare", *options], PrepareConfig, description=__doc__ or "")
    if len(paths) < 2:
        raise ConfigError(
            f"jaxtrain prepare takes SOURCE ... OUT, at least two paths, and flags as --name=value;"
            f" got {' '.join(words) or 'nothing'}"
        )
    setup_logging()
    try:
        manifest = prepare(paths[:-1], paths[-1], config)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this stopped", file=sys.stderr)
        sys.exit(ExitCode.PREEMPTED)
    size = nbytes(manifest.tokens * int(manifest.dtype.removeprefix("uint")) // 8)
    print(
        f"{manifest.root}: {several(manifest.documents, 'document')},"
        f" {several(manifest.tokens, 'token')} of {manifest.vocab_size:,} ({manifest.tokenizer})"
        f" in {several(len(manifest.shards), 'shard')}, {size}"
    )


def prepare(sources: Sequence[str], out: str, config: PrepareConfig) -> Manifest:
    """Makes token shards of `sources` in the directory `out`; returns their manifest."""
    skipped_limit = prepare_plan.parse_on_error(config.on_error)
    files = _find(sources)
    size = bpe_size(config.tokenizer)
    tokenizer = None if size else open_tokenizer(config.tokenizer, config.end_of_document)
    if size and config.end_of_document:
        raise ConfigError(
            f"end_of_document is for tokenizers of files; {config.tokenizer} has its own"
        )
    plan = Plan(
        files=prepare_plan.describe(files),
        units=prepare_plan.cut(
            files, config.shard_bytes, cut_plain=tokenizer is None or tokenizer.can_cut
        ),
        tokenizer=config.tokenizer if tokenizer is None else tokenizer.hash,
        end_of_document=config.end_of_document,
        json_field=config.json_field,
        replace=config.on_bad_bytes == "replace",
        skip_binary=not all(os.path.isfile(source) for source in sources),
    )
    if _is_done(out, plan):
        _log.info("%s is prepared already; there is nothing to do", out)
        shutil.rmtree(Path(out, UNFINISHED), ignore_errors=True)
        return Manifest.read(out)
    folder = Path(out, UNFINISHED)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with lock_file(
        folder / _LOCK,
        lambda holder: ConfigError(f"OUT={out} is being prepared by {holder}; let it end"),
    ):
        _keep_plan(out, plan)
        if not Path(out, TOKENIZER).exists():
            data = tokenizer.save() if tokenizer else _train(plan, size, skipped_limit is not None)
            if data:
                replace_file(Path(out, TOKENIZER), data)
        records = _make_shards(out, plan, config.workers or _num_cores(), skipped_limit)
        plan.require_unchanged_files()
        name = tokenizer.name if tokenizer else config.tokenizer
        _write_manifest(out, plan, name, load_tokenizer(out, plan), records)
    shutil.rmtree(Path(out, UNFINISHED), ignore_errors=True)
    return Manifest.read(out)


def _find(sources: Sequence[str]) -> list[TextFile]:
    if len(sources) == 1:
        return find_files(sources[0], "SOURCE ")
    found = []
    for source in sources:
        files, prefix = find_files(source, "SOURCE "), ""
        if os.path.isdir(source):
            prefix = f"{os.path.basename(os.path.normpath(source))}/"
        found += [dataclasses.replace(f, relative=prefix + f.relative) for f in files]
    return found


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


def _train(plan: Plan, size: int, skip_bad: bool) -> bytes:
    """Trains a BPE on evenly spaced units, 256 MiB at most."""
    weights = [plan.weight(unit) for unit in range(len(plan.units))]
    stride = -(-sum(weights) // _TRAINED_BYTES) or 1
    reader = plan.reader(skip_bad=skip_bad)
    _log.info("training bpe:%d on %s", size, nbytes(sum(weights[::stride])))
    units = plan.units[::stride]
    data = train_bpe((text for u in units for text, _ in documents_of(plan, u, reader)), size)
    if not skip_bad:
        reader.raise_problems()
    return data


def _make_shards(out: str, plan: Plan, workers: int, limit: int | None) -> list[dict[str, Any]]:
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
