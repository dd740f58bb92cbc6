"""Memory of a compiled step: the compiler's dump, the classes, what devices and hosts have."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import RunConfig, make_mesh
from jaxtrain.data.load import abstract_batch
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.host import memory_bytes
from jaxtrain.losses import lm_loss
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.plan import buffers, hlo, memory
from jaxtrain.plan.origin import origin
from jaxtrain.plan.targets import parse_target
from jaxtrain.program import train_program
from jaxtrain.rules import DEFAULT_RULES

LENGTH = 48
MODEL = TransformerConfig(
    vocab_size=256, num_layers=12, embed_dim=64, num_heads=4, mlp_dim=160, scan_unroll=1
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(program, batch, compiled step, assignment) of a small model on fsdp:4,tensor:2."""
    dump = tmp_path_factory.mktemp("dump")
    config = RunConfig(global_batch_size=16, accumulate_steps=2)
    program, batch = program_of(config)
    seen = dataclasses.replace(program, xla={**program.xla, "xla_dump_to": str(dump)})
    step = seen.compile(batch)
    return program, batch, step, buffers.read_dump(dump, "cpu")


def program_of(config, mesh="fsdp:4,tensor:2", ema=0.0):
    tokens = np.zeros((64, LENGTH), np.int32)
    optimizer = dataclasses.replace(config.optimizer, ema_decay=ema)
    config = config.replace(mesh=mesh, optimizer=optimizer)
    model = transformer(MODEL)
    mesh = make_mesh(mesh)
    program = train_program(model, lm_loss(model), config, mesh, rules=DEFAULT_RULES)
    mask = np.ones((64, LENGTH), np.float32)
    data = ArrayDataset({"tokens": tokens, "targets": tokens, "loss_mask": mask})
    batch = abstract_batch(
        data,
        mesh,
        global_batch_size=config.global_batch_size,
        accumulate_steps=config.accumulate_steps,
    )
    return program, batch


# The dump


ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, page 0, parameter 1, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 param @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 1000, page 0, preallocated-temp:
 value: <2 fusion.1 @0> (size=400,offset=0): f32[100]{0}
 value: <3 while.2{1} (phi) @0> (size=300,offset=500): f32[75]{0}
 value: <4 bitcast.7 @0> (size=100,offset=0): f32[25]{0}
allocation 2: size 64, color 1, page 0, preallocated-temp:
 value: <5 fusion.9 @0> (size=64,offset=0): f32[16]{0}
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:param
  BufferLiveRange:
    param{}:0-9
    fusion.1{}:0-4
    bitcast.7{}:3-9
    while.2{1}:4-9
    fusion.9{}:4-4
  Live ranges at 2 (peak):
    fusion.1{}: 400 bytes (cumulative: 400 bytes)
