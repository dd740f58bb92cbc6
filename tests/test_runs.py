"""Reading a run that is there, and runs that end before they begin, through the real scripts."""

import json
import os
import resource
import shutil

import experimenting
import jax
import numpy as np
import pytest
from checkpointing import snapshot
from experimenting import TINY, eval_records, evaluation, run, start, succeed
from looping import saved

from jaxtrain import flags, tree
from jaxtrain.config import RunConfig
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.models.transformer import PRESETS, transformer
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.runs import load_params, read_config

pytestmark = pytest.mark.usefixtures("compile_cache")

HYBRID = "data:2,fsdp:2,tensor:2"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return experimenting.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def words(text):
    return [
        *(*TINY, f"--data.source={text}", "--num_steps=4", "--optimizer.warmup_steps=0"),
        *("--log_every_steps=1", "--checkpoint.every_steps=2", "--checkpoint.keep_last=9"),
    ]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, words):
    """A run of train_lm, of 4 steps with checkpoints 2 and 4."""
    path = tmp_path_factory.mktemp("run") / "run"
    succeed("train_lm", *words, f"--mesh={HYBRID}", f"--workdir={path}")
    return path


@pytest.fixture(scope="module")
def lm_config(workdir):
    from train_lm import LmConfig

    return read_config(workdir, LmConfig)


# jaxtrain.runs


def test_a_run_s_configuration_is_read_back(workdir, lm_config):
    assert lm_config.num_steps == 4
    assert lm_config.model.embed_dim == 32
    assert lm_config.mesh == HYBRID
    # All of it, also what was left at the script's own defaults.
    assert lm_config.optimizer.learning_rate == 3e-3
    assert read_config(str(workdir), type(lm_config)) == lm_config


def test_no_run_no_json_and_another_experiment_are_told_apart(tmp_path, workdir):
    with pytest.raises(CheckpointError, match=r"workdir=.* holds no run: .*: No such file"):
        read_config(tmp_path, RunConfig)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"holds no run: .*json: it is not JSON of a run"):
        read_config(tmp_path, RunConfig)
    with pytest.raises(ConfigError, match=r"config\.json.*"):
        read_config(workdir, RunConfig)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("mesh", ["fsdp:8", HYBRID])
def test_parameters_are_those_of_the_checkpoint_on_any_mesh(workdir, lm_config, step, mesh):
    model = transformer(lm_config.model)
    params = load_params(model, workdir, step=step, mesh=mesh)
    expected, _ = saved(workdir, step)
    found = dict(tree.named_leaves(params))
    assert {f"params/{name}" for name in found} == {
        name for name in expected if name.startswith("params/")
    }
    for name, leaf in found.items():
        assert np.asarray(leaf).tobytes() == np.asarray(expected[f"params/{name}"]).tobytes()
    assert len(found["embed/embedding"].sharding.device_set) == 8


def test_the_newest_parameters_are_the_default(workdir, lm_config):
    model = transformer(lm_config.model)
    newest, last = load_params(model, workdir), load_params(model, workdir, step=4)
    first = load_params(model, workdir, step=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, newest, last))
    assert not jax.tree.all(jax.tree.map(np.array_equal, newest, first))


def test_parameters_of_another_model_are_refused_by_name(workdir):
    model = transformer(TransformerConfig(num_layers=2, embed_dim=32, mlp_dim=64, qk_norm=True))
    with pytest.raises(CheckpointError, match="layers/attention/k_norm/scale"):
        load_params(model, workdir)


# The configuration file


def test_the_stored_configuration_names_what_was_changed_from_the_script_s_defaults(workdir):
    """Also by a preset, but not what `train_lm.py` itself declares with another default."""
    content = json.loads((workdir / "config.json").read_text())
    assert content["config"]["optimizer"]["learning_rate"] == 3e-3  # OptimizerConfig has 1e-3
    assert "optimizer.learning_rate" not in content["changed"]
    assert content["changed"]["num_steps"] == 500  # RunConfig has 1000
    assert content["changed"]["mesh"] == "fsdp:-1"
    assert content["changed"]["model.embed_dim"] == 128
    page = (workdir / "report.html").read_text()
    assert "changed from the default" in page
    shown = page[page.index("changed from the default") :].split("the rest of the")[0]
    for path in content["changed"]:
        assert f"<code>{path}</code>" in shown
    assert shown.count("<tr>") == len(content["changed"])


def test_the_resolved_configuration_given_back_is_the_same(workdir, lm_config):
    words = ["train_lm.py", f"--config={workdir / 'config.json'}"]
    assert flags.parse(words, type(lm_config)) == lm_config
    # Flags stand over the file, the file over a preset's defaults.
    changed = flags.parse([*words, "--seed=3"], type(lm_config), presets={"model": PRESETS})
    assert changed == lm_config.replace(seed=3)


