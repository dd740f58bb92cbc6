"""What guardians conclude: which failure caused the others, who hangs, who keeps others waiting."""

import logging
import signal

import pytest

from jaxtrain import ExitCode
from jaxtrain.launch import stragglers, verdict
from jaxtrain.launch.verdict import Member, exit_code, find_stall, judge
from jaxtrain.phases import BUDGETS, Phase

LATER = 100.0


def members(*changes):
    """One process for each change; all at step 7 since time 0."""
    common = {"pid": 4711, "step": 7, "phase": Phase.TRAIN_STEP, "count": 20}
    common |= {"heard": 0.0, "changed": 0.0}
    return [Member(i, f"node{i}", **{**common, **change}) for i, change in enumerate(changes)]


def failed(code, at=10.0, **changes):
    return {"code": code, "failed": at, **changes}


LOST = {"lost": "its guardian was silent", "failed": 10.0}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        # What is killed, or lost, is nobody's consequence; an abort and 76 may be.
        ([failed(76, 1.0), failed(-9)], "process 1 (node1, pid 4711) was killed by signal 9"),
        ([failed(1, 1.0), failed(-11)], "process 1 (node1, pid 4711) was killed by signal 11"),
        ([failed(1, 1.0), LOST], "process 1 (node1, pid 4711) was lost at step 7 in train_step"),
        ([failed(-6, 1.0), failed(1)], "process 1 (node1, pid 4711) ended with exit code 1"),
        ([failed(76, 1.0), failed(-6)], "process 1 (node1, pid 4711) was killed by signal 6"),
        ([failed(76), failed(76, 1.0)], "process 1 (node1, pid 4711) lost its connection"),
        # Of two of a kind the first.
        ([failed(-9), failed(-9, 1.0)], "process 1 (node1, pid 4711) was killed by signal 9"),
    ],
)
def test_the_cause_among_several_failures(changes, cause):
    found = judge(members(*changes), LATER)
    assert found.text.startswith(cause)
    assert found.code == ExitCode.PEER_LOST


def test_what_fails_next_is_waited_for():
    both = members(failed(76, 10.0), {})
    assert judge(both, 10.0 + verdict.GATHER_SECONDS - 0.01) is None
    dead = members(failed(76, 10.0), failed(-9, 10.4))
    assert "process 1" in judge(dead, 10.0 + verdict.GATHER_SECONDS).text


@pytest.mark.parametrize(("code", "others"), [(1, 76), (2, 2), (3, 3), (4, 4), (17, 76)])
def test_who_has_not_failed_is_given_time_and_then_a_code(code, others):
    one = members(failed(code, 10.0), {})
    assert judge(one, 10.0 + verdict.FELLOW_SECONDS - 0.01) is None
    found = judge(one, 10.0 + verdict.FELLOW_SECONDS)
    assert found.code == others
    assert [exit_code(member, found) for member in one] == [code, others]


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_what_all_say_themselves_is_not_said_again(code):
    both = members(failed(code), failed(code))
    found = judge(both, LATER)
    assert found.text == ""
    assert [exit_code(member, found) for member in both] == [code, code]


def test_an_error_that_comes_of_a_kill_is_no_code_of_its_own():
    both = members(failed(-9), failed(1))
    assert [exit_code(member, judge(both, LATER)) for member in both] == [76, 76]
    lasting = members(failed(-9), failed(4))
    assert [exit_code(member, judge(lasting, LATER)) for member in lasting] == [76, 4]


def test_a_process_that_was_killed_leaves_with_a_code_of_ours():
    (dead,) = members(failed(-9))
    assert exit_code(dead, judge([dead], LATER)) == ExitCode.PEER_LOST


@pytest.mark.parametrize("code", [0, 75])
def test_an_end_in_order_is_no_failure_and_one_in_a_step_is(code):
    leaving, early = members({"phase": Phase.LEAVE, "code": code}, failed(code))
    assert judge([leaving], LATER) is None
    assert exit_code(early, judge([early], LATER)) == ExitCode.ERROR


@pytest.mark.parametrize("code", [-15, -2, 130, 143])
def test_a_process_that_one_signal_ended_takes_the_others_along(code):
    told = members(failed(code, told=1), {})
    found = judge(told, LATER)
    assert "was told to end" in found.text
    assert [exit_code(member, found) for member in told] == [75, 75]


