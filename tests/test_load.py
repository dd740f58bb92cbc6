"""Loading: the same batches on any layout, exact evaluation, and a thread that always ends."""

import gc
import logging

import jax
import numpy as np
import pytest
from loading import Rows, mesh_of, numbers, take

from jaxtrain.data.batch_placement import BatchPlacement
from jaxtrain.data.load import Loader, eval_batches
from jaxtrain.data.order import sample_indices
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.sharding import batch_sharding

pytestmark = pytest.mark.usefixtures("no_loader_thread_stays")

MESHES = {
    "1 device": ("data:1", 1),
    "data 2": ("data:2", 2),
    "data 8": ("data:8", 8),
    "fsdp 8": ("fsdp:8", 8),
    "fsdp 4, tensor 2": ("fsdp:4,tensor:2", 8),
    "data 2, fsdp 2, tensor 2": ("data:2,fsdp:2,tensor:2", 8),
    "tensor 8": ("tensor:8", 8),
}


# Which samples


@pytest.mark.parametrize("accumulate_steps", [1, 2, 4])
@pytest.mark.parametrize("layout", MESHES)
def test_batches_are_ranges_of_the_order_on_every_layout(layout, accumulate_steps):
    mesh = mesh_of(*MESHES[layout])
    n, batch = 50, 32
    data = numbers(n, x=np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3))
    expected = sample_indices(3, n, np.arange(4 * batch)).reshape(4, batch)
    assert len({*expected.reshape(-1)[:n]}) == n
    sharding = batch_sharding(mesh, accumulate_steps=accumulate_steps)
    with Loader(
        data, mesh, global_batch_size=batch, accumulate_steps=accumulate_steps, seed=3
    ) as loader:
        for step, loaded in enumerate(take(loader, 4)):
            assert loaded.position == step * batch
            rows = (batch,) if accumulate_steps == 1 else (accumulate_steps, -1)
            ids = expected[step].reshape(rows)
            np.testing.assert_array_equal(loaded.arrays["id"], ids)
            np.testing.assert_array_equal(loaded.arrays["x"], data.arrays["x"][ids])
            np.testing.assert_array_equal(loaded.arrays["loss_mask"], np.ones(ids.shape))
            for array in loaded.arrays.values():
                assert array.sharding.is_equivalent_to(sharding, array.ndim)
                assert array.committed


def test_the_position_is_all_there_is_to_resume():
    mesh = mesh_of("fsdp:8")
    with Loader(numbers(50), mesh, global_batch_size=16, seed=1) as loader:
        ids = np.concatenate([np.asarray(b.arrays["id"]) for b in take(loader, 12)])
    # Another batch size and layout, from the middle of the second epoch.
    with Loader(
        numbers(50), mesh_of("data:2", 2), global_batch_size=8, seed=1, position=80
    ) as loader:
        resumed = take(loader, 5)
    assert [b.position for b in resumed] == [80, 88, 96, 104, 112]
    resumed_ids = np.concatenate([np.asarray(b.arrays["id"]) for b in resumed])
    np.testing.assert_array_equal(resumed_ids, ids[80:120])


def test_long_runs_cross_the_blocks_in_which_the_order_is_computed(monkeypatch):
    monkeypatch.setattr("jaxtrain.data.load._ORDER_BLOCK", 24)
    with Loader(numbers(7), mesh_of("data:1", 1), global_batch_size=4, seed=2) as loader:
        ids = np.concatenate([np.asarray(b.arrays["id"]) for b in take(loader, 30)])
    np.testing.assert_array_equal(ids, sample_indices(2, 7, np.arange(120)))


