"""finetune_lm.py on a tiny model of Hugging Face: from its directory to an export of the result."""

import ast
import json
import math
import re

import hugging
import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from experimenting import ROOT, TINY, eval_records, start, succeed, train_records, write_text

from jaxtrain import cli
from jaxtrain.models.functional import logits
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


# Sampling


def greedy(directory, tokens, num_tokens):
    """The likeliest tokens by the parallel forward of a whole model, one after the other."""
    _, model, params, _ = hugging.load(directory)

    @jax.jit
    def scores(tokens):
        hidden, _ = model.apply(params, {}, {"tokens": tokens}, key=None, train=False)
        return logits(model, params, hidden)

    tokens = list(tokens)
    for position in range(len(tokens), len(tokens) + num_tokens):
        padded = np.array([tokens + [0] * (128 - len(tokens))], np.int32)
        tokens.append(int(scores(padded)[0, position - 1].argmax()))
    return tokens[-num_tokens:]


NAMES = ["<unk>", "\n", *map(chr, range(32, 127)), "<|im_start|>", "<|im_end|>", "", ""]
"""What `write_tokenizer` makes of tokens; the models have two more."""


@pytest.fixture(scope="module")
def imported(model, tmp_path_factory):
    """What `jaxtrain import-hf` makes of it; generation ends at 98 only."""
    workdir = tmp_path_factory.mktemp("imported") / "base"
    cli.main(["jaxtrain", "import-hf", str(model), f"--workdir={workdir}"])
    (workdir / "hf" / "generation_config.json").write_text('{"eos_token_id": 98}')
    return workdir


def test_a_chat_is_answered_as_the_template_asks(model, imported, tmp_path):
    """Text from Jinja itself, tokens from the parallel forward of the original."""
    text = jinja2.Template(hugging.TEMPLATE, trim_blocks=True).render(
        messages=[{"role": "user", "content": "Hi?"}], add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    written = map(NAMES.index, re.findall(r"<\|im_(?:start|end)\|>|[\s\S]", text))
    tokens = greedy(model, written, 20)
    tokens = tokens[: tokens.index(98)] if 98 in tokens else tokens
    flags = (f"--workdir={imported}", "--num_tokens=20", "--temperature=0")
    out = succeed("sample_lm", *flags, "--chat", "--prompt=Hi?").out
    assert out == f"Hi?\n{''.join(NAMES[token] for token in tokens)}\n\n"
    # The same messages in a file, and a template of one's own that does not write the roles.
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi?"}]}')
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}")
    chat = (*flags, "--chat", f"--prompts_file={tmp_path / 'asked.jsonl'}")
    assert succeed("sample_lm", *chat).out == out
    other = succeed("sample_lm", *chat, f"--chat_template={tmp_path / 'other.jinja'}").out
    plain = succeed("sample_lm", *flags, "--prompt=Hi?").out
    assert other == plain.replace("Hi?", "Hi?\n", 1) != out


def test_generation_ends_at_the_tokens_that_the_model_names(imported):
    flags = (f"--workdir={imported}", "--num_tokens=24", "--temperature=0", "--prompt=abc")
    path = imported / "hf" / "generation_config.json"
    before = path.read_text()
    free = succeed("sample_lm", *flags).out.removeprefix("abc").removesuffix("\n\n")
    path.write_text(json.dumps({"eos_token_id": [98, NAMES.index(free[2])]}))
    found = succeed("sample_lm", *flags).out
    path.write_text(before)
    assert found == f"abc{free[: free.index(free[2])]}\n\n"


def test_what_lora_learned_is_sampled(tuned):
    """As the run said itself after its last step."""
    workdir, said = tuned
    (workdir / "hf" / "generation_config.json").write_text('{"eos_token_id": 98}')
    flags = (f"--workdir={workdir}", "--chat", "--num_tokens=8", "--temperature=0")
    answers = []
    for when in ("before", "after"):
        ((prompt, answer),) = re.findall(rf"{when}: ('.*') -> ('.*')", said)
        question = ast.literal_eval(prompt).split("\n")[1]
        answers.append(f"{question}\n{ast.literal_eval(answer)}\n\n")
    assert succeed("sample_lm", *flags, f"--prompt={question}").out == answers[1] != answers[0]
