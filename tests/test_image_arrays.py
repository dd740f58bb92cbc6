"""Images in .npz archives and idx files: read as they were stored, refused where they are not."""

import numpy as np
import picturing
import pytest

from jaxtrain.data.image_arrays import is_idx, read_idx, read_npz, scaled
from jaxtrain.errors import DataError

IMAGES = np.stack([picturing.grey(i) for i in range(12)])
LABELS = np.arange(12) % 3


def saved(tmp_path, **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return str(tmp_path / "a.npz")


@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train")])
def test_an_archive_with_and_without_a_test_part(tmp_path, names):
    arrays = dict(zip(names, (IMAGES, LABELS), strict=True))
    train, test = read_npz(saved(tmp_path, **arrays))
    assert test is None
    np.testing.assert_array_equal(train["image"], IMAGES[..., None])
    np.testing.assert_array_equal(train["label"], LABELS)
    assert train["label"].dtype == np.int32
    color = np.stack([IMAGES] * 3, -1)[:5]
    arrays[names[0]] = np.stack([IMAGES] * 3, -1)
    _, test = read_npz(saved(tmp_path, **arrays, x_test=color, y_test=LABELS[:5, None]))
    np.testing.assert_array_equal(test["image"], color)
    np.testing.assert_array_equal(test["label"], LABELS[:5])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": IMAGES}, "must hold arrays x and y, or x_train and y_train .*; it holds a$"),
        ({"x": IMAGES, "y": LABELS, "x_test": IMAGES}, "x_test alone; x_test and y_test go toge"),
        ({"x": IMAGES[0], "y": LABELS}, r"x must have shape \[N, H, W\].*got \[8, 8\]"),
        ({"x": np.zeros((4, 3, 8, 8), np.uint8), "y": LABELS[:4]}, "numpy.moveaxis"),
        ({"x": IMAGES.astype(int), "y": LABELS}, "dtype int64, whose range of brightness is not"),
        ({"x": IMAGES * np.float32("nan"), "y": LABELS}, "not finite"),
        ({"x": IMAGES, "y": LABELS[:5]}, r"y must hold one whole number for each of the 12 images"),
        ({"x": IMAGES, "y": np.eye(12)}, r"whole number .* got float64\[12, 12\]"),
        ({"x": IMAGES, "y": LABELS - 1}, "classes count from 0; got -1 to 1"),
        ({"x": np.array([{}] * 12), "y": LABELS}, "is not an .npz archive of plain arrays"),
    ],
)
def test_an_archive_of_other_things_is_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        read_npz(saved(tmp_path, **arrays))


def test_what_is_no_archive_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=IMAGES, y=LABELS)
    picturing.truncate(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_text("text")
    (tmp_path / "c.npz").write_bytes(b"")
    np.save(tmp_path / "d.npy", IMAGES)
    (tmp_path / "d.npy").rename(tmp_path / "d.npz")
    for name in "abcd":
        with pytest.raises(DataError, match=f"{name}.npz is not an .npz archive"):
            read_npz(str(tmp_path / f"{name}.npz"))


@pytest.mark.parametrize("end", ["", ".gz"])
def test_the_folder_of_the_four_files(tmp_path, end):
    folder = picturing.mnist(tmp_path, end)
    assert is_idx(str(folder))
    train, test = read_idx(str(folder))
    np.testing.assert_array_equal(train["image"][7, ..., 0], picturing.grey(7))
    np.testing.assert_array_equal(train["label"], np.arange(30) % 10)
    np.testing.assert_array_equal(test["image"][3, ..., 0], picturing.grey(103))
    assert (len(train["label"]), len(test["label"])) == (30, 10)


def test_one_file_of_images_finds_its_labels(tmp_path):
    picturing.mnist(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte"
    images, test = read_idx(str(path))
    assert test is None
    np.testing.assert_array_equal(images["image"][0, ..., 0], picturing.grey(100))
    # Also where one of the two is compressed.
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.unlink()
    picturing.write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.full(10, 4, np.uint8))
    assert read_idx(str(path))[0]["label"].tolist() == [4] * 10


def test_broken_idx_files_are_named(tmp_path):
    folder = picturing.mnist(tmp_path)
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    for broken, message in (
        (whole[:-1], "train-images-idx3-ubyte is truncated or damaged"),
        (whole + b"x", "truncated or damaged"),
        (whole[:6], "truncated or damaged"),
        (b"", "is no idx file"),
        (b"\x89PNG", r"is no idx file: .* it begins with \[137, 80, 78, 71\]"),
    ):
        images.write_bytes(broken)
        with pytest.raises(DataError, match=message):
            read_idx(str(folder))
    images.write_bytes(whole)
    picturing.write_idx(labels, np.zeros(29, np.uint8))
    with pytest.raises(DataError, match="for each of the 30 images"):
        read_idx(str(folder))
    labels.unlink()
    with pytest.raises(DataError, match="needs its labels beside it, in train-labels-idx1-ubyte"):
        read_idx(str(folder))
    images.rename(folder / "my-images-idx3-ubyte")
    with pytest.raises(DataError, match="must hold train-images-idx3-ubyte and"):
        read_idx(str(folder))


def test_a_truncated_gz_is_named(tmp_path):
    folder = picturing.mnist(tmp_path, ".gz")
    picturing.truncate(folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz cannot be read"):
        read_idx(str(folder))


def test_pixels_go_to_the_devices_as_bytes_or_floats():
    small = np.array([0, 85, 255], np.uint8)
    assert scaled(small) is small
    found = scaled(np.array([0, 21845, 65535], np.uint16))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0, 1 / 3, 1], rtol=1e-6)
    np.testing.assert_array_equal(scaled(np.array([-1.5, 7.0])), [-1.5, 7])


def test_fashion_mnist_where_it_is_installed():
    if not picturing.FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not there; apt-get install dataset-fashion-mnist")
    train, test = read_idx(str(picturing.FASHION_MNIST))
    assert (train["image"].shape, test["image"].shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert np.bincount(train["label"]).tolist() == [6000] * 10
    assert np.bincount(test["label"]).tolist() == [1000] * 10
