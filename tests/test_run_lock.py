"""One run at a time in a directory; who only reads is let in."""

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import time

import looping
import pytest
from processes import finished, started

from jaxtrain import file_lock
from jaxtrain.errors import CheckpointError, OutputError
from jaxtrain.run_lock import LOCK, hold


def test_a_second_start_is_refused_and_touches_nothing_until_the_first_is_killed(tmp_path):
    workdir = tmp_path / "run"
    with started(workdir, at="step 7 ask") as first:
        first.wait_for("at step 7")
        while looping.saved_steps(workdir) != [5]:  # committed in the background
            time.sleep(0.05)
        lines = (workdir / "metrics.jsonl").read_bytes()
        names = sorted(path.name for path in workdir.rglob("*"))
        for flags in ((), ("--checkpoint.overwrite", "--resume=never", "--num_steps=3")):
            code, output = finished(workdir, *flags)
            assert code == 4, output
            (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
            assert f"workdir={workdir} is in use by process {first.process.pid} on" in error
            assert socket.gethostname() in error
        assert (workdir / "metrics.jsonl").read_bytes() == lines
        assert sorted(path.name for path in workdir.rglob("*")) == names
        code, output = finished(workdir, "--evaluate")
        assert code == 0, output
        first.signal(signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
    code, output = finished(workdir)
    assert code == 0, output
    assert [record["step"] for record in looping.train_records(workdir)] == list(range(1, 11))


def test_the_lock_is_held_to_the_end_and_let_go_of_by_every_end(tmp_path):
    def look(step, metrics):
        del step, metrics
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on "):
            looping.fit(config)

    config = looping.config(tmp_path)
    looping.crashed_fit(config, 7)
    assert (tmp_path / LOCK).read_bytes() == b""
    looping.fit(config, on_step=look)
    assert looping.fit(config).status == "complete"
    assert (tmp_path / LOCK).read_bytes() == b""


def test_a_holder_that_wrote_nothing_is_another_process(tmp_path):
    with open(tmp_path / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="is in use by another process; wait"):
            hold(str(tmp_path)).__enter__()


def test_a_file_system_without_locks_costs_one_line(tmp_path, monkeypatch, caplog):
    def flock(file, operation):
        del file, operation
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "jaxtrain"), hold(str(tmp_path)), hold(str(tmp_path)):
        pass
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == (
        f"{tmp_path / LOCK} cannot be locked (No locks available): do not start a second run in its"
        " directory"
    )


def test_what_cannot_be_locked_is_an_error_that_says_why(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(OutputError, match=r"\.lock could not be written: Is a directory"):
        hold(str(tmp_path)).__enter__()


def test_a_run_without_a_directory_locks_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with hold(""):
        assert os.listdir(tmp_path) == []
