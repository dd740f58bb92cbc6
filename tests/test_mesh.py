"""Meshes: case B2, canonical order, nodes."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxtrain import mesh as mesh_module
from jaxtrain.errors import ConfigError
from jaxtrain.mesh import (
    AXES,
    describe_mesh,
    factor_over_nodes,
    format_sizes,
    make_mesh,
    parse_mesh,
    resolve_mesh,
)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of a machine that is not here."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "no GPU"


def fake_nodes(num_nodes: int, per_node: int) -> list[FakeDevice]:
    return [FakeDevice(i, i // per_node) for i in range(num_nodes * per_node)]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data:8", (8, 1, 1)),
        ("fsdp:-1", (1, 8, 1)),
        ("data:-1,tensor:2", (4, 1, 2)),
        ("tensor:2,data:2,fsdp:-1", (2, 2, 2)),
        (" data : 4 , fsdp : 2 ", (4, 2, 1)),
    ],
)
def test_mesh_from_text_has_all_axes_in_canonical_order(text, shape):
    mesh = make_mesh(text)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}


def test_the_default_is_fsdp_over_all_devices():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:3,tensor:2", ["needs 6 devices", "there are 8"]),
        ("data:-1,tensor:3", ["8 devices are not divisible", "product 3"]),
        ("data:-1,fsdp:-1", ["data and fsdp", "only one axis may be -1"]),
        ("data:8,tensor:2", ["needs 16 devices", "there are 8", "with --num_cpu_devices=16"]),
        ("data:0", ["'data' has the size 0"]),
        ("data:-2", ["'data' has the size -2"]),
        ("data:4,dta:2", ["unknown mesh axis 'dta'", "data, fsdp, tensor", "'data'?"]),
        ("data:4,stage:2", ["'stage' is not supported yet", "data, fsdp, tensor"]),
        ("data,tensor:8", ["'data' where an axis and its size", "data, fsdp, tensor"]),
        ("data:2,data:4", ["'data' twice"]),
        ("data:two", ["'two'", "positive integer"]),
        ("data=8", ["'data=8'", "data:2,fsdp:4"]),
        ("", ["''", "data:2,fsdp:4"]),
    ],
)
def test_b2_a_mesh_that_does_not_fit_is_refused_in_words(text, words):
    with pytest.raises(ConfigError) as error:
        make_mesh(text)
    for word in [*words, "8 cpu devices"]:
        assert word in str(error.value)


def test_b2_part_of_the_devices_needs_an_explicit_list():
    with pytest.raises(ConfigError, match="explicit device list"):
        make_mesh("data:3,tensor:2")
    mesh = make_mesh("data:3,tensor:2", devices=jax.devices()[:6])
    assert mesh.size == 6


def test_sizes_by_name_are_checked_like_text():
    assert dict(make_mesh({"tensor": 2, "data": -1}).shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    with pytest.raises(ConfigError, match=r"'data' has the size 2\.0"):
        make_mesh({"data": 2.0, "fsdp": 4})  # pyright: ignore


def test_parse_keeps_the_open_axis_and_resolve_fills_it():
    assert parse_mesh("fsdp:-1,data:2") == {"fsdp": -1, "data": 2}
    assert resolve_mesh({"fsdp": -1, "data": 2}, 6) == {"data": 2, "fsdp": 3, "tensor": 1}


def test_sizes_are_written_as_the_flag_takes_them():
    for text in ("data:2,fsdp:2,tensor:2", "fsdp:8", "data:1"):
        assert format_sizes(parse_mesh(text)) == text
    assert describe_mesh(make_mesh("tensor:2,data:4")) == "mesh data:4,tensor:2 on 8 cpu devices"
    one = make_mesh(devices=jax.devices()[:1])
    assert describe_mesh(one) == "mesh data:1 on 1 cpu device"


@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        ((4, 1, 2), 4, ((2, 2), (1, 1), (1, 2))),
        ((2, 8, 1), 8, ((2, 1), (1, 8), (1, 1))),
        ((1, 4, 4), 8, ((1, 1), (2, 2), (1, 4))),
        ((1, 1, 16), 8, ((1, 1), (1, 1), (2, 8))),
        ((3, 1, 8), 8, ((3, 1), (1, 1), (1, 8))),
        ((1, 3, 4), 6, ((1, 1), (1, 3), (2, 2))),
    ],
)
def test_inner_axes_are_kept_inside_a_node(sizes, per_node, expected):
    factors = factor_over_nodes(dict(zip(AXES, sizes, strict=True)), per_node)
    assert tuple(factors.values()) == expected
    assert np.prod([inside for _, inside in expected]) == per_node


@pytest.mark.parametrize("text", ["data:2,fsdp:8", "fsdp:4,tensor:4", "data:4,fsdp:2,tensor:2"])
def test_devices_are_laid_out_by_node(text):
    devices = fake_nodes(2, 8)
    shuffled = [devices[i] for i in np.random.default_rng(0).permutation(16)]
    mesh = make_mesh(text, devices=shuffled)  # pyright: ignore
    factors = factor_over_nodes(dict(mesh.shape), 8)
    nodes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert sorted(d.id for d in mesh.devices.flat) == list(range(16))
    # Along an axis the node changes only where the factoring says that the axis crosses nodes.
    for dim, (across, inside) in enumerate(factors.values()):
        blocks = np.moveaxis(nodes, dim, 0).reshape(across, inside, -1)
        assert (blocks == blocks[:, :1]).all(), f"{text}: axis {AXES[dim]} leaves its node"
        if across > 1:
            assert (blocks[0] != blocks[1]).all()
    assert "of 2 nodes" in describe_mesh(mesh)


def test_tensor_across_nodes_warns_with_better_sizes(caplog):
    with caplog.at_level(logging.WARNING):
        make_mesh("data:2,fsdp:8", devices=fake_nodes(2, 8))  # pyright: ignore
        assert not caplog.records
        make_mesh("tensor:16", devices=fake_nodes(2, 8))  # pyright: ignore
    (record,) = caplog.records
    assert "splits tensor:16 across 2 nodes of 8 devices" in record.getMessage()
    assert "better: mesh=fsdp:2,tensor:8" in record.getMessage()


def test_uneven_nodes_and_no_devices_are_refused():
    uneven = [FakeDevice(0, 0), FakeDevice(1, 0), FakeDevice(2, 1)]
    with pytest.raises(ConfigError, match=r"process 0: 2, process 1: 1"):
        make_mesh("data:3", devices=uneven)  # pyright: ignore
    with pytest.raises(ConfigError, match="at least one device"):
        make_mesh("data:1", devices=[])


# Nodes of several processes


@pytest.fixture
def cyclic(monkeypatch):
    """Four processes of two devices, dealt to two nodes like cards."""
    monkeypatch.setattr(mesh_module, "node_names", lambda: ("a", "b", "a", "b"))
    return fake_nodes(4, 2)


def test_the_unit_is_the_node_and_not_the_process(cyclic):
    mesh = make_mesh("fsdp:2,tensor:4", devices=cyclic)  # pyright: ignore
    processes = [[device.process_index for device in row] for row in mesh.devices[0]]
    assert processes == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert describe_mesh(mesh).endswith(
        "of 2 nodes (fsdp 2 across x 1 inside, tensor 1 across x 4 inside)"
    )


def test_processes_of_one_node_are_no_nodes(monkeypatch):
    monkeypatch.setattr(mesh_module, "node_names", lambda: ("a", "a"))
    mesh = make_mesh("tensor:4", devices=fake_nodes(2, 2))  # pyright: ignore
    assert describe_mesh(mesh) == "mesh tensor:4 on 4 gpu devices of 2 processes on one node"


def test_nodes_with_other_numbers_of_devices_are_refused(monkeypatch):
    monkeypatch.setattr(mesh_module, "node_names", lambda: ("a", "a", "b"))
    with pytest.raises(ConfigError, match=r"every node must bring .* \(node a: 4, node b: 2\)"):
        make_mesh("data:6", devices=fake_nodes(3, 2))  # pyright: ignore


def test_an_axis_across_nodes_inside_of_one_that_is_not_is_refused():
    with pytest.raises(ConfigError) as error:
        make_mesh("data:4,fsdp:3", devices=fake_nodes(3, 4))  # pyright: ignore
    text = str(error.value)
    assert "mesh=data:4,fsdp:3 does not fit 3 nodes of 4 devices: fsdp would go across" in text
    sizes = text.partition("sizes that work: ")[2].split(" or ")
    assert "data:3,fsdp:4" in sizes
    for size in sizes:
        make_mesh(size, devices=fake_nodes(3, 4))  # pyright: ignore