"""


@pytest.mark.parametrize(("platform", "temp", "live"), [("tpu", 1000, 700), ("gpu", 1064, 764)])
def test_the_dump_is_read(tmp_path, platform, temp, live):
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "m.after_optimizations-live-range.txt").write_text(RANGES)
    assert buffers.read_dump(tmp_path, platform) is None  # the program itself is missing
    (tmp_path / "m.after_optimizations.txt").write_text("HloModule m")
    found = buffers.read_dump(tmp_path, platform)
    # A parameter is no temporary, and the bytes of a bitcast count once.
    names = [(value.instruction, value.index) for value in found.at_peak]
    assert names[:2] == [("fusion.1", ()), ("while.2", (1,))]
    assert (found.temp_bytes, found.live_bytes) == (temp, live)


def test_no_bytes_are_counted_twice(compiled):
    *_, assignment = compiled
    spans = sorted((v.offset, v.offset + v.num_bytes) for v in assignment.at_peak)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= assignment.temp_bytes


# The classes


def test_the_classes_are_the_whole_peak(compiled):
    program, batch, step, assignment = compiled
    needs = memory.memory_of(step, program, batch, assignment)
    assert needs.peak_bytes == step.memory["total"]
    assert sum(needs.classes.values()) == pytest.approx(needs.peak_bytes, rel=0.02)
    assert set(needs.classes) <= set(memory.CLASSES)


def test_arguments_are_counted_by_their_shards(compiled):
    program, batch, step, _ = compiled
    classes = memory.argument_classes(program, batch)
    assert sum(classes.values()) == pytest.approx(step.memory["argument"], rel=0.01)
    by_group = program.layout.group_bytes_per_device()
    assert classes["parameters"] == by_group["params"]
    assert classes["optimizer_state"] == by_group["opt_state"]
    rows = 16 // 4  # of the 4 copies over fsdp
    assert classes["batch"] == rows * LENGTH * (4 + 4 + 4)


def test_the_average_of_the_parameters_is_a_class():
    program, batch = program_of(RunConfig(global_batch_size=16), ema=0.9)
    classes = memory.argument_classes(program, batch)
    assert classes["ema_parameters"] == classes["parameters"] > 0


def test_sums_over_micro_batches_are_gradients(compiled):
    program, batch, step, assignment = compiled
    needs = memory.memory_of(step, program, batch, assignment)
    # The accumulators, and at the peak perhaps some gradients of one micro-batch.
    params = needs.classes["parameters"]
    assert params <= needs.classes["gradients"] <= 4 * params


def test_without_a_dump_the_classes_are_estimated(compiled):
    program, batch, step, _ = compiled
    needs = memory.memory_of(step, program, batch, None)
    assert sum(needs.classes.values()) == needs.peak_bytes
    assert needs.classes["gradients"] == needs.classes["parameters"]
    assert needs.buffers == ()


def test_large_buffers_name_their_line_of_the_model(compiled):
    program, batch, step, assignment = compiled
    needs = memory.memory_of(step, program, batch, assignment)
    sizes = [buffer.num_bytes for buffer in needs.buffers]
    assert sizes == sorted(sizes, reverse=True)
    stacked = [buffer for buffer in needs.buffers if buffer.shape.startswith("f32[12,")]
    assert stacked
    assert all(b.source.startswith("jaxtrain/") for b in stacked), needs.buffers
    files = {buffer.source.partition(":")[0] for buffer in needs.buffers}
    assert "jaxtrain/models/attention.py" in files or "jaxtrain/models/layers.py" in files


def test_an_array_is_followed_through_loop_and_fusion_to_its_maker(tmp_path):
    def block(x_D, w_DD):
        return jnp.tanh(x_D @ w_DD), jnp.sin(x_D)

    def fn(x_D, w_LDD):
        return jax.lax.scan(block, x_D, w_LDD)

    args = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    text = jax.jit(fn).lower(*args).compile().as_text()
    module = hlo.parse(text)
    makers = [
        origin(module, site.computation, site.instruction, (index,)).op_name.rpartition("/")[2]
        for site in module.walk()
        if site.instruction.opcode == "while"
        for index, array in enumerate(site.instruction.arrays)
        if array.dims == (8, 64)
    ]
    assert "sin" in makers


def test_no_layer_keeps_gathered_parameters(compiled):
    """Kept for the backward pass, they would be the whole model on every device."""
    *_, assignment = compiled
    dims = {tuple(sorted(hlo.parse_arrays(v.shape)[0].dims)) for v in assignment.at_peak}
    gathered = {(12, 32, 64), (12, 64, 80)}  # q, k, v and o; gate, up and down
    assert not gathered & dims


# What devices and hosts have


def test_the_pool_limits_a_gpu_unless_the_rest_is_too_small():
    target = parse_target("h100:1x8")
    kind = target.kind
    has = memory.available(target, 0.9, 2)
    assert has.num_bytes == int(0.9 * kind.memory_bytes)
    assert "pool" in has.text
    outside = kind.context_bytes + 2 * kind.communicator_bytes
    has = memory.available(target, 1.0, 2)
    assert has.num_bytes == kind.memory_bytes - outside
    assert "too large" in has.text


def test_a_tpu_gives_all_but_the_share_of_its_runtime():
    target = parse_target("tpu-v5e:4x4")
    assert memory.available(target, 0.5, 2).num_bytes == 15.75 * 2**30


def test_simulated_devices_share_the_memory_of_the_machine():
    target = parse_target("cpu:8")
    assert memory.available(target, 0.9, 1).num_bytes == memory_bytes() // 8


def test_a_host_holds_what_its_devices_hold_once():
    """On 2 hosts of 4 with fsdp:4,tensor:2 a host has every shard of two of the four fsdp shards"""
    program, batch = program_of(RunConfig(global_batch_size=16))
    data = ArrayDataset({"tokens": np.zeros((1000, 10), np.int32)})
    gpus = parse_target("h100:2x4")
    uses = memory.host_memory(program, batch, data, gpus)
    state = program.layout.total_bytes
    # Norms are split over fsdp alone and thus twice on a host, but counted once.
    assert uses["save"] == pytest.approx(state / 2, rel=0.02)
    assert uses["data"] == 40_000
    assert memory.host_total(uses) == sum(uses.values()) - uses["save"]
    one = memory.host_memory(program, batch, data, parse_target("h100:1x8"))
    assert one["save"] == pytest.approx(state, rel=0.02)


def test_simulated_devices_live_on_the_host():
    program, batch = program_of(RunConfig(global_batch_size=16))
    target = parse_target("cpu:8")
    uses = memory.host_memory(program, batch, None, target)
    assert "save" not in uses
    needs = memory.Memory({}, 1000, ())
    assert memory.with_devices(uses, needs, target)["devices"] == 8000
    gpus = parse_target("h100:1x8")
    assert "devices" not in memory.with_devices(uses, needs, gpus)


def test_random_keys_have_a_size():
    mesh = make_mesh("fsdp:8")
    config = RunConfig(global_batch_size=8)
    model = transformer(dataclasses.replace(MODEL, num_layers=1))
    tx = optax.sgd(0.1)
    program = train_program(model, lm_loss(model), config, mesh, rules=DEFAULT_RULES, tx=tx)
    assert memory.argument_classes(program, {})["model_state"] == 4 + 8  # step and key
