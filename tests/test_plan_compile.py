"""Plans: the run's own step compiled for other devices, from the command line and in pieces.

The GPU and TPU parts need the packages of the extras `plan` and `tpu` and are skipped without.
"""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from planning import lm_builder, needs_cuda, needs_tpu

from jaxtrain import ConfigError, ExitCode, RunConfig
from jaxtrain.data.load import Loader, abstract_batch
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.mesh import make_mesh
from jaxtrain.models.transformer import TransformerConfig
from jaxtrain.plan import compile_target, hlo, planner, table
from jaxtrain.plan.compile_target import DoesNotFit, compile_for, target_devices, target_here
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.targets import parse_target
from jaxtrain.program import train_program
from jaxtrain.rules import DEFAULT_RULES

ROOT = Path(__file__).parents[1]
LENGTH = 64
MODEL = TransformerConfig(
    vocab_size=256, num_layers=2, embed_dim=256, num_heads=4, mlp_dim=256, scan_unroll=1
)
PLAN_FIELDS = {
    *("target", "num_devices", "mesh", "flags", "fits", "peak_bytes_per_device", "device_bytes"),
    *("memory", "host_bytes", "flops_per_device", "communication", "step_seconds", "mfu"),
    *("tokens_per_second_per_device", "fused_attention", "warnings", "min_hosts"),
}

build = lm_builder(MODEL, LENGTH)


def config(**changes):
    return RunConfig(global_batch_size=8, mesh="fsdp:4,tensor:2", precision="bfloat16", **changes)


def compiled_for(target, run):
    """(compiled, program, batch) of the test's model for a target."""
    target, devices = target_devices(parse_target(target))
    mesh = make_mesh(run.mesh, devices=devices, devices_per_node=target.devices_per_host)
    experiment = build(run)
    program = train_program(experiment.model, experiment.loss_fn, run, mesh, rules=DEFAULT_RULES)
    batch = abstract_batch(experiment.train_data, mesh, global_batch_size=run.global_batch_size)
    return compile_for(target, program, batch, log_dir=""), program, batch


def planned(target, run):
    """(plan, what it was read from)."""
    compilations = []

    def noting_compile(*args, **kwargs):
        compilations.append(compile_for(*args, **kwargs))
        return compilations[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "compile_for", noting_compile)
        plan = Planner(build, run, parse_target(target)).plan(run)
    return plan, *compilations


def instructions(step):
    """All instructions of a program, without the lines of Python that they come from."""
    module = hlo.parse(step.compiled.as_text())
    return [
        (i.name, i.opcode, i.arrays, i.operands, i.literal)
        for computation in module.computations.values()
        for i in computation.instructions.values()
    ]


# The same program for run and plan


def test_the_plan_of_the_devices_here_is_the_program_of_the_run():
    run = config()
    mesh = make_mesh(run.mesh)
    experiment = build(run)
    program = train_program(experiment.model, experiment.loss_fn, run, mesh, rules=DEFAULT_RULES)
    with Loader(experiment.train_data, mesh, global_batch_size=8) as loader:
        loaded = next(loader).arrays
    compiled, _, batch = compiled_for("cpu:8", run)
    assert {n: (a.shape, a.dtype, a.sharding) for n, a in loaded.items()} == {
        n: (a.shape, a.dtype, a.sharding) for n, a in batch.items()
    }
    assert instructions(compiled.step) == instructions(program.compile(loaded))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_the_abstract_batch_is_that_of_the_loader(accumulate_steps):
    mesh = make_mesh("fsdp:4,tensor:2")
    options = {"global_batch_size": 8, "accumulate_steps": accumulate_steps}
    rows = ArrayDataset({"x": np.zeros((20, 3), np.float64), "i": np.zeros(20, np.int64)})
    abstract = abstract_batch(rows, mesh, **options)
    with Loader(rows, mesh, **options) as loader:
        loaded = next(loader).arrays
    assert set(abstract) == {"x", "i", "loss_mask"}
    assert {n: (a.shape, a.dtype, a.sharding) for n, a in abstract.items()} == {
        n: (a.shape, a.dtype, a.sharding) for n, a in loaded.items()
    }


def test_nothing_is_run_or_allocated(monkeypatch):
    """Only descriptions of arrays are made, also of the parameters."""
    before = {id(array) for array in jax.live_arrays()}
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("put on a device"))
    plan = Planner(build, config(), parse_target("cpu:8")).plan(config())
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in made) < 10_000
    assert plan.fits


# Plans


