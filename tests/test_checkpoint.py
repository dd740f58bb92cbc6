"""Checkpoints: what is saved comes back bit for bit, on any mesh, or an error says why not."""

import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import checkpointing as toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import HOST, abstract_like, save, train_and_save
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import checkpoint
from jaxtrain import checkpoint_files as files
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.tree import named_leaves


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "jaxtrain")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("trained")
    return workdir, *train_and_save(workdir)


@pytest.fixture
def small():
    return {"w": jnp.arange(6.0).reshape(2, 3), "step": jnp.int32(7)}


# C1: another mesh


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (8, 1)])
def test_restore_on_another_mesh_continues_the_training(trained, data, tensor):
    workdir, saved, losses = trained
    mesh = toy.make_mesh(data, tensor)
    state = Checkpointer(workdir / "checkpoints").restore(3, toy.abstract_state(mesh))
    for leaf, wanted in zip(toy.to_numpy(state), saved, strict=True):
        assert leaf.tobytes() == wanted.tobytes()
    for leaf, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(toy.abstract_state(mesh)), strict=True
    ):
        assert leaf.sharding == wanted.sharding
    _, continued = toy.train(mesh, state, 3)
    np.testing.assert_allclose(continued, losses, rtol=1e-5)


def test_contents_are_listed_on_one_device_without_a_mesh(trained):
    workdir, *_ = trained
    rows = Checkpointer(workdir / "checkpoints", read_only=True).contents(3)
    wanted = {
        name: (leaf.shape, str(leaf.dtype))
        for name, leaf in named_leaves(toy.abstract_state(toy.make_mesh(4, 2)))
    }
    assert {name: (shape, dtype) for name, shape, dtype in rows} == wanted
    result = subprocess.run(
        [sys.executable, "-m", "jaxtrain", "checkpoints", str(workdir), "--step=3"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "params/layer_0/kernel" in result.stdout
    assert len(result.stdout.splitlines()) == len(wanted)
    assert result.stderr == ""


def test_two_processes_restore_and_save_what_one_wrote(trained, tmp_path):
    workdir, saved, losses = trained
    directory = tmp_path / "checkpoints"
    shutil.copytree(workdir / "checkpoints", directory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    driver = str(Path(__file__).with_name("cluster_driver.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, driver, str(index), "2", port, str(directory), "3"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        lines, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        found = json.loads(lines.splitlines()[-1])
        assert found["steps"] == [3, 6]
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    # And one process restores what two wrote.
    state = Checkpointer(directory).restore(6, toy.abstract_state(toy.make_mesh(1, 1)))
    assert int(state.step) == 6
    assert not np.array_equal(toy.to_numpy(state)[1], saved[1])


# C2: another model, another place


def test_another_model_is_refused_with_every_parameter(trained):
    checkpointer = Checkpointer(trained[0] / "checkpoints")
    mesh = toy.make_mesh(4, 2)

    def message(**sizes):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(3, toy.abstract_state(mesh, **sizes))
        return str(caught.value)

    text = message(num_layers=3)
    assert "checkpoint step 3 has no parameter 'layer_2/kernel'; the model has it." in text
    assert "Did the model change since it was saved?" in text
    way_out = "--workdir=NEW --checkpoint.restore_from=OLD --checkpoint.partial_restore=PATTERN"
    assert way_out in text
    text = message(num_layers=9)
    assert "'layer_2/kernel', 'layer_3/kernel', " in text
    assert "'layer_6/kernel' and 2 more; the model has them." in text
    assert "'layer_0/bias', 'layer_1/bias'; the model has them." in message(bias=True)
    assert "has parameter 'layer_1/kernel'; the model does not." in message(num_layers=1)
    text = message(hidden=6)
    for part in ("'in/kernel': shape 8x4 vs 8x6", "'layer_1/kernel': shape 4x4 vs 6x6"):
        assert part in text
    text = message(hidden=6, num_layers=3, bias=True)
    for name in ("in/kernel", "layer_0/bias", "layer_2/bias", "layer_2/kernel"):
        assert repr(name) in text


def test_another_dtype_or_optimizer_is_refused(trained):
    checkpointer = Checkpointer(trained[0] / "checkpoints")
    abstract = toy.abstract_state(toy.make_mesh(4, 2))

    def half(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)

    params = jax.tree.map(half, abstract.params)
    with pytest.raises(CheckpointError, match="'in/kernel': dtype float32 vs bfloat16"):
        checkpointer.restore(3, abstract.replace(params=params))
    with pytest.raises(CheckpointError, match=r"has array 'opt_state/1/0/count'.*optimizer"):
        checkpointer.restore(3, abstract.replace(opt_state=()))


def test_a_numpy_leaf_of_another_shape_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    table = np.arange(5)
    save(checkpointer, 1, state={"table": table})
    restored = checkpointer.restore(1, {"table": np.zeros(5, table.dtype)})["table"]
    assert isinstance(restored, np.ndarray)
    np.testing.assert_array_equal(restored, table)
    with pytest.raises(CheckpointError, match="'table': shape 5 vs 6"):
        checkpointer.restore(1, {"table": np.zeros(6, table.dtype)})
    checkpointer.close()


def test_partial_restore_loads_the_rest_and_says_what_stays_initial(trained, caplog):
    mesh = toy.make_mesh(4, 2)
    sizes = {"num_layers": 3, "bias": True}
    initial = toy.init_state(mesh, **sizes)
    state = Checkpointer(trained[0] / "checkpoints", read_only=True).restore(
        3,
        toy.abstract_state(mesh, **sizes),
        partial="layer_2|bias",
        initial=lambda: toy.init_state(mesh, **sizes),
    )
    saved = Checkpointer(trained[0] / "checkpoints", read_only=True).restore(
        3, toy.abstract_state(mesh)
    )
    toy.assert_bit_equal(state.params["in"], saved.params["in"])
    toy.assert_bit_equal(state.params["layer_2"], initial.params["layer_2"])
    toy.assert_bit_equal(state.opt_state[1][0].mu["in"], saved.opt_state[1][0].mu["in"])
    assert int(state.step) == 3
    # 3 biases and a kernel, with two moments each.
    assert "12 of 25 arrays keep their initial values" in caplog.text
    assert "params/layer_2/kernel" in caplog.text
    assert "opt_state/1/0/nu/layer_1/bias" in caplog.text


def test_partial_restore_leaves_what_it_matches_though_the_checkpoint_has_it(trained):
    """As its help says: the pattern names what is not read, not what may be missing."""
    mesh = toy.make_mesh(4, 2)
    checkpointer = Checkpointer(trained[0] / "checkpoints", read_only=True)
    initial, saved = toy.init_state(mesh), checkpointer.restore(3, toy.abstract_state(mesh))
    options = {"partial": "^in/", "initial": lambda: toy.init_state(mesh)}
    state = checkpointer.restore(3, toy.abstract_state(mesh), **options)
    for found, before, trained_on in (
        (state.params, initial.params, saved.params),
        (state.opt_state[1][0].mu, initial.opt_state[1][0].mu, saved.opt_state[1][0].mu),
    ):
        toy.assert_bit_equal(found["in"], before["in"])
        assert not np.array_equal(found["in"]["kernel"], trained_on["in"]["kernel"])
        toy.assert_bit_equal(found["layer_0"], trained_on["layer_0"])


def test_partial_restore_still_refuses_what_it_does_not_name(trained):
    mesh = toy.make_mesh(4, 2)
    checkpointer = Checkpointer(trained[0] / "checkpoints")
    options = {"initial": lambda: toy.init_state(mesh, num_layers=3, bias=True)}
    abstract = toy.abstract_state(mesh, num_layers=3, bias=True)
    with pytest.raises(CheckpointError, match="no parameter 'layer_0/bias'"):
        checkpointer.restore(3, abstract, partial="layer_2", **options)
    with pytest.raises(ConfigError, match="'laier_2' matches no parameter; near paths: layer_"):
        checkpointer.restore(3, abstract, partial="laier_2", **options)


def test_a_subset_is_restored_when_asked_for(trained):
    mesh = toy.make_mesh(1, 1)
    wanted = toy.abstract_state(mesh).replace(opt_state=None)
    checkpointer = Checkpointer(trained[0] / "checkpoints", read_only=True)
    state = checkpointer.restore(3, wanted, subset=True)
    assert state.opt_state is None
    assert int(state.step) == 3
    with pytest.raises(CheckpointError, match="optimizer"):
        checkpointer.restore(3, wanted)


def test_an_absent_step_is_refused_with_the_steps_present(trained):
    checkpointer = Checkpointer(trained[0] / "checkpoints", read_only=True)
    for call in (checkpointer.contents, checkpointer.read_host):
        with pytest.raises(CheckpointError, match=r"step 77 does not exist in .*; steps there: 3"):
            call(77)


# C6: exactness


def test_training_with_a_restart_is_bit_equal(tmp_path):
    mesh = toy.make_mesh(4, 2)
    straight, losses = toy.train(mesh, toy.init_state(mesh), 6)
    state, _ = toy.train(mesh, toy.init_state(mesh), 3)
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 3, state=state)
    restored = checkpointer.restore(3, toy.abstract_state(mesh))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert type(restored.opt_state[1][0]) is type(state.opt_state[1][0])
    assert restored.step.dtype == jnp.int32
    assert restored.key.dtype == state.key.dtype
    resumed, rest = toy.train(mesh, restored, 3)
    assert rest == losses[3:]
    toy.assert_bit_equal(resumed, straight)
    assert int(resumed.opt_state[1][0].count) == 6
    checkpointer.close()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_come_back_with_their_implementation(tmp_path, impl):
    mesh = toy.make_mesh(4, 2)
    sharding = NamedSharding(mesh, PartitionSpec())
    state = {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4), 3)}
    state = jax.device_put(state, sharding)
    save(checkpointer := Checkpointer(tmp_path), 1, state=state)
    restored = checkpointer.restore(1, abstract_like(state))
    toy.assert_bit_equal(restored, state)
    for name, key in state.items():
        assert restored[name].dtype == key.dtype
        assert restored[name].sharding.is_equivalent_to(sharding, key.ndim)
    draws = [jax.random.normal(tree["one"], (4,)) for tree in (state, restored)]
    np.testing.assert_array_equal(*draws)
    other = jax.random.key(3, impl="rbg" if impl != "rbg" else "threefry2x32")
    with pytest.raises(CheckpointError, match=r"'one': dtype key<.*> vs key<.*>"):
        checkpointer.restore(1, abstract_like({**state, "one": jax.device_put(other, sharding)}))
    checkpointer.close()


def test_all_kinds_of_arrays_come_back(tmp_path):
    state = {
        "bfloat16": jnp.arange(7, dtype=jnp.bfloat16) / 3,
        "bool": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "nan": jnp.array([jnp.nan, jnp.inf, -0.0]),
        "nested/name": {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}},
        "numpy": np.arange(3, dtype=np.int64) + 2**40,
        "numpy_empty": np.zeros((0,), np.float64),
        "scalar": jnp.float32(1 / 3),
        "uint8": jnp.arange(5, dtype=jnp.uint8),
    }
    save(checkpointer := Checkpointer(tmp_path), 1, state=state)
    abstract = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else abstract_like(leaf), state
    )
    toy.assert_bit_equal(checkpointer.restore(1, abstract), state)
    checkpointer.close()


