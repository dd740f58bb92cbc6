"""Which steps of a directory count, after crashes and damage (case C3), and which are kept."""

import json
import logging
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import checkpointing as toy
import jax.numpy as jnp
import kill_driver
import pytest
from checkpointing import abstract_like, save, train_and_save
from processes import TIMEOUT

from jaxtrain import checkpoint
from jaxtrain import checkpoint_files as files
from jaxtrain import checkpoint_keep as keep
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint_sums import first_damaged
from jaxtrain.errors import CheckpointError


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "jaxtrain")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    return workdir, *train_and_save(workdir)


# C3: what a crash leaves


def damage(directory: Path) -> None:
    """What kills, converters and people leave beside the steps."""
    (directory / "9").mkdir()
    (directory / "11.orbax-checkpoint-tmp").mkdir()
    (directory / "notes.txt").write_text("keep me")
    for name in ("10-hf", "5.backup"):
        shutil.copytree(directory / "5", directory / name)


def test_only_whole_steps_count_and_foreign_entries_stay(tmp_path, caplog):
    save(first := Checkpointer(tmp_path), 5)
    first.close()
    damage(tmp_path)
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    assert checkpointer.committed_steps() == [5]
    assert checkpointer.latest_step() == 5
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"skipping {tmp_path / '9'}, which is no whole checkpoint: it is empty"
    ]
    foreign = {name: toy.snapshot(tmp_path / name) for name in ("10-hf", "5.backup")}
    checkpointer.restore(5, abstract_like({"w": jnp.zeros(64)}))
    save(checkpointer, 9, 11)
    checkpointer.close()
    # The keep policy took 5 and 9 of this run, and nothing else.
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"11", "9.broken", "10-hf", "5.backup", "notes.txt"}
    assert foreign == {name: toy.snapshot(tmp_path / name) for name in foreign}
    assert "damaged checkpoint step 9 is now 9.broken" in caplog.text


def files_of_a_step(directory: Path) -> list[str]:
    save(checkpointer := Checkpointer(directory), 1)
    checkpointer.close()
    return sorted(files.read_manifest(directory / "1").files)


