"""Augmentation: what it does to pixels, and that it depends on seed and position alone."""

import jax
import numpy as np
import pytest

from jaxtrain.data.augment import KINDS, augmented
from jaxtrain.data.images import ImageDataset
from jaxtrain.data.load import Loader, eval_batches
from jaxtrain.data.mix import MixedDataset
from jaxtrain.data.order import random_bits, sample_indices
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.mesh import make_mesh

IMAGES = np.random.default_rng(0).integers(1, 256, (64, 16, 24, 3)).astype(np.uint8)


def candidates(image, kind):
    """Every image that `kind` may make of one, by plain slicing."""
    height, width, _ = image.shape
    tall, wide = (height // 8, width // 8) if "crop" in kind else (0, 0)
    padded = np.pad(image, ((tall, tall), (wide, wide), (0, 0)))
    crops = [
        padded[y : y + height, x : x + width]
        for y in range(2 * tall + 1)
        for x in range(2 * wide + 1)
    ]
    mirrored = [
        np.pad(image, ((tall, tall), (wide, wide), (0, 0)))[y : y + height, x : x + width][:, ::-1]
        for y in range(2 * tall + 1)
        for x in range(2 * wide + 1)
    ]
    return [*crops, *(mirrored if "flip" in kind else [])]


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_becomes_one_of_those_that_are_meant(kind):
    found = augmented(IMAGES, kind, seed=3, positions=np.arange(64))
    assert (found.dtype, found.shape) == (np.uint8, IMAGES.shape)
    for before, after in zip(IMAGES, found, strict=True):
        assert any(np.array_equal(after, one) for one in candidates(before, kind))


def test_every_shift_is_as_likely_and_every_second_image_is_mirrored():
    # One bright pixel in the middle of 16 x 16, in an image that is brighter on its left.
    count = 20_000
    image = np.zeros((count, 16, 16, 1), np.uint8)
    image[:, 8, 8] = 255
    found = augmented(image, "crop", seed=0, positions=np.arange(count))
    _, rows, columns, _ = np.nonzero(found)
    counts = np.bincount((rows - 6) * 5 + columns - 6, minlength=25)
    assert counts.size == 25
    # 800 each; five standard deviations are 140.
    assert np.abs(counts - count / 25).max() < 140
    found = augmented(image, "flip", seed=0, positions=np.arange(count))
    share = (np.nonzero(found)[2] == 7).mean()
    assert abs(share - 0.5) < 0.02


def test_a_sample_gets_the_same_pixels_in_any_batch():
    positions = np.arange(1000, 1064)
    whole = augmented(IMAGES, "crop_flip", seed=5, positions=positions)
    for chosen in (np.array([63]), np.array([40, 2, 17]), np.arange(0, 64, 2)):
        part = augmented(IMAGES[chosen], "crop_flip", seed=5, positions=positions[chosen])
        np.testing.assert_array_equal(part, whole[chosen])


def test_seeds_and_positions_change_the_pixels():
    one = augmented(IMAGES, "crop_flip", seed=5, positions=np.arange(64))
    for seed, first in ((6, 0), (5, 64)):
        other = augmented(IMAGES, "crop_flip", seed=seed, positions=np.arange(first, first + 64))
        assert (one != other).any(axis=(1, 2, 3)).mean() > 0.8


def test_the_numbers_stay_the_same_in_all_versions():
    # Whoever changes them changes the pixels of runs that are resumed.
    assert random_bits(0, 0, np.array([0, 1])).tolist() == GOLDEN[:2]
    assert random_bits(7, 2, np.array([10**12])).tolist() == GOLDEN[2:]


GOLDEN = [5197578548964807871, 5199774590669546748, 9278753249522377440]


def pictures(kind="crop_flip"):
    arrays = {"image": IMAGES, "label": np.arange(64, dtype=np.int32)}
    return ImageDataset(ArrayDataset(arrays, name="pictures"), augment=kind)


def loaded(dataset, mesh, count, *, batch=16, position=0, seed=2):
    """(images, labels) of `count` batches, one after the other."""
    with Loader(dataset, mesh, global_batch_size=batch, seed=seed, position=position) as loader:
        batches = [next(loader).arrays for _ in range(count)]
    return tuple(
        np.concatenate([np.asarray(arrays[name]) for arrays in batches])
        for name in ("image", "label")
    )


def test_the_loader_changes_each_sample_by_its_position():
    image, label = loaded(pictures(), make_mesh("data:8"), 6)
    rows = sample_indices(2, 64, np.arange(96))
    np.testing.assert_array_equal(label, rows)
    wanted = augmented(IMAGES[rows], "crop_flip", seed=2, positions=np.arange(96))
    np.testing.assert_array_equal(image, wanted)


def test_other_meshes_batches_and_restarts_give_the_same_pixels():
    whole = loaded(pictures(), make_mesh("data:8"), 6)
    one_device = make_mesh("data:1", devices=jax.devices()[:1])
    for mesh, count, batch, position in (
        (one_device, 6, 16, 0),
        (make_mesh("data:8"), 3, 32, 0),
        (make_mesh("data:4,fsdp:2"), 2, 16, 64),
    ):
        part = loaded(pictures(), mesh, count, batch=batch, position=position)
        for found, wanted in zip(part, whole, strict=True):
            np.testing.assert_array_equal(found, wanted[position : position + count * batch])


def test_evaluation_sees_images_as_they_are():
    batches = eval_batches(pictures(), make_mesh("data:8"), batch_size=64)
    (arrays, _), *_ = batches
    np.testing.assert_array_equal(arrays["image"], IMAGES)


def test_a_mixture_changes_the_samples_of_its_sources():
    mixed = MixedDataset({"a": pictures(), "b": pictures("none")}, {"a": 1, "b": 1})
    image, label = loaded(mixed, make_mesh("data:8"), 4)
    is_changed = (image != IMAGES[label]).any(axis=(1, 2, 3))
    source, _ = mixed.mixture.locate(np.arange(64))
    assert not is_changed[source == 1].any()
    assert is_changed[source == 0].mean() > 0.8
    # At the ranks of its own order, with its own seed: what else is mixed does not matter.
    alone = MixedDataset({"a": pictures()}, {"a": 1})
    np.testing.assert_array_equal(
        image[source == 0], loaded(alone, make_mesh("data:8"), 2)[0][: (source == 0).sum()]
    )
