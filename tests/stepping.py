"""Small models on rows and a way to run steps on any layout, for the tests of gradients and steps.

Shapes: R rows, D features, H hidden units, T tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from layouts import mesh_of

from jaxtrain.models.functional import as_model
from jaxtrain.sharding import shard_batch
from jaxtrain.state import abstract_state, state_shardings
from jaxtrain.step import make_train_step

D, H = 8, 16
HYBRID = "data:2,fsdp:2,tensor:2"

LAYOUTS = {
    "one device": ("data:1", 1),
    "one device, accumulated": ("data:1", 4),
    "data:8": ("data:8", 1),
    "fsdp:8": ("fsdp:8", 1),
    HYBRID: (HYBRID, 1),
    f"{HYBRID}, accumulated": (HYBRID, 4),
}
"""Name -> (mesh, accumulate_steps)"""


def new_state(model, tx, mesh, ema=False):
    """Like `init_state`, but placed from the host: most of these tests would compile only this."""
    abstract = abstract_state(model, tx, ema=ema)
    params, model_state = as_model(model).init(jax.random.key(0))
    state = abstract.replace(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=tx.init(params),
        ema_params=jax.tree.map(jnp.copy, params) if ema else None,
        key=jax.random.key(1),
    )
    return jax.device_put(state, state_shardings(abstract, model, mesh))


def compiled(step, state, donate=False):
    """Like the loop: the state comes back laid out as it was."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, out_shardings=(shardings, None), donate_argnums=(0,) if donate else ())


def run(model, loss_fn, tx, layout, batches, **options):
    """States and metrics after each step, on the host."""
    sizes, accumulate_steps = layout
    mesh = mesh_of(sizes)
    state = new_state(model, tx, mesh, ema=bool(options.get("ema_decay")))
    step = make_train_step(model, loss_fn, tx, mesh, accumulate_steps=accumulate_steps, **options)
    step, history = compiled(step, state), []
    for batch in batches:
        state, metrics = step(state, shard_batch(batch, mesh, accumulate_steps=accumulate_steps))
        history.append((on_host(state), jax.device_get(metrics)))
    return history


def on_host(state):
    return jax.device_get(state.replace(key=jax.random.key_data(state.key)))


# A two-layer network on rows, whose loss leaves rows out by a mask.


def mlp_init(key):
    first, second = jax.random.split(key)
    params = {
        "first": {"kernel": 0.3 * jax.random.normal(first, (D, H)), "bias": jnp.zeros(H)},
        "second": {"kernel": 0.3 * jax.random.normal(second, (H, D))},
    }
    return params, {}


def mlp_apply(params, model_state, batch, *, key, train):
    del key, train
    hidden_RH = batch["x"] @ params["first"]["kernel"] + params["first"]["bias"][None, :]
    return jnp.tanh(hidden_RH) @ params["second"]["kernel"], model_state


def squared_loss(outputs_RD, batch, params):
    del params
    error_R = jnp.sum(jnp.square(outputs_RD - batch["y"]), axis=-1)
    return {"loss": (jnp.sum(error_R * batch["loss_mask"]), jnp.sum(batch["loss_mask"]))}


MLP = (mlp_init, mlp_apply)


def rows(seed, num_rows=32):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, num_rows, D)).astype(np.float32)
    mask = (rng.random(num_rows) < 0.7).astype(np.float32)
    return {"x": x, "y": y, "loss_mask": mask}


# One parameter that multiplies every token (case E1).


def tokens_loss(outputs_RT, batch, params):
    del params
    return {"loss": (jnp.sum(outputs_RT * batch["loss_mask"]), jnp.sum(batch["loss_mask"]))}


TOKENS = (
    lambda key: ({"w": jnp.zeros(())}, {}),
    lambda params, state, batch, *, key, train: (params["w"] * batch["x"], state),
)


# Batch normalisation: rows depend on each other through the statistics.


def normalised_init(key):
    return mlp_init(key)[0], {"mean": jnp.zeros(H), "var": jnp.ones(H)}


def normalised_apply(params, model_state, batch, *, key, train):
    del key, train
    hidden_RH = batch["x"] @ params["first"]["kernel"]
    mean_H, var_H = hidden_RH.mean(0), hidden_RH.var(0)
    hidden_RH = (hidden_RH - mean_H[None, :]) / jnp.sqrt(var_H + 1e-3)[None, :]
    new = jax.tree.map(
        lambda old, now: 0.9 * old + 0.1 * now, model_state, {"mean": mean_H, "var": var_H}
    )
    return jnp.tanh(hidden_RH) @ params["second"]["kernel"], new


NORMALISED = (normalised_init, normalised_apply)
