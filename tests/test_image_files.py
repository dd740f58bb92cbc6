"""Class folders: which files are rows, which are held out, and what becomes of bad ones."""

import logging

import cloudpickle
import jax
import numpy as np
import picturing
import pytest

from jaxtrain.data.images import ImageDataConfig, image_datasets
from jaxtrain.data.load import Loader
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.mesh import make_mesh


def opened(root, **options):
    return image_datasets(ImageDataConfig(source=str(root), **options))


def whole(dataset):
    return dataset.read(np.arange(len(dataset)))


def numbers(rows):
    """Which image each row is, by its first pixel."""
    return rows["image"][:, 0, 0, 0].tolist()


def test_every_file_is_in_one_part_with_the_class_of_its_folder(tmp_path):
    train, held_out, info = opened(picturing.class_folders(tmp_path, 20))
    rows = [whole(train), whole(held_out)]
    assert sorted(numbers(rows[0]) + numbers(rows[1])) == list(range(40))
    for part in rows:
        assert part["label"].tolist() == [number // 20 for number in numbers(part)]
        assert part["loss_mask"].tolist() == [1] * len(part["label"])
        assert part["image"].shape[1:] == (8, 8, 1)
    assert 1 <= len(held_out) <= 16
    assert (info.num_classes, info.classes) == (2, ["cat", "dog"])
    assert (
        f"8x8 grey, 2 classes (cat, dog); {len(train)} for training, {len(held_out)} for"
        " evaluation (by the hash of their names)"
    ) in info.summary()


def test_a_file_stays_on_its_side_when_others_come(tmp_path):
    def held_out_names(count):
        root = picturing.class_folders(tmp_path / str(count), count)
        return set(numbers(whole(opened(root, validation_fraction=0.3)[1])))

    few, many = held_out_names(10), held_out_names(18)
    assert few == {number for number in many if number % 20 < 10}


def test_few_files_still_leave_each_class_one_to_train_on(tmp_path):
    root = picturing.class_folders(tmp_path, 1, ("a", "b", "c"))
    train, held_out, _ = opened(root, validation_fraction=0.5)
    assert (len(train), held_out) == (3, None)
    root = picturing.class_folders(tmp_path, 2, ("a", "b", "c"))
    train, held_out, _ = opened(root, validation_fraction=0.01)
    assert (len(train), len(held_out)) == (5, 1)
    assert opened(root, validation_fraction=0)[1] is None


def test_a_folder_named_val_is_held_out(tmp_path):
    picturing.class_folders(tmp_path / "train", 5)
    picturing.class_folders(tmp_path / "val", 3, ("dog",))
    train, held_out, info = opened(tmp_path)
    assert (len(train), len(held_out), info.num_classes) == (10, 3, 2)
    assert whole(held_out)["label"].tolist() == [1, 1, 1]
    assert "all of val/" in info.summary()
    with pytest.raises(ConfigError, match=r"validation_fraction=0.1 would do nothing: .*val/"):
        opened(tmp_path, validation_fraction=0.1)
    picturing.class_folders(tmp_path / "val", 1, ("cow",))
    with pytest.raises(DataError, match="has the classes cow, of which there are no training imag"):
        opened(tmp_path)


def test_other_files_are_counted_and_empty_classes_refused(tmp_path):
    picturing.class_folders(tmp_path)
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / "cat" / "notes.csv").write_text("1,2")
    assert "2 other files skipped (README.txt, cat/notes.csv)" in opened(tmp_path)[2].summary()
    (tmp_path / "cow").mkdir()
    with pytest.raises(DataError, match="has no image in cow; every folder is a class"):
        opened(tmp_path)


