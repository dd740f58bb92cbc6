"""A run that is killed 24 times ends as if nothing had happened (case C3, and E3's kill -9).

60 steps with warm-up, accumulation, averaging, dropout and evaluations, a checkpoint every 5 steps.
Each start is killed with SIGKILL at a named moment (`toy_run.py`) and the same command is given
again. `pytest -s` shows where each kill landed.
"""

import itertools

import looping
import numpy as np
import pytest
from processes import finished

FLAGS = (
    "--num_steps=60",
    "--eval_every_steps=10",
    "--eval_batches=2",
    "--accumulate_steps=2",
    "--optimizer.warmup_steps=4",
    "--optimizer.learning_rate=0.05",
    "--optimizer.ema_decay=0.9",
    "--checkpoint.every_steps=5",
)

# A second thread is held where it would get ahead of the one that is killed: the one that writes a
# checkpoint, so that the checkpoint stays in flight ...
IN_FLIGHT = "commit_started {0} hang; save_started {0} kill"
# ... or the main one, so that it writes no later record.
COMMITTED = "save_started {0} hang; commit_finished {0} kill"

# (kind, TOY_AT, newest checkpoint afterwards). The passes are counted in each process anew: a kill
# at the first save of a process gets nowhere, so later ones alternate with it.
KILLS = [
    ("start-up", "build 1 kill", None),
    ("start-up", "config 1 kill", None),
    ("saving", IN_FLIGHT.format(1), None),
    ("saving", "commit_started 1 kill", None),
    ("metrics", "write 3 kill", None),
    ("committed", COMMITTED.format(1), 5),
    ("restoring", "restore_started 1 kill", 5),
    ("saving", IN_FLIGHT.format(2), 10),
    ("metrics", "cut 1 kill", 10),
    ("metrics", "cut_done 1 kill", 10),
    ("saving", "commit_started 1 kill", 10),
    ("restoring", "restore_finished 1 kill", 10),
    ("committed", COMMITTED.format(2), 20),
    ("saving", IN_FLIGHT.format(1), 20),
    ("start-up", "compile 1 kill", 20),
    ("saving", "commit_started 2 kill", 25),
    ("restoring", "restore_started 1 kill", 25),
    ("metrics", "commit_started 2 hang; write 12 kill", 30),
    ("committed", COMMITTED.format(1), 35),
    ("saving", IN_FLIGHT.format(2), 40),
    ("start-up", "compiled 1 kill", 40),
    ("restoring", "restore_finished 1 kill", 40),
    ("committed", COMMITTED.format(2), 50),
    ("saving", "commit_started 2 kill", 55),
]


@pytest.mark.timeout(1500)
def test_24_kills_leave_no_trace(tmp_path):
    kinds = [kind for kind, _, _ in KILLS]
    counts = {kind: kinds.count(kind) for kind in kinds}
    assert counts == {"start-up": 4, "saving": 8, "metrics": 4, "committed": 4, "restoring": 4}
    workdir = killed_and_whole(tmp_path, FLAGS, KILLS)
    assert [record["step"] for record in looping.train_records(workdir)] == list(range(1, 61))
    assert [record["step"] for record in looping.eval_records(workdir)] == list(range(10, 61, 10))
    assert looping.saved_steps(workdir) == [50, 55, 60]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_language_model_too(tmp_path):
    """The real experiment, on text."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}, cubed {n**3}.\n" for n in range(500)))
    flags = (
        f"--data.source={text}",
        "--data.sequence_length=32",
        "--model.num_layers=1",
        "--model.embed_dim=32",
        "--model.num_heads=2",
        "--model.mlp_dim=64",
        "--global_batch_size=8",
        "--num_steps=12",
        "--log_every_steps=1",
        "--eval_every_steps=4",
        "--eval_batches=2",
        "--checkpoint.every_steps=4",
        "--optimizer.warmup_steps=2",
    )
    kills = [
        ("committed", COMMITTED.format(1), 4),
        ("saving", IN_FLIGHT.format(1), 4),
    ]
    workdir = killed_and_whole(tmp_path, flags, kills, script="faults/lm_run.py")
    assert [record["step"] for record in looping.train_records(workdir)] == list(range(1, 13))


def killed_and_whole(tmp_path, flags, kills, **options):
    """Kills one run again and again, lets another be, and compares; the directory of the first."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, output = finished(whole, *flags, **options)
    assert code == 0, output
    for number, (kind, at, newest) in enumerate(kills, start=1):
        code, output = finished(killed, *flags, at=at, **options)
        assert code == -9, output
        where = [line for line in output.splitlines() if line.startswith("at ")][-1]
        steps = looping.saved_steps(killed)
        print(f"kill {number:2}  {kind:9}  {where}; checkpoints {steps}")
        moment = at.rpartition(";")[-1].removesuffix("kill").strip()
        assert where.startswith(f"at {moment}, "), output
        assert max(steps, default=None) == newest, output
    code, output = finished(killed, *flags, **options)
    assert code == 0, output

    lines = looping.records(killed)
    assert lines == looping.records(whole)
    assert all(a["step"] <= b["step"] for a, b in itertools.pairwise(lines))
    found, expected = np.load(killed / "final.npz"), np.load(whole / "final.npz")
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
    # No scratch file and no half of a checkpoint is left either.
    assert names_in(killed) == names_in(whole)
    assert names_in(killed / "checkpoints") == names_in(whole / "checkpoints")
    return killed


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())
