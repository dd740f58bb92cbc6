"""The loop: its order, one compilation, what it writes and when it gives up."""

import dataclasses
import json
import logging
import threading
import time

import jax
import jax.numpy as jnp
import looping
import numpy as np
import pytest
from looping import (
    assert_bit_equal,
    config,
    crashed_fit,
    eval_records,
    fit,
    records,
    saved_steps,
    train_records,
)

from jaxtrain import (
    CheckpointError,
    DataError,
    ExitCode,
    checkpoint,
    checkpoint_files,
    evaluation,
    program,
    resume,
)
from jaxtrain.preemption import Preemption

pytestmark = pytest.mark.usefixtures("compile_cache")

# The order of things


class Watched:
    """Metrics that note when the host reads them."""

    def __init__(self, value, note):
        self._value, self._note = value, note

    def __array__(self, dtype=None, copy=None):
        self._note()
        return np.asarray(self._value, dtype)


def test_order_of_dispatch_metrics_evaluation_and_save(tmp_path, monkeypatch):
    """Metrics are read one step late, except where an evaluation or a save needs them.

    A transfer guard would not see a read on CPU, so the metrics themselves note it.
    """
    events = []

    def around(step_fn, state, batch):
        step = sum(name == "dispatch" for name, _ in events) + 1
        events.append(("dispatch", step))
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            jnp.add(np.ones(3), 1)  # nothing may move to the devices in here
        state, metrics = step_fn(state, batch)
        watched = Watched(metrics.values_M, lambda: events.append(("read", step)))
        return state, dataclasses.replace(metrics, values_M=watched)

    looping.spy_on_train_step(monkeypatch, around)
    evaluate, save = evaluation.Evaluation.run, looping.Checkpointer.save

    def run(self, state, *args):
        events.append(("evaluate", int(state.step)))
        return evaluate(self, state, *args)

    def begin_save(self, step, state, host):
        events.append(("save", step))
        return save(self, step, state, host)

    monkeypatch.setattr(evaluation.Evaluation, "run", run)
    monkeypatch.setattr(looping.Checkpointer, "save", begin_save)

    class Log:
        def write(self, record):
            events.append(("log evaluation" if record.get("eval") else "log", record["step"]))

        def flush(self):
            events.append(("flush", 0))

        def close(self):
            pass

    result = fit(
        config(tmp_path, num_steps=5, eval_every_steps=3, every_steps=3),
        writers=[Log()],
        on_step=lambda step, metrics: events.append(("on_step", step)),
    )
    assert result.status == "finished"
    assert events == [
        ("dispatch", 1),
        ("dispatch", 2),
        *[("read", 1), ("log", 1), ("on_step", 1)],
        ("dispatch", 3),
        *[("read", 2), ("log", 2), ("on_step", 2)],
        *[("read", 3), ("log", 3), ("on_step", 3)],
        *[("evaluate", 3), ("log evaluation", 3)],
        *[("flush", 0), ("save", 3)],
        ("dispatch", 4),
        ("dispatch", 5),
        *[("read", 4), ("log", 4), ("on_step", 4)],
        *[("read", 5), ("log", 5), ("on_step", 5)],
        *[("evaluate", 5), ("log evaluation", 5)],
        *[("flush", 0), ("save", 5)],
    ]


def test_every_record_has_the_time_of_its_own_steps(tmp_path):
    """An evaluation or a save between two records takes nothing from a step and adds nothing."""
    fit(config(tmp_path, num_steps=4, eval_every_steps=2, every_steps=2))
    lines = looping.read_records(tmp_path / "metrics.jsonl")
    times = [record["step_seconds"] for record in lines if not record.get("eval")]
    assert len(times) == 4
    assert all(seconds > 0 for seconds in times)


