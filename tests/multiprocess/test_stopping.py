"""SIGTERM and SIGINT to any of several real processes (case G2): all stop at the same step."""

import shutil
import signal
import time

import looping
import numpy as np
import pytest
from clusters import TOY, finished, samples, started

from jaxtrain import ExitCode
from jaxtrain.stop_signals import SAME_SIGNAL_SECONDS

STEPS, ROWS = 16, 12
WORDS = [
    *("--mesh=data:-1", "--num_cpu_devices=1", f"--global_batch_size={ROWS}"),
    *(f"--num_steps={STEPS}", "--checkpoint.every_steps=1000", "--eval_every_steps=0"),
]
NOTICED = "finishing the step, then saving; once more to leave at once"


def run(workdir, num_processes, *words, at=""):
    """Starts processes; `at` is for the last one."""
    variables = [{"TOY_SAMPLES": "1"} for _ in range(num_processes)]
    variables[-1]["TOY_AT"] = at
    options = {"places": [[]]} if num_processes == 1 else {}
    return started(
        workdir,
        *WORDS,
        *words,
        num_processes=num_processes,
        variables=variables,
        script=TOY,
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a run in one process that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    codes, (output,) = finished(
        workdir,
        *WORDS,
        num_processes=1,
        places=[[]],
        variables=[{"TOY_SAMPLES": "1"}],
        script=TOY,
    )
    assert codes == [0], output
    return workdir


def assert_same_run(workdir, whole):
    """The records, and the samples of every step, are those of the undisturbed run."""
    found, expected = looping.records(workdir), looping.records(whole)
    assert [(r["step"], r.get("eval")) for r in found] == [
        (r["step"], r.get("eval")) for r in expected
    ]
    for name in ("loss", "weight"):
        np.testing.assert_allclose(
            [r[name] for r in found], [r[name] for r in expected], rtol=1e-5, err_msg=name
        )
    read, wanted = samples(workdir), samples(whole)
    for position in range(0, STEPS * ROWS, ROWS):
        np.testing.assert_array_equal(read[position], wanted[position])


def end_all(runs):
    codes = [run.end() for run in runs]
    assert codes == [ExitCode.PREEMPTED] * len(runs), "\n".join(run.output for run in runs)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, whole):
    """Four are stopped, then two, then one; three finish."""
    steps = []
    for num_processes in (4, 2, 1):
        with run(tmp_path, num_processes, at="read 4 ask") as runs:
            last = runs[-1]
            last.wait_for("at read 4")
            last.signal(signal.SIGTERM)
            last.wait_for(f"SIGTERM: {NOTICED}")
            last.answer()
            end_all(runs)
        (*before, step) = looping.saved_steps(tmp_path)
        assert before == steps
        # The wish goes out with the next batch, and is known when that one's metrics are read.
        assert 2 <= step - max(steps, default=0) <= 6
        steps.append(step)
        if num_processes > 1:
            assert "another process was told to stop: all save and leave" in runs[0].output
    with run(tmp_path, 3) as runs:
        assert [process.end() for process in runs] == [0] * 3, runs[0].output
        assert f"resumed from step {steps[-1]} of {STEPS}" in runs[0].output
    assert_same_run(tmp_path, whole)


def test_signals_in_a_compilation_wait_for_its_end(tmp_path, whole):
    with run(tmp_path, 2, at="compile 1 ask") as runs:
        runs[1].wait_for("at compile 1")
        for process in runs:
            process.signal(signal.SIGINT)
            process.wait_for("SIGINT")
        runs[1].answer()
        end_all(runs)
    (step,) = looping.saved_steps(tmp_path)
    assert step <= 3
    with run(tmp_path, 2) as runs:
        assert [process.end() for process in runs] == [0, 0], runs[0].output
    assert_same_run(tmp_path, whole)


def test_a_signal_in_an_evaluation_gives_it_up_on_all_and_it_is_done_later(tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    words = ["--num_steps=20", "--eval_every_steps=18"]
    # The evaluation of 20 rows has two batches; that of step 20 is whole.
    with run(tmp_path, 2, *words, at="evaluate 1 ask") as runs:
        runs[1].wait_for("at evaluate 1")
        runs[0].signal(signal.SIGTERM)
        runs[0].wait_for(NOTICED)
        runs[1].answer()
        end_all(runs)
    assert looping.saved_steps(tmp_path)[-1] in (18, 20)
    with run(tmp_path, 2, *words) as runs:
        assert [process.end() for process in runs] == [0, 0], runs[0].output
    assert [record["step"] for record in looping.eval_records(tmp_path)] == [16, 18, 20]


def test_a_second_signal_leaves_at_once(tmp_path):
    with run(tmp_path, 2, at="read 4 ask") as runs:
        runs[1].wait_for("at read 4")
        runs[1].signal(signal.SIGTERM)
        runs[1].wait_for(NOTICED)
        # One that comes sooner is taken for a copy of the first.
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
        runs[1].signal(signal.SIGTERM)
        assert runs[1].end() == 128 + signal.SIGTERM
        assert runs[0].end() == ExitCode.PEER_LOST
        for process in runs:
            assert "was told twice to end, and was ended at step" in process.output
    assert looping.saved_steps(tmp_path) == []
