"""Warnings about compiled programs: each appears for the program that has its fault, alone."""

import dataclasses

import pytest
from planning import CONDITION, MACHINE, computation, module_text, while_text

from jaxtrain.plan import advice, cost, hlo
from jaxtrain.plan.traffic import communication

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
SCOPE = ', metadata={op_name="jit(step)/%s"}'
# A product long enough to be worth its launch: 2e9 operations.
PRODUCT = """
%a = bf16[1000,1000]{1,0} parameter(0)
%product = bf16[1000,1000]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
OVER = {
    "tensor": "replica_groups=[4,2]<=[8]",
    "fsdp": "replica_groups=[4,2]<=[2,2,2]T(0,2,1)",
    "data": "replica_groups=[4,2]<=[2,4]T(1,0)",
}
LARGE = "%x = bf16[1000000]{0} parameter(1)\n"


def warned(entry, *computations, devices_per_host=8, machine=MACHINE):
    module = hlo.parse(module_text(entry, *computations))
    found = communication(module, MESH, devices_per_host)
    return dict(advice.warnings(module, found, cost.predict(module, found, machine)))


def hidden(kind="all-gather", axis="fsdp", scope="", operand="x"):
    """A collective that hides behind the product."""
    return (
        f"%s = bf16[2000000]{{0}} {kind}-start(%{operand}), {OVER[axis]}{SCOPE % scope}\n"
        + PRODUCT
        + f"%d = bf16[2000000]{{0}} {kind}-done(%s)\n"
    )


def in_loop(body, turns):
    """`body` in a loop that turns often."""
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(turns)}"
    return entry, computation("body", body), CONDITION


def test_a_program_without_faults_gets_none():
    assert warned(LARGE + hidden()) == {}


@pytest.mark.parametrize(
    ("scope", "kind", "axis", "is_fault"),
    [
        ("accumulate/while/body/layers/while/body/psum", "all-reduce", "data", True),
        # What is stored split has to be gathered, and its gradient scattered, every time.
        ("accumulate/while/body/layers/while/body/g", "all-gather", "fsdp", False),
        ("accumulate/while/body/layers/while/body/g", "reduce-scatter", "fsdp", False),
        # Activations that devices of a layer add up.
        ("accumulate/while/body/layers/while/body/psum", "all-reduce", "tensor", False),
        ("jvp(loss)/while/body/psum", "all-reduce", "fsdp", True),
        ("jvp(loss)/while/body/psum", "all-reduce", "tensor", False),
    ],
)
def test_collectives_that_could_leave_a_loop(scope, kind, axis, is_fault):
    found = warned(*in_loop(LARGE + hidden(kind, axis, scope), 4))
    assert (list(found) == ["collective_in_loop"]) == is_fault
    if is_fault:
        text = found["collective_in_loop"]
        assert f"an {kind} of 1.91 MiB bf16 over '{axis}' runs 4 times" in text


def test_communication_that_nothing_hides():
    # 1e6 bytes at 1e9 a second, behind a product of 6 ms.
    entry = PRODUCT + LARGE + f"%g = bf16[2000000]{{0}} all-gather(%x), {OVER['fsdp']}\n"
    found = warned(entry)
    assert list(found) == ["not_overlapped"]
    assert "2.00 ms of 2.00 ms of communication over 'fsdp'" in found["not_overlapped"]


def test_parameters_gathered_in_float32():
    entry = LARGE.replace("bf16", "f32") + hidden()
    assert list(warned(entry)) == ["float32_gather"]
    # All of the program in float32 is a choice.
    assert warned(entry.replace("bf16[1000,1000]", "f32[1000,1000]")) == {}


def test_many_small_collectives():
    entry = LARGE.replace("1000000", "1000") + hidden()
    assert (
        "201 collectives of less than 256 KiB"
        in (warned(*in_loop(entry, 201))["many_small_collectives"])
    )
    assert warned(*in_loop(entry, 199)) == {}


@pytest.mark.parametrize(
    ("devices_per_host", "axis", "is_fault"),
    [(8, "tensor", False), (1, "tensor", True), (4, "tensor", False), (1, "fsdp", False)],
)
def test_activations_over_the_network(devices_per_host, axis, is_fault):
    fast = dataclasses.replace(MACHINE, network_bandwidth=1e12)
    entry = LARGE + hidden("all-reduce", axis)
    found = warned(entry, devices_per_host=devices_per_host, machine=fast)
    assert list(found) == ["slow_link"] * is_fault


def test_sizes_that_the_matrix_units_pad():
    found = warned(PRODUCT.replace("%product = bf16[1000,1000]", "%product = bf16[1000,999]"))
    assert "100% of the matrix products" in found["padding_waste"]
    assert "1000x999" in found["padding_waste"]


def test_too_little_work():
    entry = "%a = bf16[8,8]{1,0} parameter(0)\n%n = bf16[8,8]{1,0} negate(%a)\n"
    assert list(warned(entry)) == ["little_work"]


def test_loops_of_unknown_length():
    entry, *others = in_loop(PRODUCT, None)
    assert list(warned(entry, *others)) == ["unknown_loop"]


FUSED = (
    "%q = bf16[2,512,8,64]{3,2,1,0} parameter(5)\n"
    "%o = (bf16[2,8,512,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q),"
    ' custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
    ' {"intermediate_tensor_shape": {"dimensions": ["2", "8", "512", "512"]},'
    ' "mask_type": "CAUSAL"}}\n'
)
SCORES = PRODUCT.replace(
    "contracting_dims={0}", "contracting_dims={0}" + SCOPE % "attention/attend/bkgts"
)


@pytest.mark.parametrize(
    ("entry", "is_fused"),
    [(PRODUCT, None), (FUSED, True), (SCORES, False), (FUSED + SCORES, False)],
)
def test_attention_that_is_not_fused(entry, is_fused):
    module = hlo.parse(module_text(entry))
    assert advice.attention_is_fused(module) is is_fused
    assert ("unfused_attention" in warned(entry)) == (is_fused is False)


def test_involuntary_rematerialisation_quotes_the_log():
    (found,) = advice.involuntary_remat(["[SPMD] Involuntary full rematerialization of %x"])
    assert found.kind == "involuntary_remat"
    assert found.text.endswith("[SPMD] Involuntary full rematerialization of %x")