@pytest.fixture(scope="module")
def on_cpu():
    return planned("cpu:8", config())


@pytest.fixture(scope="module")
def cpu_plan(on_cpu):
    return on_cpu[0]


def test_a_plan_has_what_the_documentation_says(cpu_plan):
    values = json.loads(json.dumps(cpu_plan.to_json()))
    assert set(values) >= PLAN_FIELDS
    assert values["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert values["num_devices"] == 8
    assert values["target"] == "cpu:8"
    assert "--mesh=fsdp:4,tensor:2" in values["flags"]
    assert sum(values["memory"].values()) == pytest.approx(
        values["peak_bytes_per_device"], rel=0.02
    )
    assert {"fsdp", "tensor"} <= set(values["communication"])
    assert all(
        set(v) == {"bytes_sent_per_device", "seconds", "exposed_seconds"}
        for v in values["communication"].values()
    )
    assert values["step_seconds"] > 0
    assert values["flops_per_device"] > 0
    assert values["ranking"] == []
    assert values["min_hosts"] == 1
    assert cpu_plan.exit_code == ExitCode.OK


def test_the_text_of_a_plan_names_its_classes_and_flags(cpu_plan):
    text = table.as_text(cpu_plan)
    for part in ("parameters", "optimizer state", "peak", "available", "memory per host", "fits"):
        assert part in text
    assert "--mesh=fsdp:4,tensor:2" in text
    assert text.isascii()


def test_remat_makes_another_model():
    made = []

    def noting_build(config):
        made.append(config.remat)
        return build(config)

    some = Planner(noting_build, config(), parse_target("cpu:8"))
    for remat in ("none", "full", "none", "full"):
        some.experiment(config(remat=remat))
    assert made == ["none", "full"]


def test_what_does_not_fit_says_how_many_hosts_it_needs(on_cpu, monkeypatch):
    plan, compilation = on_cpu
    device = plan.peak_bytes_per_device // 2
    monkeypatch.setattr(planner, "compile_for", lambda *_, **__: compilation)
    monkeypatch.setattr(
        planner, "available", lambda *_: planner.Available(device, "half of what it needs")
    )
    plan = Planner(build, config(), parse_target("cpu:8")).plan(config())
    assert not plan.fits
    assert plan.exit_code == ExitCode.CONFIG
    first = plan.warnings[0]
    assert first.kind == "does_not_fit"
    assert "half of what it needs" in first.text
    assert plan.min_hosts is None or f"at least {plan.min_hosts} hosts" in first.text


def test_a_mesh_that_does_not_fit_the_target_is_refused():
    some = Planner(build, config(), parse_target("cpu:8"))
    with pytest.raises(ConfigError, match=r"needs 16 devices .* but there are 8"):
        some.plan(config().replace(mesh="fsdp:16"))


# Failures


def test_a_failure_of_the_compiler_is_a_sentence_with_the_log_in_a_file(tmp_path, monkeypatch):
    message = "INTERNAL: something broke in pass 17\nwith many\nmore lines"

    def fail(*_):
        os.write(2, b"W0000 hlo.cc:1 said on the way\n")
        raise RuntimeError(message)

    monkeypatch.setattr("jaxtrain.program.TrainProgram.compile", fail)
    with pytest.raises(ConfigError) as caught:
        compiled_for("cpu:8", config())
    text = str(caught.value)
    assert "something broke in pass 17" in text
    assert "more lines" not in text
    log = Path(text.partition("whole log is in ")[2].partition(";")[0]).read_text()
    assert "more lines" in log
    assert "said on the way" in log


def test_a_compiler_that_is_out_of_memory_gives_a_plan(monkeypatch):
    def refuse(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: XLA:TPU ... Used 63.80G of 30.75G hbm. Exceeded")

    monkeypatch.setattr("jaxtrain.program.TrainProgram.compile", refuse)
    with pytest.raises(DoesNotFit):
        compiled_for("cpu:8", config())
    plan = Planner(build, config(), parse_target("cpu:8")).plan(config())
    assert not plan.fits
    assert plan.peak_bytes_per_device == int(63.8 * 2**30)
    assert plan.device_bytes == int(30.75 * 2**30)
    assert sum(plan.memory.values()) == plan.peak_bytes_per_device
    assert json.dumps(plan.to_json())
    assert "DOES NOT FIT" in table.as_text(plan)


@pytest.mark.parametrize(
    ("target", "extra"), [("h100:1x8", "setup.sh plan"), ("tpu-v5e:2x2", "setup.sh tpu")]
)
def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch, target, extra):
    monkeypatch.setattr(compile_target, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=rf"{extra}.*--plan={target}@cpu"):
        target_devices(parse_target(target))


def test_the_devices_here_are_a_target():
    target = target_here()
    assert (target.kind.name, target.num_devices) == ("cpu", 8)


def test_the_hosts_of_the_devices_here_are_nodes_and_not_processes(monkeypatch):
    """One process for each GPU, as launchers of clusters start them."""
    kind = "NVIDIA H100 80GB HBM3"
    devices = [
        types.SimpleNamespace(process_index=i, platform="gpu", device_kind=kind) for i in range(16)
    ]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr("jaxtrain.mesh.node_names", lambda: ("a",) * 8 + ("b",) * 8)
    target = target_here()
    assert (target.kind.name, target.num_hosts, target.devices_per_host) == ("h100", 2, 8)


# Other devices


@pytest.fixture(scope="module")
def on_gpus():
    return planned("h100:2x4", config())


@needs_cuda
def test_attention_is_fused_on_gpus_forward_and_backward(on_gpus):
    plan, compilation = on_gpus
    text = compilation.step.compiled.as_text()
    assert '__cudnn$fmhaSoftmax"' in text
    assert '__cudnn$fmhaSoftmaxBackward"' in text
    assert plan.fused_attention is True


@needs_cuda
def test_the_memory_of_a_gpu_plan_is_the_compilers(on_gpus):
    plan, compilation = on_gpus
    stats = compilation.step.compiled.memory_analysis()
    assert plan.peak_bytes_per_device == stats.peak_memory_in_bytes
    assert sum(plan.memory.values()) == pytest.approx(plan.peak_bytes_per_device, rel=0.02)
    assert plan.device_bytes == int(config().memory_fraction * 84942979072)
    assert plan.fits
    assert all(buffer.source for buffer in plan.buffers[:3])


@needs_cuda
def test_the_work_of_a_gpu_plan_is_about_what_the_model_needs(on_gpus):
    plan, _ = on_gpus
    per_token = build(config()).model.flops_per_token(LENGTH)
    assert plan.flops_per_device == pytest.approx(per_token * LENGTH, rel=0.15)


@needs_tpu
def test_a_tpu_plan_begins_with_its_unfused_attention():
    run = config().replace(mesh="fsdp:4", global_batch_size=4)
    plan = Planner(build, run, parse_target("tpu-v5e:2x2")).plan(run)
    assert plan.fits
    assert plan.fused_attention is False
    assert table.as_text(plan).splitlines()[0] == "unfused attention"
    assert sum(plan.memory.values()) == pytest.approx(plan.peak_bytes_per_device, rel=0.02)


# From the command line


def command(tmp_path, *words, **environment):
    """Runs train_lm.py; returns (exit code, stdout, stderr)."""
    tiny = ["--model.num_layers=1", "--model.embed_dim=32", "--model.mlp_dim=64"]
    (tmp_path / "text").mkdir(exist_ok=True)
    (tmp_path / "text" / "a.txt").write_text("some words to learn\n" * 400)
    inherited = {n: v for n, v in os.environ.items() if n not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [
            *(sys.executable, "experiments/train_lm.py", f"--workdir={tmp_path / 'run'}", *tiny),
            *(f"--data.source={tmp_path / 'text'}", *words),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env=inherited | environment,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_plan_from_the_command_line(tmp_path):
    """Also without JAX_PLATFORMS and beside packages for GPUs and TPUs: not a word of theirs."""
    code, out, err = command(tmp_path, "--plan=cpu:4", "--mesh=fsdp:-1")
    assert code == 0, err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert set(plan) >= PLAN_FIELDS
    assert plan["mesh"]["fsdp"] == 4
    assert "plan for cpu:4" in out
    assert not [line for line in err.splitlines() if not line.startswith("20")], err
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "plan.html",
        "plan.json",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan=h1000:1x8"], "there is no target 'h1000'; the targets are here, a100-40"),
        (["--plan=h100:8"], "has the shape '8'"),
        (["--plan=cpu:4", "--mesh=fsdp:3"], "needs 3 devices .*but there are 4"),
        (["--plan=cpu:4", "--global_batch_size=6"], "global_batch_size=6 is not divisible by"),
        (["--plan=cpu:4", "--audit"], "plan, evaluate, audit and peek exclude each other"),
    ],
)
def test_wrong_requests_end_with_2(tmp_path, words, message):
    code, _, err = command(tmp_path, *words)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line), line
