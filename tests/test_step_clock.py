"""What a step's time is spent on."""

from jaxtrain.step_clock import StepClock


def test_step_clock_counts_steps_that_are_done(monkeypatch):
    now = 0.0
    monkeypatch.setattr("jaxtrain.step_clock.time.perf_counter", lambda: now)
    clock = StepClock()
    assert clock.read() == {}
    # Three steps are dispatched, two are done; one evaluation passes between them.
    for wait in (0.25, 0.5, 0.75):
        clock.batch(wait, read=1.0, h2d=0.5)
        clock.dispatched(0.125)
    clock.done(2.0)
    with clock.other():
        now = 100.0
    clock.done(1.0)
    now = 108.0
    times = clock.read()
    assert times["step_seconds"] == (108 - 100) / 2
    assert times["input_wait_seconds"] == (0.25 + 0.5 + 0.75) / 2
    assert times["host_seconds"] == (8 - 1.5 - 3 * 0.125 - 3.0) / 2
    assert times["read_seconds"] == 3.0 / 2
    assert times["h2d_seconds"] == 1.5 / 2
    assert "checkpoint_seconds" not in times
    assert clock.read() == {}
    with clock.saving():
        now = 118.0
    clock.done(1.0)
    now = 120.0
    times = clock.read()
    assert times["step_seconds"] == 2
    assert times["checkpoint_seconds"] == 10
    assert clock.checkpoint_seconds == 0


def test_step_clock_adds_up_what_goes_into_neither_devices_nor_others(monkeypatch):
    now = 0.0
    monkeypatch.setattr("jaxtrain.step_clock.time.perf_counter", lambda: now)
    clock = StepClock()
    for step in range(4):
        clock.batch(0.25, read=1.0, h2d=0.5)
        now += 1.0
        clock.dispatched(0.125)
        clock.done(0.5)
        with clock.other():
            now += 10.0
        if step == 1:
            clock.read()
    assert clock.busy_seconds == 4 * (1.0 - 0.125 - 0.5)
