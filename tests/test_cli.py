import importlib.metadata
import os
import re
import subprocess
import sys
import types

import pytest

import jaxtrain
from jaxtrain import cli


def run(capsys, *words):
    """(exit code, standard output, standard error) of a command."""
    code = 0
    try:
        cli.main(["jaxtrain", *words])
    except SystemExit as leaving:
        code = leaving.code
    return code, *capsys.readouterr()


def fake_module(monkeypatch, name, **attributes):
    module = types.ModuleType(f"jaxtrain.{name}")
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, f"jaxtrain.{name}", module)
    monkeypatch.setattr(jaxtrain, name, module, raising=False)


class FakeCheckpointer:
    steps = (5, 10)
    closed = 0

    def __init__(self, directory, *, keep_last, keep_every_steps=0, read_only=False):
        assert read_only, "looking at a run must not change it"
        assert os.path.basename(directory) == "checkpoints"

    def committed_steps(self):
        return list(self.steps)

    def contents(self, step):
        assert step in self.steps
        return [("params/embed/embedding", (256, 128), "float32"), ("step", (), "int32")]

    def close(self):
        type(self).closed += 1


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    fake_module(monkeypatch, "checkpoint", Checkpointer=FakeCheckpointer)
    FakeCheckpointer.closed = 0
    return str(tmp_path)


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    for name, text in (
        ("checkpoints WORKDIR [--step=N]", "list the checkpoints"),
        ("doctor [--workdir=DIR] [--json]", "look whether"),
        ("eval --workdir=WORKDIR --tasks=NAME", "answer tasks"),
        ("export-hf DIR --workdir=WORKDIR", "write the model"),
        ("import-hf DIR --workdir=WORKDIR", "make a checkpoint"),
        ("launch --processes=N", "run a command"),
        ("prepare SOURCE ... OUT", "make token shards"),
        ("report WORKDIR", "write report.html"),
        ("verify-hf DIR [--python=PATH]", "see whether"),
        ("verify-shards SHARDS ...", "read token shards"),
        ("version", "versions of"),
    ):
        assert re.search(rf"\n  {re.escape(name)}.* {text}", out)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["launch", "--help"], "--restarts=0"),
        (["doctor", "-h"], "--device_timeout_seconds=120.0"),
        (["prepare", "--help"], "--tokenizer=bytes"),
        (["import-hf", "--help"], "--workdir="),
        (["eval", "--help"], "--num_fewshot=-1"),
        (["export-hf", "--help"], "--shard_bytes=5000000000"),
        (["verify-hf", "--help"], "--length=0"),
    ],
)
def test_commands_with_flags_list_them(capsys, words, flag):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert f"\n  {flag} " in out


def test_help_of_a_command(capsys):
    assert run(capsys, "report", "--help") == (
        0,
        "Usage: jaxtrain report WORKDIR\n\nwrite report.html again from the files of a run\n",
        "",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reprot"], "'reprot' is not a command; did you mean report?"),
        (
            ["train"],
            "'train' is not a command; one of checkpoints, doctor, eval, export-hf, import-hf,"
            " launch, prepare, report, verify-hf, verify-shards, version",
        ),
        (["report"], "jaxtrain report takes WORKDIR; got nothing"),
        (["report", "a", "b"], "jaxtrain report takes WORKDIR; got a b"),
        (["report", "--x"], "jaxtrain report takes WORKDIR; got --x"),
        (["checkpoints", "/tmp", "--step"], "--step takes the number of a step"),
        (["checkpoints", "/tmp", "--step=x"], "--step=x must be a whole number"),
        (["version", "x"], "jaxtrain version takes no arguments; got x"),
    ],
)
def test_bad_commands(capsys, words, message):
    assert run(capsys, *words) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize("command", ["checkpoints", "report"])
def test_a_run_that_is_not_there(capsys, command):
    """The same fault, and code, as `--evaluate --workdir=/absent`."""
    message = "error: WORKDIR=/absent must be the directory of a run; there is none\n"
    assert run(capsys, command, "/absent") == (4, "", message)


def test_checkpoints_lists_the_steps(capsys, workdir):
    assert run(capsys, "checkpoints", workdir) == (0, "step 5\nstep 10\n", "")
    assert FakeCheckpointer.closed == 1


@pytest.mark.parametrize("words", [["--step=10"], ["--step", "10"]])
def test_checkpoints_shows_one_step(capsys, workdir, words):
    code, out, _ = run(capsys, "checkpoints", workdir, *words)
    assert code == 0
    assert out.splitlines() == [
        "params/embed/embedding  [256,128]  float32",
        "step                    []         int32",
    ]


def test_checkpoints_of_an_absent_step_or_an_empty_run(capsys, workdir, monkeypatch):
    place = os.path.join(workdir, "checkpoints")
    assert run(capsys, "checkpoints", workdir, "--step=77") == (
        4,
        "",
        f"error: {place} holds no whole checkpoint of step 77; present: 5, 10\n",
    )
    monkeypatch.setattr(FakeCheckpointer, "steps", ())
    assert run(capsys, "checkpoints", workdir) == (
        4,
        "",
        f"error: {place} holds no whole checkpoint; present: none\n",
    )
    assert FakeCheckpointer.closed == 2


def test_report_is_written_again(capsys, tmp_path, monkeypatch):
    fake_module(monkeypatch, "report", write_report=lambda workdir: f"{workdir}/report.html")
    assert run(capsys, "report", str(tmp_path)) == (0, f"{tmp_path}/report.html\n", "")


def test_version_as_a_module():
    process = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "version"],
        env=dict(os.environ, JAX_PLATFORMS="doesnotexist"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = dict(line.split(" ") for line in process.stdout.splitlines())
    assert found["jax"] == importlib.metadata.version("jax")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"jaxtrain", "flax", "optax", "orbax-checkpoint", "grain"} <= found.keys()


@pytest.mark.parametrize("words", [["version"], ["launch", "--help"], ["--help"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "jaxtrain", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_an_output_that_cannot_be_written_is_one_line(options):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, *options, "-m", "jaxtrain", "version"],
            env=variables,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "error: standard output cannot be written: No space left on device\n"
    assert (process.returncode, process.stderr) == (4, said)


def test_an_interrupted_command_ends_quietly(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_usage", interrupt)
    assert run(capsys, "help") == (130, "", "")
