"""For the tests of plans: programs written by hand in the form that XLA prints, and experiments."""

import dataclasses
import textwrap

import numpy as np
import pytest

from jaxtrain.data.sources import ArrayDataset
from jaxtrain.losses import lm_loss
from jaxtrain.main import Experiment
from jaxtrain.models.transformer import transformer
from jaxtrain.plan import compile_target, cost

needs_cuda = pytest.mark.skipif(
    not all(map(compile_target._is_installed, compile_target._CUDA_PACKAGES)),
    reason="needs the extra plan; install it with `bash scripts/setup.sh plan`",
)
needs_tpu = pytest.mark.skipif(
    not compile_target._is_installed("libtpu"),
    reason="needs the extra tpu; install it with `bash scripts/setup.sh tpu`",
)


def lm_builder(model_config, length, lora=None):
    """A `build` as `jaxtrain.main.run` takes it: a transformer, and a few rows of zeros."""
    rows, mask = np.zeros((4, length), np.int32), np.ones((4, length), np.float32)
    data = ArrayDataset({"tokens": rows, "targets": rows, "loss_mask": mask})

    def build(config):
        kinds = {"precision": config.precision, "remat": config.remat}
        model = transformer(model_config, lora=lora, **kinds)
        return Experiment(model=model, loss_fn=lm_loss(model), train_data=data)

    return build


M, B, K = cost.MATRIX_EFFICIENCY, cost.BANDWIDTH_EFFICIENCY, cost.LINK_EFFICIENCY


@dataclasses.dataclass(frozen=True)
class Machine:
    """A peak of 2e12 FLOP/s; after the efficiencies 1e12 FLOP/s, 1e9 B/s of memory and links, 1e8
    of network."""

    peak_flops: float = 2e12
    sustained_flops: float = 1e12 / M
    float32_rate: float = 0.5
    memory_bandwidth: float = 1e9 / B
    link_bandwidth: float = 1e9 / K
    network_bandwidth: float = 1e8 / K
    link_latency: float = 0.0
    network_latency: float = 0.0


MACHINE = Machine()


def module_text(entry, *computations, num_devices=8, tables=""):
    """A module with the given entry instructions and whole other computations."""
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={num_devices}\n\n"
    body = textwrap.indent(textwrap.dedent(entry).strip(), "  ")
    others = "".join(textwrap.dedent(text).strip() + "\n\n" for text in computations)
    return f"{header}{tables}{others}ENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def computation(name, instructions):
    """One computation besides the entry."""
    body = textwrap.indent(textwrap.dedent(instructions).strip(), "  ")
    return f"%{name} (p: f32[]) -> f32[] {{\n{body}\n}}"


LOOP = computation(
    "body",
    """
    %arg = (s32[], bf16[64,128]{1,0}) parameter(0)
    %i = s32[] get-tuple-element(%arg), index=0
    %x = bf16[64,128]{1,0} get-tuple-element(%arg), index=1
    %w = bf16[128,128]{1,0} constant({...})
    %dot.1 = bf16[64,128]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ROOT %tuple.1 = (s32[], bf16[64,128]{1,0}) tuple(%i, %dot.1)
    """,
)
CONDITION = computation(
    "condition",
    """
    %arg.1 = (s32[], bf16[64,128]{1,0}) parameter(0)
    ROOT %less = pred[] constant(true)
    """,
)


def while_text(trips, body="body", name="while.1"):
    """A loop over `LOOP`; `trips` is None where the compiler does not know."""
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return (
        f"%{name} = (s32[], bf16[64,128]{{1,0}}) while(%init), condition=%condition,"
        f' body=%{body}, metadata={{op_name="jit(step)/jvp(layers)/while"}}{known}'
    )


def tpu_gather(between="", shape="bf16[500000]{0}", whole="bf16[2000000]{0}"):
    """How a TPU gathers asynchronously: (entry instructions, computations).

    Start and end are fusions with a copy of the collective each; fusions between them hold further
    copies.
    """
    line = (
        f"%gather = {whole} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={{0}},"
        ' frontend_attributes={chain_id="3"}'
    )
    start = f"""
    %p = {shape} parameter(0)
    {line}
    ROOT %c = ({shape}, {whole}, u32[]) custom-call(%gather), TARGET
    """
    step = f"""
    %p = {shape} parameter(0)
    %q = {whole} parameter(1)
    %x = f32[1000]{{0}} parameter(2)
    {line}
    %n = f32[1000]{{0}} negate(%x)
    ROOT %t = (f32[1000]{{0}}, {shape}, {whole}, {whole}) tuple(%n, %p, %q, %gather)
    """
    done = f"""
    %p = {shape} parameter(0)
    {line}
    ROOT %c = {whole} custom-call(%p, %gather), custom_call_target="AsyncCollectiveDone"
    """
    entry = f"""
    %half = {shape} parameter(9)
    %x = f32[1000]{{0}} parameter(8)
    %s = ({shape}, {whole}, u32[]) fusion(%half), kind=kCustom, calls=%start
    %g1 = {shape} get-tuple-element(%s), index=0
    %g2 = {whole} get-tuple-element(%s), index=1
    %m = (f32[1000]{{0}}, {shape}, {whole}, {whole}) fusion(%g1, %g2, %x), kind=kLoop, calls=%step
    BETWEEN
    %g3 = {shape} get-tuple-element(%m), index=1
    %d = {whole} fusion(%g3), kind=kCustom, calls=%done
    """
    start = start.replace("TARGET", 'custom_call_target="AsyncCollectiveStart"')
    entry = textwrap.dedent(entry).replace("BETWEEN", between.strip())
    parts = (("start", start), ("step", step), ("done", done))
    return entry, *(computation(name, text) for name, text in parts)
