import dataclasses
import logging
import os
import resource
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxtrain
import jaxtrain.program
from jaxtrain.config import Config, RunConfig, field
from jaxtrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    JaxtrainError,
    NonFiniteError,
)
from jaxtrain.main import Experiment, main

SCRIPT = '''"""Trains nothing, in no time."""
from jaxtrain.config import RunConfig
from jaxtrain.main import main

def build(config):
    print("BUILD")
    raise SystemExit(55)

if __name__ == "__main__":
    main(RunConfig, build, presets={"optimizer": {"plain": {"name": "sgd"}}})
'''


# In a process of its own, on a machine without a device


def run_script(tmp_path, *words):
    """Runs SCRIPT where JAX finds no backend; returns (process, seconds of processor time)."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    environment = dict(os.environ, JAX_PLATFORMS="doesnotexist", COLUMNS="90")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, str(path), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return process, seconds


def test_help_needs_no_device(tmp_path):
    process, seconds = run_script(tmp_path, "--help")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(
        "Usage: train.py [--flag=value ...]\n\nTrains nothing, in no time.\n"
    )
    assert "presets of --optimizer\n  plain  name=sgd" in process.stdout
    # Processor time, since other programs may use the machine.
    assert seconds < 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--remat", "False"], "--remat=False must be one of none, dots, full"),
        (["steps=5"], "'steps=5' is a stray word; did you mean --num_steps=5?"),
        (["--stesp=5"], "--stesp=5 is not a flag; did you mean --num_steps?"),
        (
            ["--num_steps=1e3"],
            "--num_steps=1e3 must be a whole number written out; use 1000",
        ),
        (["--config=absent.json"], "config file absent.json cannot be read: No such file or d"),
    ],
)
def test_bad_flags_end_with_2_and_one_line(tmp_path, words, message):
    process, seconds = run_script(tmp_path, *words)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"error: {message}")
    assert process.stderr.count("\n") == 1
    assert seconds < 5


# In this process, with a loop that only notes what it is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig(Config):
    num_layers: int = field(2, minimum=1, help="layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(RunConfig):
    model: NetConfig = field(default_factory=NetConfig)


@pytest.fixture
def calls(monkeypatch):
    """The calls that `main` makes into the heavy modules, in order."""
    noted: list[tuple] = []
    status = types.SimpleNamespace(status="finished")

    def note(name, result=None):
        def noting(*args, **kwargs):
            noted.append((name, args, kwargs))
            return result

        return noting

    def module(name, **attributes):
        fake = types.ModuleType(f"jaxtrain.{name}")
        vars(fake).update(attributes)
        monkeypatch.setitem(sys.modules, f"jaxtrain.{name}", fake)
        monkeypatch.setattr(jaxtrain, name, fake, raising=False)

    layout = types.SimpleNamespace(table=lambda: "w  [4,8]  fsdp")
    module("layout_audit", audit=note("audit", layout))
    module("backend", configure_backend=note("configure_backend"))
    module("loop", fit=note("fit", status))
    module("evaluation", evaluate_run=note("evaluate_run"))
    noted_status = types.SimpleNamespace(calls=noted, result=status, note=note)
    return noted_status


def run_main(build, *words, presets=None):
    with pytest.raises(SystemExit) as caught:
        main(ExperimentConfig, build, presets=presets, argv=["train.py", *words])
    return caught.value.code


def test_trains_in_order(calls, caplog):
    experiment = Experiment(
        model="model",
        loss_fn=print,
        train_data="train",
        eval_data="eval",
        describe={"order-1 entropy": 2.37},
        writers=("writer",),
        on_step=print,
        on_end=calls.note("on_end"),
    )

    def build(config):
        calls.calls.append(("build", (config,), {}))
        return experiment

    caplog.set_level(logging.INFO, "jaxtrain")
    presets = {"model": {"deep": {"num_layers": 9}}}
    assert run_main(build, "--num_steps=7", "--model=deep", presets=presets) == 0
    config = ExperimentConfig(num_steps=7, model=NetConfig(num_layers=9))
    (backend, built, fit, end) = calls.calls
    assert backend == ("configure_backend", (config,), {})
    assert built == ("build", (config,), {})
    assert fit == (
        "fit",
        ("model", print, "train", "eval"),
        {
            "config": config,
            "rules": experiment.rules,
            "tx": None,
            "describe": {"order-1 entropy": 2.37},
            "writers": ("writer",),
            "on_start": None,
            "on_step": print,
        },
    )
    assert end == ("on_end", (calls.result,), {})
    assert "num_steps=7" in caplog.text
    assert "order-1 entropy: 2.37" in caplog.text


def test_the_default_rules_are_the_package_s():
    from jaxtrain.rules import DEFAULT_RULES

    assert Experiment(model=0, loss_fn=print, train_data=0).rules is DEFAULT_RULES


def minimal(config):
    del config
    return Experiment(model="model", loss_fn=print, train_data="train", eval_data="eval")


@pytest.mark.parametrize("mesh", ["fsdp:3", "dta:2", "fsdp:8,tensor:2", "fsdp"])
def test_a_wrong_mesh_ends_with_2_before_anything_is_built(calls, capsys, mesh):
    def build(config):
        raise AssertionError("data would be read")

    assert run_main(build, f"--mesh={mesh}") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert ("--num_cpu_devices=16" in message) == (mesh == "fsdp:8,tensor:2")


def test_evaluate_only_evaluates(calls):
    assert run_main(minimal, "--evaluate") == 0
    assert [name for name, _, _ in calls.calls] == ["configure_backend", "evaluate_run"]
    assert calls.calls[1][1] == ("model", print, "eval")
    assert calls.calls[1][2]["config"].evaluate


def test_audit_only_prints_the_table(calls, capsys):
    def build(config):
        init = lambda key: ({"w": jnp.zeros((4, 8))}, {})  # noqa: E731
        return dataclasses.replace(minimal(config), model=(init, print))

    assert run_main(build, "--audit", "--mesh=fsdp:4,tensor:2") == 0
    assert capsys.readouterr().out == "w  [4,8]  fsdp\n"
    assert [name for name, _, _ in calls.calls] == ["configure_backend", "audit"]
    _, (model, mesh, tx), options = calls.calls[1]
    assert model.apply is print
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    # The moments of AdamW are part of what is shown.
    assert len(jax.tree.leaves(jax.eval_shape(tx.init, {"w": jnp.zeros((4, 8))}))) >= 2
    assert options["allow_replicated"] == 1.0


def test_a_preempted_run_ends_with_75_and_without_on_end(calls):
    calls.result.status = "preempted"

    def build(config):
        return dataclasses.replace(minimal(config), on_end=calls.note("on_end"))

    assert run_main(build) == 75
    assert "on_end" not in [name for name, _, _ in calls.calls]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (NonFiniteError, 3),
        (CheckpointError, 4),
        (DataError, 4),
        (JaxtrainError, 1),
    ],
)
def test_our_errors_are_one_line_and_their_code(calls, capsys, error, code):
    def build(config):
        raise error("vocab 50257 is not divisible by tensor=2; use 50304")

    assert run_main(build) == code
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: vocab 50257 is not divisible by tensor=2; use 50304"
    )


@pytest.mark.parametrize(("made", "said"), [(None, "None"), (3, "int")])
def test_what_is_no_experiment(calls, capsys, made, said):
    assert run_main(lambda config: made) == 2
    message = f"error: <lambda>(config) must return a jaxtrain.main.Experiment; it returned {said}."
    assert capsys.readouterr().err.splitlines()[-1] == message


def test_an_interrupt_before_the_loop_ends_with_130(calls, capsys):
    def build(config):
        raise KeyboardInterrupt

    assert run_main(build) == 130
    assert "nothing to save" in capsys.readouterr().err


def test_an_unexpected_error_is_shown_whole(calls):
    # Python prints the traceback and ends with 1.
    def build(config):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        main(ExperimentConfig, build, argv=["train.py"])
