"""Every script of experiments/: it runs, reads its options, and computes what it says.

New scripts are found by themselves. One that does not train needs a line in `TOOLS`.
"""

import ast
import json
import math
import re

import experimenting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experimenting import TINY, eval_records, evaluation, start, succeed, train_records

from jaxtrain import cli, fields
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import record_reads, unread
from jaxtrain.data.manifest import Manifest
from jaxtrain.models.functional import logits
from jaxtrain.models.sample import generate
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.runs import load_params

pytestmark = pytest.mark.usefixtures("compile_cache")

TOOLS = {"sample_lm": "train_lm"}
"""Scripts that do not train -> the script whose run they take."""
TRAINERS = [name for name in experimenting.SCRIPTS if name not in TOOLS]

# The defaults warm up for longer than these runs last.
TWO_STEPS = ("--num_steps=2", "--log_every_steps=1", "--optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return experimenting.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def quick(text):
    """Script -> flags with which it is quick; what is not here is quick as it is."""
    pairs = text.parent / "pairs.jsonl"
    record = '{"prompt": "1 times ", "completion": "2 is 2"}\n'
    pairs.write_text("".join(record.replace("1", str(n)) for n in range(40)))
    finetune = [*TINY, f"--data.source={pairs}", "--data.tokenizer=bytes", "--sample_tokens=4"]
    return {
        "train_lm": [*TINY, f"--data.source={text}"],
        "finetune_lm": [*finetune, "--lora.rank=2"],
    }


@pytest.fixture(scope="module")
def lm_run(tmp_path_factory, quick):
    """The directory of a run of train_lm, of two steps, each saved."""
    workdir = tmp_path_factory.mktemp("lm") / "run"
    words = [*quick["train_lm"], *TWO_STEPS, "--checkpoint.every_steps=1"]
    succeed("train_lm", *words, f"--workdir={workdir}", num_devices=1)
    return workdir


# Each script


def test_there_are_scripts_and_all_are_short():
    assert {"train_lm", "train_image", *TOOLS} <= set(experimenting.SCRIPTS)
    for name in experimenting.SCRIPTS:
        source = (experimenting.ROOT / "experiments" / f"{name}.py").read_text()
        assert len(source.splitlines()) <= 80, name
        # What it does, and the command.
        assert f"python experiments/{name}.py" in (ast.get_docstring(ast.parse(source)) or "")


@pytest.mark.parametrize("name", TRAINERS)
def test_pulse(name, quick, tmp_path):
    ended = start(name, *quick.get(name, ()), *TWO_STEPS, "--workdir=run", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "tensorboard", "report.html"} <= left
    assert [record["step"] for record in train_records(tmp_path / "run")] == [1, 2]
    evaluated = [0, 2] if name == "finetune_lm" else [2]
    assert [record["step"] for record in eval_records(tmp_path / "run")] == evaluated
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    # Case C7: a relative path is logged whole.
    assert f"workdir {tmp_path / 'run'}\n" in ended.err


@pytest.mark.parametrize("name", TOOLS)
def test_pulse_of_a_tool(name, lm_run, tmp_path):
    assert TOOLS[name] == "train_lm", "give the run of another script here"
    ended = start(name, f"--workdir={lm_run}", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("import ")
    assert list(tmp_path.iterdir()) == []


# Unread options

# Read where a run has several processes: tests/multiprocess.
WITH_OTHERS = ["init_timeout_seconds", "stall_timeout_seconds"]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_reads_every_option(name, quick, tmp_path):
    # What is asked for only where something stands in the way: a directory that is no checkpoint.
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    words = [*quick.get(name, ()), *TWO_STEPS, "--eval_every_steps=1", "--checkpoint.overwrite"]
    with record_reads() as reads:
        ended = succeed(name, *words, f"--workdir={tmp_path}", num_devices=1)
    assert unread(ended.config, reads) == WITH_OTHERS


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_reads_every_option(name, lm_run):
    with record_reads() as reads:
        ended = succeed(name, f"--workdir={lm_run}")
    assert unread(ended.config, reads) == []


SHRUNK = (
    *("--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=4"),
    *("--model.mlp_dim=64", "--model.head_dim=8", "--model.vocab_size=300"),
)
KINDS = {
    "llama3.2-1b": (
        *("--optimizer=sgd", "--optimizer.momentum=0.9", "--optimizer.schedule=wsd"),
        "--data.packing=best_fit",
    ),
    "gpt2": ("--optimizer=lion", "--optimizer.schedule=linear", "--optimizer.freeze=^(embed|pos)"),
    "qwen3-0.6b": ("--optimizer.schedule=constant", "--optimizer.ema_decay=0.9"),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, text, tmp_path_factory):
    """(preset, how it ended, directory, paths that were read) of a shrunken preset."""
    workdir = tmp_path_factory.mktemp("kind")
    words = [*TINY, *SHRUNK, *TWO_STEPS, "--eval_every_steps=1", "--checkpoint.every_steps=1"]
    if request.param != "gpt2":
        words.append("--model.num_kv_heads=2")
    (workdir / "checkpoints" / "9").mkdir(parents=True)
    words += ["--checkpoint.overwrite", f"--data.source={text}", f"--workdir={workdir}"]
    with record_reads() as reads:
        words = [f"--model={request.param}", *words, *KINDS[request.param]]
        ended = succeed("train_lm", *words, num_devices=1)
    return request.param, ended, workdir, reads


def test_other_models_and_optimizers_train_and_read_what_is_theirs(kind):
    _, ended, workdir, reads = kind
    assert unread(ended.config, reads) == WITH_OTHERS
    for record in train_records(workdir):
        assert np.log(300) - 1 < record["loss"] < np.log(300) + 1
        assert record["grad_norm"] > 0


def test_an_optimizer_keeps_the_moments_that_are_its_own(kind):
    preset, _, workdir, _ = kind
    arrays = Checkpointer(workdir / "checkpoints", read_only=True).contents(2)
    moments = {
        found[1]
        for path, _, _ in arrays
        if (found := re.search(r"opt_state/.*?/(mu|nu|trace)/", path))
    }
    expected = {"llama3.2-1b": {"trace"}, "gpt2": {"mu"}, "qwen3-0.6b": {"mu", "nu"}}
    assert moments == expected[preset]
    averages = [path for path, _, _ in arrays if path.startswith("ema_params/")]
    assert bool(averages) == (preset == "qwen3-0.6b")


def test_what_is_frozen_stays_and_the_rest_moves(kind):
    preset, ended, workdir, _ = kind
    model = transformer(ended.config.model)
    before, after = (load_params(model, workdir, step=step) for step in (1, 2))
    same = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array_equal(old, new)
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
    }
    frozen = {"embed/embedding", "position/embedding"} if preset == "gpt2" else set()
    assert {path for path, is_same in same.items() if is_same} == frozen


def test_an_average_of_the_parameters_is_evaluated_too(kind):
    preset, _, workdir, _ = kind
    for record in eval_records(workdir):
        assert ("ema_loss" in record) == (preset == "qwen3-0.6b")
    if preset == "qwen3-0.6b":
        first, last = eval_records(workdir)
        # Debiased, so after one step it is the parameters; later it lags behind.
        np.testing.assert_allclose(first["ema_loss"], first["loss"], rtol=1e-6)
        assert last["ema_loss"] > last["loss"]


def test_every_option_of_train_lm_applies_somewhere():
    """Those that apply to some models and optimizers only are in the runs above."""
    import train_lm

    from jaxtrain.config import replace_paths

    never = {leaf.path for leaf in fields.leaves(train_lm.LmConfig)}
    for preset, words in {**KINDS, "nano": ()}.items():
        names = {"--optimizer": "optimizer.name"}
        given = [word.split("=") for word in words if not word.startswith("--optimizer.mom")]
        changes = {names.get(flag, flag.removeprefix("--")): value for flag, value in given}
        config = replace_paths(train_lm.LmConfig(), {"model": train_lm.PRESETS[preset]})
        changes = {
            k: v
            for k, v in changes.items()
            if k in ("optimizer.name", "optimizer.schedule", "data.packing")
        }
        never &= fields.inapplicable(replace_paths(config, changes))
    assert never == set()


# Other numerics, the same training

STEPS = ("--num_steps=5", "--optimizer.warmup_steps=2", "--log_every_steps=1")


@pytest.fixture(scope="module")
def train(tmp_path_factory, quick):
    """Trains a script for five steps; returns (records of the steps, the last evaluation)."""
    cache = {}

    def run(name, *words, num_devices=1):
        if (name, words, num_devices) not in cache:
            workdir = tmp_path_factory.mktemp(name)
            words_ = [*quick.get(name, ()), *STEPS, *words, f"--workdir={workdir}"]
            succeed(name, *words_, num_devices=num_devices)
            cache[name, words, num_devices] = train_records(workdir), eval_records(workdir)[-1]
        return cache[name, words, num_devices]

    return run


def assert_close(found, expected, rtol, names=("loss", "grad_norm")):
    """Compares some metrics of all steps and of the evaluation."""
    for name in names:
        values, wanted = ([record[name] for record in run[0]] for run in (found, expected))
        np.testing.assert_allclose(values, wanted, rtol=rtol, err_msg=name)
    np.testing.assert_allclose(found[1]["loss"], expected[1]["loss"], rtol=rtol)


@pytest.mark.parametrize(
    ("words", "rtol"),
    [
        (["--remat=dots"], 2e-5),
        (["--remat=full"], 2e-5),
        (["--accumulate_steps=4"], 2e-5),
        (["--precision=bfloat16"], 2e-2),
    ],
)
def test_train_lm_computes_the_same_otherwise(train, words, rtol):
    expected, found = train("train_lm"), train("train_lm", *words)
    assert expected[0][-1]["loss"] < expected[0][0]["loss"] - 0.1
    assert_close(found, expected, rtol)
    if "bfloat16" in words[0]:
        # It did compute in another precision.
        assert abs(found[0][0]["loss"] / expected[0][0]["loss"] - 1) > 1e-6


def test_train_image_computes_the_same_in_bfloat16(train):
    expected, found = train("train_image"), train("train_image", "--precision=bfloat16")
    assert_close(found, expected, 5e-2, names=["loss"])
    assert abs(found[0][0]["loss"] / expected[0][0]["loss"] - 1) > 1e-6


def test_train_image_computes_the_same_on_eight_devices(train):
    """Also batch statistics, and an evaluation whose 360 rows do not fill the last 64."""
    one, eight = train("train_image"), train("train_image", "--mesh=data:8", num_devices=8)
    assert_close(eight, one, 1e-4)
    for name in ("accuracy", "weight", "rows"):
        assert eight[1][name] == one[1][name], name
    assert one[1]["rows"] == 360


# What the scripts promise


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """(how it ended, directory) of train_image as a user runs it."""
    workdir = tmp_path_factory.mktemp("image") / "run"
    return start("train_image", f"--workdir={workdir}", is_optimized=True), workdir


def test_train_image_reads_digits_it_never_saw(digits):
    ended, workdir = digits
    assert ended.code == 0, ended.err
    assert (
        "digits: 1797 images of 8x8; image 0 and every fifth after it are held out: 1437 for"
        " training, 360 for evaluation"
    ) in ended.err
    last = eval_records(workdir)[-1]
    assert last["accuracy"] >= 0.97
    assert (last["step"], last["rows"]) == (300, 360)


def test_an_evaluation_is_the_same_on_one_and_on_eight_devices(digits):
    _, workdir = digits
    last = eval_records(workdir)[-1]
    for mesh in ("data:8", "fsdp:4,tensor:2"):
        words = [f"--workdir={workdir}", f"--mesh={mesh}", "--evaluate"]
        found = evaluation(succeed("train_image", *words))
        for name in ("accuracy", "weight", "rows", "step"):
            assert found[name] == last[name], name
        np.testing.assert_allclose(found["loss"], last["loss"], rtol=1e-4)


def test_the_decoder_gives_the_probabilities_of_the_parallel_forward(tmp_path_factory):
    """512 validation bytes of the default data, one by one with a cache, by a trained nano."""
    from train_lm import LmConfig

    from jaxtrain.data.text import text_datasets

    config = LmConfig()
    workdir = tmp_path_factory.mktemp("nano")
    # Trained on something small; what the scores say is not the question, symmetry would be.
    source = experimenting.write_text(workdir / "text.txt")
    words = ["--num_steps=12", "--data.sequence_length=32", "--global_batch_size=8"]
    words += [f"--data.source={source}", "--mesh=data:1", f"--workdir={workdir / 'run'}"]
    succeed("train_lm", *words, num_devices=1)
    model = transformer(TransformerConfig())
    params = load_params(model, workdir / "run")
    held_out = text_datasets(config.data)[1]
    rows = held_out.read(np.arange(-(-512 // config.data.sequence_length)))
    tokens_1T = jnp.asarray(np.concatenate(rows["tokens"])[None, :512])
    assert tokens_1T.shape == (1, 512)

    def parallel(params, tokens_1T):
        return model.apply(params, {}, {"tokens": tokens_1T}, key=None, train=False)[0]

    def one_by_one(params, tokens_1T):
        def step(cache, inputs):
            token, position = inputs
            hidden_11D, cache = model.decode(params, cache, token[None, None], position[None, None])
            return cache, hidden_11D[0, 0]

        inputs = (tokens_1T[0], jnp.arange(512))
        return jax.lax.scan(step, model.init_cache(1, 512), inputs)[1][None]

    def log_probabilities(forward):
        return jax.jit(
            lambda tokens_1T: jax.nn.log_softmax(logits(model, params, forward(params, tokens_1T)))
        )

    with experimenting.light_compilation():
        expected_1TV = log_probabilities(parallel)(tokens_1T)
        found_1TV = log_probabilities(one_by_one)(tokens_1T)
        forgotten_1TV = log_probabilities(parallel)(tokens_1T.at[:, :200].set(32))
    assert found_1TV.shape == (1, 512, 256)
    np.testing.assert_allclose(found_1TV, expected_1TV, rtol=0, atol=1e-4)
    # A cache that loses something old would show.
    assert np.abs(forgotten_1TV - expected_1TV)[:, 300:].max() > 1e-2


# sample_lm


def sampled(workdir, *words):
    words = ["--num_tokens=40", "--prompt=12 times ", *words]
    return succeed("sample_lm", f"--workdir={workdir}", *words).out


def test_samples_are_a_function_of_the_seed(lm_run):
    one = sampled(lm_run, "--seed=1")
    assert one.startswith("12 times ")
    assert sampled(lm_run, "--seed=2") != one
    # The first of several is the one; the others differ from it.
    several = sampled(lm_run, "--seed=1", "--num_samples=2")
    assert several.startswith(one)
    assert several.removeprefix(one).strip() != one.strip()


def test_several_prompts_at_once_are_each_as_alone(lm_run, tmp_path):
    asked = ["12 times ", "7", "a prompt that is longer than one of the others is, 10 times"]
    flags = [f"--workdir={lm_run}", "--num_tokens=9", "--temperature=0"]
    alone = [succeed("sample_lm", *flags, f"--prompt={one}").out for one in asked]
    together = succeed("sample_lm", *flags, *(f"--prompt={one}" for one in asked))
    assert together.out == "".join(alone)
    assert len(set(alone)) == 3
    (tmp_path / "asked.txt").write_text("\n".join([*asked, "", ""]))
    batches = ["--batch_size=2", f"--prompts_file={tmp_path / 'asked.txt'}"]
    assert succeed("sample_lm", *flags, *batches).out == together.out
    num_tokens = sum(map(len, asked))
    speed = rf"3 rows: prefill {num_tokens} tokens of prompts in .* tokens/s; decode \d+ generated"
    assert re.search(speed, together.err)


def test_a_stop_string_ends_an_answer(lm_run):
    flags = ("--prompt=12 times ", "--temperature=0", "--num_tokens=60")
    whole = succeed("sample_lm", f"--workdir={lm_run}", *flags).out.removeprefix("12 times ")
    stop = whole[3:5]
    ended = succeed("sample_lm", f"--workdir={lm_run}", *flags, f"--stop={stop}", "--stop=,no,")
    assert ended.out == f"12 times {whole[: whole.index(stop)]}\n\n"


def test_temperature_0_takes_the_likeliest_of_the_step_asked_for(lm_run):
    greedy = sampled(lm_run, "--temperature=0", "--step=1")
    assert sampled(lm_run, "--top_k=1", "--seed=5", "--step=1") == greedy
    # Without a step it is the newest checkpoint, another model.
    assert sampled(lm_run, "--temperature=0") != greedy


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--workdir=absent"], 4, r"workdir=absent holds no run: .*config.json: No such file"),
        (["--prompt="], 2, "prompt is empty"),
        (["--prompt=a", "--prompt="], 2, "prompt is empty"),
        (["--stop="], 2, "a stop string is empty"),
        (["--prompts_file=absent.txt"], 4, "prompts_file=absent.txt cannot be read: No such"),
        (["--prompt=a", "--prompts_file=b"], 2, "prompt=a is read only with prompts_file="),
        (["--chat"], 2, "the run keeps no chat template; give --chat_template=FILE"),
        (["--chat_template=t.jinja"], 2, "chat_template=t.jinja is read only with chat=true"),
        (["--step=7"], 4, r"step 7.*1, 2"),
        (["--top_p=0"], 2, "--top_p=0 must be greater than 0"),
        (["--tempreature=1"], 2, "did you mean --temperature"),
    ],
)
def test_samples_that_cannot_be_drawn(lm_run, words, code, message):
    ended = experimenting.run("sample_lm", f"--workdir={lm_run}", *words)
    assert ended.code == code
    assert re.search(message, ended.error), ended.error


def test_a_run_of_another_experiment_is_refused(digits):
    _, workdir = digits
    ended = experimenting.run("sample_lm", f"--workdir={workdir}")
    assert ended.code == 4
    assert re.search(r"is no run of a transformer \(.*config\.json\)", ended.error)


def test_token_shards_are_trained_on_and_sampled_from(tmp_path, text, capsys):
    shards = tmp_path / "shards"
    cli.main(["jaxtrain", "prepare", str(text), str(shards), "--tokenizer=bpe:300"])
    words = [f"--data.source={shards}", f"--workdir={tmp_path / 'run'}", *TWO_STEPS]
    refused = experimenting.run("train_lm", *words, *TINY)
    assert refused.code == 2
    assert "model.vocab_size=256 is smaller than the 300 tokens of data.source=" in refused.error
    ended = succeed("train_lm", *words, *TINY, "--model.vocab_size=300", num_devices=1)
    assert "tokenizer bpe:300" in ended.err
    (record,) = eval_records(tmp_path / "run")
    assert 4 < record["loss"] < 2 * math.log(300)
    capsys.readouterr()
    drawn = sampled(tmp_path / "run", "--temperature=0")
    # The same tokens by hand, in the words of the shards' tokenizer.
    tokenizer = Manifest.read(str(shards)).open_tokenizer()
    config = TransformerConfig(num_layers=2, embed_dim=32, mlp_dim=64, vocab_size=300)
    model = transformer(config)
    (prompt,) = tokenizer.encode([b"12 times "])
    params = load_params(model, str(tmp_path / "run"))
    (tokens,) = generate(model, params, [prompt], num_tokens=40, temperature=0.0).tolist()
    end = tokenizer.end_of_document
    tokens = tokens[: tokens.index(end)] if end in tokens else tokens
    assert drawn == f"12 times {tokenizer.decode(tokens)}\n\n"


def test_config_json_holds_what_was_resolved_and_the_versions(lm_run):
    content = json.loads((lm_run / "config.json").read_text())
    assert content["config"]["num_steps"] == 2
    assert content["config"]["model"]["embed_dim"] == 32
    assert content["config"]["optimizer"]["learning_rate"] == 3e-3
    assert {"jaxtrain", "jax", "flax", "optax", "orbax-checkpoint"} <= set(content["versions"])
