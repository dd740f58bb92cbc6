"""Plans of runs of which a part does not train: LoRA, and `--optimizer.freeze`.

The GPU parts need the packages of the extra `plan` and are skipped without.
"""

import dataclasses
import json
import math

import jax
import pytest
from experimenting import TINY, run
from planning import lm_builder, needs_cuda

from jaxtrain import RunConfig
from jaxtrain.config import OptimizerConfig
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer import TransformerConfig
from jaxtrain.plan import memory
from jaxtrain.plan.analytic import Analysis, Candidate
from jaxtrain.plan.compile_target import compile_for
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.targets import parse_target
from jaxtrain.plan.traced import row_flops
from jaxtrain.tree import named_leaves

LENGTH = 64
MODEL = TransformerConfig(
    vocab_size=512, num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=2, mlp_dim=384,
    scan_unroll=1,
)  # fmt: skip
LORA = LoraConfig(rank=4)
ONE = "fsdp:1"


def config(**optimizer):
    return RunConfig(
        global_batch_size=8,
        mesh=ONE,
        precision="bfloat16",
        optimizer=OptimizerConfig(**optimizer),
    )


def planner(target="cpu:8", lora=LORA, run=None):
    """A planner for one device of a target."""
    some = Planner(lm_builder(MODEL, LENGTH, lora), run or config(), parse_target(target))
    some.devices = some.devices[:1]
    some.target = dataclasses.replace(some.target, devices_per_host=1)
    return some


def needs_of(some, run):
    """(classes with XLA's dump, classes without, program, compiled step) of a run."""
    program, batch, _ = some.program(run)
    found = compile_for(some.target, program, batch, log_dir="")
    seen, unseen = (
        memory.memory_of(found.step, program, batch, dump).classes
        for dump in (found.assignment, None)
    )
    return seen, unseen, program, found.step


def sizes(program):
    """(elements of the base, elements of the adapters)."""
    leaves = [
        (is_adapter(path), math.prod(leaf.shape))
        for path, leaf in named_leaves(program.abstract.params)
    ]
    base, adapters = (sum(size for kind, size in leaves if kind == wanted) for wanted in (0, 1))
    assert base > 50 * adapters > 0
    return base, adapters


@pytest.fixture(scope="module")
def adapted():
    run = config(ema_decay=0.9)
    return needs_of(planner(run=run), run)


def test_the_base_has_parameters_and_no_gradients_moments_or_average(adapted):
    seen, unseen, program, step = adapted
    base, adapters = sizes(program)
    for classes in (seen, unseen):
        assert classes["parameters"] == 2 * base + 4 * adapters
        assert classes["ema_parameters"] == 4 * adapters
        assert classes["optimizer_state"] == pytest.approx(8 * adapters, abs=64)
    assert unseen["gradients"] == 4 * adapters
    # At the peak perhaps twice, or those of one layer besides.
    assert seen.get("gradients", 0) <= 3 * 4 * adapters
    # What the program itself takes.
    arguments = step.compiled.memory_analysis().argument_size_in_bytes
    kept = ("parameters", "ema_parameters", "optimizer_state", "model_state", "batch")
    assert sum(seen.get(name, 0) for name in kept) == pytest.approx(arguments, rel=0.001)


def test_a_host_copies_what_there_is(adapted):
    _, _, program, _ = adapted
    base, adapters = sizes(program)
    uses = memory.host_memory(program, {}, None, parse_target("h100:1x1"))
    state = 2 * base + 4 * adapters * (1 + 1 + 2)
    assert uses["restore"] == pytest.approx(state, abs=64)


def test_parameters_frozen_by_name_are_left_out_too():
    run = config(freeze="^embed|attention")
    _, unseen, program, _ = needs_of(planner(lora=None, run=run), run)
    trained = sum(
        math.prod(leaf.shape)
        for path, leaf in named_leaves(program.abstract.params)
        if not path.startswith("embed") and "attention" not in path
    )
    assert unseen["gradients"] == 4 * trained < unseen["parameters"]
    assert unseen["optimizer_state"] == pytest.approx(8 * trained, abs=64)
    assert memory.gradient_bytes(program, is_whole=True) == 4 * trained


def test_hosts_that_a_run_needs_do_not_hold_gradients_of_the_base(adapted, monkeypatch):
    """A device that has room for the base, and not for gradients of it, is enough."""
    from jaxtrain.plan import planner as planning

    _, _, program, _ = adapted
    base, _ = sizes(program)
    some, run = planner(), config()
    whole = some.plan(run)
    room = whole.peak_bytes_per_device + base
    monkeypatch.setattr(planning, "available", lambda *_: planning.Available(room, "a little"))
    plan = some.plan(run)
    assert plan.fits
    assert plan.min_hosts == 1


# Estimates


CANDIDATE = Candidate((("data", 1), ("fsdp", 1), ("tensor", 1)), "none", 1)


def compared(target):
    """(estimate, bytes of the compiled step) with LoRA, and without."""
    found = []
    for lora in (LORA, None):
        some, run = planner(target, lora), config()
        estimate = Analysis(some, run).estimate(CANDIDATE, some.target)
        program, batch, _ = some.program(run)
        step = compile_for(some.target, program, batch, log_dir="").step
        assert estimate.state_bytes == program.layout.bytes_per_device
        found.append((estimate, memory.peak_bytes(step)))
    return found


@pytest.mark.parametrize("target", ["cpu:8", pytest.param("h100:1x1", marks=needs_cuda)])
def test_estimated_memory_is_like_that_of_the_compiled_step(target):
    (adapted, adapted_peak), (full, full_peak) = compared(target)
    for estimate, peak in ((adapted, adapted_peak), (full, full_peak)):
        assert 0.6 * peak < estimate.num_bytes() < 2 * peak
    # Of all parameters: gradients and two moments are not there, and two bytes of four.
    assert adapted.num_bytes() < 0.6 * full.num_bytes()
    assert adapted_peak < 0.6 * full_peak


def test_operations_leave_out_the_gradients_of_the_base():
    some, run = planner(), config()
    program, _, mesh = some.program(run)
    flops = row_flops(some.experiment(run), program.abstract, program.frozen, mesh)
    counted = some.plan(run).flops_per_device
    assert 8 * sum(flops.values()) == pytest.approx(counted, rel=0.05)
    everything = jax.tree.map(lambda _: False, program.frozen)
    with_all = row_flops(some.experiment(run), program.abstract, everything, mesh)
    assert sum(flops.values()) < 0.8 * sum(with_all.values())


def test_the_command_needs_no_examples_and_no_model(tmp_path, monkeypatch):
    """As docs/finetuning.md has it: nothing but the model's name."""
    monkeypatch.chdir(tmp_path)
    words = ("--plan=here", "--mesh=data:-1", "--lora.rank=2", "--workdir=run")
    ended = run("finetune_lm", *TINY, *words)
    assert ended.code == 0, ended.err
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["fits"]
    assert plan["memory"]["optimizer_state"] < 0.2 * plan["memory"]["parameters"]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
