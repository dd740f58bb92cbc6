"""The train step: the guard, averages, freezing, low precision, and its program.

Shapes: R rows, D features, H hidden units.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stepping import (
    HYBRID,
    LAYOUTS,
    MLP,
    NORMALISED,
    TOKENS,
    H,
    compiled,
    mesh_of,
    mlp_apply,
    mlp_init,
    new_state,
    on_host,
    rows,
    run,
    squared_loss,
    tokens_loss,
)

from jaxtrain import tree
from jaxtrain.config import OptimizerConfig
from jaxtrain.errors import ConfigError
from jaxtrain.optim import frozen_mask, learning_rate_schedule, make_optimizer, num_updates
from jaxtrain.sharding import shard_batch
from jaxtrain.state import abstract_state, state_shardings
from jaxtrain.step import make_train_step

pytestmark = pytest.mark.usefixtures("compile_cache")


@functools.cache
def three_steps(layout):
    """AdamW on masks of unequal weight, warm-up, clipping, average."""
    config = OptimizerConfig(learning_rate=0.02, warmup_steps=1, clip_norm=0.5)
    tx = make_optimizer(config, jax.eval_shape(mlp_init, jax.random.key(0))[0], num_steps=3)
    options = {"ema_decay": 0.9, "learning_rate": learning_rate_schedule(config, 3)}
    return run(MLP, squared_loss, tx, LAYOUTS[layout], [rows(seed) for seed in range(3)], **options)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one device"])
def test_layouts_agree(layout):
    pairs = zip(three_steps(layout), three_steps("one device"), strict=True)
    for (state, metrics), (expected_state, expected_metrics) in pairs:
        assert metrics.keys() == expected_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected_metrics[name], rtol=2e-6, err_msg=name)
        for part in ("params", "ema_params"):
            leaves = dict(tree.named_leaves(getattr(state, part)))
            for path, wanted in tree.named_leaves(getattr(expected_state, part)):
                np.testing.assert_allclose(leaves[path], wanted, rtol=1e-4, atol=1e-6, err_msg=path)


# Case E5: a step that is not finite changes nothing but the step counter.


def bad_batch(seed):
    batch = rows(seed)
    batch["x"][3, 2] = np.nan
    batch["loss_mask"][3] = 1
    return batch


@pytest.mark.parametrize("layout", ["one device", f"{HYBRID}, accumulated"])
def test_nonfinite_step_changes_nothing(layout):
    config = OptimizerConfig(learning_rate=0.02, warmup_steps=2)
    model = NORMALISED
    params = jax.eval_shape(mlp_init, jax.random.key(0))[0]
    tx = make_optimizer(config, params, num_steps=8)
    options = {"ema_decay": 0.9, "learning_rate": learning_rate_schedule(config, 8)}
    good, bad = [rows(0), rows(1), rows(2)], bad_batch(7)
    with_bad = [good[0], bad, good[1], bad, bad, good[2]]
    history = run(model, squared_loss, tx, LAYOUTS[layout], with_bad, **options)
    expected = run(model, squared_loss, tx, LAYOUTS[layout], good, **options)
    for flag in ("is_applied", "is_finite"):
        assert [metrics[flag] for _, metrics in history] == [1, 0, 1, 0, 0, 1]
    assert not np.isfinite(history[1][1]["loss"])
    final, wanted = history[-1][0], expected[-1][0]
    assert final.step == 6
    assert num_updates(final.opt_state) == 3
    for part in ("params", "opt_state", "model_state", "ema_params"):
        before, after = getattr(history[0][0], part), getattr(history[1][0], part)
        jax.tree.map(np.testing.assert_array_equal, before, after)
        jax.tree.map(np.testing.assert_array_equal, getattr(final, part), getattr(wanted, part))
    # The rate that is logged is the one that was applied: skipped steps do not advance it.
    rates = [metrics["learning_rate"] for _, metrics in history]
    np.testing.assert_allclose(rates, [0, 0.01, 0.01, 0.02, 0.02, 0.02], rtol=1e-6)


def test_gradient_that_overflows_is_not_applied():
    batch = {"x": np.full((1, 1), 3e30, np.float32), "loss_mask": np.ones((1, 1), np.float32)}
    [(state, metrics)] = run(TOKENS, tokens_loss, optax.sgd(1.0), ("data:1", 1), [batch])
    assert np.isfinite(metrics["loss"])
    assert (metrics["is_applied"], metrics["is_finite"]) == (0, 0)
    assert state.params["w"] == 0


def test_parameters_that_overflow_are_reported():
    """The gradient is finite, the rate is absurd: the flag says that this state is not to keep."""
    batch = {"x": np.full((1, 1), 8, np.float32), "loss_mask": np.ones((1, 1), np.float32)}
    [(state, metrics)] = run(TOKENS, tokens_loss, optax.sgd(1e38), ("data:1", 1), [batch])
    assert np.isfinite(metrics["grad_norm"])
    assert not np.isfinite(state.params["w"])
    assert (metrics["is_applied"], metrics["is_finite"]) == (1, 0)


def test_batch_in_which_nothing_counts_is_not_applied():
    batch = {"x": np.ones((2, 1), np.float32), "loss_mask": np.zeros((2, 1), np.float32)}
    [(state, metrics)] = run(TOKENS, tokens_loss, optax.sgd(1.0), ("data:1", 1), [batch])
    assert metrics["weight"] == 0
    assert metrics["is_finite"] == 0
    assert state.params["w"] == 0


# Case E3: rates and averages count optimizer steps, and go on where they were.


@functools.cache
def counting_step():
    """Warm-up 4, then cosine to 10, accumulation 2, EMA 0.9."""
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=4, schedule="cosine")
    params = jax.eval_shape(mlp_init, jax.random.key(0))[0]
    tx, schedule = make_optimizer(config, params, num_steps=10), learning_rate_schedule(config, 10)
    mesh = mesh_of("data:2")
    step = make_train_step(
        MLP, squared_loss, tx, mesh, accumulate_steps=2, learning_rate=schedule, ema_decay=0.9
    )
    state = new_state(MLP, tx, mesh, ema=True)
    return compiled(step, state), state


def counting_run(num_steps, state=None):
    step, start = counting_step()
    state, log = state or start, []
    for _ in range(num_steps):
        index = int(state.step)
        batch = shard_batch(rows(index), mesh_of("data:2"), accumulate_steps=2)
        state, metrics = step(state, batch)
        weight, average = (p["first"]["kernel"] for p in (state.params, state.ema_params))
        log.append((index, jax.device_get(metrics), np.asarray(weight), np.asarray(average)))
    return state, log


@functools.cache
def whole_counting_run():
    return counting_run(10)[1]


def test_counters_go_on_after_a_restore():
    whole = whole_counting_run()
    state, first = counting_run(5)
    host = on_host(state)
    restored = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding),
        host.replace(key=jax.random.wrap_key_data(host.key)),
        state,
    )
    _, second = counting_run(5, restored)
    for actual, expected in zip(first + second, whole, strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert [index for index, *_ in whole] == list(range(10))
    rates = [metrics["learning_rate"] for _, metrics, *_ in whole]
    np.testing.assert_allclose(rates[:5], [0, 0.025, 0.05, 0.075, 0.1], rtol=1e-6)


def test_average_is_debiased():
    log = whole_counting_run()
    weights = [weight.astype(np.float64) for _, _, weight, _ in log]
    np.testing.assert_array_equal(log[0][3], log[0][2])  # the first value is the parameters
    for t in range(1, 11):
        share = [0.1 * 0.9 ** (t - i) for i in range(1, t + 1)]
        expected = sum(s * w for s, w in zip(share, weights, strict=False)) / (1 - 0.9**t)
        np.testing.assert_allclose(log[t - 1][3], expected, rtol=1e-5, atol=1e-7)


def test_average_needs_its_decay():
    mesh, tx = mesh_of("data:1"), optax.sgd(0.1)
    step = make_train_step(MLP, squared_loss, tx, mesh)
    state = abstract_state(MLP, tx, ema=True)
    with pytest.raises(ConfigError, match=r"ema_decay=0\.0 but the state has an average"):
        jax.eval_shape(step, state, rows(0))


# Case E2: parameters in bfloat16.


def test_bfloat16_parameters_warn():
    model = (
        lambda key: ({"deep": {"w": jnp.ones((), jnp.bfloat16)}}, {}),
        lambda params, state, batch, *, key, train: (params["deep"]["w"] * batch["x"], state),
    )
    batch = {"x": np.ones((1, 1), np.float32), "loss_mask": np.ones((1, 1), np.float32)}
    with pytest.warns(UserWarning, match=r"low precision: deep/w \(bfloat16\).*are lost"):
        history = run(model, tokens_loss, optax.sgd(1e-3), ("data:1", 1), [batch])
    state, _ = history[-1]
    assert state.params["deep"]["w"].dtype == jnp.bfloat16
    assert state.params["deep"]["w"] == 1  # what the warning is about


# Frozen parameters.


@pytest.mark.parametrize("layout", ["one device", f"{HYBRID}, accumulated"])
def test_frozen_parameters_are_bit_identical(layout):
    def init(key):
        params, state = mlp_init(key)
        # -0.0 + 0.0 is +0.0: adding an update of zero would not keep the bits.
        params["first"]["bias"] = jnp.full(H, -0.0)
        return params, state

    config = OptimizerConfig(freeze="^first/", learning_rate=0.1)
    params = jax.eval_shape(init, jax.random.key(0))[0]
    tx, frozen = make_optimizer(config, params, num_steps=3), frozen_mask(config, params)
    batches = [rows(seed) for seed in range(3)]
    history = run(
        (init, mlp_apply), squared_loss, tx, LAYOUTS[layout], batches, frozen=frozen, ema_decay=0.9
    )
    start = dict(tree.named_leaves(init(jax.random.key(0))[0]))
    for state, _ in history:
        average = dict(tree.named_leaves(state.ema_params))
        for path, leaf in tree.named_leaves(state.params):
            for now in (leaf, average[path]):
                is_same = now.tobytes() == np.asarray(start[path]).tobytes()
                assert is_same == path.startswith("first/"), path


# The compiled program.


def lowered(sizes, accumulate_steps, model=MLP, num_rows=32):
    mesh = mesh_of(sizes)
    params = jax.eval_shape(model[0], jax.random.key(0))[0]
    tx = make_optimizer(OptimizerConfig(), params, num_steps=10)
    state = new_state(model, tx, mesh, ema=True)
    step = make_train_step(
        model, squared_loss, tx, mesh, accumulate_steps=accumulate_steps, ema_decay=0.9
    )
    batch = shard_batch(rows(0, num_rows), mesh, accumulate_steps=accumulate_steps)
    return mesh, state, batch, compiled(step, state, donate=True).lower(state, batch)


def test_program_of_one_device_is_bare():
    mesh = mesh_of("data:1")
    tx = optax.adamw(1e-3)
    step = make_train_step(MLP, squared_loss, tx, mesh)
    state = abstract_state(MLP, tx)
    text = str(jax.make_jaxpr(step)(state, rows(0)))
    for primitive in ("shard_map", "scan", "sharding_constraint"):
        assert primitive not in text
    assert text.count("optimization_barrier") == 1  # between parameters and moments, on CPU


def test_no_moment_is_copied_in_a_step():
    """The memory traffic of an optimizer is a good part of a step on CPU."""
    _, _, _, program = lowered(*LAYOUTS["one device"])
    copied = [line for line in program.compile().as_text().splitlines() if " copy(" in line]
    assert not [line for line in copied if "opt_state" in line]


@pytest.mark.parametrize("layout", ["one device", "one device, accumulated", HYBRID])
def test_every_buffer_of_the_state_is_updated_in_place(layout):
    _, state, batch, program = lowered(*LAYOUTS[layout])
    program = program.compile()
    per_device = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
    )
    # The base key goes in and comes out unchanged; XLA may or may not alias its 8 bytes.
    assert per_device - 8 <= program.memory_analysis().alias_size_in_bytes <= per_device
    program(state, batch)
    deleted = [leaf.is_deleted() for leaf in jax.tree.leaves(state)]
    assert all(deleted[:-1])


@pytest.mark.parametrize("layout", ["one device", f"{HYBRID}, accumulated"])
def test_one_compilation_and_stable_shardings(layout):
    sizes, accumulate_steps = LAYOUTS[layout]
    mesh, tx = mesh_of(sizes), optax.adamw(1e-3)
    state = new_state(MLP, tx, mesh, ema=True)
    wanted = state_shardings(abstract_state(MLP, tx, ema=True), MLP, mesh)
    step = make_train_step(
        MLP, squared_loss, tx, mesh, accumulate_steps=accumulate_steps, ema_decay=0.9
    )
    step = jax.jit(step, donate_argnums=0, out_shardings=(wanted, None))
    batch = shard_batch(rows(0), mesh, accumulate_steps=accumulate_steps)
    compilations = []
    listener = lambda event, seconds, **_: compilations.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for _ in range(5):
            state, _ = step(state, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compilations.count("/jax/core/compile/backend_compile_duration") == 1
    for (path, leaf), sharding in zip(
        tree.named_leaves(state), jax.tree.leaves(wanted), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
