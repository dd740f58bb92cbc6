"""`jaxtrain prepare SOURCE ... OUT`: text to token shards, on all cores.

    jaxtrain prepare corpus/ more.jsonl.gz tokens/ --tokenizer=bpe:8192
    python experiments/train_lm.py --data.source=tokens/ --model.vocab_size=8192

A SOURCE is a file, a folder or a glob of plain text, JSON lines (.jsonl, also .gz and .zst),
Parquet or ArrayRecord, or stdlib. OUT is a new directory. After a kill, and after an error that has
been mended, the same command goes on where it stopped. The same sources and flags make the same
bytes, whatever the number of workers and the interruptions.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

from jaxtrain import flags
from jaxtrain.config import Config, field
from jaxtrain.data import prepare_plan
from jaxtrain.data.files import TextFile, find_files
from jaxtrain.data.manifest import (
    Manifest,
)
from jaxtrain.data.prepare_plan import Plan
from jaxtrain.data.prepare_shards import make_shards
from jaxtrain.data.tokenizing import Tokenizer, bpe_size, open_tokenizer
from jaxtrain.errors import ConfigError, ExitCode
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
    json_field: str = field("text", help="field of records that holds the text")
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
    config, paths = flags.parse_with_paths("prepare", words, PrepareConfig, __doc__)
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
    """Makes token shards of `sources` in the directory `out`; returns their manifest.

    Raises:
        BeingPreparedError: when another process is at it.
        ConfigError: for an `out` that holds something else, and options that cannot work.
        DataError: for text that cannot be used.
    """
    size = bpe_size(config.tokenizer)
    tokenizer = None if size else open_tokenizer(config.tokenizer, config.end_of_document)
    if size and config.end_of_document:
        raise ConfigError(
            f"end_of_document is for tokenizers of files; {config.tokenizer} has its own"
        )
    return make_shards(
        out,
        make_plan(sources, config, tokenizer),
        tokenizer,
        name=tokenizer.name if tokenizer else config.tokenizer,
        workers=config.workers,
        on_error=config.on_error,
    )


def make_plan(
    sources: Sequence[str], config: PrepareConfig, tokenizer: Tokenizer | None, flags: str = "--"
) -> Plan:
    """What is to be done for `sources`; reads names and sizes.

    Args:
        sources: as the command takes them.
        config: of the preparation.
        tokenizer: None: one is trained.
        flags: what stands before the names of flags in messages.
    """
    files = _find(sources)
    return Plan(
        files=prepare_plan.describe(files),
        units=prepare_plan.cut(
            files, config.shard_bytes, cut_plain=tokenizer is None or tokenizer.can_cut
        ),
        tokenizer=config.tokenizer if tokenizer is None else tokenizer.hash,
        end_of_document=config.end_of_document,
        json_field=config.json_field,
        replace=config.on_bad_bytes == "replace",
        skip_binary=not all(os.path.isfile(source) for source in sources),
        flags=flags,
    )


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
