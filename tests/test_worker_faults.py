"""Case D3 on real runs: workers that die or hang, signals, and a run that is killed.

The moments are chosen by what a process prints; nothing here sleeps.
"""

import os
import re
import signal
import time

import looping
import pytest
from processes import assert_gone, started

SCRIPT = "faults/workers_run.py"


def run(workdir, action="", **options):
    return started(workdir, script=SCRIPT, variables={"WORKERS_AT": action}, **options)


def readers(output):
    """Process ids of the workers."""
    found = sorted(set(map(int, re.findall(r"reader (\d+)", output))))
    assert len(found) == 2
    return found


def assert_nothing_left(output, shared_memory):
    assert_gone(*readers(output))
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.fixture
def shared_memory():
    return set(os.listdir("/dev/shm"))


def test_d3_a_script_that_begins_at_import_begins_once(tmp_path, shared_memory):
    with run(tmp_path) as process:
        assert process.end() == 0
    # By the run, twice if it restarts for huge pages.
    assert len(set(re.findall(r"imported by (\d+)", process.output))) == 1
    assert "input workers: 2 processes" in process.output
    assert_nothing_left(process.output, shared_memory)


@pytest.mark.parametrize(
    ("action", "how"), [("exit", "ended with exit code 3"), ("kill", "was killed by SIGKILL")]
)
def test_d3_a_dead_worker_ends_the_run_with_4_and_is_named(tmp_path, shared_memory, action, how):
    with run(tmp_path, action) as process:
        process.wait_for("at row 40")
        begin = time.monotonic()
        assert process.end() == 4
        assert time.monotonic() - begin < 30  # about one on an idle machine
    message = process.output[process.output.index("error: ") :]
    assert re.search(rf"an input worker \(process \d+, 2 of 2\) {how}", message)
    assert "(while loading samples 40 to 47 of the order from rows)" in message
    assert "Traceback" not in process.output
    assert_nothing_left(process.output, shared_memory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_d3_a_signal_to_the_whole_group_saves_and_leaves(tmp_path, shared_memory, number):
    # As from a terminal, or a batch system: the workers get it too, and leave it to the run.
    with run(tmp_path, "hang", prefix=["setsid"]) as process:
        process.wait_for("at row 40")
        if "step  4/10" not in process.output:
            process.wait_for("step  4/10")
        os.killpg(process.process.pid, number)
        begin = time.monotonic()
        assert process.end() == 75
        assert time.monotonic() - begin < 60
    assert looping.saved_steps(tmp_path) == [5]
    assert_nothing_left(process.output, shared_memory)


def test_d3_workers_end_with_a_run_that_is_killed(tmp_path, shared_memory):
    with run(tmp_path, "hang") as process:
        process.wait_for("at row 40")
        process.signal(signal.SIGKILL)
        assert process.process.wait(60) == -signal.SIGKILL
        assert_nothing_left(process.output, shared_memory)