@pytest.mark.parametrize(
    ("asked", "attribute", "shuffled"),
    [(None, None, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_shuffle_is_a_property_of_the_data_unless_asked_for(asked, attribute, shuffled):
    data = numbers(16)
    if attribute is not None:
        data.shuffle = attribute
    with Loader(data, mesh_of("data:1", 1), global_batch_size=16, shuffle=asked) as loader:
        ids = np.asarray(next(loader).arrays["id"]).tolist()
    assert sorted(ids) == list(range(16))
    assert (ids != list(range(16))) == shuffled


# Several processes: the rows that each would read, computed from its devices


@pytest.mark.parametrize("accumulate_steps", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "num_devices", "processes"),
    [
        ("data:8", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("fsdp:8", 8, [[0, 7], [1, 2, 3], [4, 5, 6]]),
        ("data:6", 6, [[0, 1], [2, 3], [4, 5]]),
        ("data:2,fsdp:2,tensor:2", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("fsdp:4,tensor:2", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("tensor:8", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_processes_read_their_own_rows_and_nothing_else(
    mesh, num_devices, processes, accumulate_steps
):
    mesh = mesh_of(mesh, num_devices)
    devices = mesh.devices.reshape(-1)
    batch = 24 if num_devices == 6 else 32
    sharding = batch_sharding(mesh, accumulate_steps=accumulate_steps)
    whole = np.arange(batch * 3).reshape(batch, 3)
    shape = (batch, 3) if accumulate_steps == 1 else (accumulate_steps, -1, 3)
    whole_global = whole.reshape(shape)
    placed = sharding.devices_indices_map(whole_global.shape)
    read = []
    for process in processes:
        mine = [devices[i] for i in process]
        placement = BatchPlacement.make(sharding, batch, accumulate_steps, mine)
        rows = placement.rows
        assert len({*rows}) == len(rows)
        needed = np.concatenate([whole_global[placed[d]].reshape(-1, 3)[:, 0] // 3 for d in mine])
        np.testing.assert_array_equal(np.unique(needed), np.sort(rows))
        for device in mine:
            np.testing.assert_array_equal(
                placement.shard(whole[rows], placed[device]), whole_global[placed[device]]
            )
        read.append(rows)
    assert {*np.concatenate(read)} == set(range(batch))
    if mesh.shape["tensor"] == 1:
        assert sum(map(len, read)) == batch


def test_the_loader_reads_only_the_rows_of_its_placement(monkeypatch):
    # A process that owns devices 2 and 5 of 8 reads rows 4, 5 and 10, 11 of each batch of 16.
    mesh = mesh_of("data:8")
    make, place = BatchPlacement.make, []
    mine = [jax.devices()[2], jax.devices()[5]]
    monkeypatch.setattr(BatchPlacement, "make", lambda *args: make(*args, mine))
    monkeypatch.setattr(
        BatchPlacement, "place", lambda self, arrays: place.append(arrays) or dict(arrays)
    )
    data = Rows(100)
    with Loader(data, mesh, global_batch_size=16, seed=5) as loader:
        take(loader, 3)
    expected = sample_indices(5, 100, np.array([4, 5, 10, 11]) + 16 * np.arange(3)[:, None])
    np.testing.assert_array_equal(np.stack(data.asked[:3]), expected)
    np.testing.assert_array_equal(place[2]["id"], expected[2])


# Case D2: not enough data


def test_d2_fewer_samples_than_a_batch_repeat_and_say_so_once(caplog):
    with (
        caplog.at_level(logging.INFO, "jaxtrain"),
        Loader(numbers(5), mesh_of("data:8"), global_batch_size=8, seed=0) as loader,
    ):
        batches = take(loader, 5)
    ids = np.concatenate([np.asarray(b.arrays["id"]) for b in batches])
    assert len(ids) == 40
    # 8 epochs, each with every sample once, straight across the batches.
    for epoch in ids.reshape(8, 5):
        assert sorted(epoch) == [0, 1, 2, 3, 4]
    lines = [r.message for r in caplog.records if "repeat" in r.message]
    assert len(lines) == 1
    assert "numbers has 5 samples, fewer than global_batch_size=8" in lines[0]


def test_d2_no_samples_are_an_error():
    with pytest.raises(DataError, match="no training data in numbers"):
        Loader(numbers(0), mesh_of("data:1", 1), global_batch_size=8)


def test_d2_seven_records_on_two_processes_once_each_with_marked_padding(monkeypatch):
    # Both processes take the same number of steps, and together see {0..6} exactly once.
    mesh = mesh_of("data:2", 2)
    make = BatchPlacement.make
    seen, steps = [], []
    for device in jax.devices()[:2]:
        monkeypatch.setattr(BatchPlacement, "make", lambda *args, d=device: make(*args, [d]))
        monkeypatch.setattr(BatchPlacement, "place", lambda self, arrays: dict(arrays))
        batches = list(eval_batches(numbers(7), mesh, batch_size=4))
        steps.append(len(batches))
        assert [count for _, count in batches] == [4, 3]
        for arrays, _ in batches:
            assert len(arrays["id"]) == 2
            seen += arrays["id"][arrays["loss_mask"] > 0].tolist()
    assert steps == [2, 2]
    assert sorted(seen) == list(range(7))


# Case B4: the last evaluation batch


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize(("n", "counts"), [(10, [8, 2]), (8, [8]), (3, [3]), (1, [1])])
def test_b4_each_row_counts_once(layout, n, counts):
    # A predictor that is right on the first 8 rows and wrong on the others.
    mesh = mesh_of(*MESHES[layout])
    correct = total = 0.0
    rows = []
    for arrays, num_rows in eval_batches(numbers(n), mesh, batch_size=8):
        assert arrays["id"].sharding.is_equivalent_to(batch_sharding(mesh), 1)
        ids, mask = (np.asarray(arrays[name]) for name in ("id", "loss_mask"))
        assert ids.shape == mask.shape == (8,)
        assert mask.sum() == num_rows
        # Padding repeats a row that exists: no invented values.
        assert (ids[mask == 0] == n - 1).all()
        correct += ((ids < 8) * mask).sum()
        total += mask.sum()
        rows.append(num_rows)
    assert rows == counts
    assert total == n
    assert correct / total == min(n, 8) / n


def test_b4_no_rows_are_an_error_at_once():
    with pytest.raises(DataError, match="no evaluation data in numbers: it has 0 samples"):
        eval_batches(numbers(0), mesh_of("data:1", 1), batch_size=8)


def test_padding_keeps_the_mask_of_the_dataset():
    own = (np.arange(30).reshape(10, 3) % 2).astype(np.float32)
    batches = [
        np.asarray(arrays["loss_mask"])
        for arrays, _ in eval_batches(
            numbers(10, loss_mask=own), mesh_of("data:2", 2), batch_size=8
        )
    ]
    masks = np.concatenate(batches)
    np.testing.assert_array_equal(masks[:10], own)
    np.testing.assert_array_equal(masks[10:], np.zeros((6, 3)))
    assert masks.dtype == np.float32


def test_max_batches_takes_the_first_ones():
    mesh = mesh_of("data:2", 2)
    batches = list(eval_batches(numbers(10), mesh, batch_size=4, max_batches=2))
    ids = np.concatenate([np.asarray(arrays["id"]) for arrays, _ in batches])
    np.testing.assert_array_equal(ids, np.arange(8))
    assert len(list(eval_batches(numbers(10), mesh, batch_size=4, max_batches=9))) == 3


def test_an_evaluation_that_is_given_up_leaves_no_thread():
    batches = eval_batches(Rows(1000), mesh_of("data:1", 1), batch_size=4)
    next(batches)
    del batches
    gc.collect()


def test_sizes_that_do_not_divide_are_refused_at_once():
    with pytest.raises(ConfigError, match="global_batch_size=12 is not divisible by the 8"):
        Loader(numbers(50), mesh_of("data:8"), global_batch_size=12)
    with pytest.raises(ConfigError, match="not divisible by the 8"):
        eval_batches(numbers(50), mesh_of("data:8"), batch_size=12)
    with pytest.raises(DataError, match="position=-1 must not be negative"):
        Loader(numbers(50), mesh_of("data:8"), global_batch_size=8, position=-1)
