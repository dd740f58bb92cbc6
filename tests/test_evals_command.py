"""jaxtrain eval: models as their files say, records and report of a run, and the real lm-eval."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types

import experimenting
import hugging
import jax.numpy as jnp
import numpy as np
import pytest
from experimenting import TINY, eval_records, run, succeed

from jaxtrain import cli
from jaxtrain.data.tokenizing import ByteTokenizer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.evals import command
from jaxtrain.evals.answers import Answers
from jaxtrain.evals.command import EvalConfig, evaluate
from jaxtrain.evals.results import table, task_records
from jaxtrain.evals.subject import open_directory, open_run
from jaxtrain.metrics import JsonlWriter, read_records

pytestmark = pytest.mark.usefixtures("compile_cache")

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
DEFAULTS = {"precision": "", "max_length": 0}
RESULTS = {
    "results": {
        "colours": {
            "alias": "colours", "acc,none": 0.75, "acc_stderr,none": 0.25,
            "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "sample_len": 4,
        },
        "a group": {"alias": "a group"},
    },
    "versions": {"colours": 1.5},
    "n-shot": {"colours": 2},
    "n-samples": {"colours": {"original": 9, "effective": 4}},
}  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = experimenting.write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return [
        *(*TINY, f"--data.source={text}", "--num_steps=4", "--optimizer.warmup_steps=0"),
        *("--log_every_steps=1", "--checkpoint.every_steps=2", "--optimizer.ema_decay=0.5"),
    ]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, words):
    """A run of train_lm on bytes."""
    path = tmp_path_factory.mktemp("run") / "run"
    succeed("train_lm", *words, f"--workdir={path}")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = hugging.copy("gpt2", tmp_path_factory.mktemp("hf") / "model")
    hugging.write_tokenizer(directory)
    return directory


def test_the_model_of_a_run(workdir, tmp_path):
    """Scores of a batch of the run's own length: what --evaluate would add up."""
    common = {"mesh": "fsdp:-1", **DEFAULTS}
    subject = open_run(str(workdir), step=-1, ema=False, **common)
    assert (subject.step, subject.max_length) == (4, 32)
    assert isinstance(subject.tokenizer, ByteTokenizer)
    assert (subject.prefix, subject.ends) == (255, {255})
    older = open_run(str(workdir), step=2, ema=False, **common)
    average = open_run(str(workdir), step=-1, ema=True, **common)
    text = "7 times 8 is 56\n"
    scores = [Answers(one).rolling_log_likelihoods([text])[0] for one in (subject, older, average)]
    assert len(set(scores)) == 3
    assert scores[0] > scores[1], "it has learned"
    tokens = np.array([[255, *text.encode()]], np.int32)
    logits = hugging.scores(subject.model, subject.params, np.tile(tokens, (8, 1)), subject.mesh)
    logits = np.float64(logits[0])
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total = sum(log_probs[place, token] for place, token in enumerate(text.encode()))
    assert scores[0] == pytest.approx(total, abs=1e-3)


def test_a_model_of_hugging_face_and_what_is_imported_of_it(directory, tmp_path):
    direct = open_directory(directory, mesh="fsdp:-1", **DEFAULTS)
    cli.main(["jaxtrain", "import-hf", str(directory), f"--workdir={tmp_path / 'run'}"])
    imported = open_run(
        str(tmp_path / "run"), step=-1, ema=False, mesh="data:-1", precision="", max_length=0
    )
    positions = hugging.read_json(directory / "config.json")["n_positions"]
    asked = [("one two", " three"), ("", "one"), ("a", "b" * positions)]
    scores = []
    for subject in (direct, imported):
        assert subject.max_length == positions
        assert subject.tokenizer.decode([subject.tokenizer.end_of_document - 1]) == "<|im_start|>"
        assert subject.template().prompt([{"role": "user", "content": "x"}]).endswith("assistant\n")
        scores.append(Answers(subject).log_likelihoods(asked))
    for one, other in zip(*scores, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
    lower = open_directory(directory, mesh="fsdp:-1", precision="bfloat16", max_length=8)
    (found,) = Answers(lower).log_likelihoods(asked[:1])
    assert found.log_likelihood != scores[0][0].log_likelihood
    assert found.log_likelihood == pytest.approx(scores[0][0].log_likelihood, rel=0.05)
    with pytest.raises(ConfigError, match="learned positions"):
        open_directory(directory, mesh="fsdp:-1", precision="", max_length=positions + 1)


def test_a_run_without_a_tokenizer_is_refused(tmp_path):
    directory = hugging.copy("gpt2", tmp_path / "model")
    cli.main(["jaxtrain", "import-hf", str(directory), f"--workdir={tmp_path / 'run'}"])
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        open_run(str(tmp_path / "run"), step=-1, ema=False, mesh="fsdp:-1", **DEFAULTS)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "needs either --workdir, the directory of a run, or --model"),
        ({"workdir": "a", "model": "b"}, "got workdir='a' and model='b'"),
        ({"workdir": "a"}, "needs --tasks"),
        ({"model": "b", "tasks": "c", "ema": True}, "model=b has one set of weights"),
        ({"workdir": "a", "tasks": "c"}, "bash scripts/setup.sh eval, or pip install 'jaxtrain\\["),
    ],
)
def test_wrong_flags_are_refused(config, match, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=match):
        evaluate(EvalConfig(**config))