def test_the_record_after_a_save_says_how_long_it_held_the_loop_up(tmp_path, monkeypatch):
    save = looping.Checkpointer.save

    def slow_save(self, step, state, host):
        time.sleep(0.2)
        return save(self, step, state, host)

    monkeypatch.setattr(looping.Checkpointer, "save", slow_save)
    fit(config(tmp_path, num_steps=5, every_steps=2, log_every_steps=1))
    lines = looping.read_records(tmp_path / "metrics.jsonl")
    times = {r["step"]: r.get("checkpoint_seconds") for r in lines if not r.get("eval")}
    assert {step for step, seconds in times.items() if seconds} == {3, 5}
    assert times[3] >= 0.2
    # No record follows the last save; the run's own file has it.
    run = json.loads((tmp_path / "run.json").read_text())
    assert 0.2 <= run["checkpoint_seconds"] <= run["wall_seconds"] - 0.4


def test_the_wall_time_of_every_start_of_a_run_is_added_up(tmp_path):
    before = 0.0
    # The last one is a new run in the same place, which begins at 0.
    for num_steps, options in ((2, {}), (4, {}), (2, {"seed": 1, "overwrite": True})):
        begin = time.perf_counter()
        fit(config(tmp_path, num_steps=num_steps, **options))
        seconds = time.perf_counter() - begin
        run = json.loads((tmp_path / "run.json").read_text())
        if options:
            before = 0.0
        assert run["compile_seconds"] < run["wall_seconds"] - before < seconds
        before = run["wall_seconds"]


def test_a_committed_checkpoint_is_named_once_and_soon(tmp_path, monkeypatch, caplog):
    """Checkpoint 2 is committed while step 4 is on its way: the next step boundary says so."""
    committed = threading.Event()
    monkeypatch.setattr(checkpoint, "_commit_finished", lambda step: committed.set())
    said = {}

    def on_step(step, metrics):
        del metrics
        if step == 3:
            assert committed.wait(60)
        said[step] = [m for m in caplog.messages if m.endswith(" committed")]

    caplog.set_level(logging.INFO, "jaxtrain")
    fit(config(tmp_path, num_steps=6, every_steps=2), on_step=on_step)
    assert said[2] == []
    assert said[4] == ["checkpoint 2 committed"]
    assert [m for m in caplog.messages if m.endswith(" committed")] == [
        f"checkpoint {step} committed" for step in (2, 4, 6)
    ]


def test_a_save_that_takes_longer_than_the_grace_is_warned_of_once(tmp_path, caplog):
    fit(config(tmp_path, num_steps=4, every_steps=1, preemption_grace_seconds=1e-6))
    assert caplog.text.count("took") == 1
    assert "the save of step 1 took " in caplog.text
    assert " s, longer than preemption_grace_seconds=1e-06" in caplog.text


def test_a_save_that_took_longer_than_the_grace_is_said_at_the_next_start(tmp_path, caplog):
    fit(config(tmp_path, num_steps=2))
    took = json.loads((tmp_path / "checkpoints/2/jaxtrain.json").read_text())["save_seconds"]
    assert took > 0
    fit(config(tmp_path, num_steps=2, preemption_grace_seconds=took + 1))
    assert "the save of step" not in caplog.text
    fit(config(tmp_path, num_steps=2, preemption_grace_seconds=took / 2))
    assert "the save of step 2 took " in caplog.text


def test_cadences_of_zero_mean_never_but_the_end_counts(tmp_path):
    result = fit(
        config(tmp_path, num_steps=3, log_every_steps=0, eval_every_steps=0, every_steps=0)
    )
    assert [record["step"] for record in train_records(tmp_path)] == [3]
    assert [record["step"] for record in eval_records(tmp_path)] == [3]
    assert saved_steps(tmp_path) == [3]
    assert result.eval_metrics["rows"] == 20


def test_the_last_evaluation_is_whole_and_others_as_long_as_asked(tmp_path):
    fit(config(tmp_path, num_steps=4, eval_every_steps=2, eval_batches=2))
    assert [(r["step"], r["rows"]) for r in eval_records(tmp_path)] == [(2, 16), (4, 20)]


