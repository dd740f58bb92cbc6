"""A checkpoint written on one mesh goes on on any other (case C1), through the real scripts."""

import shutil

import experimenting
import jax
import numpy as np
import pytest
from experimenting import eval_records, start, succeed, train_records

from jaxtrain import cli
from jaxtrain.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("compile_cache")

HYBRID = "data:2,fsdp:2,tensor:2"
SAVED, END = 3, 8


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Flags of nano as it is, with little data."""
    text = experimenting.write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return [
        f"--data.source={text}",
        *("--data.sequence_length=32", "--global_batch_size=8", "--optimizer.warmup_steps=2"),
        *(f"--num_steps={END}", "--log_every_steps=1", "--eval_every_steps=0"),
        f"--checkpoint.every_steps={SAVED}",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, words):
    """The directory of a run on the hybrid mesh that nobody interrupted."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    succeed("train_lm", *words, f"--mesh={HYBRID}", f"--workdir={workdir}")
    assert Checkpointer(workdir / "checkpoints", read_only=True).committed_steps() == [3, 6, 8]
    return workdir


@pytest.fixture
def cut(whole, tmp_path):
    """A copy in which step 3 is the last thing that happened."""
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    for step in (6, 8):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    return workdir


def assert_same_losses(workdir, whole):
    """The five steps after the checkpoint, and the last evaluation, are those of the whole run."""
    found, expected = train_records(workdir), train_records(whole)
    assert [record["step"] for record in found] == list(range(1, END + 1))
    for name in ("loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose(
            [record[name] for record in found[SAVED:]],
            [record[name] for record in expected[SAVED:]],
            rtol=1e-5,
            err_msg=name,
        )
    np.testing.assert_allclose(
        eval_records(workdir)[-1]["loss"], eval_records(whole)[-1]["loss"], rtol=1e-5
    )
    # A model that does not move would agree with anything.
    assert expected[-1]["loss"] < expected[SAVED]["loss"] - 0.1


@pytest.mark.parametrize(("mesh", "num_devices"), [("tensor:4", 4), ("fsdp:8", 8)])
def test_the_losses_go_on_on_another_mesh(whole, cut, words, mesh, num_devices):
    arguments = [*words, f"--mesh={mesh}", f"--workdir={cut}"]
    ended = succeed("train_lm", *arguments, num_devices=num_devices)
    assert f"changed since step {SAVED}: mesh: {HYBRID} -> {mesh}" in ended.err
    assert f"resumed from step {SAVED} of {END}" in ended.err
    assert "warning" not in ended.err.lower()
    assert "unsafe" not in ended.err.lower()
    assert_same_losses(cut, whole)


def test_the_losses_go_on_on_the_one_device_of_another_process(whole, cut, words):
    arguments = [*words, "--mesh=fsdp:-1", f"--workdir={cut}"]
    ended = start("train_lm", *arguments, "--num_cpu_devices=1")
    assert ended.code == 0, ended.err
    assert "on 1 cpu device" in ended.err
    assert f"resumed from step {SAVED} of {END}" in ended.err
    assert_same_losses(cut, whole)


def test_the_checkpoint_is_listed_on_one_device(whole, capsys):
    cli.main(["jaxtrain", "checkpoints", str(whole)])
    assert capsys.readouterr().out == "step 3\nstep 6\nstep 8\n"
    ended = start("-m", "jaxtrain", "checkpoints", whole, "--step=3")
    assert (ended.code, ended.err) == (0, "")
    listed = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    # Whole shapes, whatever the mesh that wrote them.
    assert listed["params/embed/embedding"].split() == ["[256,128]", "float32"]
    assert listed["params/layers/attention/q/kernel"].split() == ["[4,128,4,32]", "float32"]
    assert listed["step"].split() == ["[]", "int32"]
    assert len(listed) > 2 * len([name for name in listed if name.startswith("params/")])


def test_restored_parameters_are_bit_equal_on_every_mesh(whole):
    """What a mesh of any kind restores is what the hybrid one had."""
    from train_lm import LmConfig

    from jaxtrain.models.transformer import transformer
    from jaxtrain.runs import load_params, read_config

    model = transformer(read_config(whole, LmConfig).model)
    hybrid, *others = (
        load_params(model, whole, step=SAVED, mesh=mesh)
        for mesh in (HYBRID, "data:8", "fsdp:8", "fsdp:2,tensor:4")
    )
    for other in others:
        for one, two in zip(jax.tree.leaves(hybrid), jax.tree.leaves(other), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    kernel = hybrid["layers"]["mlp"]["up"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 64, 192)}
