"""Where a run begins: the resume policy, on a small training that saves as `fit` does."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import checkpointing as toy
import jax
import numpy as np
import pytest

from jaxtrain import checkpoint_files as files
from jaxtrain import checkpoint_orbax, resume, start
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import record_reads, unread
from jaxtrain.errors import CheckpointError, ConfigError, OutputError
from jaxtrain.start import samples_at

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "jaxtrain")


@pytest.fixture(scope="module")
def straight():
    """Ten steps without any interruption: (state, losses)."""
    mesh = toy.make_mesh(4, 2)
    return toy.train(mesh, toy.init_state(mesh), 10)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run of ten steps; copy it before changing it."""
    workdir = tmp_path_factory.mktemp("finished")
    toy.run(toy.config(workdir))
    return workdir


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of a run with the steps 4, 8 and 10."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def begin(config, mesh=None, **sizes):
    mesh = mesh or toy.make_mesh(4, 2)
    checkpointer, start = resume.begin(
        config,
        toy.abstract_state(mesh, **sizes),
        init=lambda: toy.init_state(mesh, **sizes),
    )
    checkpointer.close()
    return start


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


# Nothing there yet


def test_an_empty_directory_is_a_fresh_start_with_one_line(tmp_path, caplog):
    start = begin(toy.config(tmp_path / "run"))
    assert (start.step, start.state, start.samples_seen) == (0, None, 0)
    assert start.batch_sizes == ((0, 8),)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"workdir {tmp_path / 'run'}",
        "no checkpoint yet: starting from the initial values",
    ]
    assert os.listdir(tmp_path / "run") == []


def test_what_must_be_resumed_must_be_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"resume=must, but .* holds no checkpoint; give the"):
        begin(toy.config(tmp_path, resume="must"))
    with pytest.raises(ConfigError, match="resume=must needs a workdir"):
        begin(toy.config("", resume="must"))
    with pytest.raises(CheckpointError, match=r"restore_step=3, but there is no checkpoint"):
        begin(toy.config(tmp_path, restore_step=3))


def test_a_run_without_a_directory_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, state, losses = toy.run(toy.config("", num_steps=2, every_steps=1))
    assert start.step == 0
    assert int(state.step) == len(losses) == 2
    assert os.listdir(tmp_path) == []


# C4


def test_saves_by_cadence_and_at_the_end(finished):
    assert toy.steps_in(finished) == [4, 8, 10]


def test_a_complete_run_is_left_as_it_is(workdir, straight):
    before = toy.snapshot(workdir)
    start, state, losses = toy.run(toy.config(workdir))
    assert start.step == 10
    assert losses == []
    toy.assert_bit_equal(state, straight[0])
    assert toy.snapshot(workdir) == before


def test_a_used_directory_is_refused_with_the_three_choices(workdir):
    before = toy.snapshot(workdir)
    with pytest.raises(ConfigError) as caught:
        begin(toy.config(workdir, resume="never"))
    for part in ("up to step 10", "--resume=auto", "another --workdir", "--checkpoint.overwrite"):
        assert part in str(caught.value)
    assert toy.snapshot(workdir) == before


def test_overwrite_starts_anew_after_saying_what_it_deletes(workdir, caplog):
    (workdir / "checkpoints" / "4.backup").mkdir()
    config = toy.config(workdir, resume="never", overwrite=True, num_steps=2)
    start, state, _ = toy.run(config)
    assert start.step == 0
    assert int(state.step) == 2
    assert toy.steps_in(workdir) == [2]
    assert (workdir / "checkpoints" / "4.backup").is_dir()
    assert any("deleting" in line and "steps 4, 8, 10" in line for line in warnings_in(caplog))


def test_the_keep_policy_counts_the_steps_of_earlier_starts(workdir):
    """C4 d: after a resume the older steps are the run's own, as the docstring says."""
    toy.run(toy.config(workdir, num_steps=14, every_steps=2, keep_last=2))
    assert toy.steps_in(workdir) == [12, 14]