def test_an_evaluation_is_of_the_same_rows_however_steps_are_accumulated(tmp_path):
    found = {}
    for number in (1, 2, 4):
        options = {"eval_every_steps": 1, "eval_batches": 1, "accumulate_steps": number}
        fit(config(tmp_path / str(number), num_steps=2, **options))
        found[number] = eval_records(tmp_path / str(number))
    assert [record["rows"] for record in found[1]] == [8, 20]
    for number in (2, 4):
        for one, other in zip(found[1], found[number], strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_without_a_workdir_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = fit(config(num_steps=2, eval_every_steps=1))
    assert (result.step, result.samples_seen, result.status) == (2, 16, "finished")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["training", "evaluation"])
def test_data_without_rows_is_refused_before_anything_is_done(tmp_path, monkeypatch, part):
    def refuse(*args, **kwargs):
        raise AssertionError("it should not come to this")

    monkeypatch.setattr(program, "compile_step", refuse)
    monkeypatch.setattr(resume, "begin", refuse)
    data = {"training": looping.TRAIN, "evaluation": looping.EVAL}
    data[part] = {name: rows[:0] for name, rows in data[part].items()}
    with pytest.raises(DataError, match=f"no {part} data in arrays: it has 0 samples; give data"):
        fit(config(tmp_path / "run"), data["training"], data["evaluation"])
    assert not (tmp_path / "run").exists()


# Compilations (case B3)


def test_one_compilation_each_in_a_run_and_one_after_a_resume(tmp_path, monkeypatch):
    jax.clear_caches()
    compilations = looping.Compilations()
    jax.monitoring.register_event_duration_secs_listener(compilations)
    shardings = []

    def around(step_fn, state, batch):
        before = [leaf.sharding for leaf in jax.tree.leaves(state)]
        old_state = state
        state, metrics = step_fn(state, batch)
        shardings.append((before, [leaf.sharding for leaf in jax.tree.leaves(state)]))
        # Its memory is taken over, unless a save still reads it.
        assert len(shardings) > 1 or all(
            leaf.is_deleted() for leaf in jax.tree.leaves(old_state.params)
        )
        return state, metrics

    looping.spy_on_train_step(monkeypatch, around)
    by_step = {}
    options = {"mesh": looping.LAYOUT, "eval_every_steps": 2, "every_steps": 2, "ema_decay": 0.9}
    try:
        for num_steps in (8, 12):
            compilations.names.clear()
            by_step.clear()
            result = fit(
                config(tmp_path, num_steps=num_steps, **options),
                num_devices=8,
                on_step=lambda step, _: by_step.update({step: len(compilations.names)}),
            )
            assert result.step == num_steps
            assert compilations.counts["jit(step)"] == 1
            assert compilations.counts["jit(eval_step)"] == 1
            # After the first evaluation and the first save, nothing at all is compiled.
            assert by_step[num_steps] == by_step[num_steps - 1]
            assert len(compilations.names) == by_step[num_steps]
            first = min(by_step) + 3
            assert by_step[num_steps] == by_step[first], compilations.names
    finally:
        jax.monitoring.unregister_event_duration_listener(compilations)
    assert len(shardings) == 12
    for before, after in shardings:
        assert before == after == shardings[0][0]


def test_a_result_is_short_to_print():
    result = fit(config(num_steps=1), eval_data=None)
    assert "state" not in repr(result)
    assert "step=1" in repr(result)


def test_the_last_evaluation_is_announced(caplog):
    caplog.set_level("INFO", "jaxtrain")
    fit(config(num_steps=2, eval_every_steps=1, eval_batches=1))
    assert [line for line in caplog.messages if "evaluating all" in line] == [
        "evaluating all 3 batches"
    ]


def test_an_error_is_not_hidden_by_a_writer_that_cannot_close(tmp_path, caplog):
    class Stubborn:
        def write(self, record):
            pass

        def flush(self):
            pass

        def close(self):
            raise OSError(28, "No space left on device")

    run = config(tmp_path, num_steps=2)
    with pytest.raises(looping.Crash):
        fit(run, on_step=looping.crash_at(1), writers=[Stubborn()])
    assert "No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        fit(run, writers=[Stubborn()])
    assert saved_steps(tmp_path) == [2]


