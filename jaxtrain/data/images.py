"""Images and their classes: the digits of scikit-learn, class folders, .npz archives, idx files.

Rows are {"image": uint8 or float32 [R, H, W, C], "label": int32 [R], "loss_mask": float32 [R]};
what is held out for evaluation never reaches training, and is the same in every run.

Legend: N images, R rows, H height, W width, C channels.
"""

import dataclasses
import logging
import os
from typing import Any

import numpy as np

from jaxtrain.config import DataConfig, field
from jaxtrain.data import image_arrays, image_folders
from jaxtrain.data.augment import KINDS, augmented
from jaxtrain.data.counts import parse_on_error
from jaxtrain.data.image_arrays import Arrays
from jaxtrain.data.image_files import BadImages, name_some
from jaxtrain.data.order import order
from jaxtrain.data.sources import ArrayDataset, Dataset, name_of
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.units import several

HELD_OUT_EVERY = 5
_DRAWN = "drawn by their numbers"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDataConfig(DataConfig):
    """Which images, and what is done to them."""

    source: str = field(
        "digits",
        help="digits (scikit-learn's, 8 x 8); a folder with a folder of images for each class, or "
        "with train/ and val/ of such; an .npz archive (x, y, and x_test, y_test if there are); an "
        "idx file of images, or the folder of the four (MNIST's format, also .gz)",
    )
    augment: str = field(
        "none",
        choices=KINDS,
        help="random changes in training. crop: moved by up to an eighth; flip: every second one "
        "mirrored; crop_flip: both",
    )
    validation_fraction: float = field(
        1 / HELD_OUT_EVERY,
        minimum=0,
        maximum=0.5,
        help="share of the images held out for evaluation, unless the source says which; 0: none",
    )
    image_size: int = field(
        0,
        unit="pixels",
        minimum=0,
        help="height and width to which images in folders are brought, cut to a square; 0: they "
        "have one size, and keep it",
    )
    color: str = field(
        "auto",
        choices=("auto", "grey", "rgb"),
        help="channels of images in folders: 1 or 3; auto: grey if all of them are",
    )
    on_error: str = field(
        "stop",
        on_resume="free",
        help="images in folders that cannot be read: stop names the first; skip:N leaves out and "
        "counts up to N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_on_error(self.on_error, "data.on_error")

    @property
    def max_skipped(self) -> int:
        """How many bad images are left out before the run ends."""
        return parse_on_error(self.on_error) or 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """What `image_datasets` found."""

    source: str
    train_images: int
    eval_images: int
    shape: tuple[int, int, int]
    """(H, W, C)."""
    num_classes: int
    split: str
    """How images were held out."""
    classes: list[str] = dataclasses.field(default_factory=list)
    """Names of the classes 0, 1, ..., where they have some."""
    notes: list[str] = dataclasses.field(default_factory=list)
    bad: BadImages = dataclasses.field(default_factory=lambda: BadImages(0))

    def summary(self) -> str:
        """One line for the log."""
        height, width, num_channels = self.shape
        names = f" ({name_some(self.classes)})" if self.classes else ""
        notes = "".join(f"; {note}" for note in [*self.notes, self.bad.summary()] if note)
        return (
            f"images of {self.source}: {width}x{height} {'grey' if num_channels == 1 else 'rgb'},"
            f" {self._classes()}{names};"
            f" {self.train_images:,} for training, {self.eval_images:,} for evaluation"
            f" ({self.split}){notes}"
        )

    def check_model(self, num_classes: int, in_channels: int) -> None:
        """Refuses a model that has too few classes, or other channels.

        Raises:
            ConfigError: with what it has and needs.
        """
        wanted = []
        if num_classes < self.num_classes:
            wanted.append(("num_classes", num_classes, self.num_classes, self._classes()))
        if in_channels != self.shape[2]:
            channels = several(self.shape[2], "channel")
            wanted.append(("in_channels", in_channels, self.shape[2], channels))
        if wanted:
            have = " and ".join(f"model.{name}={value}" for name, value, _, _ in wanted)
            need = " and ".join(what for _, _, _, what in wanted)
            use = " ".join(f"--model.{name}={value}" for name, _, value, _ in wanted)
            raise ConfigError(
                f"{have} must fit data.source={self.source}, whose images have {need}; use {use}"
            )

    def _classes(self) -> str:
        return f"{self.num_classes:,} {'class' if self.num_classes == 1 else 'classes'}"

    def facts(self) -> dict[str, Any]:
        """What a run records."""
        return {
            "data": self.summary(),
            "train_images": self.train_images,
            "eval_images": self.eval_images,
        }


class ImageDataset:
    """Another dataset's images, of 8 bits or float32 in 0..1, and changed at random in training.

    Pixels of 8 bits stay so until they are on the device, where the model makes numbers in 0..1 of
    them (`convnet.as_floats`): they are a quarter as large on the way.
    """

    def __init__(self, images: Dataset, *, augment: str = "none") -> None:
        """Wraps a dataset.

        Args:
            images: with rows {"image": [R, H, W, C], "label": [R]}; uint16 pixels are brought to
                0..1 as float32, uint8 and floats stay as they are.
            augment: one of `augment.KINDS`.
        """
        self.name = name_of(images)
        self._images = images
        self._augment = augment

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the rows `indices` (int64 [R]) as they are."""
        rows = self._images.read(indices)
        return {**rows, "image": image_arrays.scaled(rows["image"])}

    def read_training(
        self, indices: np.ndarray, seed: int, positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns rows as they are trained on at `positions` (int64 [R]) of the endless order."""
        rows = self._images.read(indices)
        image = augmented(rows["image"], self._augment, seed=seed, positions=positions)
        return {**rows, "image": image_arrays.scaled(image)}

    @property
    def fingerprint(self) -> str:
        """That of the images: what is done to them is in the configuration."""
        return self._images.fingerprint


def image_datasets(
    config: ImageDataConfig,
) -> tuple[ImageDataset, ImageDataset | None, ImageInfo]:
    """Returns (training rows, rows held out or None, what was found) for a configuration.

    Raises:
        DataError: for a source without images, or images that cannot form batches.
        ConfigError: for an option that nothing in the source would read.
    """
    # Read here, whether or not this source needs them: the run records which options are read.
    source, fraction, bad = config.source, config.validation_fraction, BadImages(config.max_skipped)
    image_size, color = config.image_size, config.color
    is_folder = os.path.isdir(source) and not image_arrays.is_idx(source)
    if not is_folder:
        _refuse(config, ("image_size", "color", "on_error"), "is read for images in folders only")
    if source != "digits" and not os.path.exists(source):
        raise DataError(
            f"data.source={source} does not exist; give digits, a folder of class folders, an .npz"
            f" archive, or idx files"
        )
    if is_folder:
        folders = image_folders.open_folders(
            source, validation_fraction=fraction, image_size=image_size, color=color, bad=bad
        )
        train, held_out, shape = folders.train, folders.held_out, folders.shape
        classes, notes, num_classes = folders.classes, folders.notes, len(folders.classes)
        split = (
            f"all of {folders.own_split}/" if folders.own_split else "by the hash of their names"
        )
        has_own_split = bool(folders.own_split)
    else:
        train, held_out, split = _array_datasets(source, fraction)
        shape, classes, notes = train.arrays["image"].shape[1:], [], []
        labels = [part.arrays["label"] for part in (train, held_out) if part is not None]
        num_classes = max(int(label_N.max(initial=-1)) + 1 for label_N in labels)
        has_own_split = split != _DRAWN
    if has_own_split:
        _refuse(config, ("validation_fraction",), f"would do nothing: held out is {split}")
    info = ImageInfo(
        source=source,
        train_images=len(train),
        eval_images=0 if held_out is None else len(held_out),
        shape=shape,
        num_classes=num_classes,
        split=split if held_out is not None else "nothing held out",
        classes=classes,
        notes=notes,
        bad=bad,
    )
    return (
        ImageDataset(train, augment=config.augment),
        None if held_out is None else ImageDataset(held_out),
        info,
    )


def digits_datasets() -> tuple[ArrayDataset, ArrayDataset]:
    """Returns (1,437 training images, 360 held out): every fifth image is never trained on.

    Rows are {"image": float32 [8, 8, 1] in 0..1, "label": int32, "loss_mask": float32}.

    Raises:
        DataError: if scikit-learn, whose wheel holds the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the digits images come with scikit-learn, which is not installed; install it with"
            " pip install 'jaxtrain[dev]' or pip install scikit-learn"
        ) from error
    pixels_NP, label_N = load_digits(return_X_y=True)
    image_NHWC = np.asarray(pixels_NP, np.float32).reshape(-1, 8, 8, 1) / 16
    is_held_out_N = np.arange(len(image_NHWC)) % HELD_OUT_EVERY == 0
    arrays = {"image": image_NHWC, "label": np.asarray(label_N, np.int32)}
    train, held_out = (
        _dataset(arrays, chosen_N, name)
        for name, chosen_N in (
            ("digits (training)", ~is_held_out_N),
            ("digits (held out)", is_held_out_N),
        )
    )
    _log.info(
        "digits: %d images of 8x8; image 0 and every fifth after it are held out: %d for training,"
        " %d for evaluation",
        len(image_NHWC),
        len(train),
        len(held_out),
    )
    return train, held_out


def _array_datasets(source: str, fraction: float) -> tuple[ArrayDataset, ArrayDataset | None, str]:
    """Returns (training, held out, how it was held out) of a source that fits into memory."""
    if source == "digits":
        return *digits_datasets(), "image 0 and every fifth after it"
    if source.endswith(".npz"):
        (arrays, test), split = image_arrays.read_npz(source), "all of x_test"
    elif image_arrays.is_idx(source):
        (arrays, test), split = image_arrays.read_idx(source), "all of the test files"
    else:
        raise DataError(
            f"data.source={source} is a file of no known kind; give digits, a folder of class"
            f" folders, an .npz archive, or a file named ...images-idx3-ubyte (or .gz)"
        )
    names = f"training images of {source}", f"validation images of {source}"
    if test is not None:
        if arrays["image"].shape[1:] != test["image"].shape[1:]:
            raise DataError(
                f"{source}: images for training and for the test must have one shape; got"
                f" {list(arrays['image'].shape[1:])} and {list(test['image'].shape[1:])}"
            )
        return _dataset(arrays, slice(None), names[0]), _dataset(test, slice(None), names[1]), split
    num_images = len(arrays["image"])
    if not num_images:
        raise DataError(f"no training data in data.source={source}: it holds 0 images")
    num_held_out = round(num_images * fraction)
    is_held_out_N = order(0, 0, num_images, np.arange(num_images)) < num_held_out
    held_out = _dataset(arrays, is_held_out_N, names[1]) if num_held_out else None
    return _dataset(arrays, ~is_held_out_N, names[0]), held_out, _DRAWN


def _dataset(arrays: Arrays, chosen: np.ndarray | slice, name: str) -> ArrayDataset:
    image, label = arrays["image"][chosen], arrays["label"][chosen]
    mask = np.ones(len(label), np.float32)
    return ArrayDataset({"image": image, "label": label, "loss_mask": mask}, name=name)


def _refuse(config: ImageDataConfig, names: tuple[str, ...], why: str) -> None:
    """Refuses options that were changed and have no effect on this source."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(ImageDataConfig, name):
            raise ConfigError(
                f"data.{name}={value} {why} (data.source={config.source}); leave it out"
            )
