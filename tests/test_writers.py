"""TensorBoard's files, and the writer of docs/writers.md."""

import os
import re
import struct
import subprocess
import sys
import types
from pathlib import Path

from filling import write_a_part

from jaxtrain.tensorboard import TensorBoardWriter


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Every point in every event file, in the order of the file names, as TensorBoard reads."""
    return [point for path in sorted(directory.iterdir()) for point in points_in(path)]


def points_in(path: Path) -> list[tuple[str, int, float]]:
    from tensorboardX.proto import event_pb2

    points = []
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
        points += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
        at += 16 + length
    return points


def tensorboard_steps(directory: Path, steps: range, purge_step: int | None = None) -> None:
    writer = TensorBoardWriter(directory, purge_step)
    for step in steps:
        writer.write({"step": step, "loss": 0.5 * step, "mfu": None, "name": "x"})
        if step == 2:
            writer.write({"step": step, "eval": True, "loss": 7.0})
    writer.flush()
    writer.close()


def test_tensorboard_scalars(tmp_path):
    tensorboard_steps(tmp_path / "tb", range(4))
    assert scalars(tmp_path / "tb") == [
        ("train/loss", 0, 0.0),
        ("train/loss", 1, 0.5),
        ("train/loss", 2, 1.0),
        ("eval/loss", 2, 7.0),
        ("train/loss", 3, 1.5),
    ]


def test_tensorboard_shows_no_point_twice_after_resumes(tmp_path):
    directory = tmp_path / "tb"
    tensorboard_steps(directory, range(5))
    (first,) = directory.iterdir()
    first.write_bytes(first.read_bytes() + first.read_bytes()[:30])  # torn by a kill
    # Three starts within one second: each has a file of its own, in order.
    tensorboard_steps(directory, range(2, 4), purge_step=2)
    tensorboard_steps(directory, range(3, 6), purge_step=3)
    points = scalars(directory)
    assert [(tag, step) for tag, step, _ in points] == [
        ("train/loss", 0),
        ("train/loss", 1),
        ("train/loss", 2),
        ("eval/loss", 2),
        ("train/loss", 3),
        ("train/loss", 4),
        ("train/loss", 5),
    ]
    assert len(list(directory.iterdir())) == 3
    tensorboard_steps(directory, range(1), purge_step=0)  # from the beginning: old files go
    assert [point[:2] for point in scalars(directory)] == [("train/loss", 0)]
    assert len(list(directory.iterdir())) == 1


def test_damaged_event_files_are_set_aside_and_what_can_be_read_is_kept(tmp_path, caplog):
    directory = tmp_path / "tb"
    tensorboard_steps(directory, range(4))
    (path,) = directory.iterdir()
    whole = path.read_bytes()
    for at in range(len(whole)):
        for old in directory.iterdir():
            old.unlink()
        caplog.clear()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        spoilt = path.read_bytes()
        TensorBoardWriter(directory, 3).close()
        assert len(caplog.messages) <= 1
        left = [point for file in directory.glob("*tfevents*") for point in points_in(file)]
        assert len(left) <= 4
        copies = list(directory.glob("*.broken"))
        assert len(copies) == len(caplog.messages)
        for copy in copies:
            assert copy.read_bytes() == spoilt
            assert "tfevents" not in copy.name  # TensorBoard does not read it either
            assert f"is damaged; what can be read is kept, all of it is in {copy}" in caplog.text


def test_an_event_file_that_cannot_be_cut_stays_and_costs_a_warning(tmp_path, monkeypatch, caplog):
    directory = tmp_path / "tb"
    tensorboard_steps(directory, range(4))
    (path,) = directory.iterdir()
    before = path.read_bytes()

    def refuse(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    TensorBoardWriter(directory, 2).close()
    assert path.read_bytes() == before
    assert list(directory.iterdir()) == [path]
    (message,) = caplog.messages
    assert message.startswith(f"{path} is left as it is: ")
    assert "No space left on device" in message


def test_a_disk_that_tensorboard_finds_full_costs_one_warning(tmp_path, monkeypatch, caplog):
    directory = tmp_path / "tb"
    writer = TensorBoardWriter(directory)
    writer.write({"step": 0, "loss": 1.0})
    with monkeypatch.context() as patch:
        write_a_part(patch, 5)
        for step in (1, 2):
            writer.write({"step": step, "loss": 1.0})
        patch.setattr(os, "fsync", lambda file: os.write(file, b"x"))
        writer.flush()
    writer.write({"step": 3, "loss": 1.0})
    writer.close()
    assert [step for _, step, _ in scalars(directory)] == [0, 3]
    (message,) = caplog.messages
    assert message.startswith(f"TensorBoard lacks points that metrics.jsonl has: {directory}")
    assert "No space left on device; make room" in message


def test_tensorboard_writes_no_file_without_a_record_and_imports_nothing(tmp_path):
    code = (
        "import sys\n"
        "from jaxtrain.tensorboard import TensorBoardWriter\n"
        "TensorBoardWriter(sys.argv[1], 3).close()\n"
        "assert 'tensorboardX' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "tb")], check=True)
    assert not (tmp_path / "tb").exists()


def test_the_wandb_writer_of_the_docs_works_as_it_stands(monkeypatch):
    document = Path(__file__).parents[1] / "docs" / "writers.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    fake = types.ModuleType("wandb")
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    namespace: dict = {}
    exec(code, namespace)
    writer = namespace["WandbWriter"](project="demo", id="run-7", resume="allow")
    writer.write({"step": 10, "loss": 2.0, "mfu": None})
    writer.write({"step": 10, "eval": True, "loss": 2.5})
    writer.flush()
    writer.close()
    assert calls == [
        {"project": "demo", "id": "run-7", "resume": "allow"},
        (10, {"train/loss": 2.0, "train/mfu": None}),
        (10, {"eval/loss": 2.5}),
        "finish",
    ]