def test_what_is_no_array_or_shares_a_path_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=r"these are not: rate \(float\)"):
        checkpointer.save(1, {"rate": 0.5, "w": jnp.zeros(2)}, {})
    with pytest.raises(CheckpointError, match="a path of its own"):
        checkpointer.save(1, {"a/b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}, {})


def test_the_host_record_is_exact_and_taken_when_save_is_called(tmp_path, small):
    checkpointer = Checkpointer(tmp_path)
    host = json.loads(json.dumps(HOST))
    checkpointer.save(1, small, host)
    host["batch_sizes"].append("changed later")
    checkpointer.close()
    assert checkpointer.read_host(1) == HOST
    assert isinstance(checkpointer.read_host(1)["samples_seen"], int)
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        checkpointer.save(2, small, {"loss": float("nan")})


def test_donated_steps_right_after_a_save_do_not_change_what_is_written(tmp_path):
    """Large and small arrays, sharded and replicated, trained on while they are written."""
    mesh = toy.make_mesh(4, 2)
    shardings = {
        "sharded": NamedSharding(mesh, PartitionSpec("data", "tensor")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "scalar": NamedSharding(mesh, PartitionSpec()),
    }
    make = jax.jit(
        lambda: {
            "sharded": jnp.ones((1024, 4096)),
            "replicated": jnp.ones((256, 1024)),
            "scalar": jnp.ones(()),
        },
        out_shardings=shardings,
    )
    step = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1, tree),
        donate_argnums=0,
        out_shardings=shardings,
    )
    checkpointer = Checkpointer(tmp_path, keep_last=9)
    state, value = step(make()), 2
    for number in range(4):
        checkpointer.save(number, state, {"value": value})
        for _ in range(10):
            state = step(state)
        value += 10
    checkpointer.wait()
    for number in range(4):
        restored = checkpointer.restore(number, abstract_like(state))
        for leaf in jax.tree.leaves(restored):
            np.testing.assert_array_equal(leaf, checkpointer.read_host(number)["value"])
    checkpointer.close()


def test_saving_and_restoring_work_inside_of_an_event_loop(tmp_path, small):
    """A notebook's cells run in one."""
    import asyncio

    before = asyncio.run

    async def cell():
        save(checkpointer := Checkpointer(tmp_path), 1, state=small)
        restored = checkpointer.restore(1, abstract_like(small))
        checkpointer.close()
        return restored

    toy.assert_bit_equal(asyncio.run(cell()), small)
    assert asyncio.run is before  # nest_asyncio would have replaced it


# How it is done


def test_the_manifest_is_in_place_before_the_step_has_its_name(tmp_path, monkeypatch):
    """Also: orbax marks unfinished steps as we think, and calls us when all files are complete."""
    from orbax.checkpoint import path as orbax_path

    assert orbax_path.atomicity.TMP_DIR_SUFFIX == files.UNFINISHED
    sizes = {}

    def look(step):
        assert not (tmp_path / str(step)).exists()
        unfinished = tmp_path / f"{step}{files.UNFINISHED}"
        assert (unfinished / files.MANIFEST).is_file()
        sizes.update(
            {str(p.relative_to(unfinished)): p.stat().st_size for p in unfinished.rglob("*")}
        )

    monkeypatch.setattr(checkpoint, "_commit_started", look)
    save(checkpointer := Checkpointer(tmp_path), 1)
    checkpointer.close()
    manifest = files.read_manifest(tmp_path / "1")
    assert {"host/metadata", "state/_METADATA", "state/manifest.ocdbt"} <= manifest.files.keys()
    for name, size in manifest.files.items():
        assert sizes[name] == size == (tmp_path / "1" / name).stat().st_size


def test_check_costs_nothing(tmp_path, small):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small, {})
    started = time.perf_counter()
    for _ in range(1000):
        checkpointer.check()
    assert (time.perf_counter() - started) / 1000 < 20e-6
    checkpointer.close()


def test_looking_needs_neither_orbax_nor_a_backend(trained):
    program = (
        "import sys; from jaxtrain.checkpoint import Checkpointer\n"
        f"c = Checkpointer({str(trained[0] / 'checkpoints')!r}, read_only=True)\n"
        "print(c.committed_steps(), len(c.contents(3)), c.read_host(3)['samples_seen'])\n"
        "assert not [m for m in sys.modules if m.startswith(('orbax', 'flax', 'tensorstore'))]\n"
        "import jax; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["[3]", "13", str(HOST["samples_seen"])]


def test_a_save_compiles_nothing_but_the_view_of_the_random_key(tmp_path):
    """Else the first save would cost a compilation for every shape and device."""
    state = toy.init_state(toy.make_mesh(8, 1), hidden=48)  # shapes of this test only
    checkpointer = Checkpointer(tmp_path)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **facts: compiled.append((event, facts.get("fun_name", "")))
    )
    try:
        save(checkpointer, 1, state=state)
    finally:
        jax.monitoring.clear_event_listeners()
    checkpointer.close()
    names = {name for event, name in compiled if "backend_compile" in event}
    assert all("random_unwrap" in name for name in names), names
