"""Checkpoints as files: which steps are whole, and what they hold.

    checkpoints/
      100/                       a step
        jaxtrain.json            our manifest: step, run, arrays, size and checksum of every file
        state/  host/metadata    arrays (OCDBT) and the JSON record, written by orbax
      200.orbax-checkpoint-tmp/  a save in flight, or one that a kill interrupted
      300.broken/                a damaged step that stood in the way of a new one; never deleted
      50.deleting/               an old step on its way out

A step is whole if it has a manifest and every file in it has the size that the manifest names. The
manifest is written when all other files are complete, and the directory gets its name after that,
so a kill at any moment leaves either a whole step or none. Everything is on the disk (fsync) before
the directory gets its name, so a power loss does not either. Bytes that change later without
changing the size of a file are noticed when the step is read (`checkpoint_sums`).

Everything else in the directory (backups, conversions, notes) is neither read nor deleted. Nothing
here needs a device, orbax, or the mesh that wrote a checkpoint.
"""

import dataclasses
import errno
import json
import logging
import os
import re
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint_sums import sync_files
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.output_files import sync, sync_directory, writing

MANIFEST = "jaxtrain.json"
UNFINISHED = ".orbax-checkpoint-tmp"
"""How orbax marks a step that is being written; `tests/test_checkpoint.py` compares them."""
DELETING = ".deleting"
CHANGED = "its bytes are not those that were written"
"""What is wrong with a file of the right size."""

_FORMAT = 1
_STEP = re.compile(r"0|[1-9][0-9]*")
# orbax rewrites this file after the manifest is made, when it stamps the commit.
_STAMP = "_CHECKPOINT_METADATA"
# Another path would not help.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

_logger = logging.getLogger("jaxtrain")


def is_step(name: str) -> bool:
    """Whether an entry of a directory of checkpoints is named like a step."""
    return _STEP.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as the manifest describes it."""

    shape: tuple[int, ...]
    dtype: str
    """As `str(dtype)`; a typed random key is `key<...>`."""
    key_impl: str = ""
    """Of a typed random key: the generator's name."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step says about itself."""

    step: int
    run: str
    """Identity of the run that wrote it; a resumed run keeps its identity."""
    arrays: Mapping[str, Array]
    """By path, e.g. `params/layers/attention/q/kernel`."""
    files: Mapping[str, int]
    """Sizes in bytes, by path below the step's directory."""
    sums: Mapping[str, int]
    """Checksums; empty in a checkpoint of the first release."""
    save_seconds: float
    """How long the save took until all of it was on the disk; 0 where the step does not say."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a directory of checkpoints holds."""

    whole: dict[int, Manifest]
    """Ascending."""
    broken: dict[int, str]
    """Directories named like a step that are not one, and why."""
    unfinished: list[str]
    """Directories of interrupted saves."""


class NotWholeError(Exception):
    """A directory is not a whole step; the text says why."""


class BrokenCheckpointError(CheckpointError):
    """The files of a step are damaged; an older step may serve."""


def cause(error: BaseException) -> str:
    """What went wrong, in words: the system's own where it was the system."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    # TensorStore raises a ValueError with a long text.
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(found[1]))
    return str(error).partition("\n")[0][:300] or type(error).__name__


# Paths


def absolute(path: str | os.PathLike[str], option: str) -> Path:
    """The absolute form of a path given as `option`: relative to here, with `~` expanded.

    Raises:
        ConfigError: for a path that cannot name a local directory.
    """
    text = os.path.expanduser(os.fspath(path))
    if not text or text.startswith("~") or "://" in text or "\0" in text:
        raise ConfigError(f"{option}={os.fspath(path)!r} is not the path of a local directory.")
    return Path(os.path.abspath(text))


def prepare(path: str | os.PathLike[str], option: str) -> Path:
    """Makes a directory that files can be written to, and proves it.

    Raises:
        ConfigError: naming what is in the way; better now than at the first save.
        OutputError: when the disk is full, read-only or broken.
    """
    directory = absolute(path, option)
    with writing(directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            if error.errno in _OF_THE_DISK:
                raise
            blocker = next(p for p in (directory, *directory.parents) if os.path.lexists(p))
            reason = f"{blocker} is a file" if not blocker.is_dir() else error.strerror
            raise ConfigError(
                f"{option}={directory} cannot be written to: {reason}; give a directory of your "
                "own."
            ) from error
    return directory


def locate(path: str | os.PathLike[str], option: str) -> tuple[Path, int | None]:
    """Finds the checkpoints that a user means by a path.

    Args:
        path: a run's directory, its `checkpoints`, or one step in there.
        option: the flag that holds it, for errors.

    Returns:
        (directory of checkpoints, step or None).
    """
    given = absolute(path, option)
    if not given.is_dir():
        raise CheckpointError(
            f"{option}={given} does not exist; give the directory of a run, or its checkpoints."
        )
    if (given / "checkpoints").is_dir():
        return given / "checkpoints", None
    if is_step(given.name) and (given / MANIFEST).is_file():
        return given.parent, int(given.name)
    if not scan(given).whole:
        raise CheckpointError(
            f"{option}={given} holds no checkpoint; give the directory of a run, or its "
            "checkpoints."
        )
    return given, None


# Whole steps


def write_manifest(
    directory: Path, *, step: int, run: str, arrays: Mapping[str, Array], began: float
) -> None:
    """Describes a step whose files are complete but whose directory has no final name yet.

    When it returns, all of the step is on the disk.

    Args:
        directory: of the step.
        step: its number.
        run: identity of the run.
        arrays: by path.
        began: `time.monotonic()` when the save began.
    """
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != _STAMP
    }
    manifest = {
        "format": _FORMAT,
        "step": step,
        "run": run,
        "arrays": {name: dataclasses.asdict(array) for name, array in arrays.items()},
        "files": files,
        "crc32": sync_files(directory, files),
    }
    manifest["save_seconds"] = time.monotonic() - began
    manifest["own_crc32"] = _own_sum(manifest)
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
        file.flush()
        sync(file.fileno())
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a step and tests that the step is whole.

    Raises:
        NotWholeError: with the file and what is wrong with it.
    """
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise NotWholeError(f"{MANIFEST} has format {content['format']}, not {_FORMAT}")
        arrays = {
            name: Array(tuple(array["shape"]), array["dtype"], array["key_impl"])
            for name, array in content["arrays"].items()
        }
        manifest = Manifest(
            content["step"],
            content["run"],
            arrays,
            content["files"],
            content.get("crc32", {}),
            content.get("save_seconds", 0.0),
        )
        own_sum = content.pop("own_crc32", None)
    except FileNotFoundError:
        has_files = directory.is_dir() and any(directory.iterdir())
        raise NotWholeError(f"it has no {MANIFEST}" if has_files else "it is empty") from None
    except OSError as error:
        raise NotWholeError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotWholeError(f"{MANIFEST} is damaged") from None
    if str(manifest.step) != directory.name.removesuffix(UNFINISHED):
        raise NotWholeError(f"its {MANIFEST} is that of step {manifest.step}")
    if own_sum not in (None, _own_sum(content)):
        raise NotWholeError(f"{MANIFEST} is damaged")
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise NotWholeError(f"file {name}: {error.strerror}") from None
        if found != size:
            raise NotWholeError(f"file {name} has {found} of {size} bytes")
    return manifest


