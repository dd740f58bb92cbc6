"""Times of a step, against numbers worked out by hand for a machine with round figures."""

import dataclasses

import pytest
from planning import CONDITION, MACHINE, K, M, computation, module_text, tpu_gather, while_text

from jaxtrain.plan import cost, hlo
from jaxtrain.plan.traffic import Collective, bytes_sent, communication

MESH = {"data": 2, "fsdp": 4}

# 2e9 operations and 6e6 bytes: 2 ms of the matrix units, 6 ms of the memory.
PRODUCT = """
%a = bf16[1000,1000]{1,0} parameter(0)
%product = bf16[1000,1000]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""


def predict(entry, *computations, machine=MACHINE, devices_per_host=8, **kwargs):
    module = hlo.parse(module_text(entry, *computations))
    found = communication(module, MESH, devices_per_host)
    return cost.predict(module, found, machine, **kwargs)


def gather(kind="-start", groups="[2,4]<=[8]", name="g"):
    """4e6 bytes to gather, of which a device sends 3 parts of 4: 3 ms inside a host."""
    return f"%{name} = bf16[2000000]{{0}} all-gather{kind}(%half), replica_groups={groups}\n"


HALF = "%half = bf16[500000]{0} parameter(9)\n"


def test_a_kernel_takes_the_longer_of_its_two_times():
    found = predict(PRODUCT)
    assert found.matmul_seconds == pytest.approx(2e-3)
    assert found.memory_seconds == pytest.approx(6e-3)
    assert found.step_seconds == found.kernel_seconds == pytest.approx(6e-3)
    slow = dataclasses.replace(MACHINE, sustained_flops=1e11 / M)
    assert predict(PRODUCT, machine=slow).step_seconds == pytest.approx(20e-3)


def test_operands_in_float32_take_longer_and_in_8_bits_less():
    for dtype, milliseconds in (("f32", 4), ("f8e4m3fn", 1)):
        found = predict(PRODUCT.replace("bf16", dtype))
        assert found.matmul_seconds == pytest.approx(milliseconds * 1e-3)


def test_a_collective_that_is_not_asynchronous_is_exposed():
    found = predict(PRODUCT + HALF + gather(""))
    assert found.step_seconds == pytest.approx(9e-3)
    assert found.exposed_seconds == pytest.approx(3e-3)
    assert found.communication["fsdp"] == (
        cost.AxisTime(pytest.approx(3e6), pytest.approx(3e-3), pytest.approx(3e-3))
    )


def test_an_asynchronous_one_hides_behind_what_is_launched_before_its_end():
    entry = HALF + gather() + PRODUCT + "%d = bf16[2000000]{0} all-gather-done(%g)\n"
    found = predict(entry)
    assert found.exposed_seconds == 0
    assert found.step_seconds == pytest.approx(6e-3)
    assert found.communication["fsdp"].seconds == pytest.approx(3e-3)


def test_what_is_launched_after_its_end_hides_nothing():
    entry = HALF + gather() + "%d = bf16[2000000]{0} all-gather-done(%g)\n" + PRODUCT
    found = predict(entry)
    assert found.exposed_seconds == pytest.approx(3e-3)
    assert found.step_seconds == pytest.approx(9e-3)


def test_collectives_wait_for_each_other():
    """Four of 3 ms, started at once, behind one kernel of 6 ms: 6 ms are left."""
    starts = "".join(gather(name=f"g{i}") for i in range(4))
    ends = "".join(f"%d{i} = bf16[2000000]{{0}} all-gather-done(%g{i})\n" for i in range(4))
    found = predict(HALF + starts + PRODUCT + ends)
    assert found.step_seconds == pytest.approx(12e-3)
    assert found.exposed_by == pytest.approx({"g0": 0, "g1": 0, "g2": 3e-3, "g3": 3e-3})


@pytest.mark.parametrize(
    ("devices_per_host", "groups", "milliseconds"),
    [
        # 3e6 bytes by one device, over the link alone.
        (8, "[2,4]<=[8]", 3),
        # Two hosts of two devices: 3e6 bytes cross, spread over two ports.
        (2, "[2,4]<=[8]", 15),
        # Each device on a host of its own.
        (1, "[2,4]<=[8]", 30),
        # A group of two, one device on each of two hosts: half of 2e6 bytes.
        (4, "[4,2]<=[2,4]T(1,0)", 10),
    ],
)
def test_rings_over_hosts(devices_per_host, groups, milliseconds):
    found = predict(HALF + gather("", groups), devices_per_host=devices_per_host)
    assert found.step_seconds == pytest.approx(milliseconds * 1e-3)


@pytest.mark.parametrize(
    ("kind", "devices_per_host", "milliseconds"),
    [
        # A ring of 4: 3 steps of 1 ms inside a host, 3e6 bytes in 3 ms.
        ("all-gather", 8, 3 + 3),
        # Two hosts of two: 2 steps inside, 1 between them of 100 ms; 3e6 bytes in 15 ms.
        ("all-gather", 2, 2 + 100 + 15),
        # Round twice: 4e6 bytes sent of which 3/4 each time.
        ("all-reduce", 2, 2 * (2 + 100) + 30),
        # No ring: one step; half of 4e6 bytes crosses.
        ("all-to-all", 2, 100 + 20),
    ],
)
def test_the_steps_of_a_ring_take_time(kind, devices_per_host, milliseconds):
    late = dataclasses.replace(MACHINE, link_latency=1e-3, network_latency=100e-3)
    collective = Collective(
        name="", kind=kind, axis="fsdp", group_size=4, devices_inside=min(devices_per_host, 4),
        num_bytes=4_000_000, bytes_sent=bytes_sent(kind, 4e6, 4), dtypes=(), times=1,
        loops=(), source="",
    )  # fmt: skip
    assert cost.link_seconds(collective, late) == pytest.approx(milliseconds * 1e-3)


def test_the_link_can_be_slower_than_the_ports_together():
    fast = dataclasses.replace(MACHINE, network_bandwidth=9e8 / K)
    found = predict(HALF + gather("", "[2,4]<=[8]"), machine=fast, devices_per_host=2)
    assert found.step_seconds == pytest.approx(3e-3)


def test_an_all_to_all_crosses_with_what_is_meant_for_other_hosts():
    """1e6 bytes, 4 devices on 2 hosts: half of the array crosses, 5 ms."""
    entry = HALF + "%c = bf16[500000]{0} all-to-all(%half), replica_groups=[2,4]<=[8]\n"
    assert predict(entry, devices_per_host=2).step_seconds == pytest.approx(5e-3)


def test_a_tpu_gathers_while_it_computes():
    """3 ms behind a product of 6 ms, and the 8 us of the fusion that holds the collective."""
    found = predict(*tpu_gather(PRODUCT))
    assert found.exposed_seconds == 0
    assert found.step_seconds == pytest.approx(6.008e-3)
    found = predict(*tpu_gather())
    assert found.step_seconds == pytest.approx(3e-3)
    assert found.exposed_by == pytest.approx({"s": 3e-3 - 8e-6})


def test_loops_multiply():
    body = computation(
        "body",
        HALF.replace("parameter(9)", "parameter(1)")
        + gather()
        + PRODUCT
        + "%d = bf16[2000000]{0} all-gather-done(%g)\n"
        + gather("", name="h"),
    )
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(10)}"
    found = predict(entry, body, CONDITION)
    assert found.step_seconds == pytest.approx(10 * (6e-3 + 3e-3))
    assert found.exposed_seconds == pytest.approx(30e-3)
    assert found.communication["fsdp"].seconds == pytest.approx(60e-3)
    assert found.communication["fsdp"].bytes_sent == pytest.approx(10 * 6e6)


def test_tokens_per_second_and_mfu():
    found = predict(PRODUCT, tokens_per_device=12, flops_per_token=5e8)
    assert found.tokens_per_second_per_device == pytest.approx(2000)
    # 2,000 tokens x 5e8 operations of a peak of 2e12.
    assert found.mfu == pytest.approx(0.5)
    assert predict(PRODUCT).mfu is None


def test_phases_are_told_by_scopes():
    scopes = {
        "forward": "jit(step)/jvp(layers)/while/body/dot",
        "backward": "jit(step)/transpose(jvp(layers))/while/body/dot",
        "remat": "jit(step)/transpose(jvp(layers))/while/body/rematted_computation/dot",
        "loss": "jit(step)/jvp(loss)/dot",
        "update": "jit(step)/mul",
    }
    entry = "%a = bf16[1000,1000]{1,0} parameter(0)\n" + "".join(
        f'%{phase} = bf16[1000,1000]{{1,0}} copy(%a), metadata={{op_name="{scope}"}}\n'
        # What has no scope belongs to what stands before it.
        f"%{phase}.1 = bf16[1000,1000]{{1,0}} copy(%a)\n"
        for phase, scope in scopes.items()
    )
    assert predict(entry).phases == {phase: (pytest.approx(8e-3), 0) for phase in scopes}
