"""train_image on images of one's own: bad files, resume, and a model that does not fit."""

import experimenting
import picturing
import pytest


@pytest.fixture
def folder(tmp_path):
    return picturing.class_folders(tmp_path / "pictures", 12)


def words(folder, workdir, *more):
    return [
        *(f"--data.source={folder}", f"--workdir={workdir}", "--global_batch_size=8"),
        *("--model.num_classes=2", "--model.channels=4", "--log_every_steps=1", *more),
    ]


def test_a_truncated_image_ends_the_run_and_is_named(folder, tmp_path):
    path = picturing.truncate(folder / "dog" / "05.png")
    ended = experimenting.run("train_image", *words(folder, tmp_path / "run", "--num_steps=4"))
    assert ended.code == 4
    _, found, message = ended.err.rpartition("error: ")
    assert found
    assert f"{path} is no readable image: image file is truncated; mend or delete" in message
    assert "samples " in message
    assert "Traceback" not in ended.err


def test_a_run_counts_what_it_left_out_and_keeps_its_length(folder, tmp_path):
    path = picturing.truncate(folder / "dog" / "05.png")
    more = ["--num_steps=6", "--data.on_error=skip:1", "--data.validation_fraction=0"]
    ended = experimenting.succeed("train_image", *words(folder, tmp_path / "run", *more))
    # Two epochs of 24 images, 8 a step.
    records = experimenting.train_records(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["weight"] for record in records] == [8] * 6
    assert ended.err.count(f"left out {path}") == 1
    assert ended.err.count(f"1 bad image left out: {path}") == 1


def test_a_run_goes_on_with_the_same_pixels(folder, tmp_path):
    more = ["--data.augment=crop_flip", "--optimizer.schedule=constant"]
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        given = words(folder, tmp_path / name, f"--num_steps={steps}", *more)
        experimenting.succeed("train_image", *given, num_devices=1)
    whole, parts = (experimenting.train_records(tmp_path / name) for name in ("whole", "parts"))
    assert [record["loss"] for record in parts] == [record["loss"] for record in whole]
    plain = words(folder, tmp_path / "plain", "--num_steps=6", "--optimizer.schedule=constant")
    experimenting.succeed("train_image", *plain, num_devices=1)
    assert experimenting.train_records(tmp_path / "plain")[0]["loss"] != whole[0]["loss"]


def test_a_model_that_does_not_fit_is_refused_before_anything_is_compiled(folder, tmp_path):
    given = words(folder, tmp_path / "run", "--model.in_channels=3")
    ended = experimenting.run("train_image", *given)
    assert ended.code == 2
    assert "model.in_channels=3 must fit data.source=" in ended.error
    assert ended.error.endswith("whose images have 1 channel; use --model.in_channels=1")


@pytest.mark.long
def test_fashion_mnist_is_read_in_nine_of_ten_cases(tmp_path):
    """The command of docs/data.md; 5 minutes of processor time."""
    if not picturing.FASHION_MNIST.is_dir():
        pytest.skip("Fashion-MNIST is not there; apt-get install dataset-fashion-mnist")
    flags = "--model.num_stages=3 --global_batch_size=128 --num_steps=900 --eval_every_steps=0"
    page = " ".join((experimenting.ROOT / "docs" / "data.md").read_text().split())
    assert f"--data.source={picturing.FASHION_MNIST} \\ {flags}" in page
    given = [f"--data.source={picturing.FASHION_MNIST}", f"--workdir={tmp_path}", *flags.split()]
    ended = experimenting.start("train_image", *given, is_optimized=True, timeout=1700)
    assert ended.code == 0, ended.err
    (record,) = experimenting.eval_records(tmp_path)
    assert record["rows"] == 10_000
    assert record["accuracy"] >= 0.9
