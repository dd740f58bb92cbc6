"""import-hf, export-hf and verify-hf; a run that begins with a model of Hugging Face."""

import json
import re

import experimenting
import hugging
import jax
import numpy as np
import optax
import pytest
import tokenizers
from experimenting import succeed, train_records
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from jaxtrain import cli
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import dump
from jaxtrain.hf import exporting, files, importing, verifying
from jaxtrain.hf.configs import ModelPresets, read_model_config
from jaxtrain.losses import lm_loss
from jaxtrain.models.transformer_config import TransformerConfig
from jaxtrain.state import TrainState, init_state
from jaxtrain.step import make_train_step

pytestmark = pytest.mark.usefixtures("compile_cache")

GPT2 = hugging.ROOT / "gpt2"


def run(capsys, *words):
    """(exit code, standard output, standard error) of a command."""
    code = 0
    try:
        cli.main(["jaxtrain", *map(str, words)])
    except SystemExit as end:
        code = end.code or 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def model(tmp_path):
    """A model in two files, with a tokenizer."""
    directory = hugging.copy("gpt2", tmp_path / "model", shard_bytes=100_000)
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer.json").write_text('{"a": 1}')
    (directory / "README.md").write_text("not of the model")
    return directory


def test_import_and_export_give_the_files_of_the_original(model, tmp_path, capsys, caplog):
    workdir, out = tmp_path / "run", tmp_path / "out"
    with caplog.at_level("INFO", "jaxtrain"):
        code, text, _ = run(capsys, "import-hf", model, f"--workdir={workdir}")
    assert code == 0
    assert "gpt2, 40 tensors, 44,320 parameters with padding" in text
    assert "host memory at most" in caplog.text
    code, text, _ = run(capsys, "export-hf", out, f"--workdir={workdir}", "--shard_bytes=100000")
    assert code == 0
    assert "gpt2, 40 tensors in F32" in text
    weights = [path.name for path in out.iterdir() if path.suffix == ".safetensors"]
    assert len(weights) > 1
    others = {"config.json", "generation_config.json", "tokenizer.json"}
    assert {path.name for path in out.iterdir()} == {*weights, files.INDEX, *others}
    for name in others:
        assert (out / name).read_bytes() == (model / name).read_bytes()
    before, after = hugging.read_tensors(model), hugging.read_tensors(out)
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    # The same again is refused, and neither command leaves anything beside what it made.
    code, _, err = run(capsys, "import-hf", model, f"--workdir={workdir}")
    assert (code, "holds a run" in err) == (4, True)
    code, _, err = run(capsys, "export-hf", out, f"--workdir={workdir}")
    assert (code, "is there already" in err) == (2, True)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "run", "out"}


def test_what_stops_an_import_or_export_leaves_nothing_half_written(
    model, tmp_path, capsys, monkeypatch
):
    workdir, out = tmp_path / "run", tmp_path / "out"

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", killed)
        assert run(capsys, "import-hf", model, f"--workdir={workdir}")[0] == 130
    assert not (workdir / "checkpoints").exists()
    assert run(capsys, "import-hf", model, f"--workdir={workdir}")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_file", killed)
        assert run(capsys, "export-hf", out, f"--workdir={workdir}")[0] == 130
    assert {path.name for path in tmp_path.iterdir()} == {"model", "run"}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("import-hf", "absent", "--workdir=run"), 4, "there is none"),
        (("import-hf", "--workdir=run"), 2, "takes one DIR"),
        (("import-hf", GPT2), 2, "needs --workdir"),
        (("export-hf", "out", "--workdir=absent"), 4, "holds no run"),
        (("export-hf", "out"), 2, "needs --workdir"),
        (("verify-hf", "absent"), 4, "there is none"),
    ],
)
def test_wrong_words_are_errors(words, code, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, _, err = run(capsys, *words)
    assert found == code
    assert text in err


def test_a_broken_model_leaves_no_run(model, tmp_path, capsys):
    sorted(model.glob("*.safetensors"))[0].write_bytes(b"")
    code, _, err = run(capsys, "import-hf", model, f"--workdir={tmp_path / 'run'}")
    assert code == 4
    assert "is cut off or damaged" in err
    assert not (tmp_path / "run").exists()


def test_verify_says_what_is_right(capsys, monkeypatch):
    monkeypatch.setattr(verifying.importlib.util, "find_spec", lambda name: None)
    code, out, _ = run(capsys, "verify-hf", GPT2)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "ok", "skip", "verdict:"]
    assert "40 tensors, byte for byte" in lines[2]
    assert lines[-1] == "verdict: right"


