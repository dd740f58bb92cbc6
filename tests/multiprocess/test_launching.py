"""`jaxtrain launch` with a real run."""

import subprocess
import sys

import looping
import numpy as np
from clusters import TOY, finished
from processes import TESTS, TIMEOUT, environment


def test_a_killed_run_is_started_again_and_ends_as_if_nothing_had_happened(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    codes, outputs = finished(
        whole, "--mesh=data:-1", "--num_cpu_devices=2", num_processes=2, script=TOY
    )
    assert codes == [0, 0], "\n".join(outputs)
    command = [
        *(sys.executable, "-m", "jaxtrain", "launch", "--processes=2"),
        *("--devices_per_process=2", "--restarts=2", "--"),
        *(sys.executable, str(TESTS / TOY), f"--workdir={killed}", "--mesh=data:-1"),
    ]
    process = subprocess.run(
        command,
        env=environment(at="commit_finished 1 kill"),  # of step 5, then of 10, on any of the two
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    output = process.stdout
    assert process.returncode == 0, output
    assert "mesh data:4 on 4 cpu devices of 2 processes" in output
    assert output.count("was killed by signal 9 at step") == 4
    assert "the processes ended with exit codes 76, 76; again in 1 s (restart 1 of 2)" in output
    assert "[0] " in output.split("resumed from step 5 of 10")[0].splitlines()[-1]
    assert "again in 2 s (restart 2 of 2)" in output
    assert "the run is complete: 10 of 10 steps" in output
    assert looping.records(killed) == looping.records(whole)
    found, expected = np.load(killed / "final.npz"), np.load(whole / "final.npz")
    for name in expected:
        assert found[name].tobytes() == expected[name].tobytes(), name