def test_a_signal_that_nobody_sent_through_a_guardian_is_a_kill():
    (dead,) = members(failed(-signal.SIGTERM))
    assert judge([dead], LATER).code == ExitCode.PEER_LOST


def stalled(*changes, at=LATER, seconds=60):
    return find_stall(members(*changes), at, seconds)


def test_the_one_that_has_come_least_far_is_named():
    found = stalled({}, {"count": 18, "phase": Phase.INPUT, "step": 6, "changed": 30.0}, {})
    assert "process 1 (node1, pid 4711) stands still at step 6 in input, for 70 s" in found.text
    assert "stall_timeout_seconds=60 allows 60 s" in found.text
    assert (found.code, found.stuck) == (ExitCode.STALLED, (1,))


def test_a_stopped_process_is_named_first():
    found = stalled({}, {"count": 18}, {"state": "T"})
    assert "process 2 (node2, pid 4711) stands still at step 7 in train_step, stopped" in found.text


def test_who_waits_for_one_that_moves_does_not_stand_still():
    assert stalled({}, {"count": 18, "changed": LATER - 59}) is None
    assert stalled({}, {"count": 18, "changed": LATER - 61}) is not None


def test_one_that_may_take_its_time_is_waited_for():
    saving = {"count": 18, "phase": Phase.SAVE}
    limit = 60 * BUDGETS[Phase.SAVE]
    assert stalled({}, saving, at=limit - 1) is None
    assert stalled({}, saving, at=limit + 1) is not None


def test_who_has_ended_or_is_lost_does_not_stand_still():
    assert stalled({"code": 0}, {"lost": "silent"}) is None


def test_no_limit():
    assert stalled({}, {"state": "T"}, seconds=0) is None


def test_every_phase_has_a_budget():
    assert set(BUDGETS) == set(Phase)


# Stragglers


def watch(busy, *, num_windows, step_seconds=0.1, phases=None):
    """What is logged while each process is so many seconds busy per step."""
    found = stragglers.Stragglers()
    lines = []
    now = 1000.0
    those = members(*({"step": 0} for _ in busy))
    for window in range(num_windows + 1):
        for member, seconds in zip(those, busy, strict=True):
            member.step = round(window * stragglers.WINDOW_SECONDS / step_seconds)
            member.busy_seconds = member.step * seconds
            member.phase = (phases or {}).get(window, Phase.TRAIN_STEP)
        lines += found.look(those, now)
        assert not list(found.look(those, now + stragglers.WINDOW_SECONDS / 2))
        now += stragglers.WINDOW_SECONDS
    return lines


def test_a_process_that_is_late_again_and_again_is_named_once():
    lines = watch([0.01, 0.01, 0.05, 0.012], num_windows=10)
    (warning,) = [line for level, line in lines if level == logging.WARNING]
    assert warning == (
        "process 2 (node2, pid 4711) keeps the others waiting: 50 ms of each step of 100 ms go"
        " into its data and Python, on the others 10 ms"
    )


@pytest.mark.parametrize(
    ("busy", "num_windows"),
    [
        ([0.01, 0.01, 0.05], stragglers.NUM_WINDOWS - 1),  # not often enough
        ([0.01, 0.01, 0.015], 10),  # not late enough
        ([0.05, 0.05, 0.05], 10),  # all alike
    ],
)
def test_who_is_not_late_is_not_named(busy, num_windows):
    lines = watch(busy, num_windows=num_windows)
    assert logging.WARNING not in [level for level, _ in lines]


def test_times_of_all_are_logged_once_a_minute():
    lines = watch([0.01, 0.02], num_windows=13)
    times = [line for level, line in lines if level == logging.INFO]
    assert len(times) == 3
    assert times[0] == "ms of a step of 100 ms in data and Python on each process: 0: 10, 1: 20"


def test_of_many_processes_the_slowest_are_logged():
    lines = watch([i / 1000 for i in range(20)], num_windows=1)
    ((_, line),) = lines
    assert "on the slowest 8: 12: 12, 13: 13," in line


def test_a_window_that_is_not_all_steps_does_not_count():
    lines = watch([0.01, 0.05], num_windows=3, phases={n: Phase.SAVE for n in range(4)})
    assert lines == []
