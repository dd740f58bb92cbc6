"""Small image files for the tests, of pixels that say which they are."""

import gzip
import struct
from pathlib import Path

import numpy as np
from PIL import Image

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def grey(number: int, height: int = 8, width: int = 8) -> np.ndarray:
    """Pixels uint8 [H, W], different for every number below 200."""
    return (np.arange(height * width).reshape(height, width) % 50 + number).astype(np.uint8)


def save(path: Path, pixels: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def truncate(path: Path) -> Path:
    """Cuts a file in the middle of its pixels; its head stays whole."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 30])
    return path


def class_folders(
    root: Path, per_class: int = 6, classes: tuple[str, ...] = ("cat", "dog")
) -> Path:
    """Writes root/CLASS/00.png, ...: image i of class c is grey(20 * c + i)."""
    for label, name in enumerate(classes):
        for number in range(per_class):
            save(root / name / f"{number:02}.png", grey(20 * label + number))
    return root


def write_idx(path: Path, values: np.ndarray, type_code: int = 8) -> Path:
    """Writes an idx file of bytes, compressed where the name ends in .gz."""
    head = struct.pack(">BBBB", 0, 0, type_code, values.ndim)
    data = head + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def mnist(folder: Path, end: str = "", num_train: int = 30, num_test: int = 10) -> Path:
    """Writes the four files of MNIST: image i is grey(i), its label i % 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, first in (("train", num_train, 0), ("t10k", num_test, 100)):
        images = np.stack([grey(first + i) for i in range(count)])
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", images)
        labels = (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", labels)
    return folder
