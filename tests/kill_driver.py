"""A run in a process of its own that kills itself, or is killed, at a chosen moment."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path


def main(workdir: str, hook: str = "", count: int = 1) -> None:
    """Runs to the end and writes `digest.json`, unless the moment comes first.

    Args:
        workdir: of the run.
        hook: function of `jaxtrain.checkpoint` at whose call the process kills itself; "" none.
        count: at which call.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    import checkpointing
    import jax

    from jaxtrain import checkpoint

    # Only the first life compiles.
    jax.config.update("jax_compilation_cache_dir", str(Path(workdir).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    calls = 0

    def kill(step: int) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)

    if hook:
        assert hasattr(checkpoint, hook)
        setattr(checkpoint, hook, kill)
    Path(workdir).mkdir(parents=True, exist_ok=True)
    log = open(Path(workdir, "log.txt"), "a", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), sys.stderr.fileno())
    config = checkpointing.config(workdir, num_steps=8, every_steps=1, keep_last=2)
    start, state, _ = checkpointing.run(config, mesh=checkpointing.make_mesh(1, 1))
    leaves = checkpointing.to_numpy(state)
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    Path(workdir, "digest.json").write_text(json.dumps({"from": start.step, "digest": digest}))
