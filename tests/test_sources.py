"""Datasets: made from what users have, named where they cannot form batches."""

import numpy as np
import pytest
from loading import mesh_of

from jaxtrain.data.load import Loader
from jaxtrain.data.order import sample_indices
from jaxtrain.data.sources import ArrayDataset, Dataset, RecordDataset, as_dataset
from jaxtrain.errors import DataError

pytestmark = pytest.mark.usefixtures("no_loader_thread_stays")


def test_datasets_are_made_from_what_users_have():
    array = np.arange(12).reshape(6, 2)
    from_dict = as_dataset({"x": array})
    np.testing.assert_array_equal(from_dict.read(np.array([4, 0]))["x"], array[[4, 0]])
    from_list = as_dataset([{"x": row, "y": i} for i, row in enumerate(array)])
    assert isinstance(from_list, RecordDataset)
    rows = from_list.read(np.array([4, 0]))
    np.testing.assert_array_equal(rows["x"], array[[4, 0]])
    np.testing.assert_array_equal(rows["y"], [4, 0])
    assert as_dataset(from_list) is from_list
    assert isinstance(from_list, Dataset)
    for wrong in (5, "text", iter([])):
        with pytest.raises(DataError, match="is no dataset; give a dict of arrays"):
            as_dataset(wrong)


def test_a_grain_dataset_is_a_dataset():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.range(20).map(lambda i: {"id": np.int32(i), "square": i * i})
    with Loader(source, mesh_of("data:2", 2), global_batch_size=4, seed=1) as loader:
        arrays = next(loader).arrays
    expected = sample_indices(1, 20, np.arange(4))
    np.testing.assert_array_equal(arrays["id"], expected)
    np.testing.assert_array_equal(arrays["square"], expected**2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrayDataset({}), "needs at least one"),
        (lambda: ArrayDataset({"x": 3}), "each with rows in dim 0"),
        (lambda: ArrayDataset({"x": np.zeros(3), "y": np.zeros(4)}), "'x': 3, 'y': 4"),
        (
            lambda: RecordDataset([{"x": 1}, {"y": 1}]).read(np.arange(2)),
            r"record 0 is \['x'\], record 1 is \['y'\]",
        ),
        (
            lambda: RecordDataset([{"x": [1]}, {"x": [1, 2]}]).read(np.arange(2)),
            "'x' must have one shape in all records",
        ),
        (lambda: RecordDataset([1, 2]).read(np.arange(2)), "must be a dict"),
    ],
)
def test_datasets_that_cannot_form_batches_are_named(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_the_fingerprint_depends_on_every_value():
    array = np.arange(12).reshape(6, 2)
    changed = array.copy()
    changed[5, 1] += 1
    prints = [
        ArrayDataset(arrays).fingerprint
        for arrays in (
            {"x": array},
            {"x": changed},
            {"y": array},
            {"x": array.astype(np.int32)},
            {"x": array.reshape(3, 4)},
        )
    ]
    assert len({*prints}) == len(prints)
    assert ArrayDataset({"x": array.copy()}).fingerprint == prints[0]
