"""Images of every source: right split, right values, and a clear way out where there are none."""

import builtins
import logging

import numpy as np
import picturing
import pytest

from jaxtrain.data.images import ImageDataConfig, digits_datasets, image_datasets
from jaxtrain.errors import ConfigError, DataError, ExitCode


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


def opened(source, **options):
    return image_datasets(ImageDataConfig(source=str(source), **options))


def test_an_archive_is_split_by_record(tmp_path):
    images = np.stack([picturing.grey(number) for number in range(50)])
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(50))
    train, held_out, info = opened(tmp_path / "a.npz", validation_fraction=0.3)
    parts = [part.read(np.arange(len(part))) for part in (train, held_out)]
    labels = [part["label"].tolist() for part in parts]
    assert sorted(labels[0] + labels[1]) == list(range(50))
    assert len(held_out) == 15
    for part in parts:
        np.testing.assert_array_equal(part["image"], images[part["label"]][..., None])
    # Drawn, not every third: data often comes class after class.
    assert len(set(np.diff(labels[1]))) > 2
    again = opened(tmp_path / "a.npz", validation_fraction=0.3)[1]
    assert again.read(np.arange(15))["label"].tolist() == labels[1]
    assert "50 classes; 35 for training, 15 for evaluation (drawn by" in info.summary()
    assert opened(tmp_path / "a.npz", validation_fraction=0)[1] is None


def test_the_test_files_of_mnist_are_held_out(tmp_path):
    folder = picturing.mnist(tmp_path, ".gz")
    train, held_out, info = opened(folder)
    assert (len(train), len(held_out), info.num_classes, info.shape) == (30, 10, 10, (8, 8, 1))
    assert "all of the test files" in info.summary()
    image = held_out.read(np.array([3]))["image"]
    np.testing.assert_array_equal(image[0, ..., 0], picturing.grey(103))
    # One of the files alone is split like any other array.
    alone = opened(folder / "train-images-idx3-ubyte.gz")
    assert (len(alone[0]), len(alone[1])) == (24, 6)


def test_options_that_nothing_reads_are_refused(tmp_path):
    folder = picturing.mnist(tmp_path)
    for option, value in (("image_size", 8), ("color", "rgb"), ("on_error", "skip:3")):
        with pytest.raises(ConfigError, match=f"{option}={value} is read for images in folders on"):
            opened(folder, **{option: value})
    with pytest.raises(ConfigError, match=r"validation_fraction=0.5 would do nothing: held out is"):
        opened(folder, validation_fraction=0.5)
    with pytest.raises(ConfigError, match="every fifth after it"):
        opened("digits", validation_fraction=0.5)


def test_a_file_of_no_known_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a.txt is a file of no known kind; give digits, a folder"):
        opened(tmp_path / "a.txt")


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    _, _, info = opened(picturing.class_folders(tmp_path), color="rgb")
    info.check_model(2, 3)
    info.check_model(10, 3)
    with pytest.raises(ConfigError, match=r"images have 3 channels; use --model.in_channels=3$"):
        info.check_model(10, 1)
    info = opened("digits")[2]
    with pytest.raises(ConfigError, match=r"model.num_classes=9 and model.in_channels=3 must fit"):
        info.check_model(9, 3)


def test_the_digits_are_the_same_rows_through_the_configuration():
    train, held_out, _ = opened("digits")
    for found, wanted in zip((train, held_out), digits_datasets(), strict=True):
        assert (len(found), found.fingerprint) == (len(wanted), wanted.fingerprint)
        rows = found.read(np.arange(5))
        np.testing.assert_array_equal(rows["image"], wanted.read(np.arange(5))["image"])
