"""Writers: valid lines whatever the values, exact cuts, nothing lost or doubled by a kill."""

import json
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filling import write_a_part

from jaxtrain import metrics
from jaxtrain.errors import ExitCode, OutputError
from jaxtrain.metrics import JsonlWriter, cut_after, read_records
from jaxtrain.output_files import replace_file


def write_steps(path: Path, steps: range) -> None:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write({"step": step, "loss": 1.0 / (step + 1)})
    writer.close()


def steps_in(path: Path) -> list[int]:
    """Reads with json alone, so that every line must be valid JSON."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_comes_back_bit_for_bit(tmp_path):
    record = {
        "step": np.int32(3),
        "loss": np.float32(2.3456789),
        "tokens": 2**53 + 1,
        "mfu": None,
        "eval": True,
        "accuracy": np.array(0.1, np.float32),
        "note": "caf\u00e9\n",
    }
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(record)
    writer.close()
    writer.close()  # the loop closes in a finally block
    (back,) = read_records(path)
    assert back == {
        **record,
        "loss": float(np.float32(2.3456789)),
        "accuracy": float(np.float32(0.1)),
    }
    assert np.float32(back["loss"]) == record["loss"]
    assert path.read_bytes().count(b"\n") == 1


def test_values_that_json_cannot_hold(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 0, "loss": float("nan"), "grad_norm": np.float32("-inf"), "mfu": None})
    writer.close()
    line = path.read_text()
    stored = json.loads(line, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert stored == {
        "step": 0,
        "loss": None,
        "grad_norm": None,
        "mfu": None,
        "nonfinite": {"loss": "nan", "grad_norm": "-inf"},
    }
    (back,) = read_records(path)
    assert math.isnan(back["loss"])
    assert back["grad_norm"] == -math.inf
    assert back["mfu"] is None
    assert "nonfinite" not in back


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"loss": 1.0}, "integer 'step'; got step=None"),
        ({"step": True}, "integer 'step'"),
        ({"step": 1.5}, "integer 'step'"),
        ({"step": 1, "loss": [1.0]}, r"loss=\[1.0\] is a list"),
        ({"step": 1, "mask": np.zeros(2)}, "is a ndarray"),
        ({"step": 1, "nonfinite": 3}, "rename it"),
    ],
)
def test_records_that_are_refused(record, match):
    with pytest.raises(ValueError, match=match):
        metrics.encode(record)


def test_a_record_is_one_write_and_flush_reaches_the_disk(tmp_path, monkeypatch):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    written, synced = [], []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or write(file, data))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file) or fsync(file))
    writer.write({"step": 0, "loss": 1.0})
    assert written == [b'{"step": 0, "loss": 1.0}\n']
    assert synced == []
    writer.flush()
    assert len(synced) == 1
    writer.close()


def test_a_full_disk_is_said_in_one_sentence():
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    writer = JsonlWriter("/dev/full")
    message = "^/dev/full could not be written: No space left on device; make room"
    with pytest.raises(OutputError, match=message) as caught:
        writer.write({"step": 0})
    assert caught.value.exit_code == ExitCode.UNUSABLE == 4
    os.close(writer._file.descriptor)


def test_what_a_full_disk_took_of_a_record_is_cut_off_again(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write({"step": 0})
    with monkeypatch.context() as patch:
        write_a_part(patch, 5)
        with pytest.raises(OutputError):
            writer.write({"step": 1})
    writer.write({"step": 1})  # room was made
    writer.close()
    assert steps_in(path) == [0, 1]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_scratch(tmp_path, monkeypatch, call):
    path = tmp_path / "run.json"
    path.write_text("old")

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open" if call == "open" else f"os.{call}", refuse)
        with pytest.raises(OutputError, match=r"run\.json could not be written: No space left"):
            replace_file(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\0" * 100_000, b"x" * 200_000])
def test_a_torn_last_line_is_removed_before_the_next_record(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(3))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [record["step"] for record in read_records(path)] == [0, 1, 2]
    write_steps(path, range(3, 5))
    assert path.read_bytes().startswith(whole)
    assert steps_in(path) == [0, 1, 2, 3, 4]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(3))
    path.write_bytes(path.read_bytes()[:-1])
    write_steps(path, range(3, 4))
    assert steps_in(path) == [0, 1, 2, 3]
    path.write_bytes(path.read_bytes()[:-1])
    assert cut_after(path, 10) == 0
    assert path.read_bytes().endswith(b"\n")
    assert steps_in(path) == [0, 1, 2, 3]


def test_cut_drops_later_steps_and_keeps_the_rest_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(6):
        writer.write({"step": step, "loss": 0.1 + step})
        if step % 2 == 0:
            writer.write({"step": step, "eval": True, "loss": float("inf")})
    writer.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b'{"step": 6,')
    assert cut_after(path, 3) == 4  # 4, its evaluation, 5, and the torn line
    assert path.read_bytes() == b"".join(lines[:6])
    before = path.stat()
    assert cut_after(path, 3) == 0
    assert path.stat().st_ino == before.st_ino  # nothing to drop: the file is left alone
    assert cut_after(path, -1) == 6
    assert path.read_bytes() == b""
    assert cut_after(tmp_path / "absent.jsonl", 3) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        b"\0\0\0",
        b"[1]",
        b'{"step": Infinity}',
        b'{"step": 1e400}',
        b'{"step": "one"}',
        b'{"step": 1, "nonfinite": 3}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_record_is_named_and_set_aside(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(2))
    path.write_bytes(path.read_bytes() + line + b"\n[1]\n" + b'{"step": 2}\n')
    before = path.read_bytes()
    assert [record["step"] for record in read_records(path)] == [0, 1, 2]
    assert "metrics.jsonl, line 3 and 1 more: not a record" in caplog.text
    caplog.clear()
    assert cut_after(path, 2) == 2
    assert steps_in(path) == [0, 1, 2]
    (message,) = caplog.messages
    assert message.endswith(f"left out, the file as it was is {path}.broken")
    assert Path(f"{path}.broken").read_bytes() == before


def test_a_cut_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(6))
    calls, fsync, replace = [], os.fsync, os.replace

    def logged_fsync(file):
        calls.append("directory" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def logged_replace(source, target):
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    cut_after(path, 2)
    assert calls == ["file", "rename", "directory"]


class _KilledError(BaseException):
    """Ends the cut where a SIGKILL would: no handler, no clean-up."""


def test_a_cut_that_is_killed_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    kills = 0
    for kill_at in range(1, 100):
        path.unlink(missing_ok=True)
        write_steps(path, range(6))
        calls = 0
        with monkeypatch.context() as patch:

            def counted(function, kill_at=kill_at):
                def wrapper(*args, **kwargs):
                    nonlocal calls
                    calls += 1
                    if calls == kill_at:
                        raise _KilledError
                    return function(*args, **kwargs)

                return wrapper

            for name in ("fsync", "replace", "unlink", "open"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                cut_after(path, 2)
            except _KilledError:
                kills += 1
        assert steps_in(path) in ([0, 1, 2, 3, 4, 5], [0, 1, 2])
        cut_after(path, 2)  # the next start
        assert steps_in(path) == [0, 1, 2]
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
        if calls < kill_at:
            break
    assert kills >= 4  # the data, the name, the directory


def test_sigkill_while_writing_loses_nothing_that_was_flushed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys\n"
        "from jaxtrain.metrics import JsonlWriter\n"
        "writer, step = JsonlWriter(sys.argv[1]), int(sys.argv[2])\n"
        "while True:\n"
        "    writer.write({'step': step, 'text': 'x' * 3000})\n"
        "    if step % 100 == 0:\n"
        "        writer.flush(); print(step, flush=True)\n"
        "    step += 1\n"
    )
    first = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        flushed = [int(child.stdout.readline()) for _ in range(3)][-1]
        child.send_signal(signal.SIGKILL)
        child.communicate()
        steps = [record["step"] for record in read_records(path)]
        assert steps == list(range(len(steps)))
        assert steps[-1] >= flushed
        first = steps[-1] + 1
