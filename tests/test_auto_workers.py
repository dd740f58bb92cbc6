"""How many input workers are chosen, from times that a test makes up."""

import pytest

from jaxtrain.data.auto_workers import Trial

MEGABYTE = 2**20


def trial(*, step, read, busy=1.0, h2d=0.0, size=MEGABYTE, num_batches=12):
    """The first batches of a run whose thread makes two ahead."""
    found, now = Trial(), 0.0
    for number in range(num_batches):
        wait = max(0.0, read + h2d - step) if number > 2 else 0.0
        found.taken(now, now + wait)
        now += wait + step
        found.loaded(read, busy * read, h2d, size)
    assert found.is_enough
    return found


@pytest.mark.parametrize(
    ("times", "cores", "count", "reason"),
    [
        ({"step": 0.1, "read": 0.05}, 8, 0, "read in 50.0 ms, a step takes 100 ms: the thread"),
        ({"step": 0.1, "read": 0.099}, 8, 0, "the thread keeps up"),
        ({"step": 0.0003, "read": 0.0009}, 8, 0, "to hand it over would take as long"),
        ({"step": 0.05, "read": 0.02, "h2d": 0.1}, 8, 0, "its way to the devices takes longer"),
        ({"step": 0.1, "read": 0.3}, 8, 4, "read in 300 ms, a step takes 100 ms"),
        ({"step": 0.1, "read": 0.3}, 2, 1, "4 would keep up, 1 is the limit of the cores"),
        ({"step": 0.1, "read": 0.3, "busy": 0.1}, 2, 4, "a step takes 100 ms"),
        ({"step": 0.1, "read": 0.3, "size": 40 * MEGABYTE}, 8, 3, "3 is the limit of the memory"),
    ],
    ids=["fast", "just", "tiny", "transfer", "slow", "2 cores", "waits for storage", "memory"],
)
def test_choices(times, cores, count, reason):
    choice = trial(**times, num_batches=80).choose(cores, budget=300 * MEGABYTE)
    assert choice.count == count
    assert reason in choice.reason


def test_the_first_batches_do_not_count():
    found = Trial()
    found.taken(0, 0)
    found.loaded(1.0, 1.0, 0.0, 1)
    found.taken(60, 60)  # it was compiled meanwhile
    found.taken(60, 60)
    found.taken(60, 60)
    assert not found.is_enough
    for second in range(61, 65):
        assert not found.is_enough
        found.taken(second, second)
        found.loaded(0.1, 0.1, 0.0, 1)
    assert found.is_enough
    assert "a step takes 1" in found.choose(8, 0).reason
