"""Schedules, optimizers and masks by parameter name, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain
from jaxtrain import optim
from jaxtrain.config import OptimizerConfig
from jaxtrain.errors import ConfigError

PARAMS = {
    "dense": {"kernel": np.full((3, 2), 0.5, np.float32), "bias": np.full(2, -0.25, np.float32)},
    "head": {"kernel": np.full((2, 4), 0.75, np.float32)},
}
NO_EXTRAS = {"schedule": "constant", "weight_decay": 0.0, "clip_norm": 0.0}


def random_grads(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: (scale * rng.normal(size=p.shape)).astype(np.float32), PARAMS)


def run(config, num_steps=4, params=PARAMS, scale=1.0):
    """Parameters after each update, and the last state of the optimizer."""
    tx = optim.make_optimizer(config, params, num_steps=num_steps)
    state, history = tx.init(params), []
    update = jax.jit(tx.update)
    for step in range(num_steps):
        updates, state = update(random_grads(step, scale), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history, state


def numpy_schedule(config, num_steps):
    peak, warmup = config.learning_rate, config.warmup_steps
    final = peak * config.final_learning_rate_ratio
    rates = []
    for step in range(num_steps + 3):
        done = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
        if step < warmup:
            rates.append(peak * step / warmup)
        elif config.schedule == "constant":
            rates.append(peak)
        elif config.schedule == "cosine":
            rates.append(final + (peak - final) * 0.5 * (1 + np.cos(np.pi * done)))
        elif config.schedule == "linear":
            rates.append(peak + (final - peak) * done)
        else:
            decay = round(config.decay_fraction * num_steps)
            fallen = min(max(step - (num_steps - decay), 0) / decay, 1.0)
            rates.append(peak + (final - peak) * fallen)
    return np.array(rates)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_schedule_values(schedule, warmup_steps):
    options = {} if schedule == "constant" else {"final_learning_rate_ratio": 0.2}
    if schedule == "wsd":
        options["decay_fraction"] = 0.3
    config = OptimizerConfig(
        learning_rate=3e-3, schedule=schedule, warmup_steps=warmup_steps, **options
    )
    rate = jax.jit(optim.learning_rate_schedule(config, 20))
    rates = [rate(jnp.int32(step)) for step in range(23)]
    assert all(r.dtype == jnp.float32 and r.shape == () for r in rates)
    np.testing.assert_allclose(rates, numpy_schedule(config, 20), rtol=1e-6)


@pytest.mark.parametrize(("num_steps", "expected"), [(5, 0), (500, 50), (100_000, 2000)])
def test_warmup_that_follows_the_length_of_the_run(num_steps, expected):
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=-1)
    given = OptimizerConfig(learning_rate=2.0, warmup_steps=expected)
    for step in (0, 1, expected // 2, expected, num_steps - 1):
        rate = optim.learning_rate_schedule(config, num_steps)(step)
        np.testing.assert_allclose(rate, numpy_schedule(given, num_steps)[step], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warmup_of_four_steps(schedule):
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_steps=4)
    rates = [float(optim.learning_rate_schedule(config, 10)(step)) for step in range(5)]
    assert rates == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine", "warmup_steps": 11}, "warmup_steps=11 and the 0 decay steps"),
        (
            {"schedule": "wsd", "warmup_steps": 6, "decay_fraction": 0.5},
            "warmup_steps=6 and the 5 decay steps of schedule=wsd do not fit into num_steps=10",
        ),
    ],
)
def test_schedule_longer_than_the_run(options, message):
    with pytest.raises(ConfigError, match=message):
        optim.learning_rate_schedule(OptimizerConfig(**options), 10)


def adamw_numpy(rates, b1, b2, eps, decay):
    params = [p.astype(np.float64) for p in jax.tree.leaves(PARAMS)]
    decays = [0.0, decay, decay]  # dense/bias, dense/kernel, head/kernel
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    for step, rate in enumerate(rates):
        for i, g in enumerate(jax.tree.leaves(random_grads(step))):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g.astype(np.float64) ** 2
            m_hat, v_hat = m[i] / (1 - b1 ** (step + 1)), v[i] / (1 - b2 ** (step + 1))
            params[i] -= rate * (m_hat / (np.sqrt(v_hat) + eps) + decays[i] * params[i])
    return params


def lion_numpy(rates, b1, b2, decay):
    params = [p.astype(np.float64) for p in jax.tree.leaves(PARAMS)]
    decays = [0.0, decay, decay]
    m = [np.zeros_like(p) for p in params]
    for step, rate in enumerate(rates):
        for i, g in enumerate(jax.tree.leaves(random_grads(step))):
            params[i] -= rate * (np.sign(b1 * m[i] + (1 - b1) * g) + decays[i] * params[i])
            m[i] = b2 * m[i] + (1 - b2) * g
    return params


def sgd_numpy(rates, momentum, decay):
    params = [p.astype(np.float64) for p in jax.tree.leaves(PARAMS)]
    decays = [0.0, decay, decay]
    m = [np.zeros_like(p) for p in params]
    for step, rate in enumerate(rates):
        for i, g in enumerate(jax.tree.leaves(random_grads(step))):
            m[i] = momentum * m[i] + g
            params[i] -= rate * (m[i] + decays[i] * params[i])
    return params


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "sgd with momentum"])
def test_optimizer_against_numpy(name, decay):
    shared = {"learning_rate": 0.1, "weight_decay": decay, "clip_norm": 0.0, "warmup_steps": 2}
    if name == "adamw":
        config = OptimizerConfig(b1=0.8, b2=0.9, eps=1e-3, **shared)
        reference = lambda rates: adamw_numpy(rates, 0.8, 0.9, 1e-3, decay)  # noqa: E731
    elif name == "lion":
        config = OptimizerConfig(name="lion", b1=0.8, b2=0.9, **shared)
        reference = lambda rates: lion_numpy(rates, 0.8, 0.9, decay)  # noqa: E731
    else:
        momentum = 0.7 if name == "sgd with momentum" else 0.0
        config = OptimizerConfig(name="sgd", momentum=momentum, **shared)
        reference = lambda rates: sgd_numpy(rates, momentum, decay)  # noqa: E731
    history, _ = run(config)
    expected = reference(numpy_schedule(config, 4)[:4])
    for ours, theirs in zip(jax.tree.leaves(history[-1]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5)


def test_own_decay_pattern():
    config = OptimizerConfig(
        name="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.0, no_decay="^head/"
    )
    tx = optim.make_optimizer(config, PARAMS, num_steps=1)
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["dense"]["bias"], 0.1 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.1 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(updates["head"]["kernel"], 0.0)


@pytest.mark.parametrize("option", ["no_decay", "freeze", "no_clip"])
def test_pattern_that_matches_nothing_is_an_error(option):
    config = OptimizerConfig(**{option: "dens/kernle"})
    with pytest.raises(ConfigError, match=rf"optimizer\.{option}='dens/kernle' .* dense/kernel"):
        optim.make_optimizer(config, PARAMS, num_steps=10)


@pytest.mark.parametrize(
    ("tx", "message"),
    [(optax.adam, r"got adam: call it: adam\(learning_rate\)"), (1e-3, r"got float: give what")],
)
def test_what_is_no_optimizer(tx, message):
    """Also in an audit, which needs no devices."""
    model = (lambda key: ({"w": jnp.zeros(3)}, {}), lambda *args, **options: None)
    mesh = jaxtrain.make_mesh()
    with pytest.raises(ConfigError, match=message):
        jaxtrain.audit(model, mesh, tx)
    with pytest.raises(ConfigError, match=message):
        jaxtrain.make_train_step(model, lambda outputs, batch, params: {}, tx, mesh)


def test_default_decay_pattern_may_match_nothing():
    params = {"w": np.ones((2, 2), np.float32)}
    optim.make_optimizer(OptimizerConfig(), params, num_steps=10).init(params)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_by_global_norm(scale):
    options = dict(NO_EXTRAS, clip_norm=1.5)
    config = OptimizerConfig(name="sgd", learning_rate=1.0, **options)
    history, _ = run(config, num_steps=1, scale=scale)
    grads = random_grads(0, scale)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in jax.tree.leaves(grads)))
    factor = min(1.0, 1.5 / norm)
    moved = jax.tree.map(lambda p, q: p - q, PARAMS, history[0])
    for ours, grad in zip(jax.tree.leaves(moved), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, factor * grad, rtol=1e-5, atol=1e-7)


def test_clipping_leaves_out_by_name():
    options = dict(NO_EXTRAS, clip_norm=1.5, no_clip="^dense/")
    tx = optim.make_optimizer(
        OptimizerConfig(name="sgd", learning_rate=1.0, **options), PARAMS, num_steps=1
    )
    grads = random_grads(0, 10.0)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["dense"]["kernel"], -grads["dense"]["kernel"], rtol=1e-6)
    norm = np.linalg.norm(grads["head"]["kernel"])
    np.testing.assert_allclose(
        updates["head"]["kernel"], -grads["head"]["kernel"] * 1.5 / norm, rtol=1e-5
    )


def test_frozen_leaves_hold_no_moments_and_get_no_updates():
    config = OptimizerConfig(freeze="^dense/", momentum=0.0)
    tx = optim.make_optimizer(config, PARAMS, num_steps=10)
    state = tx.init(PARAMS)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert shapes == [(2, 4), (2, 4)]  # both moments of head/kernel
    updates, _ = tx.update(random_grads(0), state, PARAMS)
    assert not np.any(updates["dense"]["kernel"])
    assert not np.any(updates["dense"]["bias"])
    assert np.all(updates["head"]["kernel"] != 0)


def test_frozen_leaves_do_not_count_in_clipping():
    options = dict(NO_EXTRAS, clip_norm=1.5, freeze="^dense/")
    tx = optim.make_optimizer(
        OptimizerConfig(name="sgd", learning_rate=1.0, **options), PARAMS, num_steps=1
    )
    grads = random_grads(0, 10.0)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(np.linalg.norm(updates["head"]["kernel"]), 1.5, rtol=1e-5)


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match=r"optimizer\.freeze='\.' matches all 3 parameters"):
        optim.frozen_mask(OptimizerConfig(freeze="."), PARAMS)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_that_come_later_are_refused(name):
    with pytest.raises(ConfigError, match=f"name='?{name}"):
        OptimizerConfig(name=name)


def test_bfloat16_parameters_have_float32_moments():
    """Case E2: in bfloat16 a decay of 0.999 is 1, and 1 - 0.999 is lost with it."""
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    config = OptimizerConfig(learning_rate=1e-3, b2=0.999, **NO_EXTRAS)
    tx = optim.make_optimizer(config, params, num_steps=300)
    state = tx.init(params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state) if leaf.ndim)
    update = jax.jit(tx.update)
    for _ in range(300):
        _, state = update({"w": jnp.ones(4, jnp.bfloat16)}, state, params)
    nu = optax.tree.get(state, "nu")["w"]
    np.testing.assert_allclose(nu, 1 - 0.999**300, rtol=1e-5)
    count = optim.num_updates(state)
    assert count is not None
    assert count == 300
    assert count.dtype == jnp.int32


def test_num_updates_is_not_fooled_by_a_parameter_called_count():
    params = {"count": jnp.ones(2)}
    tx = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda step: 0.1 * step))
    state = tx.init(params)
    assert optim.num_updates(state) == 0
    _, state = tx.update(params, state, params)
    assert optim.num_updates(state) == 1
    assert optim.num_updates(optax.trace(0.9).init(params)) is None
