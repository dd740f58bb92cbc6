"""Images in class folders, root/CLASS/*.png: decoded when they are read.

A file that is no image, or a broken one, is an error that names it, or is left out: then the
next readable file of the same part (after the last comes the first) stands in for its row. That
is a function of the files alone, so that all processes, batches and restarts see the same rows,
and an epoch keeps its length. In training a stand-in counts as any other row; in an evaluation its
loss_mask is 0, and no image counts twice.

Legend: R rows, H height, W width, C channels.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxtrain.data.files import walk
from jaxtrain.errors import DataError
from jaxtrain.host import cores_at_hand
from jaxtrain.units import several

_MAX_THREADS = 8
_SHOWN_CLASSES = 5

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """A file below a source, and its class."""

    path: str
    relative: str
    """CLASS/name, with forward slashes: by it files are sorted, split and named."""
    size: int
    label: int


class BadImages:
    """What was left out, at most so many; a process of a run counts what it and its input workers
    have read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.reasons: dict[str, str] = {}
        """Path -> what is wrong."""
        # Workers have copies of this object: they tell each other by a file.
        self._path = ""
        if limit:
            file, self._path = tempfile.mkstemp(prefix="bad-images-")
            os.close(file)
            weakref.finalize(self, _remove, self._path)

    def add(self, path: str, reason: str) -> None:
        """Notes a bad file, and logs it, once.

        Raises:
            DataError: when it is one more than may be left out.
        """
        self._read_others()
        if path in self.reasons:
            return
        if len(self.reasons) >= self._limit:
            more = len(self.reasons) + 1
            left_out = f"; {len(self.reasons)} were left out before it" if self.reasons else ""
            raise DataError(
                f"{path} is no readable image: {reason}{left_out}; mend or delete it, or set"
                f" data.on_error=skip:N with N of {more} or more, which leaves out up to N"
            )
        self.reasons[path] = reason
        with contextlib.suppress(FileNotFoundError):  # when the run has ended
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.write(file, json.dumps([path, reason]).encode() + b"\n")
            os.close(file)
        _log.warning("left out %s: %s (bad image %d)", path, reason, len(self.reasons))

    def summary(self) -> str:
        """One line; empty if there were none."""
        self._read_others()
        if not self.reasons:
            return ""
        return f"{several(len(self.reasons), 'bad image')} left out: {', '.join(self.reasons)}"

    def _read_others(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            text = pathlib.Path(self._path).read_text() if self._path else ""
            self.reasons.update(map(json.loads, text.splitlines()))


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class ImageFiles:
    """Rows {"image": uint8 [R, H, W, C], "label": int32 [R], "loss_mask": float32 [R]}."""

    def __init__(
        self,
        files: Sequence[ImageFile],
        decode: Callable[[str], np.ndarray],
        *,
        shape: tuple[int, int, int],
        bad: BadImages,
        stand_ins_count: bool,
        facts: str = "",
        name: str = "images",
    ) -> None:
        """Reads nothing yet.

        Args:
            files: the rows, in this order.
            decode: path -> uint8 [H, W, C]; raises BadImageError.
            shape: (H, W, C) of every image.
            bad: where bad images are counted.
            stand_ins_count: whether the row of a bad image keeps its weight.
            facts: what the pixels depend on besides the files, for the fingerprint.
            name: in messages.
        """
        self.name = name
        self._files = list(files)
        self._decode = decode
        self._shape = shape
        self._bad = bad
        self._stand_ins_count = stand_ins_count
        self._facts = facts
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_pool": None}

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Decodes the rows `indices` (int64 [R]), on several cores.

        Raises:
            DataError: for more bad images than may be left out, and for one of another size.
        """
        if self._pool is None and num_threads() > 1:
            self._pool = ThreadPoolExecutor(num_threads(), "decode images")
        rows = [int(index) for index in indices]
        images = list((self._pool.map if self._pool else map)(self._try, rows))
        sources = list(rows)
        for at, row in enumerate(rows):
            # In the order of the rows: which bad image is named first must not depend on threads.
            while isinstance(images[at], str):
                self._bad.add(self._files[sources[at]].path, str(images[at]))
                sources[at] = (sources[at] + 1) % len(self)
                if sources[at] == row:
                    raise DataError(f"{self.name}: none of its {len(self)} images can be read")
                images[at] = self._try(sources[at])
        is_own_R = np.array(rows) == np.array(sources)
        return {
            "image": np.stack([np.asarray(image) for image in images]),
            "label": np.array([self._files[row].label for row in sources], np.int32),
            "loss_mask": np.ones(len(rows), np.float32)
            if self._stand_ins_count
            else is_own_R.astype(np.float32),
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the files' names, sizes and classes; their contents are not read for it."""
        digest = hashlib.blake2b(f"image files {self._facts}".encode(), digest_size=16)
        for file in self._files:
            name = file.relative.encode(errors="surrogateescape")
            digest.update(name + f"\0{file.size} {file.label};".encode())
        return digest.hexdigest()

    def _try(self, row: int) -> np.ndarray | str:
        """The pixels of a file, or what is wrong with it."""
        from jaxtrain.data.image_decode import BadImageError

        path = self._files[row].path
        if path in self._bad.reasons:
            return self._bad.reasons[path]
        try:
            image_HWC = self._decode(path)
        except BadImageError as error:
            return str(error)
        if image_HWC.shape != self._shape:
            raise DataError(
                f"{path} is {image_HWC.shape[1]}x{image_HWC.shape[0]} pixels, other images"
                f" {self._shape[1]}x{self._shape[0]}; set data.image_size=N, to which all are"
                f" brought"
            )
        return image_HWC


def num_threads() -> int:
    """How many images are decoded at once; Pillow holds no interpreter lock meanwhile."""
    return min(_MAX_THREADS, cores_at_hand())


def class_names(root: str) -> list[str]:
    """The folders of a root, sorted: class 0, 1, ...; those that begin with a dot are none.

    Raises:
        DataError: if there are none.
    """
    names = sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."
    )
    if not names:
        raise DataError(
            f"data.source={root} must hold a folder for each class (CLASS/*.png), or idx files"
            f" (train-images-idx3-ubyte); it holds no folder"
        )
    return names


