"""Small optimised programs written by hand, in the form that XLA prints, for the tests of plans."""

import dataclasses
import textwrap

from jaxtrain.plan import cost

M, B, K = cost.MATRIX_EFFICIENCY, cost.BANDWIDTH_EFFICIENCY, cost.LINK_EFFICIENCY


@dataclasses.dataclass(frozen=True)
class Machine:
    """After the efficiencies: 1e12 FLOP/s, 1e9 B/s of memory and links, 1e8 B/s of network."""

    peak_flops: float = 1e12 / M
    float32_rate: float = 0.5
    memory_bandwidth: float = 1e9 / B
    link_bandwidth: float = 1e9 / K
    network_bandwidth: float = 1e8 / K


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
