"""Checkpoints that were moved away: the records that remain are not dropped in silence."""

import logging
import shutil

import looping
import pytest

from jaxtrain import run_files
from jaxtrain.metrics import JsonlWriter, read_records


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.WARNING, "jaxtrain")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run of ten steps, saved every second one."""
    workdir = tmp_path_factory.mktemp("finished")
    looping.fit(looping.config(workdir, every_steps=2))
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def copies(workdir):
    return sorted(path.name for path in workdir.glob("metrics.jsonl.*"))


@pytest.mark.parametrize("newest", [0, 4])
def test_the_records_are_kept_where_checkpoints_are_gone(workdir, newest, caplog):
    before = (workdir / "metrics.jsonl").read_bytes()
    for step in range(newest + 2, 11, 2):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    looping.fit(looping.config(workdir, every_steps=2))
    assert (workdir / "metrics.jsonl.bak-1").read_bytes() == before
    assert caplog.messages == [
        f"{workdir / 'metrics.jsonl'} holds records up to step 10, but the checkpoints after step "
        f"{newest} are gone; it is cut to step {newest}, and the file as it was is kept as "
        f"{workdir / 'metrics.jsonl.bak-1'}"
    ]
    # Once more: no copy is written over.
    shutil.rmtree(workdir / "checkpoints")
    looping.fit(looping.config(workdir, every_steps=2))
    assert copies(workdir) == ["metrics.jsonl.bak-1", "metrics.jsonl.bak-2"]


def test_one_checkpoint_of_a_run_that_ended_is_enough(tmp_path):
    looping.fit(looping.config(tmp_path, every_steps=0))
    shutil.rmtree(tmp_path / "checkpoints")
    looping.fit(looping.config(tmp_path, every_steps=0))
    assert copies(tmp_path) == ["metrics.jsonl.bak-1"]


def test_records_of_a_run_that_was_killed_while_it_trained_on_are_written_anew(tmp_path, caplog):
    config = looping.config(tmp_path, every_steps=4)
    looping.crashed_fit(config, 3)
    looping.crashed_fit(config, 7)
    looping.fit(config)
    steps = [record["step"] for record in read_records(tmp_path / "metrics.jsonl")]
    assert steps == [*range(1, 11), 10]
    assert copies(tmp_path) == []
    assert caplog.messages == []


@pytest.mark.parametrize(("last_save", "is_kept"), [(10, False), (15, True)])
def test_a_save_in_flight_at_the_kill_is_not_a_lost_checkpoint(tmp_path, last_save, is_kept):
    """Resumed from 5: that a save at 10 was begun says nothing; one at 15 had to wait for it."""
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 21):
        seconds = {"checkpoint_seconds": 0.1} if step - 1 in range(5, last_save + 1, 5) else {}
        writer.write({"step": step, "loss": 1.0, **seconds})
    writer.close()
    run_files.open_writers(looping.config(tmp_path), 5, (), is_primary=True).close()
    assert copies(tmp_path) == ["metrics.jsonl.bak-1"] * is_kept


def test_overwriting_was_asked_for_and_keeps_nothing(workdir):
    looping.fit(looping.config(workdir, every_steps=2, overwrite=True, seed=5))
    assert copies(workdir) == []
