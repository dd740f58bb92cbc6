"""The library in a notebook: no flags, no process to itself, and a stop button."""

import nbclient
import nbformat
import pytest

TRAIN = """
import logging, os, signal
import jax, jax.numpy as jnp, numpy as np, optax
import jaxtrain
from jaxtrain import CheckpointConfig, OptimizerConfig, RunConfig
from jaxtrain.metrics import read_records

def init(key):
    return {"kernel": 0.3 * jax.random.normal(key, (8, 4))}, {}

def apply(params, model_state, batch, *, key, train):
    return batch["x"] @ params["kernel"], model_state

def loss_fn(outputs, batch, params):
    mask = batch["loss_mask"]
    error = ((outputs - batch["y"]) ** 2).sum(-1)
    return {"loss": ((error * mask).sum(), mask.sum())}

x = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
data = {"x": x, "y": np.tanh(x[:, :4])}

def config(workdir="", **options):
    return RunConfig(
        workdir=workdir, num_steps=6, global_batch_size=8, log_every_steps=1,
        allow_replicated=1.0,
        optimizer=OptimizerConfig(learning_rate=0.05, weight_decay=0.0, schedule="constant"),
        **options,
    )

result = jaxtrain.fit(
    (init, apply), loss_fn, data, {"x": x[:10], "y": data["y"][:10]}, config=config("run")
)
print(result.status, result.step, sorted(result.eval_metrics))
"""

PIECES = """
mesh = jaxtrain.make_mesh("data:2,fsdp:2,tensor:2")
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05, b2=0.95, weight_decay=0.0))
model = (init, apply)
state = jaxtrain.init_state(model, tx, mesh)
step = jax.jit(jaxtrain.make_train_step(model, loss_fn, tx, mesh), donate_argnums=0)
evaluate = jax.jit(jaxtrain.make_eval_step(model, loss_fn, mesh))

from jaxtrain.data.order import sample_indices

losses = []
for i in range(6):
    rows = sample_indices(0, 100, np.arange(8 * i, 8 * i + 8))
    batch = {name: array[rows] for name, array in data.items()}
    batch["loss_mask"] = np.ones(8, np.float32)
    state, metrics = step(state, jaxtrain.shard_batch(batch, mesh))
    losses.append(float(metrics["loss"]))
logged = [record["loss"] for record in read_records("run/metrics.jsonl") if not record.get("eval")]
np.testing.assert_allclose(losses, logged, rtol=1e-5)
sums = evaluate(state.params, state.model_state, jaxtrain.shard_batch(batch, mesh))
print(float(sums["loss"][1]), int(state.step))
"""

MODULE = """
from flax import nnx

def build(rngs):
    return nnx.Linear(8, 4, rngs=rngs)

model = jaxtrain.functional(build, call=lambda module, batch: module(batch["x"]))
result = jaxtrain.fit(model, loss_fn, data, config=config())
print(result.status, sorted(result.state.params))
"""

STOP = """
def stop(step, metrics):
    if step == 3:
        os.kill(os.getpid(), signal.SIGINT)

before = signal.getsignal(signal.SIGINT)
stopped = jaxtrain.fit((init, apply), loss_fn, data, config=config("stopped"), on_step=stop)
assert signal.getsignal(signal.SIGINT) is before
again = jaxtrain.fit((init, apply), loss_fn, data, config=config("stopped"))
print(stopped.status, stopped.step, again.status, again.step)
"""

STOP_EARLY = """
class Data:
    fingerprint = "0"
    def __len__(self):
        return 100
    def read(self, indices):
        os.kill(os.getpid(), signal.SIGINT)
        return {name: array[indices] for name, array in data.items()}

try:
    jaxtrain.fit((init, apply), loss_fn, Data(), config=config())
except KeyboardInterrupt:
    print("interrupted")
"""


# Of the notebook's machinery, not of ours.
@pytest.mark.filterwarnings("default")
def test_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    cells = [TRAIN, PIECES, MODULE, STOP, STOP_EARLY]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, resources=resources).execute()
    printed = [
        "".join(o["text"] for o in cell["outputs"] if o.get("name") == "stdout").splitlines()
        for cell in notebook.cells
    ]
    assert printed == [
        ["finished 6 ['eval_seconds', 'loss', 'rows', 'weight']"],
        ["8.0 6"],
        ["finished ['bias', 'kernel']"],
        ["preempted 4 finished 6"],
        ["interrupted"],
    ]
    # What a run says goes to the notebook, too.
    said = "".join(o.get("text", "") for o in notebook.cells[0]["outputs"])
    assert "step 6/6" in said