def test_stray_words_are_refused(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["jaxtrain", "eval", "arc_easy"])
    assert end.value.code == 2
    assert "jaxtrain eval takes flags as --name=value; got arc_easy" in capsys.readouterr().err


def test_results_become_records_and_a_table():
    (record,) = task_records(RESULTS, 7, {"limit": 4})
    assert record == {
        "step": 7, "eval": True, "task": "colours", "task_version": "1.5", "num_fewshot": 2,
        "samples": 4, "limit": 4, "acc": 0.75, "acc_stderr": 0.25, "exact_match,strict": 0.5,
    }  # fmt: skip
    assert [line.split() for line in table([record]).splitlines()] == [
        ["task", "metric", "value", "+-", "shots", "questions"],
        ["colours", "acc", "0.7500", "0.2500", "2", "4"],
        ["exact_match,strict", "0.5000", "-", "2", "4"],
    ]


@pytest.fixture
def harness(monkeypatch):
    """Stands for lm-eval: answers with `RESULTS`, and notes what it was asked."""
    asked = {}

    def run_tasks(answers, manager, names, **settings):
        asked.update(settings, names=names, manager=manager, step=answers.subject.step)
        return RESULTS

    module = types.ModuleType("jaxtrain.evals.harness")
    module.open_tasks = lambda names, paths: ("tasks", paths)
    module.run_tasks = run_tasks
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(command, "require_extra", lambda: None)
    return asked


def test_results_go_into_the_files_of_the_run(words, tmp_path, harness, capsys):
    workdir = tmp_path / "run"
    succeed("train_lm", *words, f"--workdir={workdir}")
    before = eval_records(workdir)
    flags = (f"--workdir={workdir}", "--tasks=colours, a*", f"--task_path={tmp_path}")
    for more in ((), ("--limit=3", "--num_fewshot=0", "--step=2", f"--output={tmp_path}/all.json")):
        cli.main(["jaxtrain", "eval", *flags, *more])
    assert harness == {
        "names": ["colours", "a*"], "manager": ("tasks", [str(tmp_path)]), "step": 2,
        "num_fewshot": 0, "limit": 3, "apply_chat_template": False,
    }  # fmt: skip
    assert "colours  acc" in capsys.readouterr().out
    assert json.loads((tmp_path / "all.json").read_text()) == RESULTS
    added = [record for record in eval_records(workdir) if "task" in record]
    assert [(record["step"], record.get("limit"), record["acc"]) for record in added] == [
        (4, None, 0.75),
        (2, 3, 0.75),
    ]
    assert [record for record in eval_records(workdir) if "task" not in record] == before
    page = (workdir / "report.html").read_text()
    text = re.sub(r"<[^>]+>", " ", page[page.index("<h2>Tasks") : page.index("<h2>Layout")])
    assert text.count("colours") == 4
    assert "0.7500 &plusmn; 0.2500" in text
    assert "limit 3" in text
    # A task is no evaluation of the run's own data: the same command owes and reports what it did.
    again = run("train_lm", *words, f"--workdir={workdir}")
    assert again.code == 0
    assert "evaluation  step 4  loss" not in again.err
    assert [record for record in eval_records(workdir) if "task" in record] == added


def test_a_record_of_a_task_settles_no_evaluation(tmp_path):
    from jaxtrain.config import RunConfig
    from jaxtrain.run_files import evaluated_step, last_metrics

    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 5, "loss": 2.0})
    writer.write({"step": 5, "eval": True, "loss": 3.0})
    writer.write({"step": 9, "loss": 1.0})
    writer.write({"step": 9, "eval": True, "task": "colours", "acc": 0.5})
    writer.close()
    config = RunConfig(workdir=str(tmp_path))
    assert evaluated_step(config, 9) == 5
    assert last_metrics(config, 9) == ({"loss": 1.0}, {"loss": 3.0})


