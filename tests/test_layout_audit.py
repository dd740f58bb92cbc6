"""The audit of a layout: bytes per device, needless replication, golden tables."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import CUBE, mesh_of, shapes

from jaxtrain.errors import ConfigError
from jaxtrain.layout_audit import audit
from jaxtrain.models.transformer import PRESETS, TransformerConfig, transformer
from jaxtrain.sharding import (
    param_shardings,
)

GOLDEN = pathlib.Path(__file__).parent / "golden"


def test_audit_counts_bytes_per_device():
    model, tx = toy.toy(), optax.adamw(1e-3)
    result = audit(model, mesh_of(CUBE), tx, ema=True)
    rows = {row.path: row for row in result.rows}
    up = rows["params/layers/up/kernel"]
    assert (up.shape, up.logical_axes) == ((3, 64, 128), ("layers", "embed", "mlp"))
    assert (up.total_bytes, up.bytes_per_device) == (3 * 64 * 128 * 4, 3 * 64 * 128)
    assert rows["params/layers/norm/scale"].bytes_per_device == 3 * 64 * 4 // 2
    assert rows["opt_state/0/nu/head/kernel"].bytes_per_device == 64 * 256
    per_device = result.group_bytes_per_device()
    params = 2 * 3 * 64 * 128 + 64 * 256 + 3 * 64 * 2 + 3 * 128 * 2
    assert per_device == {
        "params": params,
        "ema_params": params,
        "opt_state": 2 * params + 4,
    }
    assert result.bytes_per_device == sum(per_device.values())
    assert "0.00% replicated" in result.short()
    assert result.short() in result.table()
    assert len(result.to_json()["rows"]) == len(result.rows)


def test_audit_equals_what_devices_hold():
    from jaxtrain.state import init_state

    model, mesh, tx = toy.toy(), mesh_of("fsdp:4,tensor:2"), optax.adafactor(1e-3)
    state = init_state(model, tx, mesh)
    held = [
        shard.data.nbytes
        for leaf in jax.tree.leaves((state.params, state.opt_state))
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[3]
    ]
    assert audit(model, mesh, tx).bytes_per_device == sum(held)


def test_needless_replication_is_an_error_unless_allowed():
    model = dataclasses.replace(
        toy.toy(), logical_axes={**toy.LOGICAL_AXES, "head": {"kernel": (None, None)}}
    )
    with pytest.raises(ConfigError, match=r"2\d\.\d% of the train state .* params/head/kernel"):
        audit(model, mesh_of("fsdp:8"), optax.adamw(1e-3))
    result = audit(model, mesh_of("fsdp:8"), allow_replicated=0.3)
    flagged = [row.path for row in result.rows if row.is_needlessly_replicated]
    # The bias has no rule for fsdp either; it is too small to matter.
    assert flagged == ["params/head/kernel", "params/layers/up/bias"]
    assert "could be sharded" in result.table()
    # Where no axis of the mesh could split it, nothing is wasted.
    assert audit(model, mesh_of("data:8")).replicated_share == 0
    # A property of model and rules, not of the number of devices.
    shares = {audit(toy.toy(), mesh_of(text)).replicated_share for text in ("fsdp:2", "fsdp:8")}
    assert len(shares) == 1
    assert 0 < shares.pop() < 0.02


def test_an_axis_that_splits_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"mesh axis tensor=2 splits no parameter"):
        audit(toy.unlabelled(), mesh_of("fsdp:4,tensor:2"))
    assert audit(toy.unlabelled(), mesh_of("fsdp:4,data:2")).idle_axes == ()
    assert audit(toy.unlabelled(), mesh_of("tensor:8"), allow_replicated=1).idle_axes == ("tensor",)


def test_model_state_is_listed_and_replicated():
    model = dataclasses.replace(
        toy.toy(), init=lambda key: (toy.toy().init(key)[0], {"mean": jnp.zeros(64)})
    )
    row = audit(model, mesh_of("fsdp:8")).rows[-1]
    assert (row.path, row.spec, row.bytes_per_device) == ("model_state/mean", P(), 256)


def test_shardings_are_named_shardings_on_the_mesh():
    mesh = mesh_of(CUBE)
    for sharding in jax.tree.leaves(param_shardings(shapes(a=(8, 8)), None, mesh)):
        assert sharding == NamedSharding(mesh, P("fsdp"))


@pytest.mark.parametrize("text", ["data:8", "fsdp:8", "fsdp:4,tensor:2", CUBE])
@pytest.mark.parametrize("preset", ["nano", "llama3-8b"])
def test_golden_tables(preset, text):
    """Where everything lives, reviewed line by line.

    A difference means that checkpoints move and memory changes. If that is wanted, write the new
    table to the file, and look at every line of the diff.
    """
    model = transformer(TransformerConfig(**PRESETS[preset]))
    table = audit(model, mesh_of(text), optax.adamw(1e-3)).table() + "\n"
    name = f"sharding_{preset}_{text.replace(':', '').replace(',', '_')}.txt"
    assert table == (GOLDEN / name).read_text(), f"\n{table}"
