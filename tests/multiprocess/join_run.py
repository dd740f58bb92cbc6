"""Joins a run, adds something up with the others and leaves; run by `test_joining.py`.

TOY_AT: `late` uses a device first, `twice` joins twice, `otherwise` joins again with other flags.
"""

import dataclasses
import json
import os
import sys
import time

from jaxtrain.config import RunConfig
from jaxtrain.main import run_tool


def run(config: RunConfig) -> None:
    import jax

    from jaxtrain import distributed
    from jaxtrain.backend import configure_backend

    begin = time.monotonic()
    at = os.environ["TOY_AT"]
    if at == "late":
        jax.devices()
    distributed.join(config)
    seconds = time.monotonic() - begin
    if at == "twice":
        distributed.join(config)
    if at == "otherwise":
        distributed.join(dataclasses.replace(config, num_processes=3))
    configure_backend(config)
    from jax.experimental import multihost_utils

    everybody = multihost_utils.process_allgather(jax.numpy.int32(jax.process_index()))
    found = {
        "process": jax.process_index(),
        "count": jax.process_count(),
        "everybody": everybody.tolist(),
        "nodes": distributed.node_names(),
        "proxies": {name: os.environ.get(name) for name in ("http_proxy", "no_grpc_proxy")},
        "seconds": seconds,
    }
    print(json.dumps(found), flush=True)
    distributed.wait_for_all()
    distributed.leave()


if __name__ == "__main__":
    sys.argv = [word for word in sys.argv if not word.startswith("--workdir")]
    run_tool(RunConfig, run)
