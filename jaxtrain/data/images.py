"""Images that need no download: the handwritten digits of scikit-learn.

Legend: N images, H height, W width, C channels.
"""

import logging

import numpy as np

from jaxtrain.data.sources import ArrayDataset
from jaxtrain.errors import DataError

HELD_OUT_EVERY = 5

_log = logging.getLogger(__name__)


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
    train, held_out = (
        ArrayDataset(
            {
                "image": image_NHWC[chosen_N],
                "label": np.asarray(label_N, np.int32)[chosen_N],
                "loss_mask": np.ones(int(chosen_N.sum()), np.float32),
            },
            name=name,
        )
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
