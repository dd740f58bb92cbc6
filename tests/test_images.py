"""The digits images: right split, right values, and a clear way out without scikit-learn."""

import builtins
import logging

import numpy as np
import pytest

from jaxtrain.data.images import digits_datasets
from jaxtrain.errors import DataError, ExitCode


def test_every_fifth_image_is_held_out(caplog):
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    with caplog.at_level(logging.INFO, "jaxtrain"):
        train, held_out = digits_datasets()
    digits = sklearn_datasets.load_digits()
    assert (len(train), len(held_out)) == (1437, 360)
    assert "1437 for training, 360 for evaluation" in caplog.text
    # Images 0..4 of the original: the first is held out, the others are trained on.
    rows = train.read(np.arange(4))
    np.testing.assert_array_equal(rows["image"][..., 0] * 16, digits.images[1:5])
    np.testing.assert_array_equal(rows["label"], digits.target[1:5])
    rows = held_out.read(np.array([2, 1, 0]))
    np.testing.assert_array_equal(rows["image"][..., 0] * 16, digits.images[[10, 5, 0]])
    np.testing.assert_array_equal(rows["label"], digits.target[[10, 5, 0]])
    assert {key: (value.dtype, value.shape) for key, value in rows.items()} == {
        "image": (np.float32, (3, 8, 8, 1)),
        "label": (np.int32, (3,)),
        "loss_mask": (np.float32, (3,)),
    }
    assert rows["image"].min() == 0
    assert rows["image"].max() == 1
    assert rows["loss_mask"].tolist() == [1, 1, 1]
    assert train.fingerprint != held_out.fingerprint
    assert train.fingerprint == digits_datasets()[0].fingerprint


def test_without_scikit_learn_the_error_says_how_to_get_it(monkeypatch):
    real_import = builtins.__import__

    def no_sklearn(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_sklearn)
    with pytest.raises(DataError, match=r"scikit-learn, which is not installed; .*jaxtrain\[dev\]"):
        digits_datasets()
    assert DataError.exit_code == ExitCode.UNUSABLE