def find_images(
    root: str, classes: Sequence[str], endings: tuple[str, ...]
) -> tuple[list[ImageFile], list[str]]:
    """Returns (the images of a root, sorted by name, other files) of class folders.

    Args:
        root: of the class folders.
        classes: their names; label i is that of the i-th.
        endings: of the files that are images.

    Raises:
        DataError: for a folder that is no class, or one without images.
    """
    unknown = sorted(set(class_names(root)) - set(classes))
    if unknown:
        raise DataError(
            f"{root} has the classes {name_some(unknown)}, of which there are no training images;"
            f" the classes are {name_some(classes)}"
        )
    label = {name: number for number, name in enumerate(classes)}
    images, others = [], []
    for file in sorted(walk(root), key=lambda file: file.relative):
        name, has_folder, _ = file.relative.partition("/")
        if has_folder and file.relative.lower().endswith(endings):
            images.append(ImageFile(file.path, file.relative, file.size, label[name]))
        else:
            others.append(file.relative)
    return images, others


def require_images_of_all(root: str, classes: Sequence[str], files: Iterable[ImageFile]) -> None:
    """Refuses a class folder without images: the numbers of the classes after it would be wrong.

    Raises:
        DataError: naming the folders.
    """
    empty = [classes[label] for label in sorted({*range(len(classes))} - {f.label for f in files})]
    if empty:
        raise DataError(
            f"{root} has no image in {name_some(empty)}; every folder is a class: fill or delete it"
        )


def name_some(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(names) - _SHOWN_CLASSES
    return ", ".join(names[:_SHOWN_CLASSES]) + (f" and {more} more" if more > 0 else "")