def test_a_complete_run_says_so_and_changes_nothing(workdir):
    """Case C4 (b), from the run's own config.json alone."""
    before = snapshot(workdir)
    ended = succeed("train_lm", f"--config={workdir / 'config.json'}")
    assert "the run is complete: 4 of 4 steps" in ended.err
    assert "compiled" not in ended.err
    assert snapshot(workdir) == before


# Evaluation (case C7: from a read-only copy)


# Runs Python with the arguments after it as a superuser who obeys permissions like everybody else.
OBEDIENT = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_evaluation_of_a_read_only_copy_on_one_device_leaves_no_file(workdir, words, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(copy)
    probe = start("-c", OBEDIENT, "-c", f"open({str(copy / 'x')!r}, 'w')")
    if probe.code == 0:
        pytest.skip("this user may write everywhere, and cannot give that up")
    script = experimenting.ROOT / "experiments" / "train_lm.py"
    options = ["--evaluate", "--num_cpu_devices=1", f"--workdir={copy}"]
    ended = start("-c", OBEDIENT, script, *words, *options)
    assert ended.code == 0, ended.err
    assert snapshot(copy) == before
    found, expected = evaluation(ended), eval_records(workdir)[-1]
    assert found["step"] == 4
    assert found["rows"] == expected["rows"]
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


def test_evaluation_of_an_earlier_step(workdir, words):
    ended = succeed(
        "train_lm", *words, f"--workdir={workdir}", "--evaluate", "--checkpoint.restore_step=2"
    )
    assert evaluation(ended)["step"] == 2
    assert evaluation(ended)["loss"] > eval_records(workdir)[-1]["loss"]


# The audit, and presets


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_laid_out_without_an_array(preset, text, tmp_path):
    """Case B1: odd vocabularies are padded, so that they divide."""
    ended = succeed(
        "train_lm",
        *(f"--model={preset}", "--audit", f"--mesh={HYBRID}", f"--data.source={text}"),
        f"--workdir={tmp_path / 'run'}",
    )
    config = TransformerConfig(**PRESETS[preset])
    rows = [line for line in ended.out.splitlines() if "params/embed/embedding" in line]
    assert len(rows) == 1
    assert f"[{config.padded_vocab_size},{config.embed_dim}]" in rows[0].replace(" ", "")
    if preset == "gpt2":
        assert "50304" in rows[0]
    assert "compiled" not in ended.err
    assert not (tmp_path / "run").exists()


# Paths (case C7)


def test_a_run_is_one_directory_whatever_its_path_looks_like(words, tmp_path, monkeypatch):
    """All files are in it, and every other way to name it finds them."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    place = tmp_path / "home" / "a b" / "ü"
    succeed("train_lm", *words, "--num_steps=1", "--workdir=~/a b/ü/", num_devices=1)
    left = {path.name for path in place.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tensorboard", "report.html"} <= left
    assert not os.path.lexists("~")
    (tmp_path / "link").symlink_to(place)
    monkeypatch.chdir(place.parent)
    for path in ("ü", "./ü", str(tmp_path / "link")):
        words_ = [*words, "--num_steps=1", f"--workdir={path}"]
        assert "the run is complete" in succeed("train_lm", *words_, num_devices=1).err
    assert {path.name for path in place.parent.iterdir()} == {"ü"}


# What cannot run: the message and the exit code, before anything is compiled


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        # Case B2.
        (["--mesh=data:3,tensor:2"], ["data", "tensor", "6", "8"]),
        (["--mesh=data:-1,tensor:3"], ["3", "8"]),
        (["--mesh=data:8,tensor:2"], ["16", "8"]),
        (["--mesh=data:4,dta:2"], ["dta", "data, fsdp, tensor"]),
        # Case B1.
        (["--mesh=data:4,tensor:2", "--global_batch_size=19"], ["19", "data=4", "16", "20"]),
        (["--mesh=data:8", "--global_batch_size=4"], ["4", "data=8"]),
        (
            ["--mesh=tensor:8", "--model.num_heads=4"],
            [*(f"attention/{name}/kernel" for name in "qkvo"), "4", "tensor=8"],
        ),
        (
            ["--mesh=fsdp:2,tensor:4", "--model.num_kv_heads=2"],
            ["attention/k/kernel", "attention/v/kernel", "2", "tensor=4"],
        ),
        (
            ["--mesh=fsdp:4,tensor:2", "--model.embed_dim=10", "--model.head_dim=8"],
            ["embed/embedding", "layers/mlp/down/kernel", "10", "fsdp=4"],
        ),
        (["--model.vocab_size=100"], ["100", "256", "--model.vocab_size=256"]),
        (["--optimizer=muon"], ["muon", "adamw, lion or sgd"]),
        (["--optimizer.freeze=layer/"], ["freeze", "layer/", "layers/"]),
        (["--num_steps=5", "--optimizer.warmup_steps=9"], ["9", "5"]),
        (["--model=gpt3"], ["gpt3", "gpt2"]),
    ],
)
def test_what_was_asked_for_cannot_be(words, options, parts, tmp_path):
    ended = run("train_lm", *words, *options, f"--workdir={tmp_path / 'run'}")
    assert ended.code == 2, ended.err
    for part in parts:
        assert part in ended.error
    if "kv_heads" in options[-1]:
        assert "attention/q" not in ended.error
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["does not exist"]),
        (b"", ["no training data in", "text.jsonl"]),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', ["text.jsonl:2", "byte offset 27"]),
        (b'{"text": "fine"}\n{"txet": "gone"}\n', ["text.jsonl:2", "text"]),
        (b'{"text": "short"}\n', ["not enough data", "sequence_length=32"]),
    ],
)
def test_data_that_cannot_be_used(words, content, parts, tmp_path):
    """Case D1, and too little of it."""
    source = tmp_path / "text.jsonl"
    if content is not None:
        source.write_bytes(content)
    ended = run("train_lm", *words, f"--data.source={source}", f"--workdir={tmp_path / 'run'}")
    assert ended.code == 4, ended.err
    for part in parts:
        assert part in ended.error


def test_bad_bytes_are_replaced_when_asked_and_counted(words, tmp_path):
    source = tmp_path / "text.txt"
    source.write_bytes(b"an early line\n\xff a bad one\n" * 40)
    options = [f"--data.source={source}", "--data.on_bad_bytes=replace", "--audit"]
    assert "40 bad byte" in succeed("train_lm", *words, *options).err


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--seed=1"], 2, ["seed: 0 -> 1"]),
        (["--model.num_layers=3"], 2, ["model.num_layers: 2 -> 3"]),
        (["--resume=never"], 2, ["resume=never", "--checkpoint.overwrite"]),
        (["--checkpoint.restore_step=3"], 4, ["3", "2, 4"]),
        (["--evaluate", "--checkpoint.restore_step=77"], 4, ["77", "2, 4"]),
        (["--checkpoint.restore_step=2"], 2, ["newer steps 4", "--checkpoint.overwrite"]),
    ],
)
def test_a_used_directory_is_not_misused(workdir, words, options, code, parts):
    before = snapshot(workdir)
    ended = run("train_lm", *words, f"--workdir={workdir}", *options)
    assert ended.code == code, ended.err
    for part in parts:
        assert part in ended.error
    assert snapshot(workdir) == before


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--workdir=file/run"], 2, ["workdir=", "file is a file"]),
        (["--evaluate", "--workdir=absent"], 4, ["workdir=", "absent does not exist"]),
        (["--resume=must", "--workdir=empty"], 4, ["resume=must", "holds no checkpoint"]),
        (
            ["--checkpoint.restore_from=absent", "--workdir=empty"],
            4,
            ["checkpoint.restore_from=", "absent does not exist"],
        ),
        (["--workdir=damaged"], 4, ["damaged checkpoints only", "--checkpoint.overwrite"]),
    ],
)
def test_places_that_hold_nothing_of_use(words, tmp_path, monkeypatch, options, code, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged" / "checkpoints" / "5").mkdir(parents=True)
    ended = run("train_lm", *words, *options)
    assert ended.code == code, ended.err
    for part in parts:
        assert part in ended.error


def test_values_that_are_not_finite_end_with_3(words, tmp_path):
    options = ["--optimizer=sgd", "--optimizer.learning_rate=1e30", "--optimizer.clip_norm=0"]
    ended = run("train_lm", *words, *options, f"--workdir={tmp_path}", num_devices=1)
    assert ended.code == 3
    assert "param_norm not finite at step 1 (samples 0 to 7 of the order)" in ended.err
    # The record says so too, as JSON that any reader takes.
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["param_norm"]) == (1, None)
    assert last["nonfinite"] == {"param_norm": "inf"}
    assert not (tmp_path / "checkpoints" / "1").exists()


@pytest.mark.parametrize(
    "options",
    [["--mesh=data:3,tensor:2"], ["--mesh=tensor:8"], ["--mesh=data:8", "--global_batch_size=4"]],
)
def test_errors_come_soon(options, tmp_path):
    """With the default data, in a process of its own, on devices that are simulated by a flag."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = start("train_lm", "--num_cpu_devices=8", *options, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.code == 2, ended.err
    assert ended.error
    # Processor time, since other programs may use the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8
