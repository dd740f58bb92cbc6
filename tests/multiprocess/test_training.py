"""The unchanged experiment on four devices, in one process, two and four: the same run.

CI trains a tiny model on one mesh in one process and in four, the long suite nano on three meshes.
"""

import json
import re

import numpy as np
import pytest
from clusters import finished, flags_of, said, samples
from experimenting import TINY, eval_records, train_records, write_text
from looping import saved_steps

LAYOUTS = {"one": (1, 4), "two": (2, 2), "four": (4, 1)}
"""Processes, and devices of each."""
SCRIPT = "../experiments/train_lm.py"


NANO = (["one", "two", "four"], 30, ["--data.sequence_length=64"])
SMALL = (["one", "four"], 6, [*TINY])
"""Layouts, steps, and flags of the model."""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    text = write_text(tmp_path_factory.mktemp("text") / "text.txt")
    return [f"--data.source={text}", "--log_every_steps=1"]


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


def read_run(workdir):
    """(columns of the records of its steps, losses of its evaluations)"""
    steps = train_records(workdir)
    columns = {name: [r[name] for r in steps] for name in ("step", "loss", "grad_norm", "tokens")}
    return columns, [r["loss"] for r in eval_records(workdir)]


def assert_same_run(workdirs, num_steps):
    (first, evaluations), *others = map(read_run, workdirs)
    assert first["step"] == list(range(1, num_steps + 1))
    assert first["loss"][-1] < first["loss"][0] - 0.1
    assert len(evaluations) == 2
    for other, other_evaluations in others:
        for name, rtol in (("step", 0), ("tokens", 0), ("loss", 1e-5), ("grad_norm", 5e-5)):
            np.testing.assert_allclose(other[name], first[name], rtol=rtol, err_msg=name)
        np.testing.assert_allclose(other_evaluations, evaluations, rtol=1e-5)
    read = [samples(workdir) for workdir in workdirs]
    for position in range(0, num_steps * 24, 24):
        for batches in read:
            np.testing.assert_array_equal(batches[position], read[0][position])


@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        ("fsdp:2,tensor:2", SMALL),
        *(
            pytest.param(mesh, NANO, marks=pytest.mark.long)
            for mesh in ("data:4", "fsdp:4", "fsdp:2,tensor:2")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "nano" if value is NANO else "small",
)
def test_losses_and_samples_are_those_of_one_process(tmp_path, words, mesh, size):
    layouts, num_steps, model = size
    cadence = num_steps // 2
    words = [*words, *model, "--global_batch_size=24", f"--num_steps={num_steps}"]
    words += [f"--eval_every_steps={cadence}", f"--checkpoint.every_steps={cadence}"]
    workdirs = {layout: tmp_path / layout for layout in layouts}
    shown = {layout: train(workdirs[layout], words, mesh, layout) for layout in layouts}
    assert_same_run(workdirs.values(), num_steps)
    for workdir in workdirs.values():
        assert saved_steps(workdir) == [cadence, num_steps]
        assert json.loads((workdir / "config.json").read_text())
        assert not list(workdir.glob(".processes-*"))
    if "two" in layouts:
        # All devices exchange by gloo, in one process or in two, in the same order.
        assert read_run(workdirs["two"]) == read_run(workdirs["four"])
        # Where a process is a node, the devices lie as JAX would lay them.
        assert shown["two"]["is_hybrid"]
    assert shown["four"]["nodes"] == ["node0", "node1", "node0", "node1"]
    if mesh == "fsdp:2,tensor:2":
        for pair in np.array(shown["four"]["processes"]).reshape(2, 2):
            assert pair[0] % 2 == pair[1] % 2, "a tensor pair is split over two nodes"


@pytest.mark.long
def test_all_processes_train_on_the_mesh_that_auto_finds(tmp_path):
    text = write_text(tmp_path / "text.txt")
    words = [*TINY, f"--data.source={text}", "--num_steps=3", "--log_every_steps=1"]
    codes, outputs = finished(
        tmp_path / "two",
        *words,
        "--mesh=auto",
        "--num_cpu_devices=2",
        num_processes=2,
        script=SCRIPT,
    )
    assert codes == [0, 0], "\n".join(outputs)
    (mesh,) = re.findall(r"mesh=auto: (\S+) .*is the fastest", outputs[0])
    assert f"devices: mesh {mesh} on 4 cpu devices of 2 processes on one node" in outputs[0]
    # The same mesh by name, in one process.
    codes, outputs = finished(
        tmp_path / "one",
        *(*words, f"--mesh={mesh}", "--num_cpu_devices=4"),
        num_processes=1,
        places=[[]],
        script=SCRIPT,
    )
    assert codes == [0], outputs
    found, expected = (
        [record["loss"] for record in train_records(tmp_path / name)] for name in ("two", "one")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