def test_verify_compares_with_the_logits_of_another_interpreter(capsys, monkeypatch, tmp_path):
    """Stands for torch: answers with logits that are right, and a little wrong at one position."""
    # What is asked for is random: the answer is made of our own model, which has been compared.
    tokens = np.random.default_rng(0).integers(0, 101, (8, 40)).astype(np.int32)
    _, model, params, mesh = hugging.load(GPT2)
    answer = hugging.scores(model, params, tokens, mesh)
    for error, word, expected in ((0, "ok", 0), (1e-2, "WRONG", 4)):
        changed = answer.copy()
        changed[-1, -1, -1] += error
        np.save(tmp_path / "answer.npy", changed)
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\ncp {tmp_path}/answer.npy "$5"\n')
        script.chmod(0o755)
        code, out, _ = run(capsys, "verify-hf", GPT2, f"--python={script}", "--length=40")
        assert code == expected
        assert out.splitlines()[3].startswith(f"{word:<5}  logits"), out


def test_verify_compares_the_perplexity_of_a_text(capsys, tmp_path):
    directory = hugging.copy("gpt2", tmp_path / "model")
    words = {f"w{i}": i for i in range(101)}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    tokens = np.random.default_rng(1).integers(2, 101, (8, 40)).astype(np.int32)
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{i}" for i in tokens.reshape(-1)))
    _, model, params, mesh = hugging.load(directory)
    answer = hugging.scores(model, params, tokens, mesh)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncp {tmp_path}/answer.npy "$5"\n')
    script.chmod(0o755)
    command = ("verify-hf", directory, f"--python={script}", "--length=40")
    for sharpness, word, expected in ((1, "ok", 0), (1.1, "WRONG", 4)):
        np.save(tmp_path / "answer.npy", answer * np.float32(sharpness))
        code, out, _ = run(capsys, *command, f"--text={text}")
        assert code == expected
        scores = answer[:, :-1].astype(np.float64)
        found = np.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0]
        wanted = np.exp((np.log(np.exp(scores).sum(-1)) - found).mean())
        line = out.splitlines()[4]
        assert line.startswith(f"{word:<5}  perplexity"), out
        assert float(line.split()[2].rstrip(",")) == pytest.approx(wanted, rel=1e-6)
    text.write_text("w1 w2")
    code, _, err = run(capsys, *command, f"--text={text}")
    assert code == 4
    assert "has 2 tokens, and 8 rows of length=40 need 320" in err


def test_verify_names_a_tensor_that_would_change(capsys, monkeypatch):
    real = verifying.tensors_of

    def swapped(*args):
        first, second, *rest = real(*args)
        return [first, second._replace(make=lambda: second.make() + 1), *rest]

    monkeypatch.setattr(verifying, "tensors_of", swapped)
    monkeypatch.setattr(verifying.importlib.util, "find_spec", lambda name: None)
    code, out, err = run(capsys, "verify-hf", GPT2)
    assert code == 4
    assert "WRONG  round trip  these tensors differ" in out
    assert "transformer.wpe.weight" in out
    assert "round trip" in err