# Continuing


@pytest.mark.parametrize("stop_at", [6, 9])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, straight, stop_at):
    config = toy.config(tmp_path)
    toy.run(config, stop_at=stop_at)
    start, state, losses = toy.run(config)
    assert start.step == stop_at // 4 * 4
    assert losses == straight[1][start.step :]
    toy.assert_bit_equal(state, straight[0])


def test_a_run_continues_on_another_mesh(workdir, straight):
    shutil.rmtree(workdir / "checkpoints" / "10")
    start, _, losses = toy.run(toy.config(workdir, mesh="tensor:2"), mesh=toy.make_mesh(1, 2))
    assert start.step == 8
    np.testing.assert_allclose(losses, straight[1][8:], rtol=1e-5)


def test_free_changes_are_logged_and_others_refused_with_both_values(workdir, caplog):
    begin(toy.config(workdir, num_steps=20, log_every_steps=7))
    assert "changed since step 10: num_steps: 10 -> 20" in caplog.text
    assert "changed since step 10: log_every_steps: 10 -> 7" in caplog.text
    with pytest.raises(ConfigError) as caught:
        begin(toy.config(workdir, seed=5, precision="bfloat16"))
    for part in ("seed: 0 -> 5", "precision: float32 -> bfloat16", "--checkpoint.overwrite"):
        assert part in str(caught.value)


def test_overwrite_replaces_a_run_of_another_configuration_once(workdir):
    """The same command after a preemption continues; it does not start anew again."""
    config = toy.config(workdir, seed=5, overwrite=True, num_steps=6)
    start, *_ = toy.run(config, stop_at=6)
    assert start.step == 0
    assert toy.steps_in(workdir) == [4]
    start, *_ = toy.run(config)
    assert start.step == 4
    assert toy.steps_in(workdir) == [4, 6]


def test_the_command_that_starts_over_does_so_once(workdir, caplog):
    """Given again after a crash it continues; given again at the end it deletes nothing."""
    config = toy.config(workdir, overwrite=True, resume="never")
    start, *_ = toy.run(config, stop_at=6)
    assert start.step == 0
    assert toy.steps_in(workdir) == [4]
    start, *_ = toy.run(config, stop_at=9)
    assert start.step == 4
    assert "began with --resume=never --checkpoint.overwrite and continues from step 4" in (
        caplog.text
    )
    toy.run(config)
    before = toy.snapshot(workdir)
    start, _, losses = toy.run(config)
    assert (start.step, losses) == (10, [])
    assert toy.snapshot(workdir) == before
    assert "is complete: nothing is deleted, it ended at step 10; to start over once more, " in (
        caplog.text
    )
    # Another run is another matter.
    assert begin(config.replace(seed=5)).step == 0
    assert toy.steps_in(workdir) == []


def test_the_command_that_starts_over_may_have_found_nothing_to_delete(tmp_path):
    config = toy.config(tmp_path, overwrite=True, resume="never")
    toy.run(config, stop_at=6)
    assert begin(config).step == 4


def test_must_is_not_talked_into_deleting(workdir):
    with pytest.raises(ConfigError, match="seed: 0 -> 5"):
        begin(toy.config(workdir, resume="must", seed=5, overwrite=True))
    assert toy.steps_in(workdir) == [4, 8, 10]
    assert begin(toy.config(workdir, resume="must", overwrite=True)).step == 10


def test_every_option_is_read_by_a_fresh_run(tmp_path):
    config = toy.config(tmp_path)
    with record_reads() as reads:
        begin(config)
    unused = [path for path in unread(config, reads) if path.startswith("checkpoint.")]
    assert unused == ["checkpoint.every_steps"]  # which the loop reads
    assert "resume" in reads


def test_another_model_is_refused(workdir):
    with pytest.raises(CheckpointError, match="checkpoint step 10 has no parameter 'layer_2/ker"):
        begin(toy.config(workdir), num_layers=3)


