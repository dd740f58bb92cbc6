"""The loader's thread: how far ahead it runs, what it measures, and how it ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from loading import Rows, mesh_of, numbers, take

from jaxtrain.data import prefetch
from jaxtrain.data.load import Loader
from jaxtrain.data.prefetch import Interrupted, Prefetcher, interrupt
from jaxtrain.errors import DataError

pytestmark = pytest.mark.usefixtures("no_loader_thread_stays")


def test_the_thread_runs_ahead_by_exactly_the_bound():
    data = Rows(100)
    with Loader(data, mesh_of("data:1", 1), global_batch_size=4, prefetch=3) as loader:
        for taken in range(3):
            deadline = time.monotonic() + 10
            while len(data.asked) < 3 + taken and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.05)
            assert len(data.asked) == 3 + taken
            next(loader)
            loader.refill()


def test_read_and_transfer_are_measured_in_the_thread(monkeypatch):
    waiting_threads = []
    block = jax.block_until_ready

    def slow_block(arrays):
        waiting_threads.append(threading.current_thread())
        time.sleep(0.05)
        return block(arrays)

    monkeypatch.setattr("jaxtrain.data.batch_placement.jax.block_until_ready", slow_block)
    data = Rows(100, lambda indices: time.sleep(0.02))
    with Loader(data, mesh_of("data:1", 1), global_batch_size=4) as loader:
        loaded = next(loader)
    assert loaded.read_seconds >= 0.02
    assert loaded.h2d_seconds >= 0.05
    assert threading.main_thread() not in waiting_threads


def test_the_thread_goes_on_when_it_is_told_to():
    """Not while the loop dispatches a step: both would want the interpreter's lock."""
    begun = [threading.Event() for _ in range(4)]
    with Prefetcher(lambda number: begun[number].set(), ahead=1, name="the loader of x") as items:
        next(items)
        assert not items._thread.free.qsize()  # the thread waits
        assert not begun[1].is_set()
        items.refill()
        assert begun[1].wait(60)
        items.refill()  # there is nothing to replace
        assert not items._thread.free.qsize()
        next(items)
        next(items)  # a consumer that never calls it
        assert begun[2].is_set()


def test_the_consumer_pays_microseconds():
    with Prefetcher(lambda number: number, ahead=500, name="the loader of numbers") as items:
        time.sleep(0.2)
        seconds = []
        for expected in range(400):
            started = time.perf_counter()
            item = next(items)
            seconds.append(time.perf_counter() - started)
            assert item == expected
    assert np.median(seconds) < 100e-6


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (DataError("page.txt:3 is broken"), DataError, "page.txt:3 is broken .while loading"),
        (OSError(5, "Input/output error", "a.bin"), DataError, "Input/output error"),
        (ZeroDivisionError("my bug"), ZeroDivisionError, "my bug"),
        (StopIteration(), RuntimeError, "the loader of rows met StopIteration"),
        (SystemExit(0), RuntimeError, "the loader of rows met SystemExit"),
    ],
)
def test_an_exception_in_the_thread_reaches_the_consumer(raised, expected, message):
    def fail_in_the_third(indices):
        if len(data.asked) == 3:
            raise raised

    data = Rows(100, fail_in_the_third)
    with Loader(data, mesh_of("data:8"), global_batch_size=8) as loader:
        take(loader, 2)
        with pytest.raises(expected, match=message) as caught:
            next(loader)
        where = "samples 16 to 23 of the order from rows"
        cause = caught.value.__cause__ or caught.value
        notes = [*getattr(caught.value, "__notes__", []), *getattr(cause, "__notes__", [])]
        assert where in str(caught.value) or any(where in note for note in notes)
        # It does not go away, and nobody waits for a thread that has ended.
        with pytest.raises(expected, match=message):
            next(loader)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"id": np.arange(3)}, "8 rows, as many as it was asked for; 'id' has shape .3,."),
        ({"id": np.array(3)}, "'id' has shape"),
        ({"id": np.array(["a"] * 8)}, "'id' has dtype <U1, which devices cannot hold"),
        ({"id": np.array([None] * 8)}, "dtype object"),
        ([1, 2], "must return a dict of arrays; got list"),
        ({"id": np.full(8, 2**40)}, "'id' holds 1099511627776 to .*, beyond int32"),
    ],
)
def test_what_a_dataset_returns_is_checked(returned, message):
    data = Rows(100, lambda indices: returned)
    with (
        Loader(data, mesh_of("data:8"), global_batch_size=8) as loader,
        pytest.raises(DataError, match=message),
    ):
        next(loader)