def test_every_cut_or_missing_file_is_noticed_and_named(tmp_path):
    names = files_of_a_step(tmp_path / "whole")
    assert any(name.startswith("state/d/") for name in names)
    for change in ("cut", "grow", "remove"):
        for name in names:
            copy = tmp_path / change
            shutil.copytree(tmp_path / "whole", copy)
            path = copy / "1" / name
            if change == "cut":
                os.truncate(path, path.stat().st_size // 2)
            elif change == "grow":
                path.write_bytes(path.read_bytes() + b"\0")
            else:
                path.unlink()
            checkpointer = Checkpointer(copy)
            assert checkpointer.committed_steps() == []
            with pytest.raises(CheckpointError) as caught:
                checkpointer.restore(1, abstract_like({"w": jnp.zeros(64)}))
            assert name in str(caught.value)
            assert "step 1" in str(caught.value)
            shutil.rmtree(copy)


def test_every_change_of_a_byte_is_noticed_and_named(tmp_path):
    """The sizes stay; each file in turn has one byte changed."""
    names = [*files_of_a_step(tmp_path / "whole"), files.MANIFEST]
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        path = copy / "1" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        checkpointer = Checkpointer(copy)
        with pytest.raises(files.BrokenCheckpointError) as caught:
            checkpointer.restore(1, abstract_like({"w": jnp.zeros(64)}))
        assert name in str(caught.value)
        assert "step 1" in str(caught.value)
        shutil.rmtree(copy)


def test_processes_share_the_reading_of_the_files(tmp_path):
    names = files_of_a_step(tmp_path)
    sums = files.read_manifest(tmp_path / "1").sums
    assert set(sums) == set(names)
    for name in names:
        path = tmp_path / "1" / name
        data = path.read_bytes()
        path.write_bytes(bytes(len(data)))
        found = [first_damaged(tmp_path / "1", sums, part=i, parts=3) for i in range(3)]
        assert sorted(found) == ["", "", name]
        path.write_bytes(data)


def test_a_step_is_on_the_disk_before_it_has_its_name_and_the_name_before_old_ones_go(
    tmp_path, monkeypatch
):
    """As far as fsync promises it: what it was called for, in which order."""
    events = []

    def note(descriptor, fsync=os.fsync):
        fsync(descriptor)
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(checkpoint, "_commit_started", lambda step: events.append(step))
    monkeypatch.setattr(checkpoint, "_delete_started", lambda step: events.append("delete"))
    save(checkpointer := Checkpointer(tmp_path, keep_last=1), 1)
    events.clear()
    save(checkpointer, 2)
    checkpointer.close()
    before, after = events[: events.index(2)], events[events.index(2) + 1 :]
    unfinished = tmp_path / f"2{files.UNFINISHED}"
    manifest = files.read_manifest(tmp_path / "2")
    for name in [*manifest.files, files.MANIFEST]:
        place = unfinished / name
        assert before.index(str(place)) < len(before) - 1 - before[::-1].index(str(place.parent))
    assert after == [str(tmp_path), "delete"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "jaxtrain.json is damaged"),
        ('{"format": 1, "step":', "jaxtrain.json is damaged"),
        ("[]", "jaxtrain.json is damaged"),
        ('{"format": 99}', "format 99"),
        (None, "has no jaxtrain.json"),
        ("5", "that of step 5"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, text, reason):
    files_of_a_step(tmp_path)
    path = tmp_path / "1" / files.MANIFEST
    if text is None:
        path.unlink()
    elif text == "5":
        path.write_text(json.dumps({**json.loads(path.read_text()), "step": 5}))
    else:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        Checkpointer(tmp_path).contents(1)


def test_an_unreadable_array_of_the_right_size_is_an_error_with_the_step(tmp_path):
    save(checkpointer := Checkpointer(tmp_path), 1)
    for path in (tmp_path / "1" / "state").rglob("manifest.ocdbt"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(files.BrokenCheckpointError, match=r"step 1 in .* cannot be read"):
        checkpointer.restore(1, abstract_like({"w": jnp.zeros(64)}))
    checkpointer.close()


def test_kill_9_at_ten_moments_of_a_save_or_restore(tmp_path):
    """Each life is killed at another moment; the last one ends as if nothing had happened."""
    # Forked from a process that has imported everything: a life takes half a second.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["checkpointing", "kill_driver", "orbax.checkpoint"])

    def live(workdir, *args):
        process = context.Process(target=kill_driver.main, args=(str(workdir), *args))
        process.start()
        return process

    straight = live(tmp_path / "straight")
    moments = [
        ("_save_started", 2),
        ("_commit_started", 1),
        ("_restore_started", 1),
        ("_commit_finished", 2),
        ("_restore_finished", 1),
        ("_delete_started", 1),
    ]
    rng = random.Random(0)
    workdir, before = tmp_path / "killed", 0
    for life in range(10):
        hook, count = moments[life] if life < len(moments) else ("", 0)
        process = live(workdir, hook, count)
        if not hook:
            # In the middle of a save: once its directory is there, a little later.
            seen = set(workdir.glob("checkpoints/*.orbax-checkpoint-tmp"))
            while not set(workdir.glob("checkpoints/*.orbax-checkpoint-tmp")) - seen:
                assert process.is_alive()
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
        process.join(TIMEOUT)
        left = sorted(path.name for path in (workdir / "checkpoints").iterdir())
        print(f"life {life}: killed {hook or 'while files were written'}, left {left}")
        assert process.exitcode == -9
        latest = Checkpointer(workdir / "checkpoints").latest_step() or 0
        assert latest >= before
        before = latest
    last = live(workdir)
    last.join(TIMEOUT)
    straight.join(TIMEOUT)
    ends = [json.loads((d / "digest.json").read_text()) for d in (workdir, tmp_path / "straight")]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["from"] == before > 0
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"7", "8"}
    assert "Traceback" not in (workdir / "log.txt").read_text()


# Keeping


def test_steps_to_delete():
    steps = [5, 10, 12, 15, 20, 22]
    assert keep.steps_to_delete(steps, keep_last=2, keep_every_steps=0) == [5, 10, 12, 15]
    assert keep.steps_to_delete(steps, keep_last=1, keep_every_steps=10) == [5, 12, 15]
    assert keep.steps_to_delete(steps, keep_last=9, keep_every_steps=0) == []
    assert keep.steps_to_delete([], keep_last=1, keep_every_steps=5) == []


def test_the_keep_policy_keeps_the_newest_and_every_nth(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_every_steps=3)
    save(checkpointer, 1, 2, 3, 4, 5)
    checkpointer.close()
    assert Checkpointer(tmp_path).committed_steps() == [3, 4, 5]


def test_the_keep_policy_leaves_steps_of_another_run(tmp_path):
    save(other := Checkpointer(tmp_path / "other"), 1, 2)
    other.close()
    save(checkpointer := Checkpointer(tmp_path / "own", keep_last=1), 3)
    shutil.copytree(tmp_path / "other" / "1", tmp_path / "own" / "1")
    checkpointer.close()
    resumed = Checkpointer(tmp_path / "own", keep_last=1)
    resumed.restore(3, abstract_like({"w": jnp.zeros(64)}))
    save(resumed, 4)
    resumed.close()
    assert Checkpointer(tmp_path / "own").committed_steps() == [1, 4]


def test_the_old_step_stays_until_the_new_one_is_committed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        checkpoint, "_commit_started", lambda step: seen.append(files.scan(tmp_path).whole.keys())
    )
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    save(checkpointer, 1, 2)
    checkpointer.close()
    assert [set(steps) for steps in seen] == [set(), {1}]
    assert checkpointer.committed_steps() == [2]


def test_a_step_is_saved_once_and_never_over_another_runs(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    before = toy.snapshot(tmp_path)
    assert checkpointer.save(1, {"w": jnp.zeros(64)}, {}) is False
    checkpointer.close()
    stranger = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 1 in .* was written by another run"):
        stranger.save(1, {"w": jnp.zeros(64)}, {})
    stranger.close()
    assert toy.snapshot(tmp_path) == before
