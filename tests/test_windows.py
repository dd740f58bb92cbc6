"""Windows over streams of tokens."""

import collections
import math

import numpy as np
import pytest

from jaxtrain.data.windows import TextDataset


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50, 64])
@pytest.mark.parametrize("size", [2, 3, 8, 50, 51, 52, 101])
def test_windows_hold_every_target_once(length, size):
    stream = (np.arange(size) * 7 % 251).astype(np.uint8)
    data = TextDataset([stream], length)
    rows = data.read(np.arange(len(data)))
    assert len(data) == math.ceil((size - 1) / length)
    assert data.num_tokens == size - 1
    assert {k: (v.dtype, v.shape) for k, v in rows.items()} == {
        "tokens": (np.int32, (len(data), length)),
        "targets": (np.int32, (len(data), length)),
        "loss_mask": (np.float32, (len(data), length)),
    }
    real = rows["loss_mask"] > 0
    assert set(np.unique(rows["loss_mask"])) <= {0.0, 1.0}
    np.testing.assert_array_equal(rows["tokens"][real], stream[:-1])
    np.testing.assert_array_equal(rows["targets"][real], stream[1:])
    # Random access: any rows, in any order, more than once.
    some = np.array([len(data) - 1, 0, len(data) // 2, 0])
    for name, array in data.read(some).items():
        np.testing.assert_array_equal(array, rows[name][some])


def test_windows_over_several_streams_do_not_mix_them():
    streams = [np.full(size, value, np.uint8) for value, size in ((1, 10), (2, 1), (3, 2), (4, 9))]
    data = TextDataset(streams, 4)
    rows = data.read(np.arange(len(data))[::-1])
    real = rows["loss_mask"] > 0
    assert len(data) == 3 + 0 + 1 + 2
    np.testing.assert_array_equal(rows["tokens"][real], rows["targets"][real])
    assert collections.Counter(rows["targets"][real].tolist()) == {1: 9, 3: 1, 4: 8}
    assert data.num_tokens == 18


def test_the_fingerprint_depends_on_the_text_and_the_length():
    streams = [np.arange(50, dtype=np.uint8)]
    changed = [np.concatenate([streams[0][:-1], [0]]).astype(np.uint8)]
    prints = {
        TextDataset(streams, 4).fingerprint,
        TextDataset(streams, 5).fingerprint,
        TextDataset(changed, 4).fingerprint,
        TextDataset([streams[0][:25], streams[0][25:]], 4).fingerprint,
    }
    assert len(prints) == 4
    assert TextDataset([streams[0].copy()], 4).fingerprint in prints
