"""Helpers of the checkpoint tests: a tiny training on any mesh, and states to save.

Shapes: B rows, D inputs, H hidden.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain import resume
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import CheckpointConfig, RunConfig
from jaxtrain.state import TrainState

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
HOST = {"samples_seen": 2**40 + 1, "batch_sizes": [[0, 32]], "text": "ü"}


def make_mesh(data: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    return Mesh(devices, ("data", "tensor"), axis_types=axis_types)


def _init(hidden: int, num_layers: int, bias: bool) -> TrainState:
    key = jax.random.key(3)
    params = {"in": {"kernel": jax.random.normal(key, (8, hidden)) / 3}}
    for i in range(num_layers):
        kernel = jax.random.normal(jax.random.fold_in(key, i + 1), (hidden, hidden)) / 3
        params[f"layer_{i}"] = {"kernel": kernel}
        if bias:
            params[f"layer_{i}"]["bias"] = jnp.zeros(hidden)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state={"mean": jnp.zeros(hidden)},
        opt_state=TX.init(params),
        ema_params=None,
        key=key,
    )


def abstract_state(
    mesh: Mesh, *, hidden: int = 4, num_layers: int = 2, bias: bool = False
) -> TrainState:
    """Matrices are split over `tensor`, and over `data` where they divide; the rest is whole."""
    state = jax.eval_shape(functools.partial(_init, hidden, num_layers, bias))

    def place(leaf):
        spec = PartitionSpec()
        if leaf.ndim == 2 and leaf.shape[0] % mesh.shape["data"] == 0:
            spec = PartitionSpec("data", "tensor")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, state)


@functools.cache
def _init_fn(mesh: Mesh, hidden: int, num_layers: int, bias: bool):
    abstract = abstract_state(mesh, hidden=hidden, num_layers=num_layers, bias=bias)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(functools.partial(_init, hidden, num_layers, bias), out_shardings=shardings)


def init_state(
    mesh: Mesh, *, hidden: int = 4, num_layers: int = 2, bias: bool = False
) -> TrainState:
    return _init_fn(mesh, hidden, num_layers, bias)()


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(8, 8)).astype(np.float32)


@functools.cache
def make_step(mesh: Mesh):
    """A donated train step with dropout: (state, x_BD) -> (state, loss)."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh))
    x_sharding = NamedSharding(mesh, PartitionSpec("data"))

    def loss_fn(params, key, x_BD):
        h_BH = jnp.tanh(x_BD @ params["in"]["kernel"])
        for name in sorted(params.keys() - {"in"}):
            h_BH = jnp.tanh(h_BH @ params[name]["kernel"])
        keep_BH = jax.random.bernoulli(key, 0.5, h_BH.shape)
        return jnp.mean((jnp.where(keep_BH, h_BH, 0.0).sum(-1) - x_BD.sum(-1)) ** 2)

    def step(state, x_BD):
        key = jax.random.fold_in(state.key, state.step)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, key, x_BD)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, x_sharding),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )


def train(mesh: Mesh, state, num_steps: int) -> tuple[TrainState, list[float]]:
    losses = []
    for _ in range(num_steps):
        state, loss = make_step(mesh)(state, batch(int(state.step)))
        losses.append(float(loss))
    return state, losses


def train_and_save(workdir: Path) -> tuple[list[np.ndarray], list[float]]:
    """Three steps on data 4 x tensor 2, saved: (the state, the losses of the next three)."""
    mesh = make_mesh(4, 2)
    state, _ = train(mesh, init_state(mesh), 3)
    checkpointer = Checkpointer(workdir / "checkpoints")
    assert checkpointer.save(3, state, HOST)
    checkpointer.close()
    saved = to_numpy(state)
    _, losses = train(mesh, state, 3)
    return saved, losses


def save(checkpointer: Checkpointer, *steps: int, state=None) -> None:
    """Saves a small state, or `state`, at some steps, and waits."""
    for step in steps:
        checkpointer.save(step, state or {"w": jnp.full((64,), float(step))}, {"step": step})
    checkpointer.wait()


def abstract_like(tree):
    """Shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def to_numpy(tree) -> list[np.ndarray]:
    """The leaves as host copies; keys as their data."""

    def convert(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return [convert(leaf) for leaf in jax.tree.leaves(tree)]


def assert_bit_equal(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b, leaf in zip(to_numpy(one), to_numpy(other), jax.tree.leaves(one), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), leaf


def config(workdir, *, resume: str = "auto", **options) -> RunConfig:
    """A run configuration; the names of `CheckpointConfig` go there."""
    names = {field.name for field in dataclasses.fields(CheckpointConfig)}
    checkpoint = {name: options.pop(name) for name in names & options.keys()}
    checkpoint = {"every_steps": 4, "keep_last": 10, **checkpoint}
    return RunConfig(
        workdir=str(workdir),
        resume=resume,
        checkpoint=CheckpointConfig(**checkpoint),
        **{"num_steps": 10, "global_batch_size": 8, **options},
    )


def run(config: RunConfig, *, mesh: Mesh | None = None, stop_at: int = 0):
    """A small `fit`: begins as the policy says, trains, saves by cadence and at the end.

    Args:
        config: of the run.
        mesh: of the run; None: data 4 x tensor 2.
        stop_at: leave before this step like a preempted run; 0: finish.

    Returns:
        (start, state, losses of the steps done).
    """
    mesh = mesh or make_mesh(4, 2)
    checkpointer, start = resume.begin(config, abstract_state(mesh), init=lambda: init_state(mesh))
    with contextlib.ExitStack() as stack:
        stack.push(checkpointer.leave)
        state = init_state(mesh) if start.state is None else start.state
        every, losses = config.checkpoint.every_steps, []
        for step in range(start.step + 1, config.num_steps + 1):
            if step == stop_at:
                break
            checkpointer.check()
            state, (loss,) = train(mesh, state, 1)
            losses.append(loss)
            if step == config.num_steps or (every and step % every == 0):
                checkpointer.save(step, state, start.record(config, step))
    return start, state, losses


def steps_in(workdir) -> list[int]:
    """Directories named like a step."""
    return sorted(int(p.name) for p in Path(workdir, "checkpoints").iterdir() if p.name.isdigit())


def snapshot(directory) -> dict[str, tuple[int, int]]:
    """All below a directory but the run's lock, with size and time of change."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(Path(directory).rglob("*"))
        if path.name != ".lock"
    }


def largest_file(directory) -> Path:
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def mount_tmpfs(directory: Path, options: str) -> str:
    """Mounts a RAM disk; returns why it was not possible, or ""."""
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "needs root and mount(8) for a small disk: run the tests as root"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return (
            f"mount of a tmpfs is not permitted here ({result.stderr.strip()}); needs a machine "
            "or container with CAP_SYS_ADMIN"
        )
    return ""


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "-l", str(directory)], check=True)