def _own_sum(content: Mapping[str, Any]) -> int:
    """The checksum of what a manifest says, whatever its layout as text."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def scan(directory: Path) -> Scan:
    """Looks at everything in a directory of checkpoints; one that does not exist is empty."""
    whole, broken, unfinished = {}, {}, []
    try:
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"checkpoints in {directory} cannot be listed: {error.strerror}."
        ) from error
    for entry in entries:
        if is_step(entry.name.removesuffix(UNFINISHED)) and entry.is_dir():
            if entry.name.endswith(UNFINISHED):
                unfinished.append(entry.name)
                continue
            try:
                whole[int(entry.name)] = read_manifest(entry)
            except NotWholeError as error:
                broken[int(entry.name)] = str(error)
    return Scan(dict(sorted(whole.items())), dict(sorted(broken.items())), unfinished)


class CheckpointDirectory:
    """The checkpoints in a directory, to look at: no device, no orbax, nothing is written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = absolute(directory, "checkpoint directory")
        self._warned: set[int] = set()

    def scan(self) -> Scan:
        """Looks at the directory; warns once of each entry that only looks like a step."""
        found = scan(self.directory)
        for step in found.broken.keys() - self._warned:
            self._warned.add(step)
            _logger.warning(
                "skipping %s, which is no whole checkpoint: %s",
                self.directory / str(step),
                found.broken[step],
            )
        return found

    def committed_steps(self) -> list[int]:
        """The whole steps, ascending."""
        return list(self.scan().whole)

    def latest_step(self) -> int | None:
        """The newest whole step."""
        return max(self.scan().whole, default=None)

    def manifest(self, step: int) -> Manifest:
        """What a step says about itself.

        Raises:
            CheckpointError: when it is absent (naming the steps that are there) or not whole.
        """
        path = self.directory / str(step)
        if not path.is_dir():
            present = ", ".join(map(str, self.committed_steps())) or "none"
            raise CheckpointError(
                f"checkpoint step {step} does not exist in {self.directory}; "
                f"steps there: {present}."
            )
        try:
            return read_manifest(path)
        except NotWholeError as error:
            raise BrokenCheckpointError(
                f"checkpoint step {step} in {self.directory} is not whole: {error}."
            ) from error

    def contents(self, step: int) -> list[tuple[str, tuple[int, ...], str]]:
        """(path, shape, dtype) of every array of a step, in the order of the paths."""
        arrays = self.manifest(step).arrays
        return [(name, arrays[name].shape, arrays[name].dtype) for name in sorted(arrays)]

    def read_host(self, step: int) -> dict[str, Any]:
        """The JSON record that was saved with a step."""
        name = "host/metadata"
        wanted = self.manifest(step).sums.get(name)
        try:
            data = (self.directory / str(step) / name).read_bytes()
            if wanted not in (None, zlib.crc32(data)):
                raise ValueError(CHANGED)
            return json.loads(data)
        except (OSError, ValueError) as error:
            raise BrokenCheckpointError(
                f"checkpoint step {step} in {self.directory} cannot be read: file {name}: "
                f"{cause(error)}."
            ) from error