def test_training_on_a_split_vocabulary_then_export_and_import_again(tmp_path):
    """Case F2: tied; one parameter, one gradient, one slot; meshes agree."""
    name = "llama_tied"
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 101, (8, 16)).astype(np.int32),
        "targets": rng.integers(0, 101, (8, 16)).astype(np.int32),
        "loss_mask": np.ones((8, 16), np.float32),
    }
    trained = {}
    for text in ("fsdp:1", "fsdp:4,tensor:2"):
        config, model, params, mesh = hugging.load(hugging.ROOT / name, text)
        tx = optax.sgd(0.1, momentum=0.9)
        state = init_state(model, tx, mesh)
        assert jax.tree.structure(state.opt_state[0].trace) == jax.tree.structure(params)
        state = state.replace(params=params)
        step = jax.jit(make_train_step(model, lm_loss(model), tx, mesh))
        for _ in range(3):
            state, _ = step(state, batch)
        trained[text] = jax.tree.map(np.asarray, state.params)
    for a, b in zip(*map(jax.tree.leaves, trained.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    # Four times the rows, which the mesh divides.
    tokens, before = (np.tile(x, (4, *[1] * (x.ndim - 1))) for x in hugging.expected(name))
    found = hugging.scores(model, state.params, tokens, mesh)
    assert np.abs(found - before).max() > 0.1
    wanted = exporting.tensors_of(state.params, config, "llama", None)
    out = hugging.copy(name, tmp_path / "out")
    files.write_weights(out, wanted)
    _, model, params, mesh = hugging.load(out)
    again = hugging.scores(model, params, tokens, mesh)
    np.testing.assert_allclose(again, found, rtol=0, atol=1e-5)


def test_the_moving_average_is_exported_if_asked_for(tmp_path, capsys):
    workdir = tmp_path / "run"
    run(capsys, "import-hf", GPT2, f"--workdir={workdir}")
    config, model, params, mesh = hugging.load(GPT2)
    state = init_state(model, optax.identity(), mesh, ema=True)
    assert isinstance(state, TrainState)
    state = state.replace(params=jax.tree.map(lambda x: x + 1, params), ema_params=params)
    checkpointer = Checkpointer(workdir / "checkpoints")
    checkpointer.save(7, state, {})
    checkpointer.close()
    kept = hugging.read_tensors(GPT2)
    for flag, offset in (("--ema", 0), ("--noema", 1)):
        out = tmp_path / f"out{offset}"
        assert run(capsys, "export-hf", out, f"--workdir={workdir}", flag)[0] == 0
        for name, values in hugging.read_tensors(out).items():
            np.testing.assert_array_equal(values, kept[name] + np.float32(offset))
    assert config.num_layers == 3


def test_a_model_that_was_trained_here_is_exported_too(tmp_path):
    """Its config.json is made, and read again it is the same model."""
    workdir = tmp_path / "run"
    config, model, params, mesh = hugging.load(hugging.ROOT / "gemma3")
    workdir.mkdir()
    (workdir / "config.json").write_text(dump(importing.ImportedRun(model=config)))
    checkpointer = Checkpointer(workdir / "checkpoints")
    state = init_state(model, optax.identity(), mesh)
    checkpointer.save(0, state.replace(params=params), {})
    checkpointer.close()
    exporting.export_model(tmp_path / "out", exporting.ExportConfig(workdir=str(workdir)))
    config, model, params, mesh = hugging.load(tmp_path / "out")
    tokens, expected = hugging.expected("gemma3")
    found = hugging.scores(model, params, tokens, mesh)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_a_run_begins_with_a_model_and_can_be_exported(tmp_path, capsys):
    """`--checkpoint.restore_from` takes the model itself, and what import-hf made of it."""
    table = np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32)
    model = hugging.copy(
        "qwen3", tmp_path / "model", config={"vocab_size": 256},
        tensors={"model.embed_tokens.weight": table / 6},
    )  # fmt: skip
    text = experimenting.write_text(tmp_path / "text.txt")
    common = [
        f"--model={model}", f"--data.source={text}", "--data.sequence_length=16",
        "--global_batch_size=8", "--num_steps=2", "--log_every_steps=1",
        "--eval_every_steps=0", "--optimizer.ema_decay=0.5", "--optimizer.warmup_steps=0",
    ]  # fmt: skip
    imported = tmp_path / "imported"
    assert run(capsys, "import-hf", model, f"--workdir={imported}")[0] == 0
    losses = {}
    for name, source in (("direct", model), ("through", imported)):
        workdir = tmp_path / name
        succeed(
            "train_lm", *common, f"--workdir={workdir}", f"--checkpoint.restore_from={source}",
            num_devices=2,
        )  # fmt: skip
        losses[name] = [record["loss"] for record in train_records(workdir)]
        out = tmp_path / f"{name}_out"
        assert run(capsys, "export-hf", out, f"--workdir={workdir}", "--ema")[0] == 0
        assert hugging.read_json(out / "config.json") == hugging.read_json(model / "config.json")
        before, after = hugging.read_tensors(model), hugging.read_tensors(out)
        moved = [np.abs(after[key] - before[key]).max() for key in before]
        assert 0 < max(moved) < 0.1, "the average begins with the model's own parameters"
    assert losses["direct"] == losses["through"]


def test_a_preset_is_a_name_or_the_directory_of_a_model(monkeypatch):
    presets = ModelPresets({"nano": {}})
    assert list(presets) == ["nano"]
    assert "nano" in presets
    assert TransformerConfig(**presets[str(GPT2)]) == read_model_config(GPT2)[1]
    monkeypatch.chdir(GPT2)
    assert not any(name in presets for name in ("", "absent", "config.json"))


def test_another_model_than_the_run_s_is_refused_with_the_flags_that_help(tmp_path):
    text = experimenting.write_text(tmp_path / "text.txt")
    ended = experimenting.run(
        "train_lm", *experimenting.TINY, "--num_steps=1", f"--workdir={tmp_path / 'run'}",
        f"--data.source={text}", f"--checkpoint.restore_from={GPT2}", num_devices=1,
    )  # fmt: skip
    assert ended.code == 2
    assert f"give --model={GPT2}, or --model.vocab_size=101 " in ended.err


def test_an_imported_model_is_sampled_through_its_own_tokenizer(tmp_path, capsys):
    directory = hugging.copy("gpt2", tmp_path / "model")
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    words = ["<|endoftext|>", *(f"w{number}" for number in range(1, size))]
    library = tokenizers.Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="w1")
    )
    library.pre_tokenizer = Whitespace()
    library.save(str(directory / "tokenizer.json"))
    assert run(capsys, "import-hf", directory, f"--workdir={tmp_path / 'run'}")[0] == 0
    flags = ("--prompt=w5 w9", "--num_tokens=6", "--temperature=0")
    out = succeed("sample_lm", f"--workdir={tmp_path / 'run'}", *flags).out
    tokens = [int(number) for number in re.findall(r"w(\d+)", out)]
    assert (tokens[:2], len(tokens)) == ([5, 9], 8)
    # The likeliest, from the parallel forward of the whole.
    _, model, params, mesh = hugging.load(directory)
    logits = hugging.scores(model, params, np.array([tokens]), mesh)[0]
    assert tokens[2:] == logits[1:-1].argmax(-1).tolist()
