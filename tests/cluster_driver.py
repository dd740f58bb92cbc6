"""One of several processes that restore a checkpoint together and train on.

python cluster_driver.py INDEX NUM_PROCESSES PORT CHECKPOINTS STEP
"""

import json
import os
import sys


def main(index: int, num_processes: int, port: str, directory: str, step: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8 // num_processes)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, index)
    import checkpointing as toy
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxtrain.checkpoint import Checkpointer

    mesh = toy.make_mesh(4, 2)
    checkpointer = Checkpointer(directory)
    state = checkpointer.restore(step, toy.abstract_state(mesh))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    losses = []
    for number in range(step, step + 3):
        rows = toy.batch(number)
        x_BD = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        state, loss = toy.make_step(mesh)(state, x_BD)
        losses.append(float(loss))
    checkpointer.save(step + 3, state, {"samples_seen": 0})
    checkpointer.close()
    print(json.dumps({"losses": losses, "steps": checkpointer.committed_steps()}))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