def test_another_order_of_samples_is_refused(workdir, monkeypatch):
    monkeypatch.setattr(start, "ORDER_VERSION", 2)
    with pytest.raises(CheckpointError, match="order 1, this version of jaxtrain has order 2"):
        begin(toy.config(workdir))


# The position in the data


def test_samples_at():
    assert samples_at(0, [(0, 32)]) == 0
    assert samples_at(10, [(0, 32)]) == 320
    assert samples_at(10, [(0, 32), (4, 64)]) == 4 * 32 + 6 * 64
    assert samples_at(3, [(0, 32), (4, 64)]) == 96
    assert samples_at(4, [(0, 32), (4, 64)]) == 128
    assert samples_at(2**31, [(0, 2**13), (2**30, 2**14)]) == 2**43 + 2**44


def test_the_position_follows_the_history_of_batch_sizes(tmp_path):
    toy.run(toy.config(tmp_path), stop_at=6)
    config = toy.config(tmp_path, global_batch_size=16)
    start, *_ = toy.run(config, stop_at=9)
    assert (start.step, start.samples_seen) == (4, 32)
    assert start.batch_sizes == ((0, 8), (4, 16))
    start, *_ = toy.run(config)
    assert (start.step, start.samples_seen) == (8, 4 * 8 + 4 * 16)
    assert start.batch_sizes == ((0, 8), (4, 16))
    host = Checkpointer(tmp_path / "checkpoints").read_host(10)
    assert host["samples_seen"] == 4 * 8 + 6 * 16
    assert host["batch_sizes"] == [[0, 8], [4, 16]]
    assert host["config"]["global_batch_size"] == 16
    assert host["versions"]["jax"] == jax.__version__
    assert host["order_version"] == 1


def test_a_batch_size_that_was_never_saved_leaves_no_trace(tmp_path):
    toy.run(toy.config(tmp_path), stop_at=6)
    begin(toy.config(tmp_path, global_batch_size=16))
    assert begin(toy.config(tmp_path)).batch_sizes == ((0, 8),)


# C3


def test_what_a_crash_left_is_skipped_with_one_warning_each(workdir, straight, caplog):
    directory = workdir / "checkpoints"
    for step in (8, 10):
        shutil.rmtree(directory / str(step))
    (directory / "9").mkdir()
    (directory / "11.orbax-checkpoint-tmp").mkdir()
    (directory / "notes.txt").write_text("keep me")
    for name in ("10-hf", "4.backup"):
        shutil.copytree(directory / "4", directory / name)
    config = toy.config(workdir, every_steps=1, keep_last=1)
    start, state, _ = toy.run(config)
    assert start.step == 4
    toy.assert_bit_equal(state, straight[0])
    skipped = [line for line in warnings_in(caplog) if "skipping" in line]
    assert skipped == [f"skipping {directory / '9'}, which is no whole checkpoint: it is empty"]
    names = {path.name for path in directory.iterdir()}
    assert names == {"10", "9.broken", "10-hf", "4.backup", "notes.txt"}


