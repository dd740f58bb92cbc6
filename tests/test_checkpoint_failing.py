"""Saves that fail in the background (case C5): told of, and no checkpoint is lost."""

import logging
import os
import shutil
import subprocess
import threading
import time

import checkpointing as toy
import jax.numpy as jnp
import pytest
from checkpointing import abstract_like, save, train_and_save

from jaxtrain import checkpoint
from jaxtrain import checkpoint_keep as keep
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "jaxtrain")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    return workdir, *train_and_save(workdir)


@pytest.fixture
def small_disk(tmp_path):
    directory = tmp_path / "disk"
    if reason := toy.mount_tmpfs(directory, "size=200k"):
        pytest.skip(reason)
    before = set(threading.enumerate())
    yield directory
    toy.unmount(directory)
    # A process with threads left would not end.
    deadline = time.monotonic() + 10
    while left := [t for t in threading.enumerate() if t not in before and not t.daemon]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def state_of_80_kb(step: int):
    return {f"w{i}": jnp.full((25, 200), float(step)) for i in range(4)}


def test_a_full_disk_is_an_error_at_the_next_save_and_costs_no_checkpoint(small_disk, capfd):
    checkpointer = Checkpointer(small_disk / "checkpoints", keep_last=1)
    began = []

    def save_every_step():
        for step in range(5):
            checkpointer.save(step, state_of_80_kb(step), {})
            began.append(step)

    with pytest.raises(CheckpointError) as caught:
        save_every_step()
    # Two whole ones and their overhead do not fit: step 1 fails, the save of step 2 says so.
    assert began == [0, 1]
    text = str(caught.value)
    assert "step 1" in text
    assert "No space left on device" in text
    assert "newest whole checkpoint is step 0" in text
    checkpointer.close()
    assert os.listdir(small_disk / "checkpoints") == ["0"]
    again = Checkpointer(small_disk / "checkpoints")
    (small_disk / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir()
    restored = again.restore(0, abstract_like(state_of_80_kb(0)))
    assert float(restored["w3"][0, 0]) == 0.0
    save(again, 1, state={"w": jnp.zeros(64)})
    again.close()
    assert again.committed_steps() == [0, 1]
    assert "Traceback" not in capfd.readouterr().err


def test_check_reports_a_failed_save_while_training_goes_on(small_disk):
    checkpointer = Checkpointer(small_disk / "checkpoints", keep_last=1)
    checkpointer.save(0, {"w": jnp.zeros((400, 200))}, {})

    def train():
        for _ in range(1000):
            checkpointer.check()
            time.sleep(0.01)

    with pytest.raises(CheckpointError, match="No space left"):
        train()
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.check()
    checkpointer.close()


def test_a_directory_made_read_only_is_an_error_with_step_and_cause(small_disk):
    checkpointer = Checkpointer(small_disk / "checkpoints")
    save(checkpointer, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match=r"step 1 could not be .*: Read-only file system"):
        checkpointer.save(1, {"w": jnp.zeros(64)}, {})
    checkpointer.close()
    assert Checkpointer(small_disk / "checkpoints").latest_step() == 0


@pytest.mark.parametrize("moment", ["while writing", "after the commit"])
def test_a_directory_removed_before_the_end_is_an_error(tmp_path, monkeypatch, moment):
    directory = tmp_path / "checkpoints"
    if moment == "while writing":
        monkeypatch.setattr(checkpoint, "_commit_started", lambda _: shutil.rmtree(directory))
    checkpointer = Checkpointer(directory)
    checkpointer.save(5, {"w": jnp.zeros(64)}, {})
    if moment == "after the commit":
        while not directory.is_dir() or not checkpointer.committed_steps():
            time.sleep(0.01)
        shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match="step 5 could not be written"):
        checkpointer.close()


def test_an_old_step_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(directory, step):
        raise PermissionError(1, "Operation not permitted", str(directory / str(step)))

    save(checkpointer := Checkpointer(tmp_path, keep_last=1), 1)
    monkeypatch.setattr(keep, "mark_for_deletion", fail)
    save(checkpointer, 2)
    checkpointer.close()
    assert "step 1 could not be deleted: Operation not permitted" in caplog.text
    assert checkpointer.committed_steps() == [1, 2]


def test_close_waits_for_the_save_and_leaves_no_thread(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"w": jnp.zeros((1000, 1000))}, {})
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.committed_steps() == [1]
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint-")]