def test_a_folder_without_folders_and_a_missing_one_are_refused(tmp_path):
    with pytest.raises(DataError, match="must hold a folder for each class"):
        opened(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist; give digits, a folder of class"):
        opened(tmp_path / "nowhere")


def test_images_of_several_sizes_need_one(tmp_path):
    root = picturing.class_folders(tmp_path)
    picturing.save(root / "dog" / "99.png", picturing.grey(0, 10, 12))
    with pytest.raises(DataError, match=r"there are 2: .*8x8 pixels, .*99.png 12x10; set data.ima"):
        opened(root)
    train, _, info = opened(root, image_size=6)
    assert info.shape == (6, 6, 1)
    assert whole(train)["image"].shape[1:] == (6, 6, 1)


def test_color_is_that_of_the_images_or_as_asked_for(tmp_path):
    root = picturing.class_folders(tmp_path)
    assert opened(root)[2].shape == (8, 8, 1)
    assert opened(root, color="rgb")[2].shape == (8, 8, 3)
    pixels = np.stack([picturing.grey(n) for n in (1, 2, 3)], -1)
    picturing.save(root / "dog" / "99.png", pixels)
    train, _, info = opened(root)
    assert info.shape == (8, 8, 3)
    assert whole(train)["image"].shape[1:] == (8, 8, 3)
    assert opened(root, color="grey")[2].shape == (8, 8, 1)


def test_nothing_is_opened_at_the_start_where_size_and_color_are_given(tmp_path):
    root = picturing.class_folders(tmp_path)
    for path in root.rglob("*.png"):
        path.write_bytes(b"no image")
    train, _, _ = opened(root, image_size=8, color="grey")
    with pytest.raises(DataError, match="is no readable image: it is no image"):
        train.read(np.array([0]))


def test_the_fingerprint_knows_names_sizes_and_what_pixels_depend_on(tmp_path):
    root = picturing.class_folders(tmp_path)
    one = opened(root)[0].fingerprint
    assert opened(root)[0].fingerprint == one
    prints = {one, opened(root, color="rgb")[0].fingerprint, opened(root)[1].fingerprint}
    picturing.save(root / "cat" / "00.png", picturing.grey(77))
    prints.add(opened(root, image_size=7)[0].fingerprint)
    (root / "cat" / "00.png").rename(root / "cat" / "000.png")
    prints.add(opened(root)[0].fingerprint)
    assert len(prints) == 5


# Bad images


def with_truncated(root, number=5, per_class=12):
    """Class folders in which one file ends too early: (root, its path)."""
    picturing.class_folders(root, per_class)
    return root, picturing.truncate(root / "cat" / f"{number:02}.png")


def test_a_truncated_image_stops_and_is_named(tmp_path):
    root, path = with_truncated(tmp_path)
    train, _, _ = opened(root, validation_fraction=0)
    train.read(np.arange(5))
    with pytest.raises(DataError, match=f"{path} is no readable image: .*; mend or delete it, or"):
        train.read(np.arange(4, 8))
    assert DataError.exit_code == 4


def test_a_file_that_is_no_image_stops_before_training(tmp_path):
    root = picturing.class_folders(tmp_path)
    (root / "dog" / "03.png").write_text("no image")
    with pytest.raises(
        DataError, match=r"dog/03.png is no readable image: it is no image; .*N of 1"
    ):
        opened(root)


def test_the_next_image_stands_in_for_a_bad_one(tmp_path, caplog):
    root, path = with_truncated(tmp_path)
    picturing.truncate(root / "cat" / "06.png")
    train, _, info = opened(root, validation_fraction=0, on_error="skip:2")
    assert len(train) == 24
    with caplog.at_level(logging.WARNING, "jaxtrain"):
        rows = whole(train)
        again = train.read(np.array([6, 5, 0]))
    wanted = [n if n not in (5, 6) else 7 for n in range(12)]
    assert numbers(rows) == wanted + list(range(20, 32))
    assert rows["loss_mask"].tolist() == [1] * 24
    # Whatever the batch, and whoever read it before.
    assert numbers(again) == [7, 7, 0]
    assert caplog.text.count("left out") == 2
    assert f"left out {path}: " in caplog.text
    assert info.bad.summary().startswith(f"2 bad images left out: {path}, ")
    alone = opened(root, validation_fraction=0, on_error="skip:2")[0].read(np.array([6]))
    assert numbers(alone) == [7]


def test_the_first_image_stands_in_for_the_last(tmp_path):
    root = picturing.class_folders(tmp_path)
    picturing.truncate(root / "dog" / "05.png")
    rows = whole(opened(root, validation_fraction=0, on_error="skip:1")[0])
    assert (numbers(rows)[-1], rows["label"][-1]) == (0, 0)


def test_one_more_than_may_be_left_out_stops(tmp_path):
    root, _ = with_truncated(tmp_path)
    path = picturing.truncate(root / "dog" / "07.png")
    train, _, _ = opened(root, validation_fraction=0, on_error="skip:1")
    message = f"{path} is no readable image: .*; 1 were left out before it; .*skip:N with N of 2"
    with pytest.raises(DataError, match=message):
        whole(train)


def test_what_a_copy_in_an_input_worker_leaves_out_is_counted(tmp_path):
    root, path = with_truncated(tmp_path)
    train, _, info = opened(root, validation_fraction=0, on_error="skip:1")
    train.read(np.array([0]))
    worker = cloudpickle.loads(cloudpickle.dumps(train))
    assert numbers(worker.read(np.array([5]))) == [6]
    assert info.bad.summary() == f"1 bad image left out: {path}"
    # So does the limit.
    other = picturing.truncate(root / "dog" / "07.png")
    with pytest.raises(DataError, match=f"{other} is no readable image: .*; 1 were left out"):
        whole(train)


def test_input_workers_give_the_same_pixels_and_count_together(tmp_path):
    root, path = with_truncated(tmp_path)

    def trained_on(num_workers):
        options = {"validation_fraction": 0, "on_error": "skip:1", "augment": "crop_flip"}
        train, _, info = opened(root, **options)
        mesh = make_mesh("data:1", devices=jax.devices()[:1])
        with Loader(train, mesh, global_batch_size=12, num_workers=num_workers) as loader:
            # The bad image is in both epochs, and each is read by another worker.
            batches = [jax.device_get(next(loader).arrays) for _ in range(6)]
        return batches, info.bad.summary()

    alone, with_workers = trained_on(0), trained_on(2)
    for found, wanted in zip(with_workers[0], alone[0], strict=True):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array)
    assert with_workers[1] == alone[1] == f"1 bad image left out: {path}"


def test_an_evaluation_counts_no_image_twice(tmp_path):
    picturing.class_folders(tmp_path / "train", 3)
    picturing.class_folders(tmp_path / "val", 4)
    picturing.truncate(tmp_path / "val" / "cat" / "01.png")
    rows = whole(opened(tmp_path, on_error="skip:3")[1])
    assert rows["loss_mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert numbers(rows)[1] == 2


def test_no_readable_image_at_all_is_an_error(tmp_path):
    root = picturing.class_folders(tmp_path, 2)
    for path in root.rglob("*.png"):
        picturing.truncate(path)
    train, _, _ = opened(root, validation_fraction=0, on_error="skip:9")
    with pytest.raises(DataError, match="none of its 4 images can be read"):
        train.read(np.array([1]))


@pytest.mark.parametrize("value", ["skip", "skip:0", "skip:-1", "go"])
def test_on_error_is_stop_or_a_number(value):
    with pytest.raises(ConfigError, match=f"data.on_error={value} must be stop, or skip:N"):
        ImageDataConfig(on_error=value)