def test_a_cut_array_file_falls_back_with_a_warning_that_names_it(workdir, straight, caplog):
    path = toy.largest_file(workdir / "checkpoints" / "10")
    os.truncate(path, path.stat().st_size // 2)
    start, state, losses = toy.run(toy.config(workdir))
    assert start.step == 8
    assert losses == straight[1][8:]
    toy.assert_bit_equal(state, straight[0])
    (warning, _) = warnings_in(caplog)
    assert f"{workdir / 'checkpoints' / '10'}, which is no whole checkpoint" in warning
    assert str(path.relative_to(workdir / "checkpoints" / "10")) in warning
    assert toy.steps_in(workdir) == [4, 8, 10]


def spoil(step_directory: Path) -> None:
    """Damage that no size shows."""
    for path in (step_directory / "state").rglob("manifest.ocdbt"):
        path.write_bytes(bytes(path.stat().st_size))


def test_an_unreadable_step_is_set_aside_when_an_older_one_serves(workdir, straight, caplog):
    spoil(workdir / "checkpoints" / "10")
    start, state, _ = toy.run(toy.config(workdir))
    assert start.step == 8
    toy.assert_bit_equal(state, straight[0])
    assert any("step 10" in line and "cannot be read" in line for line in warnings_in(caplog))
    assert (workdir / "checkpoints" / "10.broken").is_dir()
    assert toy.steps_in(workdir) == [4, 8, 10]


@pytest.mark.parametrize("name", ["", "host/metadata", "state/manifest.ocdbt"])
def test_damage_that_no_size_shows_falls_back(workdir, straight, name, caplog):
    """Bytes of the arrays ("": the largest file), the record, the index: zeros of the same size."""
    step = workdir / "checkpoints" / "10"
    path = step / name if name else toy.largest_file(step / "state")
    path.write_bytes(bytes(path.stat().st_size))
    start, state, _ = toy.run(toy.config(workdir))
    assert start.step == 8
    toy.assert_bit_equal(state, straight[0])
    (warning,) = [line for line in warnings_in(caplog) if "cannot be read" in line]
    assert f"step 10 in {workdir / 'checkpoints'} cannot be read: file {name}" in warning
    assert "its bytes are not those that were written" in warning
    assert (workdir / "checkpoints" / "10.broken").is_dir()


def test_records_that_cannot_be_read_anywhere_do_not_hide_that(workdir):
    for step in (4, 8, 10):
        path = workdir / "checkpoints" / str(step) / "host" / "metadata"
        path.write_bytes(bytes(path.stat().st_size))
    for options in ({}, {"restore_from": "elsewhere"}, {"resume": "must", "overwrite": True}):
        with pytest.raises(CheckpointError, match="can be read; damaged: 4, 8, 10"):
            begin(toy.config(workdir, **options))
    assert begin(toy.config(workdir, overwrite=True)).step == 0


def test_a_checkpoint_of_the_first_release_has_no_checksums_and_is_continued(workdir):
    path = workdir / "checkpoints" / "10" / files.MANIFEST
    content = json.loads(path.read_text())
    del content["crc32"], content["own_crc32"]
    path.write_text(json.dumps(content))
    assert begin(toy.config(workdir)).step == 10


def test_damage_everywhere_is_an_error_every_time_never_a_fresh_start(workdir):
    for step in (4, 8, 10):
        spoil(workdir / "checkpoints" / str(step))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"can be read; damaged: 4, 8, 10"):
            begin(toy.config(workdir))
    for step in (4, 8, 10):
        (workdir / "checkpoints" / str(step) / files.MANIFEST).unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"damaged checkpoints only \(step 4: it has no"):
            begin(toy.config(workdir))
    start, *_ = toy.run(toy.config(workdir, overwrite=True))
    assert start.step == 0
    assert toy.steps_in(workdir) == [4, 8, 10]


# Another run's checkpoint, an older step


@pytest.mark.parametrize("form", ["workdir", "checkpoints", "step"])
def test_restore_from_continues_another_run(workdir, tmp_path, straight, form, caplog):
    paths = {"workdir": workdir, "checkpoints": workdir / "checkpoints"}
    options = {"restore_from": str(paths.get(form, workdir / "checkpoints" / "8"))}
    if form != "step":
        options["restore_step"] = 8
    before = toy.snapshot(workdir)
    config = toy.config(tmp_path / "new", **options)
    start, state, losses = toy.run(config)
    assert (start.step, start.samples_seen) == (8, 64)
    assert losses == straight[1][8:]
    toy.assert_bit_equal(state, straight[0])
    assert f"restored step 8 from {workdir / 'checkpoints'}" in caplog.text
    assert toy.snapshot(workdir) == before
    assert toy.steps_in(tmp_path / "new") == [10]
    # The same command again continues its own checkpoints.
    start, _, losses = toy.run(config)
    assert (start.step, losses) == (10, [])


