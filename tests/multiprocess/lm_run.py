"""experiments/train_lm.py as one of several processes, with what the tests want to see.

Every process writes `samples-N.jsonl` beside the run: which samples it read for which batch.
Process 0 prints how the mesh lies over processes and nodes.

TOY_AT is a list of PROCESS MOMENT NUMBER ACTION, separated by semicolons: when the moment comes for
the NUMBER-th time in that process it is printed ("at batch 3"), and

    fail   an OSError is raised there
    ask    the process goes on when a line comes on standard input

Moments: `build`, `batch` (of training data), `eval_batch`, `compile`, `restore`, `commit`.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np

from jaxtrain.main import main

# train_lm is imported from its file below, and may be imported by workers again.
ROOT = Path(__file__).parents[2]


class Moments:
    """Counts the moments of this process, and acts at those of TOY_AT."""

    def __init__(self, process_id):
        self._passes = {}
        self._actions = {}
        for part in filter(None, os.environ.get("TOY_AT", "").split(";")):
            process, name, number, action = part.split()
            if int(process) == process_id:
                self._actions[name, int(number)] = action

    def __call__(self, name):
        number = self._passes[name] = self._passes.get(name, 0) + 1
        action = self._actions.get((name, number))
        if action:
            print(f"at {name} {number}", flush=True)
        if action == "ask":
            sys.stdin.readline()
        if action == "fail":
            raise OSError(5, "Input/output error")


class Watched:
    """A dataset that notes what is read for training."""

    def __init__(self, dataset, read):
        self._dataset, self._read = dataset, read

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    @property
    def fingerprint(self):
        return self._dataset.fingerprint

    def __len__(self):
        return len(self._dataset)

    def read(self, indices):
        self._read()
        return self._dataset.read(indices)


def train_lm():
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "experiments/train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def note_samples(workdir, process_id):
    """Every training batch that this process makes is noted."""
    from jaxtrain.data import load

    make = load._TrainingBatches.__call__
    path = Path(workdir, f"samples-{process_id}.jsonl")

    def noting(self, number):
        batch = make(self, number)
        record = {
            "position": batch.position,
            "rows": self._rows_R.tolist(),
            "samples": self._samples[number % self._block].tolist(),
        }
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    load._TrainingBatches.__call__ = noting


def show_mesh(config):
    import jax
    from jax.experimental import mesh_utils

    from jaxtrain.distributed import node_names
    from jaxtrain.mesh import factor_over_nodes, make_mesh

    mesh = make_mesh(config.mesh)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    nodes = node_names()
    shown = {"processes": processes.tolist(), "nodes": nodes}
    if nodes and len(set(nodes)) == len(nodes):
        factors = factor_over_nodes(dict(mesh.shape), jax.local_device_count()).values()
        hybrid = mesh_utils.create_hybrid_device_mesh(
            [inside for _, inside in factors],
            [across for across, _ in factors],
            process_is_granule=True,
        )
        shown["is_hybrid"] = bool((hybrid == mesh.devices).all())
    print(json.dumps(shown), flush=True)


def watch(moments):
    """Puts the moments where they belong in the package."""
    from jaxtrain import checkpoint, program

    compile_step = program.compile_step

    def compiling(*args, **options):
        moments("compile")
        return compile_step(*args, **options)

    program.compile_step = compiling
    checkpoint._restore_started = lambda step: moments("restore")
    read = checkpoint._read

    def reading(*args):
        try:
            moments("read")
        except OSError as error:
            raise checkpoint.files.BrokenCheckpointError(f"a disk failed: {error}") from error
        return read(*args)

    checkpoint._read = reading
    finish = checkpoint.Checkpointer._describe_files

    def committing(self):
        moments("commit")
        finish(self)

    checkpoint.Checkpointer._describe_files = committing


if __name__ == "__main__":
    script = train_lm()

    def build(config):
        import jax

        moments = Moments(jax.process_index())
        moments("build")
        note_samples(config.workdir, jax.process_index())
        watch(moments)
        if jax.process_index() == 0:
            show_mesh(config)
        experiment = script.build(config)
        return dataclasses.replace(
            experiment,
            train_data=Watched(experiment.train_data, lambda: moments("batch")),
            eval_data=Watched(experiment.eval_data, lambda: moments("eval_batch")),
        )

    main(script.LmConfig, build, presets={"model": script.PRESETS})
