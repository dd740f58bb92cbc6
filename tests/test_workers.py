"""Input workers: the same batches as without, the same errors, and processes that always end."""

import gc
import os
import signal
import sys
import threading
import time

import cloudpickle
import jax
import looping
import numpy as np
import processes
import pytest
from absl import flags

from jaxtrain.config import DataConfig
from jaxtrain.data import workers
from jaxtrain.data.load import Loader
from jaxtrain.data.order import sample_indices
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.host import cores_at_hand
from jaxtrain.mesh import make_mesh

# To workers this module goes by value, as the script of a run does: it imports JAX.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCH = 16


class Rows:
    """Rows that say who read them; `act(indices)` runs in each read."""

    name = "rows"
    fingerprint = "rows"

    def __init__(self, act=lambda indices: None, num_rows=50):
        self._act, self._num_rows = act, num_rows

    def __len__(self):
        return self._num_rows

    def read(self, indices):
        rows = self._act(indices) or {"id": indices.astype(np.int32)}
        return rows | {"reader": np.full(len(indices), os.getpid())}


def loader(data=None, num_workers=2, **options):
    mesh = make_mesh("data:1", devices=jax.devices()[:1])
    options = {"global_batch_size": BATCH, "seed": 3, **options}
    return Loader(Rows() if data is None else data, mesh, num_workers=num_workers, **options)


def take(batches, count, name="id"):
    return np.stack([np.asarray(next(batches).arrays[name]) for _ in range(count)])


# The same batches


