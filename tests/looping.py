"""A toy run for the tests of the loop: model, data, configuration, and what a run left.

The rows cross epoch ends and do not fill the last evaluation batch.

Shapes: B rows, D inputs, C outputs.
"""

import collections
import contextlib
import functools
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain
from jaxtrain import CheckpointConfig, OptimizerConfig, RunConfig, loop, program
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.metrics import read_records

D, C = 8, 4
NUM_ROWS = 100
LAYOUT = "data:2,fsdp:2,tensor:2"


def init(key):
    return {"kernel": 0.3 * jax.random.normal(key, (D, C)), "bias": jnp.zeros(C)}, {}


def apply(params, model_state, batch, *, key, train):
    del key, train
    return batch["x"] @ params["kernel"] + params["bias"][None, :], model_state


def apply_noisy(params, model_state, batch, *, key, train):
    """Drops inputs at random: a key that is not what it was shows in the loss."""
    if train:
        keys_B = jaxtrain.row_keys(key, batch)
        keep_BD = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (D,)))(keys_B)
        batch = dict(batch, x=jnp.where(keep_BD, batch["x"] / 0.8, 0.0))
    return apply(params, model_state, batch, key=key, train=train)


def loss_fn(outputs_BC, batch, params):
    del params
    mask_B = batch["loss_mask"]
    error_B = jnp.sum(jnp.square(outputs_BC - batch["y"]), axis=-1)
    return {"loss": (jnp.sum(error_B * mask_B), jnp.sum(mask_B))}


MODEL, NOISY = (init, apply), (init, apply_noisy)


def rows(num_rows=NUM_ROWS, seed=0):
    x = np.random.default_rng(seed).normal(size=(num_rows, D)).astype(np.float32)
    truth = np.random.default_rng(2).normal(size=(D, C))
    return {"x": x, "y": np.tanh(x @ truth).astype(np.float32)}


TRAIN, EVAL = rows(), rows(20, seed=1)


def config(workdir="", **options):
    """A run of 10 steps, saved every 5, every step logged.

    Options of `CheckpointConfig` and `OptimizerConfig` go there, all others to `RunConfig`.
    """
    sections = {}
    defaults = {"every_steps": 5, "keep_last": 20, "learning_rate": 0.05}
    options = {**defaults, **options}
    for name, section in (("checkpoint", CheckpointConfig), ("optimizer", OptimizerConfig)):
        names = section.__dataclass_fields__.keys() & options.keys()
        sections[name] = section(**{key: options.pop(key) for key in names})
    defaults = {
        "num_steps": 10,
        "global_batch_size": 8,
        "log_every_steps": 1,
        "eval_every_steps": 0,
        "allow_replicated": 1.0,
    }
    return RunConfig(workdir=str(workdir), **sections, **{**defaults, **options})


def own_optimizer(workdir, num_steps):
    """A configuration that leaves the optimizer to `tx`."""
    defaults = OptimizerConfig()
    return config(workdir, num_steps=num_steps, learning_rate=defaults.learning_rate)


def fit(
    config,
    train_data=None,
    eval_data=EVAL,
    *,
    model=MODEL,
    loss_fn=loss_fn,
    num_devices=1,
    **options,
):
    """`jaxtrain.fit` of the toy; on one of the devices unless told, which compiles fastest."""
    train_data = TRAIN if train_data is None else train_data
    make_mesh = functools.partial(loop.make_mesh, devices=jax.devices()[:num_devices])
    with mock.patch.object(loop, "make_mesh", make_mesh):
        return jaxtrain.fit(model, loss_fn, train_data, eval_data, config=config, **options)


class Crash(Exception):
    """Ends a run in the middle of a step, like a bug or a full disk would."""


def crash_at(step):
    """An `on_step` that ends the run when the metrics of a step arrive."""

    def on_step(done, metrics):
        del metrics
        if done == step:
            raise Crash

    return on_step


def crashed_fit(config, step, **options):
    """A run that ends when the metrics of `step` arrive, whatever was saved until then."""
    with contextlib.suppress(Crash):
        fit(config, on_step=crash_at(step), **options)
        raise AssertionError("the run did not get there")


# What a run left


def records(workdir):
    """The lines of metrics.jsonl without what is measured in time."""
    return [without_times(record) for record in read_records(Path(workdir) / "metrics.jsonl")]


def without_times(record):
    return {
        name: value
        for name, value in record.items()
        if not name.endswith(("_seconds", "_per_second")) and name != "mfu"
    }


def train_records(workdir):
    return [record for record in records(workdir) if not record.get("eval")]


def eval_records(workdir):
    return [record for record in records(workdir) if record.get("eval")]


def saved_steps(workdir):
    return Checkpointer(Path(workdir) / "checkpoints", read_only=True).committed_steps()


def saved(workdir, step):
    """(arrays by path as NumPy arrays, JSON record) of a checkpoint."""
    checkpoints = Checkpointer(Path(workdir) / "checkpoints", read_only=True)
    wanted = {
        name: np.zeros(shape, np.uint32 if dtype.startswith("key") else dtype)
        for name, shape, dtype in checkpoints.contents(step)
        if not dtype.startswith("key")
    }
    nested: dict = {}
    for name, leaf in wanted.items():
        *parents, last = name.split("/")
        at = nested
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = leaf
    found = checkpoints.restore(step, nested, subset=True)
    arrays = dict(jaxtrain.tree.named_leaves(found))
    return arrays, checkpoints.read_host(step)


def assert_only_finite_saved(workdir):
    """No checkpoint of a run holds a value that is not finite."""
    for step in saved_steps(workdir):
        arrays, _ = saved(workdir, step)
        bad = [name for name, array in arrays.items() if not np.all(np.isfinite(array))]
        assert not bad, f"checkpoint {step}: {bad}"


def on_host(tree):
    """Leaves as NumPy arrays, keys as their data."""

    def convert(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return [convert(leaf) for leaf in jax.tree.leaves(tree)]


def assert_bit_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(on_host(one), on_host(other), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


# What happens inside a run


def spy_on_train_step(monkeypatch, around):
    """Calls `around(step, state, batch)` in place of every train step that `fit` compiles."""
    compile_step = program.compile_step

    def compile_spied(*args, **options):
        return Spied(compile_step(*args, **options), around)

    monkeypatch.setattr(program, "compile_step", compile_spied)


class Spied:
    """A compiled step with something around each call."""

    def __init__(self, compiled, around):
        self._compiled, self._around = compiled, around

    def __getattr__(self, name):
        return getattr(self._compiled, name)

    def __call__(self, state, batch):
        return self._around(self._compiled, state, batch)


class Compilations:
    """Counts what XLA compiles, in the whole process, by name of the function."""

    def __init__(self):
        self._lock = threading.Lock()
        self.names: list[str] = []

    def __call__(self, event, duration, **kwargs):
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.names.append(kwargs["fun_name"])

    @property
    def counts(self):
        return collections.Counter(self.names)
