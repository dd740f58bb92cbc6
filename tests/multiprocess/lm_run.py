"""experiments/train_lm.py as one of several processes, with what the tests want to see.

Every process notes the samples it reads (`clusters.samples`); process 0 prints how the mesh lies
over processes and nodes.
"""

import importlib.util
import json
import sys
from pathlib import Path

import clusters
import numpy as np

from jaxtrain.main import main

ROOT = Path(__file__).parents[2]


def train_lm():
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "experiments/train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


if __name__ == "__main__":
    script = train_lm()

    def build(config):
        import jax

        clusters.note_samples(config.workdir)
        if jax.process_index() == 0:
            show_mesh(config)
        return script.build(config)

    main(script.LmConfig, build, presets={"model": script.PRESETS})
