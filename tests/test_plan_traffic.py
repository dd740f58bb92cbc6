"""Collectives of compiled programs: groups, mesh axes, bytes, loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from planning import CONDITION, computation, module_text, tpu_gather, while_text

from jaxtrain.mesh import make_mesh
from jaxtrain.plan import hlo
from jaxtrain.plan.traffic import bytes_sent, communication, loop_scopes, parse_groups

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['b'=8] {'b':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['b'=8] {'b':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['b'=8] {'b':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=2, device_ids=([2,2]<=[4]T(0))] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2, device_ids=(0,2,1,3)] {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_every_form_of_groups(text, groups):
    assert parse_groups(text, 8).tolist() == groups


@pytest.mark.parametrize("text", ["[4,2]", "<=[8]", "mesh 'a'"])
def test_an_unknown_form_of_groups_is_refused(text):
    with pytest.raises(ValueError, match="unknown form of device groups"):
        parse_groups(text, 8)


def start(kind="all-gather", groups="replica_groups={{0,1},{2,3},{4,5},{6,7}}", **kwargs):
    """One synchronous collective of 1,000 bfloat16 numbers, in `MESH`."""
    return listed(
        f"""
        %p = bf16[1000]{{0}} parameter(0)
        ROOT %c = bf16[2000]{{0}} {kind}(%p), {groups}, dimensions={{0}}
        """,
        **kwargs,
    )[0]


def listed(entry, *computations, mesh=MESH, devices_per_host=8):
    module = hlo.parse(
        module_text(entry, *computations, num_devices=int(np.prod([*mesh.values()])))
    )
    return communication(module, mesh, devices_per_host)


@pytest.mark.parametrize(
    ("kind", "groups", "axis", "sent"),
    [
        # Every device gets 1 part of 2 from the other one.
        ("all-gather", "{{0,1},{2,3},{4,5},{6,7}}", "tensor", 2000),
        # 3 parts of 4, of an array of 4 x 2000 bytes.
        ("all-gather", "[2,4]<=[8]", "fsdp+tensor", 6000),
        ("reduce-scatter", "[4,2]<=[2,4]T(1,0)", "data", 1000),
        ("all-reduce", "{{0,2},{1,3},{4,6},{5,7}}", "fsdp", 2000),
        ("all-reduce", "{}", "data+fsdp+tensor", 3500),
        ("all-to-all", "[2,4]<=[8]", "fsdp+tensor", 1500),
    ],
)
def test_bytes_and_axis_of_a_collective(kind, groups, axis, sent):
    found = start(kind, f"replica_groups={groups}")
    assert (found.kind, found.axis, found.bytes_sent) == (kind, axis, sent)


def test_a_permutation_sends_the_whole_array_along_its_axis():
    pairs = "source_target_pairs={{0,4},{1,5},{4,0},{5,1}}"
    found = start("collective-permute", pairs)
    assert (found.axis, found.bytes_sent, found.group_size) == ("data", 2000, 2)


def test_groups_of_one_send_nothing():
    found = start("all-reduce", "replica_groups=[8,1]<=[8]")
    assert (found.axis, found.bytes_sent, found.spans_hosts) == ("", 0, False)


@pytest.mark.parametrize(
    ("kind", "times"), [("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-reduce", 1.5),
                        ("collective-permute", 1), ("collective-broadcast", 1)],
)  # fmt: skip
def test_ring_formulas(kind, times):
    assert bytes_sent(kind, 400, 4) == 400 * times


@pytest.mark.parametrize(
    ("mesh", "devices_per_host", "groups", "axis", "inside"),
    [
        # Two hosts of four: tensor and fsdp stay inside, data does not.
        (MESH, 4, "[4,2]<=[8]", "tensor", 2),
        (MESH, 4, "[4,2]<=[2,4]T(1,0)", "data", 1),
        (MESH, 4, "[1,8]<=[8]", "data+fsdp+tensor", 4),
        # Hosts of three: make_mesh puts data, not fsdp, across: devices 0 1 2 and 3 4 5.
        ({"data": 2, "fsdp": 3}, 3, "[2,3]<=[6]", "fsdp", 3),
        # Hosts of four with axes 3 x 4: the last one fills the host.
        ({"data": 3, "tensor": 4}, 4, "[3,4]<=[12]", "tensor", 4),
        # Hosts of two, fsdp of six: 3 across x 2 inside, and tensor across by itself.
        ({"fsdp": 6, "tensor": 1}, 2, "[1,6]<=[6]", "fsdp", 2),
        # data 2 x fsdp 3 on hosts of two: data is what fits inside, though it is the outer one.
        ({"data": 2, "fsdp": 3}, 2, "[3,2]<=[2,3]T(1,0)", "data", 2),
        ({"data": 2, "fsdp": 3}, 2, "[2,3]<=[6]", "fsdp", 1),
    ],
)
def test_which_groups_stay_inside_a_host(mesh, devices_per_host, groups, axis, inside):
    entry = f"""
    %p = bf16[1000]{{0}} parameter(0)
    ROOT %c = bf16[2000]{{0}} all-reduce(%p), replica_groups={groups}
    """
    (found,) = listed(entry, mesh=mesh, devices_per_host=devices_per_host)
    assert (found.axis, found.devices_inside) == (axis, inside)
    assert found.spans_hosts == (inside < found.group_size)


def test_loops_multiply_and_name_themselves():
    body = computation(
        "body",
        """
        %state = (s32[], bf16[64,128]{1,0}) parameter(0)
        %x = bf16[64,128]{1,0} get-tuple-element(%state), index=1
        %s = (bf16[64,128]{1,0}, bf16[64,256]{1,0}) all-gather-start(%x), GROUPS, METADATA
        ROOT %d = bf16[64,256]{1,0} all-gather-done(%s)
        """,
    )
    scopes = "jit(step)/accumulate/while/body/transpose(jvp(layers))/while/body/dot"
    body = body.replace("METADATA", f'metadata={{op_name="{scopes}"}}')
    body = body.replace("GROUPS", "replica_groups=[4,2]<=[8]")
    entry = f"%init = (s32[], bf16[64,128]{{1,0}}) parameter(0)\n{while_text(6)}"
    (found,) = listed(entry, body, CONDITION)
    assert (found.times, found.loops) == (6, ("accumulate", "layers"))
    assert found.total_bytes_sent == 6 * found.bytes_sent == 6 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("op_name", "scopes"),
    [
        ("jit(step)/mul", ()),
        ("jit(step)/jvp(loss)/while/body/dot", ("loss",)),
        ("jit(f)/(transpose(jvp(layers))/while/body/a:jvp(x)/while/b)", ("layers",)),
    ],
)
def test_scopes_of_loops(op_name, scopes):
    assert loop_scopes(op_name) == scopes


def test_collectives_behind_async_start_are_found():
    wrapped = computation(
        "wrapped",
        """
        %p = f32[800]{0} parameter(0)
        ROOT %r = f32[100]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}
        """,
    )
    entry = """
    %p = f32[800]{0} parameter(0)
    %s = ((f32[800]{0}), f32[100]{0}, s32[]) async-start(%p), calls=%wrapped
    %u = ((f32[800]{0}), f32[100]{0}, s32[]) async-update(%s), calls=%wrapped
    ROOT %d = f32[100]{0} async-done(%u), calls=%wrapped
    """
    (found,) = listed(entry, wrapped)
    assert (found.kind, found.bytes_sent) == ("reduce-scatter", 2800)


def test_the_fusions_of_a_tpu_are_one_collective():
    (found,) = listed(*tpu_gather())
    assert (found.name, found.kind) == ("s", "all-gather")
    assert (found.axis, found.bytes_sent) == ("fsdp+tensor", 3e6)


def test_another_mesh_than_that_of_the_program_is_refused():
    with pytest.raises(ValueError, match=r"for 8 devices, the mesh .* has 4"):
        communication(hlo.parse(module_text("ROOT %c = f32[] constant(0)")), {"fsdp": 4}, 8)


def test_a_program_compiled_here():
    """A sum over `fsdp` and a gather over `tensor`, written by hand, as XLA prints them."""
    mesh = make_mesh("data:2,fsdp:2,tensor:2")

    def local(x):
        return jax.lax.all_gather(jax.lax.psum(x, "fsdp"), "tensor", tiled=True)

    spec = PartitionSpec(("data", "fsdp", "tensor"))
    step = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec("data"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    module = hlo.parse(jax.jit(step).lower(x).compile().as_text())
    found = {c.axis: (c.kind, c.bytes_sent) for c in communication(module, dict(mesh.shape), 8)}
    shard = 64 // 8 * 16 * 4
    assert found == {"fsdp": ("all-reduce", shard), "tensor": ("all-gather", shard)}
