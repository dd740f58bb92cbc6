"""A run in parts is the run in one piece, bit for bit; cases C4, C6 and E3."""

import itertools
import json
import logging

import jax
import looping
import numpy as np
import optax
import pytest
from checkpointing import snapshot
from looping import (
    NOISY,
    assert_bit_equal,
    config,
    crashed_fit,
    eval_records,
    fit,
    records,
    saved,
    saved_steps,
    train_records,
)

from jaxtrain import (
    ConfigError,
    optim,
)
from jaxtrain.data.order import sample_indices

pytestmark = pytest.mark.usefixtures("compile_cache")

# The order of things


def test_ten_steps_are_five_and_five_bit_for_bit(tmp_path):
    """Warm-up and cosine, accumulation, averaging, dropout, evaluations: line by line the same."""
    options = {
        "warmup_steps": 4,
        "accumulate_steps": 2,
        "ema_decay": 0.9,
        "eval_every_steps": 1,
    }
    whole = fit(config(tmp_path / "whole", **options), model=NOISY)
    # The run ends at step 7, two steps after the last checkpoint.
    crashed_fit(config(tmp_path / "parts", **options), 7, model=NOISY)
    assert [record["step"] for record in train_records(tmp_path / "parts")][-1] == 7
    parts = fit(config(tmp_path / "parts", **options), model=NOISY)

    lines = records(tmp_path / "whole")
    assert records(tmp_path / "parts") == lines
    steps = [(record["step"], bool(record.get("eval"))) for record in lines]
    assert steps == [(s, is_eval) for s in range(1, 11) for is_eval in (False, True)]
    assert_bit_equal(whole.state, parts.state)
    assert (whole.metrics, whole.step, whole.samples_seen) == (
        parts.metrics,
        parts.step,
        parts.samples_seen,
    )

    # The rate moves once per step, not per micro-batch.
    rates = [record["learning_rate"] for record in train_records(tmp_path / "whole")]
    peak = 0.05
    np.testing.assert_allclose(rates[:5], np.array([0, 0.25, 0.5, 0.75, 1]) * peak, rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


def test_the_average_begins_with_the_weights_after_the_first_step(tmp_path):
    fit(config(tmp_path, num_steps=3, ema_decay=0.9, eval_every_steps=1))
    first, second, third = eval_records(tmp_path)
    assert first["ema_loss"] == first["loss"]
    assert second["ema_loss"] != second["loss"]
    assert third["ema_loss"] != third["loss"]
    assert "ema_rows" not in first


def test_optimizer_and_key_come_back_as_what_they_were(tmp_path):
    """Case C6: AdamW with clipping, dropout, and a typed key; 6 steps against 3 and 3."""
    options = {"num_steps": 6, "every_steps": 3, "clip_norm": 1.0, "seed": 3}
    whole = fit(config(tmp_path / "whole", **options), model=NOISY)
    crashed_fit(config(tmp_path / "parts", **options), 4, model=NOISY)
    parts = fit(config(tmp_path / "parts", **options), model=NOISY)
    assert_bit_equal(whole.state, parts.state)
    assert jax.random.key_impl(parts.state.key) == jax.random.key_impl(whole.state.key)
    assert jax.dtypes.issubdtype(parts.state.key.dtype, jax.dtypes.prng_key)
    assert int(optim.num_updates(parts.state.opt_state)) == 6
    losses = [record["loss"] for record in train_records(tmp_path / "whole")]
    assert [record["loss"] for record in train_records(tmp_path / "parts")] == losses
    # The noise is there at all.
    fit(config(tmp_path / "calm", **options | {"num_steps": 1}))
    assert train_records(tmp_path / "calm")[0]["loss"] != losses[0]


class Noting:
    """The toy's rows, noting which were read."""

    fingerprint = "toy"

    def __init__(self):
        self.read_rows = []

    def __len__(self):
        return looping.NUM_ROWS

    def read(self, indices):
        self.read_rows.append(list(indices))
        return {name: array[indices] for name, array in looping.TRAIN.items()}


def test_the_samples_go_on_where_they_stopped_with_another_batch_size(tmp_path):
    """Changed batch size and number of steps: every sample once, in the order of the seed."""
    first, second = Noting(), Noting()
    fit(config(tmp_path, num_steps=4), train_data=first)
    options = {"num_steps": 9, "global_batch_size": 20}
    result = fit(config(tmp_path, **options), train_data=second)
    assert result.samples_seen == 4 * 8 + 5 * 20
    assert [record["samples"] for record in train_records(tmp_path)] == [
        *(8, 16, 24, 32),
        *(52, 72, 92, 112, 132),
    ]
    # The loader reads ahead, so only the first batches of each part were trained on.
    rows = itertools.chain(*first.read_rows[:4], *second.read_rows[:5])
    assert list(rows) == list(sample_indices(0, looping.NUM_ROWS, np.arange(132)))
    _, host = saved(tmp_path, 9)
    assert host["samples_seen"] == 132
    assert host["batch_sizes"] == [[0, 8], [4, 20]]
    # A third part with the same flags goes on from the history, not from step x batch size.
    third = Noting()
    options["num_steps"] = 10
    assert fit(config(tmp_path, **options), train_data=third).samples_seen == 152
    assert third.read_rows[0] == list(sample_indices(0, looping.NUM_ROWS, np.arange(132, 152)))


def test_a_run_is_not_continued_on_other_data(tmp_path):
    fit(config(tmp_path))
    other = {name: values + 1 for name, values in looping.TRAIN.items()}
    with pytest.raises(ConfigError, match=r"the training data's fingerprint: [^;]* -> "):
        fit(config(tmp_path, num_steps=15), other)
    continued = config(tmp_path / "new", num_steps=15, restore_from=str(tmp_path))
    assert fit(continued, other).step == 15


def test_a_longer_run_follows_its_own_schedule_from_there_on(tmp_path, caplog):
    fit(config(tmp_path, num_steps=4))
    longer = config(tmp_path, num_steps=8)
    caplog.set_level("INFO", "jaxtrain")
    fit(longer)
    assert "changed since step 4: num_steps" in caplog.text
    schedule = optim.learning_rate_schedule(longer.optimizer, 8)
    rates = [record["learning_rate"] for record in train_records(tmp_path)[4:]]
    assert rates == [float(schedule(step)) for step in range(4, 8)]


def test_the_last_step_is_saved_whatever_the_cadence(tmp_path):
    """Case C4 a."""
    fit(config(tmp_path, num_steps=10, every_steps=4))
    assert saved_steps(tmp_path) == [4, 8, 10]


def test_a_complete_run_is_left_alone(tmp_path, caplog):
    """Case C4 b."""
    options = {"num_steps": 3, "every_steps": 2}
    first = fit(config(tmp_path, **options))
    before = snapshot(tmp_path)
    caplog.set_level("INFO", "jaxtrain")
    second = fit(config(tmp_path, **options))
    assert (first.status, second.status, second.step) == ("finished", "complete", 3)
    assert "the run is complete: 3 of 3 steps" in caplog.text
    assert snapshot(tmp_path) == before
    assert_bit_equal(first.state, second.state)
    assert second.samples_seen == first.samples_seen
    assert second.metrics == first.metrics
    assert second.eval_metrics == first.eval_metrics
    # A kill after the last checkpoint may have left no report, or an old one.
    (tmp_path / "report.html").unlink()
    fit(config(tmp_path, **options))
    assert (tmp_path / "report.html").exists()


def test_an_end_that_is_past_already_is_said(tmp_path, caplog):
    fit(config(tmp_path, num_steps=3))
    caplog.set_level("INFO", "jaxtrain")
    assert fit(config(tmp_path, num_steps=2)).status == "complete"
    assert "it has done 3 steps, so it is already past num_steps=2" in caplog.text
    assert "resumed from step 3, already past num_steps=2" in caplog.text


def test_a_resume_says_that_an_own_optimizer_is_not_compared(tmp_path, caplog):
    caplog.set_level("INFO", "jaxtrain")
    for num_steps, is_said in ((2, False), (3, True)):
        fit(looping.own_optimizer(tmp_path, num_steps), None, None, tx=optax.sgd(0.1))
        assert ("the optimizer is your own: changes to it are not seen" in caplog.text) == is_said


# Files beside the checkpoints


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("run.json", lambda data: b'{"wall_seconds": "x", "checkpoint_seconds": 1}'),
        ("run.json", lambda data: b'{"wall_seconds": 1' + b"0" * 400 + b"}"),
        ("run.json", lambda data: b"[" * 100_000),
        ("metrics.jsonl", lambda data: data + b'{"step": Infinity}\n\0\xff\n'),
        ("tensorboard/*", lambda data: data[:60] + b"\xff\xff\xff" + data[63:]),
        ("tensorboard/*", lambda data: data[:1] + b"\xff" + data[2:]),
    ],
)
def test_a_damaged_file_beside_the_checkpoints_stops_no_resume(tmp_path, caplog, name, spoil):
    run = config(tmp_path, num_steps=5)
    fit(run)
    (path,) = tmp_path.glob(name)
    path.write_bytes(spoil(path.read_bytes()))
    damaged = path.read_bytes()
    caplog.clear()
    assert fit(run.replace(num_steps=6)).status == "finished"
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 5, 6, 6]
    assert (tmp_path / "report.html").exists()
    (copy,) = path.parent.glob("*.broken")
    assert copy.read_bytes() == damaged
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert str(path) in warning
    assert str(copy) in warning
    assert json.loads((tmp_path / "run.json").read_text())["wall_seconds"] > 0