def test_restore_from_is_an_error_where_nothing_serves(workdir, tmp_path):
    (tmp_path / "empty").mkdir()
    for path, error in (
        ("does/not/exist", "restore_from=.*/does/not/exist does not exist"),
        (str(tmp_path / "empty"), "empty holds no checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=error):
            begin(toy.config(tmp_path / "new", restore_from=path))
    config = toy.config(tmp_path / "new", restore_from=str(workdir), restore_step=77)
    with pytest.raises(CheckpointError, match=r"step 77 does not exist .* steps there: 4, 8, 10"):
        begin(config)
    with pytest.raises(CheckpointError, match=r"step 77 does not exist .* steps there: 4, 8, 10"):
        begin(toy.config(workdir, restore_step=77))


def test_restore_from_beside_own_checkpoints_of_another_origin_is_refused(workdir, tmp_path):
    toy.run(toy.config(tmp_path / "own"), stop_at=6)
    with pytest.raises(ConfigError, match="run that started from its initial values; leave"):
        begin(toy.config(tmp_path / "own", restore_from=str(workdir)))


def test_the_origin_of_a_run_survives_resumes_without_the_flag(workdir, tmp_path):
    source = {"restore_from": str(workdir), "restore_step": 4}
    own = tmp_path / "own"
    toy.run(toy.config(own, **source), stop_at=9)
    toy.run(toy.config(own))
    assert begin(toy.config(own, **source)).step == 10


def test_partial_restore_can_take_parameters_only(workdir, tmp_path):
    config = toy.config(
        tmp_path / "new",
        restore_from=str(workdir),
        partial_restore="^(opt_state|step)|layer_1",
    )
    start = begin(config)
    initial = toy.init_state(toy.make_mesh(4, 2))
    saved, *_ = resume.load(workdir, toy.abstract_state(toy.make_mesh(4, 2)))
    assert (start.step, start.samples_seen) == (0, 0)
    assert int(start.state.step) == 0
    toy.assert_bit_equal(start.state.opt_state, initial.opt_state)
    toy.assert_bit_equal(start.state.params["layer_1"], initial.params["layer_1"])
    toy.assert_bit_equal(start.state.params["layer_0"], saved.params["layer_0"])
    with pytest.raises(ConfigError, match=r"partial_restore goes with checkpoint\.restore_from"):
        begin(toy.config(workdir, partial_restore="layer_1"))


def test_going_back_needs_overwrite_and_happens_once(workdir, straight, caplog):
    with pytest.raises(ConfigError, match=r"the newer steps 8, 10, which would be written again"):
        begin(toy.config(workdir, restore_step=4))
    assert toy.steps_in(workdir) == [4, 8, 10]
    config = toy.config(workdir, restore_step=4, overwrite=True)
    start, _, losses = toy.run(config, stop_at=9)
    assert start.step == 4
    assert losses == straight[1][4:8]
    assert "deleting the newer steps 8, 10" in caplog.text
    assert toy.steps_in(workdir) == [4, 8]
    start, *_ = toy.run(config)
    assert start.step == 8
    assert toy.steps_in(workdir) == [4, 8, 10]


def test_going_back_happens_once_also_if_the_first_start_saved_nothing(workdir):
    config = toy.config(workdir, restore_step=4, overwrite=True)
    assert begin(config).step == 4
    assert toy.run(config, stop_at=9)[0].step == 4
    assert begin(config).step == 8


# C7


@pytest.mark.parametrize("form", ["out/run1", "~/run1", "./a b/ü", "slash/", "link/run1"])
def test_every_form_of_a_path_works_and_is_logged_whole(tmp_path, monkeypatch, form, caplog):
    home = tmp_path / "home"
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    config = toy.config(form, num_steps=2, every_steps=1)
    toy.run(config, stop_at=2)
    start, *_ = toy.run(config)
    assert start.step == 1
    place = home / "run1" if form == "~/run1" else tmp_path / form
    assert f"workdir {place}" in [record.getMessage() for record in caplog.records]
    assert toy.steps_in(place) == [1, 2]
    source = toy.config(tmp_path / "other", restore_from=form, num_steps=3)
    assert begin(source).step == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/run", "workdir=.*/file/run cannot be written to: .*/file is a file"),
        ("file", "workdir=.*/file cannot be written to: .*/file is a file"),
        ("file/a/b/c", ".*/file is a file"),
        ("gs://bucket/run", "is not the path of a local directory"),
        ("~nobody-here/run", "is not the path of a local directory"),
        ("x" * 300, "cannot be written to: File name too long"),
    ],
)
def test_an_impossible_path_is_an_error_before_anything_else(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(checkpoint_orbax, "_orbax", lambda: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        begin(toy.config(path))
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_cannot_be_written_to_is_an_error_before_anything_else(tmp_path):
    if reason := toy.mount_tmpfs(tmp_path / "disk", "size=200k,ro"):
        pytest.skip(reason)
    try:
        with pytest.raises(OutputError, match="run could not be written: Read-only file system"):
            begin(toy.config(tmp_path / "disk" / "run"))
    finally:
        toy.unmount(tmp_path / "disk")


_READ_ONLY = """
import os, sys, tempfile
sys.path[:0] = {path!r}
import jax
jax.config.update("jax_num_cpu_devices", 2)
import checkpointing as toy
from jaxtrain import resume

abstract = toy.abstract_state(toy.make_mesh(1, 2)).replace(opt_state=None)
resume.load({warm!r}, abstract)  # what Python has yet to import may be closed to another user
if os.geteuid() == 0:
    os.setuid(65534)
try:
    open({workdir!r} + "/probe", "w")
    raise SystemExit("the directory is not read-only")
except PermissionError:
    pass
state, host, step = resume.load({workdir!r}, abstract)
assert float(abs(state.params["in"]["kernel"]).sum()) > 0
print(step, host["samples_seen"])
"""


def test_evaluation_from_a_read_only_copy_as_another_user_leaves_no_file(finished):
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        workdir = Path(place, "run")
        shutil.copytree(finished, workdir)
        for path in [workdir, *workdir.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = toy.snapshot(workdir)
        program = _READ_ONLY.format(
            path=[str(Path(__file__).parent), str(Path(__file__).parents[1])],
            warm=str(finished),
            workdir=str(workdir),
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd="/"
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["10", "80"]
        assert toy.snapshot(workdir) == before
        for path in [workdir, *workdir.rglob("*")]:
            path.chmod(stat.S_IRWXU)


def test_load_takes_the_newest_readable_step_and_renames_nothing(workdir, caplog):
    spoil(workdir / "checkpoints" / "10")
    (workdir / "checkpoints" / "12").mkdir()
    before = toy.snapshot(workdir)
    abstract = toy.abstract_state(toy.make_mesh(1, 1)).replace(opt_state=None)
    state, host, step = resume.load(workdir, abstract)
    assert (int(state.step), step, host["samples_seen"]) == (8, 8, 64)
    assert toy.snapshot(workdir) == before
    assert len(warnings_in(caplog)) == 2
    _, _, step = resume.load(workdir, abstract, step=4)
    assert step == 4
    with pytest.raises(CheckpointError, match=r"step 10 in .* cannot be read"):
        resume.load(workdir, abstract, step=10)
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(CheckpointError, match=r"workdir=.*/run holds no checkpoint"):
        resume.load(workdir, abstract)


def test_the_record_is_json(finished):
    record = Checkpointer(finished / "checkpoints").read_host(10)
    assert json.loads(json.dumps(record)) == record
    assert record["config"]["num_steps"] == 10