# Saves that fail


@pytest.mark.parametrize(("failing", "last_seen"), [(2, 7), (3, 9)])
def test_a_save_that_fails_ends_the_run(tmp_path, monkeypatch, failing, last_seen):
    """It is noticed before the next save, since the loop asks at every step; or at the end."""
    write_manifest = checkpoint_files.write_manifest
    seen, saves = [], []

    def write(path, *, step, **kwargs):
        saves.append(step)
        if len(saves) == failing:
            raise OSError(28, "No space left on device")
        write_manifest(path, step=step, **kwargs)

    def on_step(step, metrics):
        del metrics
        seen.append(step)
        if step == 7:
            for thread in threading.enumerate():
                if thread.name == "checkpoint-6":
                    thread.join()

    monkeypatch.setattr(checkpoint_files, "write_manifest", write)
    run = config(tmp_path, num_steps=9, every_steps=3)
    with pytest.raises(CheckpointError, match=rf"step {3 * failing} .*No space left") as caught:
        fit(run, on_step=on_step)
    assert caught.value.exit_code == ExitCode.UNUSABLE == 4
    assert seen[-1] == last_seen
    assert saved_steps(tmp_path) == [3, 6][: failing - 1]
    # Mended, the same command continues and finishes.
    monkeypatch.undo()
    assert fit(run).status == "finished"
    assert [record["step"] for record in train_records(tmp_path)] == list(range(1, 10))


# Being told to stop


def told_to_stop_at(look):
    """Patches that make the loop find a signal at its n-th look, and count the looks."""
    looks = []

    def requested(self):
        del self
        looks.append(None)
        return len(looks) >= look

    patch = pytest.MonkeyPatch()
    patch.setattr(Preemption, "requested", property(requested))
    return patch, looks


def test_a_run_told_to_stop_at_any_moment_saves_what_it_did(tmp_path, monkeypatch):
    """The loop looks several times per step; a signal may come between any two looks."""
    compile_step, compiled = program.compile_step, {}

    def compile_once(fn, args, **options):
        name = fn.__name__
        if name not in compiled:
            compiled[name] = compile_step(fn, args, **options)
        return compiled[name]

    monkeypatch.setattr(program, "compile_step", compile_once)
    monkeypatch.setattr(evaluation, "compile_step", compile_once)
    options = {"num_steps": 3, "eval_every_steps": 2, "eval_batches": 1, "every_steps": 1000}
    whole = fit(config(tmp_path / "whole", **options))
    ends = []
    for look in range(1, 100):
        run = config(tmp_path / str(look), **options)
        patch, looks = told_to_stop_at(look)
        result = fit(run)
        patch.undo()
        ends.append((result.status, result.step))
        if result.step:
            assert saved_steps(run.workdir) == [result.step]
        if result.status == "preempted":
            again = fit(run)
            assert again.status == "finished"
            assert_bit_equal(again.state, whole.state)
        assert records(run.workdir) == records(tmp_path / "whole")
        if len(looks) < look:
            break
    assert ends[0] == ("preempted", 0)
    # A signal in the last evaluation: all is trained and saved, but the evaluation is owed.
    assert ("preempted", 3) in ends
    assert ends[-1] == ("finished", 3)


def test_an_owed_evaluation_is_logged_once_whatever_happens_after_it(tmp_path):
    """It is done after the checkpoint of its step; a crash then must not repeat its record."""
    run = config(tmp_path, num_steps=4, eval_every_steps=2, every_steps=1000)
    patch, _ = told_to_stop_at(3)  # one look before each of the steps 1 and 2
    result = fit(run)
    patch.undo()
    assert (result.status, result.step, eval_records(tmp_path)) == ("preempted", 2, [])
    crashed_fit(run, 3)
    fit(run)
    assert [record["step"] for record in eval_records(tmp_path)] == [2, 4]
