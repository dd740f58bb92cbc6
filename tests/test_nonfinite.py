"""Values that are not finite (case E5): named, skipped or the end of the run, never saved."""

import math

import jax.numpy as jnp
import looping
import numpy as np
import optax
import pytest
from looping import (
    assert_only_finite_saved,
    config,
    fit,
    records,
    saved,
    saved_steps,
)

from jaxtrain import (
    ArrayDataset,
    DataError,
    ExitCode,
    NonFiniteError,
    OptimizerConfig,
    evaluation,
)
from jaxtrain.data.order import sample_indices

pytestmark = pytest.mark.usefixtures("compile_cache")

LONG = looping.rows(160)
"""One epoch of 20 batches of 8."""


def spoiled(*batches, name="x", value=math.nan):
    """Rows of which one in each of the batches (counted from 1) has a bad value."""
    arrays = {key: array.copy() for key, array in LONG.items()}
    for batch in batches:
        row = sample_indices(0, len(LONG["x"]), np.array([(batch - 1) * 8 + 3]))
        arrays[name][row, 2] = value
    return arrays


def nan_config(workdir, **options):
    return config(workdir, **{"num_steps": 20, "every_steps": 2, "keep_last": 2, **options})


@pytest.mark.parametrize(
    ("name", "value"),
    [("x", math.nan), ("x", -math.inf), ("y", 1e30)],
)
def test_a_bad_value_stops_the_run_and_is_named(tmp_path, name, value):
    message = r"^loss and grad_norm not finite at step 5 \(samples 32 to 39 of the order\); "
    with pytest.raises(NonFiniteError, match=message) as caught:
        fit(nan_config(tmp_path), spoiled(5, name=name, value=value), None)
    assert caught.value.exit_code == ExitCode.NONFINITE == 3
    assert saved_steps(tmp_path) == [2, 4]
    assert_only_finite_saved(tmp_path)
    # The bad step is in the log, so the report shows it.
    last = looping.read_records(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == 5
    assert not math.isfinite(last["grad_norm"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [(1, "there is no checkpoint before it"), (3, "the checkpoints before it are finite")],
)
def test_only_checkpoints_that_are_there_are_spoken_of(tmp_path, bad, message):
    with pytest.raises(NonFiniteError, match=f"order\\); {message}\\. Look at these samples"):
        fit(nan_config(tmp_path), spoiled(bad), None)


def test_a_bad_step_that_is_due_to_be_saved_is_not(tmp_path):
    with pytest.raises(NonFiniteError, match=r"step 6 \(samples 40 to 47"):
        fit(nan_config(tmp_path), spoiled(6), None)
    assert saved_steps(tmp_path) == [2, 4]


def test_a_skipped_step_changes_nothing_but_the_step(tmp_path, caplog):
    options = {"nonfinite": "skip:2", "every_steps": 1, "keep_last": 20, "ema_decay": 0.9}
    result = fit(nan_config(tmp_path, num_steps=7, **options), spoiled(5), None)
    assert result.status == "finished"
    assert "step 5 (samples 32 to 39 of the order): left out, 1 so far" in caplog.text
    before, _ = saved(tmp_path, 4)
    after, host = saved(tmp_path, 5)
    assert host["nonfinite"] == {"skipped": 1, "in_a_row": 1}
    assert after.keys() == before.keys()
    changed = [n for n in before if before[n].tobytes() != after[n].tobytes()]
    assert changed == ["step"]
    later, host = saved(tmp_path, 6)
    assert host["nonfinite"] == {"skipped": 1, "in_a_row": 0}
    # The next good step changes every array again.
    assert all(later[name].tobytes() != after[name].tobytes() for name in after)
    assert_only_finite_saved(tmp_path)


def test_too_many_in_a_row_end_the_run_also_over_a_resume(tmp_path):
    run = nan_config(tmp_path, nonfinite="skip:2")
    for _ in range(2):  # the second time it begins at step 6, with two bad steps behind it
        with pytest.raises(NonFiniteError, match=r"step 7 .*, 3 in a row; the checkpoints before"):
            fit(run, spoiled(5, 6, 7), None)
        assert saved_steps(tmp_path) == [4, 6]
        assert_only_finite_saved(tmp_path)


def test_bad_steps_that_are_not_in_a_row_do_not_add_up(tmp_path):
    result = fit(nan_config(tmp_path, nonfinite="skip:1"), spoiled(5, 7, 9), None)
    assert result.status == "finished"
    _, host = saved(tmp_path, 20)
    assert host["nonfinite"] == {"skipped": 3, "in_a_row": 0}


@pytest.mark.parametrize("nonfinite", ["stop", "skip:5"])
def test_an_update_that_overflows_is_never_saved(tmp_path, nonfinite):
    """Loss and gradient are finite, the new parameters are not: there is no old state left."""
    model = (
        lambda key: ({"w": jnp.zeros(())}, {}),
        lambda params, state, batch, *, key, train: (params["w"] * batch["x"], state),
    )

    def loss_fn(outputs_B, batch, params):
        mask_B = batch["loss_mask"]
        return {"loss": (jnp.sum(outputs_B * mask_B), jnp.sum(mask_B))}

    x = np.full(160, 1e-21, np.float32)
    x[sample_indices(0, 160, np.arange(24, 32))] = 1e18  # batch 4: an update of 1e39
    options = {"name": "sgd", "learning_rate": 1e21, "schedule": "constant", "clip_norm": 0.0}
    run = nan_config(tmp_path, weight_decay=0.0, nonfinite=nonfinite, **options)
    with pytest.raises(NonFiniteError, match=r"param_norm not finite at step 4 .*overflow"):
        fit(run, {"x": x}, None, model=model, loss_fn=loss_fn)
    assert saved_steps(tmp_path) == [2]
    assert_only_finite_saved(tmp_path)


@pytest.mark.parametrize("nonfinite", ["stop", "skip:5"])
@pytest.mark.parametrize("rate", [3e38, math.inf])
def test_an_overflow_is_known_by_its_flag_whatever_the_metrics(tmp_path, nonfinite, rate):
    """A metric of weight 0 is NaN at every step, and the rate itself may be infinite."""

    def loss_fn(outputs, batch, params):
        extra = {"extra": (jnp.float32(0), jnp.float32(0))}
        return looping.loss_fn(outputs, batch, params) | extra

    run = config(tmp_path, nonfinite=nonfinite, num_steps=3, every_steps=1)
    run = run.replace(optimizer=OptimizerConfig())
    tx = optax.sgd(lambda count: jnp.where(count == 1, rate, 1e-3))
    with pytest.raises(NonFiniteError, match=r"param_norm not finite at step 2 .*overflow"):
        fit(run, eval_data=None, loss_fn=loss_fn, tx=tx)
    assert saved_steps(tmp_path) == [1]
    assert_only_finite_saved(tmp_path)


@pytest.mark.parametrize("value", [1e30, math.nan])
def test_an_evaluation_that_is_not_finite_costs_no_step(tmp_path, value):
    """The last row is bad and is the one that fills up: the loss is no reason to blame loss_fn."""
    spoilt = {name: array.copy() for name, array in looping.EVAL.items()}
    spoilt["x"][-1] = value
    run = config(tmp_path, num_steps=3, every_steps=1000)
    for _ in range(2):  # the same command fails again, and evaluates only
        with pytest.raises(NonFiniteError, match=r"^loss not finite in the evaluation of step 3, "):
            fit(run, eval_data=spoilt)
        assert saved_steps(tmp_path) == [3]
    with pytest.raises(NonFiniteError, match=r"^loss not finite in the evaluation of step 3, "):
        evaluate_run(run, spoilt)
    result = fit(run.replace(nonfinite="skip:1"), eval_data=spoilt)
    assert result.status == "finished"
    assert not math.isfinite(result.eval_metrics["loss"])
    (record,) = looping.read_records(tmp_path / "metrics.jsonl")[3:]
    assert (record["step"], record["eval"], record["rows"]) == (3, True, 20)
    assert not math.isfinite(record["loss"])


def evaluate_run(run, eval_data):
    return evaluation.evaluate_run(looping.MODEL, looping.loss_fn, eval_data, config=run)


def test_an_evaluation_that_fails_costs_no_step(tmp_path):
    class Unreadable(ArrayDataset):
        def read(self, indices):
            if len(indices) > 1:  # one is looked at before the run begins
                raise OSError(5, "Input/output error")
            return super().read(indices)

    run = config(tmp_path, num_steps=3, every_steps=1000)
    with pytest.raises(DataError, match="Input/output error"):
        fit(run, eval_data=Unreadable(looping.EVAL))
    assert saved_steps(tmp_path) == [3]
    assert fit(run).status == "finished"
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 3]
