"""Sources over several disks: read together, and disks that fail while a run reads them."""

import json
import os
import shutil
import subprocess
import threading

import experimenting
import numpy as np
import preparing
import pytest
from checkpointing import mount_tmpfs, unmount
from experimenting import TINY, train_records

from jaxtrain import ExitCode
from jaxtrain.data import files, reading
from jaxtrain.data.documents import Reader
from jaxtrain.data.manifest import Manifest
from jaxtrain.data.pack import PackedDataset
from jaxtrain.data.prepare import PrepareConfig, prepare
from jaxtrain.data.text import text_datasets
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.data.windows import TextDataset
from jaxtrain.errors import DataError

WAIT = 60


def shards(folder, disk, name):
    """Prepares shards of texts of their own on a disk."""
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(json.dumps({"text": preparing.text(f"{name}{i}", 60)}) + "\n" for i in range(40))
    )
    prepare([str(path)], str(disk / name), PrepareConfig(workers=1))
    return disk / name


def meeting(function):
    """A function that waits until two threads call it at once."""
    barrier = threading.Barrier(2, timeout=WAIT)

    def met(*args, **kwargs):
        barrier.wait()
        return function(*args, **kwargs)

    return met


# Reading


def test_texts_of_two_roots_are_read_at_once(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(preparing.text(name, 100))
    source = TextDataConfig(source=f"{tmp_path}/a,{tmp_path}/b", validation_fraction=0)
    monkeypatch.setattr(reading, "THREADS", 1)
    alone = text_datasets(source)[0]
    monkeypatch.setattr(reading, "THREADS", 2)
    monkeypatch.setattr(Reader, "read", meeting(Reader.read))
    monkeypatch.setattr(files, "_files_of", meeting(files._files_of))
    together = text_datasets(source)[0]
    for name, array in alone.read(np.arange(len(alone))).items():
        np.testing.assert_array_equal(together.read(np.arange(len(together)))[name], array)


def test_manifests_of_two_roots_are_read_at_once(tmp_path, monkeypatch):
    roots = [shards(tmp_path, tmp_path, name) for name in ("a", "b")]
    source = TextDataConfig(source=",".join(map(str, roots)))
    alone = text_datasets(source)[0]
    monkeypatch.setattr(Manifest, "read", meeting(Manifest.read))
    assert text_datasets(source)[0].fingerprint == alone.fingerprint


def test_what_is_read_stands_in_order_whoever_is_first(monkeypatch):
    is_read = [threading.Event() for _ in range(5)]

    def read(number):
        # Each waits for the one behind it.
        if number < 4:
            assert is_read[number + 1].wait(WAIT)
        is_read[number].set()
        return number * 10

    assert list(reading.read_each(read, range(5))) == [0, 10, 20, 30, 40]


def test_the_first_file_that_fails_is_named_whoever_fails_first(tmp_path, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("text " * 20)
    read, failed = Reader.read, threading.Event()

    def failing(self, file):
        if file.relative == "4.txt":
            failed.set()
            raise OSError(5, "Input/output error", file.path)
        if file.relative == "1.txt":
            assert failed.wait(WAIT)
            raise OSError(2, "No such file or directory", file.path)
        return read(self, file)

    monkeypatch.setattr(Reader, "read", failing)
    with pytest.raises(DataError, match=r"1.txt cannot be read: No such file or directory"):
        text_datasets(TextDataConfig(source=str(tmp_path)))


# A disk that fails


@pytest.fixture
def disk(tmp_path):
    """A file system of its own."""
    place = tmp_path / "disk2"
    place.mkdir()
    if reason := mount_tmpfs(place, "size=8m"):
        pytest.skip(reason)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)


def truncate(path):
    os.truncate(path, 100)
    return f"{path} shrank from"


def remove(path):
    path.unlink()
    return f"{path} went away while it was in use: No such file or directory"


def lose_disk(path):
    unmount(path.parents[1])
    return "went away while it was in use: No such file or directory"


@pytest.mark.parametrize(
    ("failure", "packing"), [(truncate, "none"), (remove, "best_fit"), (lose_disk, "best_fit")]
)
def test_a_disk_that_fails_ends_the_run_by_name_and_loses_nothing(
    tmp_path, disk, monkeypatch, failure, packing
):
    first, second = shards(tmp_path, tmp_path, "a"), shards(tmp_path, disk, "b")
    copy = tmp_path / "copy"
    shutil.copytree(second, copy)
    words = [
        *(*TINY, f"--data.source={first},{second}", f"--data.packing={packing}", "--num_steps=6"),
        *("--eval_every_steps=0", "--checkpoint.every_steps=1", "--log_every_steps=1"),
        *("--optimizer.warmup_steps=0", "--data.validation_fraction=0"),
    ]
    whole = tmp_path / "whole"
    experimenting.succeed("train_lm", *words, f"--workdir={whole}", num_devices=1)

    kind = TextDataset if packing == "none" else PackedDataset
    read, reads, expected = kind.read, [], []
    victim = second / Manifest.read(str(second)).shards[0].file

    def failing(self, indices):
        # The first batch is read for its shapes too.
        reads.append(len(indices))
        if len(reads) == 5:
            expected.append(failure(victim))
        return read(self, indices)

    monkeypatch.setattr(kind, "read", failing)
    workdir = tmp_path / "run"
    ended = experimenting.run("train_lm", *words, f"--workdir={workdir}", num_devices=1)
    monkeypatch.undo()
    assert ended.code == ExitCode.UNUSABLE, ended.err
    assert expected[0] in ended.err
    assert "(while loading samples" in ended.err
    done = [record["step"] for record in train_records(workdir)]
    assert 1 <= len(done) < 6

    shutil.rmtree(second, ignore_errors=True)
    shutil.copytree(copy, second)
    ended = experimenting.succeed("train_lm", *words, f"--workdir={workdir}", num_devices=1)
    assert "resumed from step" in ended.err
    losses = [[r["loss"] for r in train_records(place)] for place in (workdir, whole)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
