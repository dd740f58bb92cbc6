"""What input workers are handed: datasets in shared memory, each array once."""

import os

import numpy as np
import pytest

from jaxtrain.data.handover import Slot, receive
from jaxtrain.data.sending import send
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import DataError


def handed_over(thing):
    """(what arrives, bytes of shared memory)."""
    descriptor = send(thing)
    try:
        return receive(descriptor), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def test_arrays_arrive_as_they_were_and_are_shared():
    arrays = {
        "image": np.arange(3000, dtype=np.float32).reshape(50, 3, 20)[:, ::2],
        "label": np.arange(50),
        "scalar": np.array(3),
        "empty": np.zeros((0, 4)),
        "names": np.array(["a", "b"]),
        "objects": np.array([{}, None], object),
    }
    found, _ = handed_over(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    # One copy in memory for all who read, and each may write.
    assert not found["label"].flags.owndata
    found["label"][0] = 7


def test_a_map_of_a_file_is_opened_again(tmp_path):
    path = tmp_path / "tokens"
    np.arange(100_000, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "r", offset=2000)
    found, size = handed_over([tokens, np.asarray(tokens)[10:90_000:3]])
    assert size < 4096
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_array_equal(found[1], tokens[10:90_000:3])


def test_a_map_of_a_file_that_has_shrunk(tmp_path):
    path = tmp_path / "tokens"
    np.arange(1000).tofile(path)
    descriptor = send(np.memmap(path, np.int64, "r"))
    os.truncate(path, 80)
    with pytest.raises(DataError, match="tokens had 8000 bytes when it was opened, and has 80 now"):
        receive(descriptor)
    os.close(descriptor)


def test_windows_of_text_cost_their_text_once():
    text = np.random.default_rng(0).integers(0, 256, 500_000, np.uint8)
    dataset = TextDataset([text[:300_001], text[300_001:]], 128)
    found, size = handed_over(dataset)
    assert size < 1.1 * text.nbytes
    rows = np.array([0, 1, 2000, len(dataset) - 1])
    for name, array in dataset.read(rows).items():
        np.testing.assert_array_equal(found.read(rows)[name], array)
    assert found.fingerprint == dataset.fingerprint


def test_a_small_part_of_a_large_array_goes_alone():
    _, size = handed_over(ArrayDataset({"x": np.zeros(10**6)[:100]}))
    assert size < 10_000


def test_a_slot_takes_batches_of_any_size():
    ours = Slot()
    theirs = Slot(os.dup(ours.descriptor))
    for size in (3, 100_000, 10):
        batch = {"x": np.arange(size * 2.0).reshape(size, 2)[:, :1], "ok": np.array([True] * size)}
        found = ours.arrays(theirs.write(batch))
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)
