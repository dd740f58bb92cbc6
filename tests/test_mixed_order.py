"""The samples of a packed mixture are the same for any number of processes and micro-batches.

The processes are simulated: each makes its batches for its own devices, and hands over rows. Real
ones are in tests/multiprocess/test_mixed_training.py. Input workers are real.
"""

import sys

import cloudpickle
import jax
import mixing
import numpy as np
import pytest
from mixing import BATCH, STEPS

from jaxtrain.data.batch_placement import BatchPlacement
from jaxtrain.data.load import _Order, _TrainingBatches
from jaxtrain.mesh import make_mesh
from jaxtrain.sharding import DEFAULT_RULES, batch_sharding

# To workers this module goes by value: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SEED = 11


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return mixing.dataset(mixing.write(tmp_path_factory.mktemp("mixed")))


@pytest.fixture(scope="module")
def expected(data):
    return data.sample_indices(SEED, np.arange(STEPS * BATCH))


class Ids:
    """The order of a dataset, and rows that are their own numbers."""

    def __init__(self, data):
        self.sample_indices, self.fingerprint, self._length = data.sample_indices, "", len(data)

    def __getstate__(self):
        return {"_length": self._length, "fingerprint": ""}

    def __len__(self):
        return self._length

    def read(self, indices):
        return {"id": np.asarray(indices)}


def batches(
    data, monkeypatch, num_processes, accumulate_steps, position=0, count=STEPS, num_workers=0
):
    """Ids [count, BATCH] of batches, each put together from the rows of all processes."""
    # Rows of a micro-batch must divide among the devices that share it.
    mesh = {1: "data:2", 2: "data:2", 3: "data:3", 4: "data:2,tensor:2"}[num_processes]
    size = {1: 2, 2: 2, 3: 3, 4: 4}[num_processes]
    mesh = make_mesh(mesh, devices=jax.devices()[:size])
    sharding = batch_sharding(mesh, DEFAULT_RULES, accumulate_steps=accumulate_steps)
    found = np.full((count, BATCH), -1)
    monkeypatch.setattr(BatchPlacement, "place", lambda self, arrays: arrays)
    for devices in np.array_split(mesh.devices.flatten(), num_processes):
        placement = BatchPlacement.make(sharding, BATCH, accumulate_steps, set(devices))
        ids = Ids(data)
        order = _Order(ids, placement, SEED, position, None)
        make = _TrainingBatches(ids, placement, order, num_workers)
        for number in range(count):
            rows = np.array(make(number).arrays["id"])
            # Rows that live in two processes are the same in both.
            assert np.isin(found[number, placement.rows], [-1, *rows]).all()
            found[number, placement.rows] = rows
        make.reader.stop()
    return found


@pytest.mark.parametrize("accumulate_steps", [1, 2, 4])
@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_any_number_of_processes_reads_the_same(
    data, expected, monkeypatch, num_processes, accumulate_steps
):
    found = batches(data, monkeypatch, num_processes, accumulate_steps)
    np.testing.assert_array_equal(found.reshape(-1), expected)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("num_processes", "accumulate_steps"), [(1, 2), (3, 4), (4, 1)])
def test_any_number_of_input_workers_reads_the_same(
    data, expected, monkeypatch, num_processes, accumulate_steps, num_workers
):
    found = batches(data, monkeypatch, num_processes, accumulate_steps, num_workers=num_workers)
    np.testing.assert_array_equal(found.reshape(-1), expected)


def test_every_sample_of_an_epoch_comes_once(data, expected):
    mixing.assert_whole_epochs(data, expected)


def test_resumed_ten_times_with_other_processes_it_reads_the_same(data, expected, monkeypatch):
    rng, step, pieces = np.random.default_rng(0), 0, []
    for start in range(11):
        count = STEPS - step if start == 10 else int(rng.integers(1, 25))
        count = min(count, STEPS - step)
        found = batches(data, monkeypatch, start % 4 + 1, (1, 2, 4)[start % 3], step * BATCH, count)
        # A run that is killed has done less than it read.
        done = count if start == 10 else int(rng.integers(0, count + 1))
        pieces.append(found[:done].reshape(-1))
        step += done
    np.testing.assert_array_equal(np.concatenate(pieces), expected)
