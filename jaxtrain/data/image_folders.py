"""From a folder of class folders to the rows that are trained on and those that are held out.

root/cat/1.png, root/dog/2.jpg                  some files of each class are held out
root/train/cat/1.png, root/val/cat/2.png        val (or validation, valid, test) is held out
"""

import functools
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from jaxtrain.data.image_files import (
    BadImages,
    ImageFile,
    ImageFiles,
    class_names,
    find_images,
    name_some,
    num_threads,
    require_images_of_all,
)
from jaxtrain.errors import DataError
from jaxtrain.units import seconds, several

_HELD_OUT_NAMES = ("val", "validation", "valid", "test")
_CHANNELS = {"grey": 1, "rgb": 3}

_log = logging.getLogger(__name__)


class Folders(NamedTuple):
    """What was found below a root."""

    train: ImageFiles
    held_out: ImageFiles | None
    shape: tuple[int, int, int]
    classes: list[str]
    """Their names; the number of a class is its place."""
    own_split: str
    """The folder that is held out because of its name; empty: files were drawn."""
    notes: list[str]
    """What was seen and is no image."""


def open_folders(
    root: str, *, validation_fraction: float, image_size: int, color: str, bad: BadImages
) -> Folders:
    """Finds the images; looks at the head of each where size or colour have to be found out.

    Args:
        root: of the class folders.
        validation_fraction: share of the files that is held out, where no folder is.
        image_size: height and width in pixels to which images are brought; 0: they have one size.
        color: "grey", "rgb", or "auto": grey if all are.
        bad: where bad images are counted.

    Raises:
        DataError: for a folder without images, images of several sizes, too many bad ones.
    """
    from jaxtrain.data.image_decode import ENDINGS, decode

    top = class_names(root)
    own_split = next((name for name in _HELD_OUT_NAMES if name in top), "")
    if "train" in top and own_split:
        train_root = os.path.join(root, "train")
        classes = class_names(train_root)
        train, others = find_images(train_root, classes, ENDINGS)
        held_out, more = find_images(os.path.join(root, own_split), classes, ENDINGS)
        others += more
    else:
        train_root, own_split, classes = root, "", top
        files, others = find_images(root, classes, ENDINGS)
        train, held_out = split_files(files, validation_fraction)
        require_images_of_all(root, classes, files)
    require_images_of_all(train_root, classes, train)
    found = _CHANNELS.get(color, 0), (image_size, image_size)
    if not (found[0] and image_size):
        found = _look_at_all([*train, *held_out], *found, bad)
    num_channels, (height, width) = found
    shape = (height, width, num_channels)
    make = functools.partial(
        ImageFiles,
        decode=functools.partial(decode, size=image_size, num_channels=num_channels),
        shape=shape,
        bad=bad,
        facts=f"{shape} {image_size}",
    )
    return Folders(
        train=make(train, stand_ins_count=True, name=f"training images of {root}"),
        held_out=make(held_out, stand_ins_count=False, name=f"validation images of {root}")
        if held_out
        else None,
        shape=shape,
        classes=classes,
        own_split=own_split,
        notes=[f"{several(len(others), 'other file')} skipped ({name_some(others)})"]
        if others
        else [],
    )


def split_files(
    files: Sequence[ImageFile], fraction: float
) -> tuple[list[ImageFile], list[ImageFile]]:
    """Returns (training, held out): the files whose name hashes below `fraction`.

    A file stays on its side when others come or go. One at least is held out, unless the fraction
    is 0 or there is only one, and one at least stays of every class.
    """
    hashes = {file.relative: _hash(file.relative) for file in files}
    limit = fraction * 2**64
    if fraction and len(files) > 1:
        limit = max(limit, min(hashes.values()) + 1)
    # What each class keeps in any case: its file with the largest hash.
    kept = {file.label: file for file in sorted(files, key=lambda file: hashes[file.relative])}
    held_out = [
        file for file in files if hashes[file.relative] < limit and file is not kept[file.label]
    ]
    chosen = {file.relative for file in held_out}
    return [file for file in files if file.relative not in chosen], held_out


def _hash(name: str) -> int:
    data = name.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _look_at_all(
    files: Sequence[ImageFile], num_channels: int, size: tuple[int, int], bad: BadImages
) -> tuple[int, tuple[int, int]]:
    """Returns (channels, (height, width)) of all images; what is 0 is found out."""
    from jaxtrain.data.image_decode import BadImageError, look_at

    def look(file: ImageFile) -> tuple[tuple[int, int], bool] | str:
        try:
            return look_at(file.path)
        except BadImageError as error:
            return str(error)

    begin = time.perf_counter()
    with ThreadPoolExecutor(num_threads()) as pool:
        seen = list(pool.map(look, files, chunksize=64))
    sizes: dict[tuple[int, int], ImageFile] = {}
    has_color = False
    for file, found in zip(files, seen, strict=True):
        if isinstance(found, str):
            bad.add(file.path, found)
        else:
            sizes.setdefault(found[0], file)
            has_color |= found[1]
    if not sizes:
        raise DataError(f"none of the {several(len(files), 'image')} can be read")
    if not size[0] and len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise DataError(
            f"all images must have one size, to form a batch; there are {len(sizes)}:"
            f" {first.path} has {one[1]}x{one[0]} pixels, {second.path} {other[1]}x{other[0]}; set"
            f" data.image_size=N, to which all are brought (N x N)"
        )
    _log.info(
        "looked at the heads of %s in %s; data.image_size and data.color (grey, rgb) make that"
        " unnecessary",
        several(len(files), "image"),
        seconds(time.perf_counter() - begin),
    )
    return num_channels or (3 if has_color else 1), size if size[0] else next(iter(sizes))
