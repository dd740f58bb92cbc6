"""What fails on one process fails, or is mended, on all of them, and all say why."""

import os
import re
import shutil
from pathlib import Path

import looping
import pytest
from clusters import TOY, finished, flags_of, started
from processes import TESTS

import jaxtrain
from jaxtrain import ExitCode
from jaxtrain.checkpoint_files import read_manifest
from jaxtrain.run_lock import hold

WORDS = ["--mesh=data:-1", "--num_cpu_devices=1"]


def run(workdir, *words, at=("", ""), places=None, num_processes=2):
    return finished(
        workdir,
        *WORDS,
        *words,
        num_processes=num_processes,
        places=places,
        variables=[{"TOY_AT": moment} for moment in at],
        script=TOY,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a run in one process, with checkpoints 5 and 10."""
    workdir = tmp_path_factory.mktemp("whole")
    codes, (output,) = run(workdir, at=[""], places=[[]], num_processes=1)
    assert codes == [0], output
    return workdir


def assert_all_end(codes, outputs, code, *words):
    assert codes == [code] * len(codes), "\n".join(outputs)
    for output in outputs:
        error = output.rpartition("error: ")[2].splitlines()[0]
        for word in words:
            assert word in error, output


def test_a_read_that_fails_on_one_ends_all(tmp_path):
    codes, outputs = run(tmp_path, at=("", "read 8 fail"))
    words = ["No space left on device", "while loading samples 56 to 63 of the order"]
    assert_all_end(codes, outputs, ExitCode.UNUSABLE, *words)
    assert "error: process 1: " in outputs[0]
    # What was computed without the batch is not saved.
    assert looping.saved_steps(tmp_path) == [5]
    assert looping.train_records(tmp_path)[-1]["step"] == 7


def test_the_first_read_that_fails_on_one_ends_all(tmp_path):
    codes, outputs = run(tmp_path, at=("read 1 fail", ""))
    assert_all_end(codes, outputs, ExitCode.UNUSABLE, "No space left on device")
    assert "error: process 0: " in outputs[1]


def test_an_evaluation_that_cannot_be_read_on_one_ends_all(tmp_path):
    codes, outputs = run(tmp_path, at=("", "evaluate 2 fail"))
    assert_all_end(codes, outputs[:1], 1, "process 1: OSError: [Errno 28] No space left")
    assert "Traceback" in outputs[1]
    assert looping.saved_steps(tmp_path) == []


def test_an_experiment_that_cannot_be_built_on_one_ends_all(tmp_path):
    codes, outputs = run(tmp_path, at=("", "build 1 fail"))
    assert_all_end(codes, outputs[:1], 1, "process 1: OSError: [Errno 28] No space left")
    assert "Traceback" in outputs[1]


def test_a_checkpoint_that_one_cannot_read_is_left_by_all(tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    codes, outputs = run(tmp_path, "--num_steps=12", at=("", "restore_read 1 fail"))
    assert codes == [0, 0], "\n".join(outputs)
    assert "The step before it is taken" in outputs[0]
    assert "resumed from step 5 of 12" in outputs[0]
    assert [record["step"] for record in looping.train_records(tmp_path)] == list(range(1, 13))
    assert looping.saved_steps(tmp_path) == [5, 10, 12]
    assert (tmp_path / "checkpoints" / "10.broken").is_dir()


@pytest.mark.parametrize("place", [0, 1])
def test_damage_that_one_finds_in_its_share_of_the_files_is_damage_to_all(tmp_path, whole, place):
    """The files are dealt out by size: process 0 compares the largest, process 1 the next.

    One with values of arrays: what orbax reads first would be missed before it is compared.
    """
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    step = tmp_path / "checkpoints" / "10"
    sizes = read_manifest(step).files
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    name = next(name for name in names[place::2] if "/d/" in name)
    (step / name).write_bytes(bytes(sizes[name]))
    codes, outputs = run(tmp_path, "--num_steps=12")
    assert codes == [0, 0], "\n".join(outputs)
    assert f"file {name}: its bytes are not those that were written" in outputs[0]
    assert "resumed from step 5 of 12" in outputs[0]
    assert (tmp_path / "checkpoints" / "10.broken").is_dir()


def test_processes_with_other_code_are_refused(tmp_path):
    """Half a learning rate on one of them, and the replicas of the parameters would differ."""
    shutil.copytree(Path(jaxtrain.__file__).parent, tmp_path / "other" / "jaxtrain")
    with open(tmp_path / "other" / "jaxtrain" / "optim.py", "a") as file:
        file.write("# changed")
    path = os.pathsep.join([str(tmp_path / "other"), str(TESTS)])
    with started(
        tmp_path / "run",
        *WORDS,
        num_processes=2,
        variables=[{}, {"PYTHONPATH": path}],
        script=TOY,
    ) as runs:
        codes = [run.end() for run in runs]
        outputs = [run.output for run in runs]
    assert_all_end(codes, outputs, ExitCode.CONFIG, "process 1 on ", "has jaxtrain's code")


def test_a_directory_in_use_is_refused_by_all(tmp_path):
    with hold(str(tmp_path)):
        codes, outputs = run(tmp_path)
    assert_all_end(codes, outputs, ExitCode.UNUSABLE, f"is in use by process {os.getpid()} on")


def test_processes_with_other_flags_are_refused(tmp_path):
    zero, one = flags_of(2)
    codes, outputs = run(tmp_path, places=[zero, [*one, "--seed=1"]])
    words = ["process 1 differs from process 0 in seed: 1 instead of 0"]
    assert_all_end(codes, outputs, ExitCode.CONFIG, *words)


def test_processes_with_other_directories_are_refused(tmp_path):
    zero, one = flags_of(2)
    codes, outputs = run(tmp_path / "a", places=[zero, [*one, f"--workdir={tmp_path / 'b'}"]])
    words = [f"workdir={tmp_path / 'b'} on ", "is not the directory that process 0 writes to"]
    assert_all_end(codes, outputs, ExitCode.CONFIG, *words)


def test_a_save_that_fails_on_process_0_ends_all(tmp_path):
    codes, outputs = run(tmp_path, at=("commit_started 1 fail", ""))
    assert_all_end(codes, outputs[:1], ExitCode.UNUSABLE, "checkpoint step 5 could not be written")
    assert looping.saved_steps(tmp_path) == []


def test_a_part_that_one_cannot_write_ends_all(tmp_path):
    """At once: orbax itself lets the others wait for 20 minutes."""
    codes, outputs = run(tmp_path, "--num_steps=1000000", at=("", "part 1 fail"))
    words = ["checkpoint step 5 could not be written", "No space left on device"]
    assert_all_end(codes, outputs, ExitCode.UNUSABLE, *words)
    assert looping.saved_steps(tmp_path) == []


def test_a_process_that_is_killed_ends_the_others_with_76(tmp_path):
    words = ["--num_steps=1000000", "--checkpoint.every_steps=50", "--eval_every_steps=0"]
    with started(tmp_path, *WORDS, *words, num_processes=2, script=TOY) as (zero, one):
        zero.wait_for("checkpoint 50 committed")
        one.process.kill()
        assert zero.end() == ExitCode.PEER_LOST, zero.output
    # Its own error, if it comes to say it, is that another process was lost.
    assert re.search(r"process 1 \(.*\) was lost at step \d+ in \w+: ", zero.output)
    assert looping.saved_steps(tmp_path)
