"""The unchanged experiment on four devices, in one process, two and four: the same run."""

import json

import numpy as np
import pytest
from clusters import finished, flags_of, said, samples
from experimenting import TINY, eval_records, train_records, write_text
from looping import saved_steps

STEPS = 6
LAYOUTS = {"one": (1, 4), "two": (2, 2), "four": (4, 1)}
"""Processes, and devices of each."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return [
        *TINY,
        f"--data.source={text}",
        *("--global_batch_size=24", f"--num_steps={STEPS}", "--log_every_steps=1"),
        *("--eval_every_steps=3", "--checkpoint.every_steps=3"),
    ]


def two_nodes(num_processes):
    """Our own variables for two nodes, to which processes were dealt like cards."""
    coordinator = flags_of(num_processes)[0][0].partition("=")[2]
    return [
        {
            "JAXTRAIN_COORDINATOR": coordinator,
            "JAXTRAIN_NUM_PROCESSES": str(num_processes),
            "JAXTRAIN_PROCESS_ID": str(process_id),
            "JAXTRAIN_NODE": f"node{process_id % 2}",
        }
        for process_id in range(num_processes)
    ]


def train(workdir, words, mesh, layout):
    """Runs a layout; returns what process 0 showed of the mesh."""
    workdir.mkdir()
    num_processes, num_devices = LAYOUTS[layout]
    if layout == "one":
        options = {"places": [[]]}
    else:
        options = {"places": [[]] * num_processes, "variables": two_nodes(num_processes)}
    codes, outputs = finished(
        workdir,
        *words,
        f"--mesh={mesh}",
        f"--num_cpu_devices={num_devices}",
        num_processes=num_processes,
        **options,
    )
    assert codes == [0] * num_processes, "\n".join(outputs)
    # Process 0 alone speaks, writes and reports.
    assert all("step 1/" not in output for output in outputs[1:])
    return said(outputs[0])


def assert_same_run(workdirs):
    first, *others = (
        {
            name: [record[name] for record in train_records(workdir)]
            for name in ("step", "loss", "grad_norm", "tokens")
        }
        for workdir in workdirs
    )
    assert first["step"] == list(range(1, STEPS + 1))
    assert first["loss"][-1] < first["loss"][0] - 0.1
    for other in others:
        for name in first:
            np.testing.assert_allclose(other[name], first[name], rtol=1e-5, err_msg=name)
    evaluations = [[r["loss"] for r in eval_records(workdir)] for workdir in workdirs]
    for other in evaluations[1:]:
        np.testing.assert_allclose(other, evaluations[0], rtol=1e-5)
    read = [samples(workdir) for workdir in workdirs]
    for position in range(0, STEPS * 24, 24):
        for batches in read:
            np.testing.assert_array_equal(batches[position], read[0][position])


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp:2,tensor:2",
        pytest.param("data:4", marks=pytest.mark.long),
        pytest.param("fsdp:4", marks=pytest.mark.long),
    ],
)
def test_losses_and_samples_are_those_of_one_process(tmp_path, words, mesh):
    workdirs = {layout: tmp_path / layout for layout in LAYOUTS}
    shown = {layout: train(workdirs[layout], words, mesh, layout) for layout in LAYOUTS}
    assert_same_run(workdirs.values())
    for workdir in workdirs.values():
        assert saved_steps(workdir) == [3, 6]
        assert json.loads((workdir / "config.json").read_text())
        assert not list(workdir.glob(".processes-*"))
    # Where a process is a node, the devices lie as JAX would lay them.
    assert shown["two"]["is_hybrid"]
    assert shown["four"]["nodes"] == ["node0", "node1", "node0", "node1"]
    if mesh == "fsdp:2,tensor:2":
        for pair in np.array(shown["four"]["processes"]).reshape(2, 2):
            assert pair[0] % 2 == pair[1] % 2, "a tensor pair is split over two nodes"
