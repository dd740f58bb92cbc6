"""A packed mixture of three sources in real processes: the samples of one, also after kills."""

import signal

import mixing
import numpy as np
import pytest
from clusters import finished, samples, started
from experimenting import TINY, eval_records, train_records

WORDS = [
    *(*TINY, f"--data.sequence_length={mixing.LENGTH}", f"--global_batch_size={mixing.BATCH}"),
    *("--data.packing=best_fit", "--data.validation_fraction=0", "--optimizer.warmup_steps=0"),
    *("--mesh=data:-1", "--num_cpu_devices=1", "--log_every_steps=1", "--seed=3"),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return mixing.write(tmp_path_factory.mktemp("mixed"))


def assert_read_in_order(workdir, mixture, num_steps):
    """Every batch up to a step holds the samples of the order; returns them."""
    data = mixing.dataset(mixture)
    expected = data.sample_indices(3, np.arange(num_steps * mixing.BATCH))
    read = samples(workdir)
    found = [read[position] for position in range(0, num_steps * mixing.BATCH, mixing.BATCH)]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    return data, expected


def test_two_processes_read_the_order_of_the_mixture(tmp_path, mixture):
    words = [*WORDS, f"--data.mixture={mixture}", "--num_steps=6"]
    words[words.index("--data.validation_fraction=0")] = "--data.validation_fraction=0.2"
    codes, outputs = finished(tmp_path, *words, num_processes=2)
    assert codes == [0, 0], "\n".join(outputs)
    # Each source is evaluated by its name, in several processes too.
    (last,) = eval_records(tmp_path)
    shares = {"web": 1 / 2, "code": 1 / 3, "tok": 1 / 6}
    mean = sum(share * last[f"loss/{name}"] for name, share in shares.items())
    np.testing.assert_allclose(last["loss"], mean, rtol=1e-3)
    # One of the two made the plans.
    assert all(record["loss"] > 0 for record in train_records(tmp_path))
    read = samples(tmp_path)
    assert all(len(read[step * mixing.BATCH]) == mixing.BATCH for step in range(6))


@pytest.mark.long
def test_killed_ten_times_with_other_numbers_of_processes(tmp_path, mixture):
    words = [
        *WORDS,
        *(f"--data.mixture={mixture}", f"--num_steps={mixing.STEPS}"),
        *("--eval_every_steps=0", "--checkpoint.every_steps=5"),
    ]
    rng = np.random.default_rng(1)
    for start in range(10):
        num_processes, accumulate = start % 4 + 1, (1, 2, 4)[start % 3]
        if (mixing.BATCH // accumulate) % num_processes:
            accumulate = 2
        options = {"places": [[]]} if num_processes == 1 else {}
        with started(
            tmp_path,
            *words,
            f"--accumulate_steps={accumulate}",
            num_processes=num_processes,
            **options,
        ) as runs:
            step = 5 + start * 15 + int(rng.integers(0, 12))
            runs[0].wait_for(f" {step}/{mixing.STEPS} ")
            runs[-1].signal(signal.SIGKILL)
    codes, outputs = finished(tmp_path, *words, "--accumulate_steps=4", num_processes=3)
    assert codes == [0] * 3, "\n".join(outputs)
    data, expected = assert_read_in_order(tmp_path, mixture, mixing.STEPS)
    mixing.assert_whole_epochs(data, expected)
    assert [r["step"] for r in train_records(tmp_path)] == list(range(1, mixing.STEPS + 1))
