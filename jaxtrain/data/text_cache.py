"""`--data.cache_dir`: text that is unpacked once, into token shards of bytes, and then mapped.

    CACHE_DIR/text-4f2a.../manifest.json, shard-00000.bin, ...

The name is a hash of everything that the shards depend on, the times at which the files were
written included: a file that changes is unpacked anew. Shards are made as `jaxtrain prepare` makes
them: on all cores, with checksums, under their name only when they are whole, and after a kill the
rest is made. Processes that start together wait for the one that is at it.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from jaxtrain import phases
from jaxtrain.data.counts import parse_on_error
from jaxtrain.data.manifest import MANIFEST, Manifest
from jaxtrain.data.prepare import PrepareConfig, make_plan
from jaxtrain.data.prepare_plan import Plan
from jaxtrain.data.prepare_shards import BeingPreparedError, make_shards
from jaxtrain.data.tokenizing import ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.file_lock import when_free
from jaxtrain.units import nbytes, several

_log = logging.getLogger(__name__)


def cached_shards(
    source: str,
    cache_dir: str,
    *,
    max_bytes: int = 0,
    json_field: str = "text",
    on_bad_bytes: str = "error",
    on_error: str = "stop",
) -> str:
    """Returns the directory of token shards that holds the text of `source`, which may take long.

    Args:
        source: as `data.source` takes text.
        cache_dir: where the directory is, or is made.
        max_bytes: that all of `cache_dir` may have; 0: what the disk has.
        json_field, on_bad_bytes, on_error: of `PrepareConfig`.

    Raises:
        ConfigError: when the text does not fit into `max_bytes`.
        DataError: for text that cannot be used.
    """
    limit = parse_on_error(on_error)
    config = PrepareConfig(json_field=json_field, on_bad_bytes=on_bad_bytes)
    plan = make_plan([source], config, ByteTokenizer(), flags="--data.")
    root = Path(os.path.expanduser(cache_dir))
    out = root / f"text-{_key(plan)}"
    if not (out / MANIFEST).exists():
        _make(out, plan, on_error, max_bytes)
    skipped = json.loads((out / MANIFEST).read_bytes())["counts"]["skipped_documents"]
    if skipped > (limit or 0):
        raise DataError(
            f"{several(skipped, 'bad document')} of data.source={source} were left out when {out}"
            f" was made, and data.on_error={on_error}; allow them with skip:{skipped}, or mend the"
            f" files"
        )
    return str(out)


class _FullError(Exception):
    """There are more bytes than the cache may have."""


def _make(out: Path, plan: Plan, on_error: str, max_bytes: int) -> None:
    """Makes the shards, or waits until another process has made them."""
    used, about = _size(out.parent, without=out), plan.text_bytes
    _log.info(
        "data.cache_dir=%s, which holds %s: unpacking about %s of text from %s",
        out.parent,
        nbytes(used),
        nbytes(about),
        several(len(plan.files), "file"),
    )

    def on_progress(tokens: int) -> None:
        phases.report(phases.Phase.START, 0)
        if max_bytes and used + tokens > max_bytes:
            raise _FullError

    def attempt() -> Manifest:
        return make_shards(
            str(out),
            plan,
            ByteTokenizer(),
            name=ByteTokenizer.name,
            on_error=on_error,
            on_progress=on_progress,
        )

    try:
        manifest = when_free(attempt, BeingPreparedError, lambda e: _log.info("waiting: %s", e))
    except _FullError:
        shutil.rmtree(out, ignore_errors=True)
        raise ConfigError(
            f"data.cache_dir={out.parent} may have data.cache_gib={max_bytes / 2**30:g}, and the"
            f" text needs more than the {nbytes(max(0, max_bytes - used))} that are left (about"
            f" {nbytes(about)}); raise it, or delete what no run needs any more from {out.parent},"
            f" which holds {nbytes(used)}"
        ) from None
    _log.info("unpacked into %s, %s", out, nbytes(manifest.tokens))


def _key(plan: Plan) -> str:
    changed = [changed for *_, changed in plan.files]
    text = json.dumps([plan.identity, changed])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _size(root: Path, *, without: Path) -> int:
    """Bytes of the files under a directory, but for those of one in it."""
    total = 0
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name) != without]
        for name in files:
            with contextlib.suppress(OSError):  # another process has just deleted it
                total += os.stat(os.path.join(folder, name)).st_size
    return total
