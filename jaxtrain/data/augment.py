"""Random changes of images in training: pure functions of the pixels, the seed and the position.

Nothing is drawn from a generator: the numbers of a sample are hashed from the run's seed and its
position in the endless order (`order.random_bits`). So a sample gets the same pixels whatever the
batch, the number of processes and the restarts, and others in each epoch. Tests pin the values:
whoever changes them changes the data of runs that are resumed.

Legend: R rows, H height, W width, C channels.
"""

import numpy as np

from jaxtrain.data.order import random_bits

KINDS = ("none", "crop", "flip", "crop_flip")
"""What `augmented` can do: crops that moved, images that are mirrored, both."""

_VERTICAL, _HORIZONTAL, _MIRROR = range(3)


def augmented(image_RHWC: np.ndarray, kind: str, *, seed: int, positions: np.ndarray) -> np.ndarray:
    """Returns changed copies of images, [R, H, W, C] of the same dtype.

    Args:
        image_RHWC: the pixels; any dtype.
        kind: one of KINDS. "crop" moves an image by up to an eighth of its height and width (at
            least a pixel) in either direction, each shift as likely, and fills with zeros; "flip"
            mirrors every second image, left to right.
        seed: of the run.
        positions: int64 [R], of the samples in the endless order.
    """
    if kind == "none":
        return image_RHWC
    num_rows, height, width, _ = image_RHWC.shape
    row_RH = np.broadcast_to(np.arange(height), (num_rows, height))
    column_RW = np.broadcast_to(np.arange(width), (num_rows, width))
    if "flip" in kind:
        is_mirrored_R = random_bits(seed, _MIRROR, positions) >> np.uint64(63) == 1
        column_RW = np.where(is_mirrored_R[:, None], column_RW[:, ::-1], column_RW)
    if "crop" in kind:
        tall, wide = max(1, height // 8), max(1, width // 8)
        image_RHWC = np.pad(image_RHWC, ((0, 0), (tall, tall), (wide, wide), (0, 0)))
        row_RH = row_RH + _below(2 * tall + 1, seed, _VERTICAL, positions)[:, None]
        column_RW = column_RW + _below(2 * wide + 1, seed, _HORIZONTAL, positions)[:, None]
    # One gather for the whole batch.
    rows_R11 = np.arange(num_rows)[:, None, None]
    return image_RHWC[rows_R11, row_RH[:, :, None], column_RW[:, None, :]]


def _below(limit: int, seed: int, draw: int, positions: np.ndarray) -> np.ndarray:
    """Numbers 0..limit - 1, int64 [R]."""
    return (random_bits(seed, draw, positions) % np.uint64(limit)).astype(np.int64)