@pytest.mark.parametrize("accumulate_steps", [1, 2, 4])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_are_ranges_of_the_order(num_workers, accumulate_steps):
    with loader(num_workers=num_workers, accumulate_steps=accumulate_steps) as batches:
        found = take(batches, 9)
    rows = (BATCH,) if accumulate_steps == 1 else (accumulate_steps, BATCH // accumulate_steps)
    assert found.shape == (9, *rows)
    expected = sample_indices(3, 50, np.arange(9 * BATCH))
    np.testing.assert_array_equal(found.reshape(-1), expected)


class Changed(Rows):
    """Rows that training changes by their position in the order."""

    def read_training(self, indices, seed, positions):
        return self.read(indices) | {"change": (positions + 1000 * seed).astype(np.int32)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_changes_follow_the_position(num_workers):
    with loader(Changed(), num_workers=num_workers, position=5) as batches:
        found = take(batches, 4, "change")
    np.testing.assert_array_equal(found.reshape(-1), 3000 + 5 + np.arange(4 * BATCH))


def test_batches_that_wait_keep_their_values():
    # On a CPU arrays may lie in the memory they were made from, which workers use again.
    with loader(Rows(lambda i: {"x": np.repeat(i[:, None], 512, 1).astype(np.float32)})) as batches:
        held = [next(batches).arrays["x"] for _ in range(12)]
    expected = sample_indices(3, 50, np.arange(12 * BATCH)).reshape(12, BATCH)
    np.testing.assert_array_equal(np.stack(held), np.repeat(expected[:, :, None], 512, 2))


def test_batches_of_growing_size():
    def growing(indices):
        return {"x": np.ones((len(indices), 1 << 14 if indices.max() == 49 else 1), np.float32)}

    with loader(Rows(growing), shuffle=False, global_batch_size=10) as batches:
        sizes = [next(batches).arrays["x"].shape[1] for _ in range(10)]
    assert sizes == [1, 1, 1, 1, 1 << 14] * 2


def test_workers_take_turns_and_none_is_this_process():
    with loader() as batches:
        readers = take(batches, 6, "reader")[:, 0]
    assert len(set(readers)) == 2
    assert os.getpid() not in readers
    np.testing.assert_array_equal(readers[2:], readers[:-2])


def test_a_bounded_number_of_batches_is_under_way(tmp_path):
    log = tmp_path / "reads"

    def note(indices):
        with open(log, "a") as file:
            file.write(f"{indices[0]}\n")

    with loader(Rows(note), shuffle=False, prefetch=1) as batches:
        take(batches, 2)
        # Those two, and the slots of both workers, but for the one of the second batch.
        deadline = time.monotonic() + 20
        while len(log.read_text().split()) < 5:
            assert time.monotonic() < deadline
    assert len(log.read_text().split()) == 5


def test_the_memory_for_batches_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr(workers, "memory_budget", lambda: 300)
    with loader() as batches, caplog.at_level("INFO", logger="jaxtrain"):
        found = take(batches, 6)
        assert batches._reader._workers.ahead == 1
    np.testing.assert_array_equal(found.reshape(-1), sample_indices(3, 50, np.arange(6 * BATCH)))
    assert "data.num_workers=2: only 1 of them are busy at once" in caplog.text


def test_losses_are_the_same_with_any_number_also_after_a_resume(tmp_path):
    for name, numbers in {"0": "00", "2": "22", "1 then 2": "12"}.items():
        for number, num_steps in zip(numbers, (5, 10), strict=True):
            data = DataConfig(num_workers=number)
            looping.fit(looping.config(tmp_path / name, num_steps=num_steps, data=data))
    expected = looping.records(tmp_path / "0")
    assert len(expected) > 10
    assert looping.records(tmp_path / "2") == expected
    assert looping.records(tmp_path / "1 then 2") == expected


# What workers are


def test_workers_start_no_jax_and_have_no_accelerator():
    def look(indices):
        found = ["jax" in sys.modules, os.environ["JAX_PLATFORMS"] != "cpu"]
        return {"found": np.array([found] * len(indices))}

    with loader(Rows(look)) as batches:
        assert not take(batches, 2, "found").any()


def test_workers_share_the_cores():
    """So that those of one that decodes in threads do not stand in the way of the others."""
    cores = min(os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    if cores < 2:
        pytest.skip("a single core cannot be shared out; run this with 2 or more")

    def look(indices):
        return {"cores": np.full(len(indices), cores_at_hand())}

    with loader(Rows(look), num_workers=cores) as batches:
        assert (take(batches, cores, "cores") == 1).all()


def test_flags_have_the_values_of_the_run():
    if "workers_test_crop" not in flags.FLAGS:
        flags.DEFINE_integer("workers_test_crop", 1, "of a test")
        flags.FLAGS.mark_as_parsed()
    flags.FLAGS.workers_test_crop = 7
    values = flags.FLAGS
    data = Rows(lambda indices: {"crop": np.full(len(indices), values.workers_test_crop)})
    with loader(data) as batches:
        assert (take(batches, 2, "crop") == 7).all()


# Errors


def raised_by(act, num_workers, **options):
    with loader(Rows(act), num_workers, shuffle=False, **options) as batches:
        take(batches, 2)
        with pytest.raises(Exception) as caught:
            take(batches, 2)
    return caught.value


def fail_with(error):
    def act(indices):
        if indices[0] == 2 * BATCH:
            raise error

    return act


@pytest.mark.parametrize(
    "error",
    [
        DataError("pictures.tar: record 5 is cut short"),
        FileNotFoundError(2, "No such file or directory", "a.png"),
        KeyError("crop"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_d3_an_error_in_a_worker_is_that_without_workers(error):
    expected, found = (raised_by(fail_with(error), number) for number in (0, 2))
    assert type(found) is type(expected)
    assert str(found) == str(expected)
    where = "while loading samples 32 to 47 of the order from rows"
    assert where in str(found) or where in found.__notes__


def test_an_error_of_the_programmers_has_the_place_in_the_worker():
    notes = "\n".join(raised_by(fail_with(KeyError("crop")), 2).__notes__)
    assert "in an input worker (process " in notes
    assert "in act\nKeyError: 'crop'" in notes


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "read() must return a dict of arrays; got list"),
        ({"x": np.zeros(3)}, "must return 16 rows, as many as it was asked for; 'x' has shape (3,"),
        ({"x": np.array(["a"] * 16)}, "'x' has dtype <U1, which devices cannot hold"),
    ],
    ids=["a list", "too few rows", "text"],
)
def test_what_is_returned_in_a_worker_is_checked(returned, message):
    class Wrong(Rows):
        def read(self, indices):
            del indices
            return returned

    with loader(Wrong()) as batches, pytest.raises(DataError) as caught:
        next(batches)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (out of memory?)"),
    ],
    ids=["exit 3", "kill -9"],
)
def test_d3_a_worker_that_dies_is_named(end, how):
    def act(indices):
        if indices[0] == 2 * BATCH:
            end()

    begin = time.monotonic()
    error = raised_by(act, 2)
    assert isinstance(error, DataError)
    assert f"1 of 2) {how}; with --data.num_workers=0" in str(error)
    assert str(error).endswith("(while loading samples 32 to 47 of the order from rows)")
    assert time.monotonic() - begin < 30  # seconds on an idle machine; most of it is the start


def test_a_dataset_that_cannot_be_sent():
    data = Rows()
    data.lock = threading.Lock()
    with loader(data) as batches, pytest.raises(DataError, match=r"cannot pickle '_thread.lock'"):
        next(batches)


def test_a_dataset_that_does_not_arrive():
    class Fragile(Rows):
        def __setstate__(self, state):
            raise OSError(f"no disk {len(state)}")

    with loader(Fragile()) as batches, pytest.raises(DataError, match=r"did not arrive.*no disk 2"):
        next(batches)


@pytest.mark.parametrize("value", ["-1", "two", "", "1.5"])
def test_numbers_of_workers_that_are_none(value):
    with pytest.raises(ConfigError, match="must be auto or a number of processes"):
        DataConfig(num_workers=value)


def test_an_order_that_fails_fails_in_its_turn():
    class Ordered(Rows):
        def sample_indices(self, seed, positions, *, shuffle=None):
            del seed, shuffle
            return positions if positions.max() < 4096 + BATCH else positions + 50

        def __len__(self):
            return 4096 + BATCH

    with loader(Ordered()) as batches:
        assert len(take(batches, 4096 // BATCH)) == 256
        with pytest.raises(DataError, match="sample_indices must return one row"):
            next(batches)


# The end


def test_close_ends_workers_that_hang():
    gate = "threading"

    def hang(indices):
        if indices[0] == 2 * BATCH:
            __import__(gate).Event().wait()

    batches = loader(Rows(hang), shuffle=False, prefetch=1)
    readers = take(batches, 2, "reader")[:, 0].tolist()
    begin = time.monotonic()
    batches.close()
    assert time.monotonic() - begin < 5
    processes.assert_gone(*readers)
    assert not batches._batches._thread.is_alive()


def test_workers_end_when_the_loader_is_forgotten():
    batches = loader()
    readers = take(batches, 2, "reader")[:, 0].tolist()
    del batches
    processes.assert_gone(*readers)


def test_workers_end_after_an_error():
    with loader(Rows(fail_with(KeyError("crop"))), shuffle=False) as batches:
        readers = take(batches, 2, "reader")[:, 0].tolist()
        with pytest.raises(KeyError):
            take(batches, 1)
        processes.assert_gone(*readers)


def test_nothing_is_left_open():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with loader() as batches:
            take(batches, 2)
    del batches
    assert len(os.listdir("/proc/self/fd")) <= before


# The number of workers


def settled(data, caplog, **options):
    """What `auto` makes of a dataset whose batches are taken as fast as they come."""
    with loader(data, None, **options) as batches, caplog.at_level("INFO", logger="jaxtrain"):
        assert batches.num_workers is None
        positions = []
        while batches.num_workers is None:
            positions.append(next(batches).position)
            assert len(positions) < 200
        positions += [next(batches).position for _ in range(4)]
    assert positions == [n * BATCH for n in range(len(positions))]
    (line,) = [r.getMessage() for r in caplog.records if "num_workers=auto" in r.getMessage()]
    assert line.startswith(f"data.num_workers=auto: {batches.num_workers}; a batch is read in ")
    return batches.num_workers, line


def test_auto_leaves_windows_of_text_to_the_thread(caplog):
    text = np.frombuffer(b"ten words of text, and then they all come again " * 200, np.uint8)
    count, line = settled(TextDataset([text], 32), caplog)
    assert count == 0, line


def test_auto_takes_workers_for_slow_reads(caplog):
    count, line = settled(Rows(lambda indices: time.sleep(0.03)), caplog)
    assert count > 0, line


def test_auto_goes_on_with_the_thread_where_a_dataset_cannot_be_sent(caplog):
    data = Rows(lambda indices: time.sleep(0.03))
    data.lock = threading.Lock()
    count, line = settled(data, caplog)
    assert count == 0
    assert "rows cannot be sent to input workers, because it cannot be pickled" in line


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_a_slow_dataset_is_reported_as_the_limit(caplog, num_workers):
    class Slow(ArrayDataset):
        def read(self, indices):
            time.sleep(0.05)
            return super().read(indices)

    with caplog.at_level("INFO", logger="jaxtrain"):
        config = looping.config(data=DataConfig(num_workers=num_workers), num_steps=12)
        looping.fit(config, Slow(looping.TRAIN))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "limit: input" in line and "/12" in line]
    (advice,) = [line for line in lines if line.startswith("steps wait for input")]
    assert "--data.num_workers=" + ("auto" if num_workers == "0" else "2") in advice
    assert "faster storage" in advice
