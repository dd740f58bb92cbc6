"""Golden metrics: the first three steps of the two training scripts, on data that never changes.

When a value here moves, the program computes something else than before. If that was the purpose
(another default, initialisation, order of the samples, or a new version of JAX that draws other
random numbers), look at the size of the change, say in the commit why it is right, and take over
the values that the failing test prints. If it was not, the change at hand has a bug.
"""

import experimenting
import numpy as np
import pytest
from experimenting import eval_records, succeed, train_records

pytestmark = pytest.mark.usefixtures("compile_cache")

GOLDEN = {
    "train_lm": {
        "loss": [5.558735, 4.873368, 4.362267],
        "grad_norm": [7.509054, 4.192317, 3.034328],
        "param_norm": [37.880035, 38.004429, 38.057251],
        "learning_rate": [0.003, 0.002325, 0.000975],
        "eval_loss": [4.217592],
    },
    "train_image": {
        "loss": [2.391356, 2.283053, 2.279190],
        "grad_norm": [1.032268, 0.906442, 0.932016],
        "param_norm": [14.146914, 14.148934, 14.149717],
        "learning_rate": [0.003, 0.002325, 0.000975],
        "eval_loss": [2.288698],
    },
}
NAMES = ("loss", "grad_norm", "param_norm", "learning_rate")


@pytest.mark.parametrize("name", GOLDEN)
def test_the_first_steps_are_the_golden_ones(name, tmp_path):
    words = ["--num_steps=3", "--log_every_steps=1", "--optimizer.warmup_steps=0"]
    if name == "train_lm":
        # The standard library differs between versions of Python.
        text = experimenting.write_text(tmp_path / "text.txt")
        words += [f"--data.source={text}", "--data.sequence_length=64", "--global_batch_size=8"]
    workdir = tmp_path / "run"
    succeed(name, *words, f"--workdir={workdir}", num_devices=1)
    steps = train_records(workdir)
    found = {key: [record[key] for record in steps] for key in NAMES}
    found["eval_loss"] = [eval_records(workdir)[-1]["loss"]]
    expected = GOLDEN[name]
    # Optimised as for a user, the programs agree within 1e-6.
    same = found.keys() == expected.keys() and all(
        np.allclose(found[key], expected[key], rtol=2e-5, atol=0) for key in found
    )
    lines = "\n".join(
        f'        "{key}": {[round(v, 6) for v in values]},' for key, values in found.items()
    )
    assert same, f"{__doc__}\nexpected of {name}: {expected}\n\nfound:\n{lines}"