def test_nothing_is_written_unless_it_is_a_run_s(workdir, directory, harness):
    before = (workdir / "metrics.jsonl").read_bytes()
    evaluate(EvalConfig(workdir=str(workdir), tasks="colours", record=False))
    assert harness["step"] == 4
    files = sorted(directory.iterdir())
    evaluate(EvalConfig(model=str(directory), tasks="colours"))
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert sorted(directory.iterdir()) == files
    with pytest.raises(CheckpointError, match="holds no run"):
        evaluate(EvalConfig(workdir=str(workdir / "absent"), tasks="colours"))
    assert not (workdir / "absent").exists()
    with pytest.raises(ConfigError, match="task_path=absent must be a folder"):
        evaluate(EvalConfig(model=str(directory), tasks="colours", task_path="absent"))


# The real lm-eval, where it is installed: in a process of its own, which may reach no network

TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} is",
        "doc_to_target": "{{choices.index(answer)}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} is {{answer}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "tell": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}} is",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCS = [
    {
        "question": f"{n} times {n + 1}",
        "answer": f"{n * (n + 1)}",
        "choices": [f"{n * (n + 1)}", f"{n + 1}", f"{7 * n + 3}"],
    }
    for n in range(3, 23)
]
ALONE = """
import runpy, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("no network is needed")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv[0] = "jaxtrain"
runpy.run_module("jaxtrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def task_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, content in TASKS.items():
        task = {
            "task": name, "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(data)}}, **content,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def ask(*words, home):
    """What `jaxtrain eval` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "eval", *map(str, words)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not HAS_HARNESS, reason="the extra eval is not installed")
def test_lm_eval_asks_our_models(words, task_path, tmp_path):
    """Its metrics are those of NumPy on our parallel forward, question by question."""
    workdir = tmp_path / "run"
    succeed("train_lm", *words, f"--workdir={workdir}")
    out = ask(
        f"--workdir={workdir}", "--tasks=choose,read,tell", f"--task_path={task_path}",
        "--max_length=64", home=tmp_path / "home",
    )  # fmt: skip
    found = {record["task"]: record for record in read_records(workdir / "metrics.jsonl")
             if "task" in record}  # fmt: skip
    assert found.keys() == TASKS.keys()
    assert {record["samples"] for record in found.values()} == {len(DOCS)}
    subject = open_run(
        str(workdir), step=-1, ema=False, mesh="fsdp:-1", precision="", max_length=64
    )

    def log_likelihood(context, text):
        tokens = (context + text).encode()
        row = np.array([[255, *tokens]], np.int32) if not context else np.array([[*tokens]])
        logits = hugging.scores(
            subject.model, subject.params, np.tile(row, (8, 1)).astype(jnp.int32), subject.mesh
        )
        log_probs = np.float64(logits[0])
        log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
        first = len(row[0]) - len(text)
        return sum(log_probs[first + n - 1, byte] for n, byte in enumerate(text.encode()))

    right, bits, num_bytes = 0, 0.0, 0
    for doc in DOCS:
        scores = [log_likelihood(f"{doc['question']} is", f" {c}") for c in doc["choices"]]
        right += scores.index(max(scores)) == 0
        text = f"{doc['question']} is {doc['answer']}"
        bits -= log_likelihood("", text) / np.log(2)
        num_bytes += len(text)
    assert found["choose"]["acc"] == pytest.approx(right / len(DOCS))
    assert found["read"]["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-4)
    assert 0 <= found["tell"]["exact_match"] <= 1
    assert all(name in out for name in ("choose", "bits_per_byte", "exact_match"))


@pytest.mark.skipif(not HAS_HARNESS, reason="the extra eval is not installed")
def test_lm_eval_asks_a_model_of_hugging_face_as_in_a_chat(directory, task_path, tmp_path):
    out = ask(
        f"--model={directory}", "--tasks=cho*", f"--task_path={task_path}", "--limit=2",
        "--num_fewshot=1", "--apply_chat_template", f"--output={tmp_path / 'all.json'}",
        home=tmp_path / "home",
    )  # fmt: skip
    assert re.search(r"choose +acc +\d", out)
    results = json.loads((tmp_path / "all.json").read_text())
    assert results["n-shot"]["choose"] == 1
    assert results["n-samples"]["choose"]["effective"] == 2


@pytest.mark.skipif(not HAS_HARNESS, reason="the extra eval is not installed")
def test_an_unknown_task_is_refused_before_the_model_is_read(tmp_path, task_path):
    words = [f"--model={tmp_path}", "--tasks=choos", f"--task_path={task_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "eval", *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 2
    assert "tasks=choos must be tasks of lm-eval or of --task_path; did you mean choose?" in (
        done.stderr
    )