def test_wide_numbers_are_narrowed_as_devices_hold_them():
    data = numbers(8, label=np.arange(8) - 4, x=np.arange(8) / 3, flag=np.arange(8) > 3)
    with Loader(data, mesh_of("data:2", 2), global_batch_size=8, shuffle=False) as loader:
        arrays = next(loader).arrays
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "id": "int32",
        "label": "int32",
        "x": "float32",
        "flag": "bool",
        "loss_mask": "float32",
    }
    np.testing.assert_array_equal(arrays["label"], np.arange(8) - 4)
    np.testing.assert_allclose(arrays["x"], np.arange(8) / 3, rtol=1e-6)


def test_after_close_the_loader_says_so():
    loader = Loader(numbers(50), mesh_of("data:1", 1), global_batch_size=4)
    next(loader)
    loader.close()
    with pytest.raises(RuntimeError, match="the loader of numbers is closed"):
        next(loader)
    loader.close()


def waiting_loader(release):
    """A loader whose reads wait for an event."""
    data = Rows(100, lambda indices: release.wait(30) and None)
    return Loader(data, mesh_of("data:1", 1), global_batch_size=4)


def test_an_interrupted_wait_loses_no_batch():
    release = threading.Event()
    loader = waiting_loader(release)
    with loader:
        timer = threading.Timer(0.05, interrupt)
        timer.start()
        with pytest.raises(Interrupted):
            next(loader)
        timer.join()
        release.set()
        assert [next(loader).position for _ in range(3)] == [0, 4, 8]


def test_close_frees_the_batches_that_wait():
    loader = Loader(Rows(100), mesh_of("data:1", 1), global_batch_size=4, prefetch=2)
    next(loader)
    loader.close()
    waiting = loader._batches._thread.ready
    assert waiting.get_nowait()[0] is None
    assert waiting.empty()


def test_close_wakes_a_consumer_in_another_thread():
    release = threading.Event()
    loader = waiting_loader(release)
    caught = []

    def consume():
        try:
            while True:
                next(loader)
        except RuntimeError as error:
            caught.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.05)
    release.set()
    loader.close()
    consumer.join(10)
    assert not consumer.is_alive()
    assert "closed" in str(caught[0])


def test_close_does_not_wait_for_ever_for_a_read_that_hangs(monkeypatch, caplog):
    monkeypatch.setattr(prefetch, "JOIN_SECONDS", 0.1)
    release = threading.Event()
    loader = waiting_loader(release)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 5
    assert "the loader of rows did not end within 0.1 s" in caplog.text
    release.set()
    loader._batches._thread.join(10)


def test_a_forgotten_loader_ends_with_its_last_reference():
    loader = Loader(numbers(50), mesh_of("data:1", 1), global_batch_size=4)
    thread = loader._batches._thread
    next(loader)
    del loader
    gc.collect()
    assert not thread.is_alive()


def test_ctrl_c_while_waiting_for_a_batch():
    release = threading.Event()
    data = Rows(100, lambda indices: release.wait(30) and None)
    with Loader(data, mesh_of("data:1", 1), global_batch_size=4) as loader:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        assert time.monotonic() - started < 10
        timer.join()
        release.set()
        # Nothing was lost: the same batch comes.
        assert next(loader).position == 0


def test_the_interpreter_ends_with_a_loader_open():
    script = """
import jax
import numpy as np
from jaxtrain.data.load import Loader
from jaxtrain.mesh import make_mesh
loader = Loader({"x": np.zeros((64, 1024))}, make_mesh(), global_batch_size=8)
next(loader)
print("took one")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "took one\n", "")
