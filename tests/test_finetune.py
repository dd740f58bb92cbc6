"""finetune_lm.py on a tiny model of Hugging Face: from its directory to an export of the result."""

import json
import math
import re

import hugging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experimenting import ROOT, TINY, eval_records, start, succeed, train_records, write_text

from jaxtrain import cli
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.runs import load_params
from jaxtrain.tree import named_leaves

pytestmark = pytest.mark.usefixtures("compile_cache")

LORA = ("--lora.rank=4", "--lora.alpha=8", "--lora.targets=attention/(q|v)|mlp")
QUICK = (
    *("--data.sequence_length=96", "--data.validation_fraction=0.2", "--global_batch_size=8"),
    *("--log_every_steps=1", "--sample_tokens=8", "--optimizer.learning_rate=0.02"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of Hugging Face with a tokenizer and a chat template."""
    directory = hugging.copy("llama_tied", tmp_path_factory.mktemp("hf") / "model")
    hugging.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    said = {"role": "assistant", "content": "aba"}
    records = [{"messages": [{"role": "user", "content": f"{n}?"}, said]} for n in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words_for(model, chats, workdir, begin=None):
    begin = begin or model
    return (
        *(f"--model={model}", f"--checkpoint.restore_from={begin}"),
        *(f"--data.source={chats}", f"--workdir={workdir}"),
    )


@pytest.fixture(scope="module")
def tuned(model, chats, tmp_path_factory):
    """(directory of a LoRA run of 12 steps, what it said)"""
    workdir = tmp_path_factory.mktemp("runs") / "tuned"
    words = words_for(model, chats, workdir)
    ended = start("finetune_lm", *words, *LORA, *QUICK, "--num_steps=12", cwd=workdir.parent)
    assert ended.code == 0, ended.err
    return workdir, ended.err


def test_the_loss_falls_and_is_said_before_and_after_with_samples(tuned):
    workdir, said = tuned
    losses = [record["loss"] for record in train_records(workdir)]
    first, last = eval_records(workdir)
    assert (first["step"], last["step"]) == (0, 12)
    assert last["loss"] < first["loss"] - 0.5
    assert losses[-1] < losses[0] - 0.5
    for when, record in (("before", first), ("after", last)):
        loss, perplexity = record["loss"], math.exp(record["loss"])
        assert f"{when}: loss {loss:.4f} nats, perplexity {perplexity:.5g}" in said
    samples = re.findall(r"(before|after): '(.*)' -> '(.*)'", said)
    assert [when for when, _, _ in samples] == ["before", "after"]
    assert samples[0][2] != samples[1][2]
    assert samples[0][1].endswith("assistant\\n")


def test_a_lora_run_begins_with_the_model_and_leaves_it_as_it_is(tuned, model):
    workdir, _ = tuned
    config, _, base, _ = hugging.load(model)
    lora = LoraConfig(rank=4, alpha=8.0, targets="attention/(q|v)|mlp")
    params = dict(named_leaves(load_params(transformer(config, lora=lora), workdir)))
    for path, leaf in named_leaves(base):
        np.testing.assert_array_equal(params[path], leaf.astype(jnp.bfloat16), err_msg=path)
    assert sorted({p.rpartition("/")[0] for p in params if p.endswith("lora_b")}) == [
        f"layers/{name}"
        for name in ("attention/q", "attention/v", "mlp/down", "mlp/gate", "mlp/up")
    ]


def test_the_export_of_a_lora_run_is_merged_and_read_back(tuned, tmp_path):
    workdir, _ = tuned
    cli.main(["jaxtrain", "export-hf", str(tmp_path / "out"), f"--workdir={workdir}"])
    config, plain, merged, mesh = hugging.load(tmp_path / "out")
    lora = LoraConfig(rank=4, alpha=8.0, targets="attention/(q|v)|mlp")
    adapted = transformer(config, lora=lora)
    params = jax.device_get(load_params(adapted, workdir))
    tokens = hugging.expected("llama_tied")[0]
    expected = hugging.scores(adapted, params, tokens, mesh)
    found = hugging.scores(plain, merged, tokens, mesh)
    # The kernels are rounded to the base's bfloat16 once more.
    np.testing.assert_allclose(found, expected, atol=0.05)
    unadapted = hugging.scores(plain, hugging.load(hugging.ROOT / "llama_tied")[2], tokens, mesh)
    assert np.abs(expected - unadapted).max() > 0.5
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_an_imported_run_begins_as_the_model_does(tuned, model, chats, tmp_path):
    base = tmp_path / "base"
    cli.main(["jaxtrain", "import-hf", str(model), f"--workdir={base}"])
    words = words_for(model, chats, tmp_path / "run", begin=base)
    succeed("finetune_lm", *words, *LORA, *QUICK, "--num_steps=1", num_devices=1)
    first = eval_records(tmp_path / "run")[0]
    assert first["loss"] == pytest.approx(eval_records(tuned[0])[0]["loss"], rel=1e-5)


def test_full_and_frozen_fine_tuning(model, chats, tmp_path):
    words = words_for(model, chats, tmp_path / "run")
    succeed(
        "finetune_lm", *words, *QUICK, "--num_steps=2", "--optimizer.freeze=^embed", num_devices=1
    )
    config, plain, before, _ = hugging.load(model)
    after = dict(named_leaves(load_params(plain, tmp_path / "run")))
    moved = {
        path
        for path, leaf in named_leaves(before)
        if np.any(np.asarray(after[path]) != np.asarray(leaf))
    }
    assert moved == after.keys() - {"embed/embedding"}
    assert config.tie_embeddings


def test_a_run_of_jaxtrain_is_adapted(tmp_path):
    """As docs/finetuning.md has it: what the run does not have stays at its initial values."""
    text = write_text(tmp_path / "text.txt")
    succeed("train_lm", *TINY, "--num_steps=1", f"--data.source={text}", f"--workdir={tmp_path}/a")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "{n} ", "completion": "x{n}"}}\n' for n in range(60)))
    page = (ROOT / "docs" / "finetuning.md").read_text()
    (pattern,) = re.findall(r"--checkpoint.partial_restore='(.*?)'", page)
    succeed(
        *("finetune_lm", *TINY, "--num_steps=1", "--lora.rank=2", "--sample_tokens=0"),
        *(f"--data.source={pairs}", "--data.tokenizer=bytes", f"--workdir={tmp_path}/b"),
        *(f"--checkpoint.restore_from={tmp_path}/a", f"--checkpoint.partial_restore={pattern}"),
    )
    sizes = TransformerConfig(num_layers=2, embed_dim=32, mlp_dim=64)
    base = dict(named_leaves(load_params(transformer(sizes), tmp_path / "a")))
    adapted = transformer(sizes, lora=LoraConfig(rank=2))
    for path, leaf in named_leaves(load_params(adapted, tmp_path / "b")):
        if path in base:
            np.testing.assert_array_equal(leaf, jnp.asarray(base[path], jnp.bfloat16), path)
