"""Joining and leaving the processes of a run: the multi-host initializer.

    distributed.join(config)    # before anything uses a device
    ...
    distributed.leave()

`jaxtrain.main` does both for every experiment. Joining is: decide from the flags and the
environment which process this is (`launch.evidence`), meet the others (`launch.meeting`), compare
what must be equal, and hand everything to `jax.distributed.initialize`, which is left nothing to
guess.
"""

import collections
import contextlib
import hashlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxtrain.config import versions
from jaxtrain.errors import CheckpointError, ConfigError, PeerError
from jaxtrain.host import accelerators, note_local_processes, num_installed_gpus
from jaxtrain.launch import meeting
from jaxtrain.launch.decision import Decision, parse_address
from jaxtrain.launch.evidence import LauncherConfig, decide_for
from jaxtrain.launch.local_devices import count_visible, local_device_ids

__all__ = ["join", "leave", "node_names"]

_logger = logging.getLogger("jaxtrain")

HEARTBEAT_SECONDS = 60
"""After so long JAX's own service ends a run that lost a process, with SIGABRT. It is the last
resort: whoever watches the processes has to be faster."""
SHUTDOWN_SECONDS = 60
"""How long JAX's service waits for the others when a process leaves; then it aborts all."""
LEAVE_SECONDS = 10
"""How long a process that leaves after an error waits for the others, which may have it too."""
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|[Hh]eartbeat|UNAVAILABLE"
    r"|NCCL|[Pp]eer|coordination service"
)
# From here on all are there, so JAX does not wait for anybody.
_INITIALIZE_SECONDS = 120
# gRPC reads the first one that is set.
_NO_PROXY, _NO_PROXY_ELSE = "no_grpc_proxy", "no_proxy"


class ClusterConfig(LauncherConfig, Protocol):
    """The fields of a run's configuration that are read here."""

    @property
    def process_per(self) -> str: ...
    @property
    def init_timeout_seconds(self) -> float: ...


_joined: tuple[tuple[str, ...] | None, tuple[Any, ...]] | None = None
"""What `join` returned, and the arguments that it had."""


def node_names() -> tuple[str, ...]:
    """The node of each process of the run; empty where none was joined."""
    return (_joined and _joined[0]) or ()


def join(config: ClusterConfig) -> tuple[str, ...] | None:
    """Joins the run that the flags or the environment speak of, before any other use of JAX.

    A second call with the same arguments changes nothing.

    Returns:
        The node of each process, or None for a single process.

    Raises:
        ConfigError: for evidence that is incomplete or contradictory, for processes that do not fit
            together, and when it is too late.
        PeerError: when other processes do not come within `init_timeout_seconds`.
    """
    global _joined
    names = ("launcher", "coordinator", "num_processes", "process_id", "process_per")
    arguments = tuple(getattr(config, name) for name in names)
    if _joined is not None:
        if arguments != _joined[1]:
            changed = ", ".join(
                f"{name}={new} instead of {old}"
                for name, new, old in zip(names, arguments, _joined[1], strict=True)
                if new != old
            )
            raise ConfigError(
                f"the processes are joined already, they cannot be joined again with {changed};"
                f" start a new process"
            )
        _logger.info("the processes are joined already; nothing to do")
        return _joined[0]
    decision = decide_for(config)
    for note in decision.notes:
        _logger.info(note)
    if line := decision.describe():
        _logger.info(line)
    num_gpus = _num_gpus()
    nodes = None
    if decision.num_processes > 1:
        nodes = _join(decision, num_gpus, config)
    elif jax.distributed.is_initialized():
        _logger.info("jax.distributed was initialized by other code; it is taken as it is")
    _joined = nodes, arguments
    return nodes


def wait_for_all() -> None:
    """Waits until every process is done: one may write a report meanwhile."""
    if node_names():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("done")


def leave(*, is_orderly: bool = True) -> None:
    """Leaves the run, with all the others, which must do the same; harmless if it was not joined.

    Args:
        is_orderly: False after an error, when others may never come: they are waited for
            LEAVE_SECONDS only. End the process then, before JAX does.
    """
    global _joined
    if not node_names():
        return
    _joined = None
    if is_orderly:
        jax.distributed.shutdown()
        return
    thread = threading.Thread(target=_shutdown, name="leave", daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)


def _shutdown() -> None:
    # Whatever it meets, the error that ends the process has been said.
    with contextlib.suppress(RuntimeError):
        jax.distributed.shutdown()


def explain(error: BaseException) -> BaseException:
    """The error, or a `PeerError` where JAX lost the connection to another process."""
    text = str(error)
    is_lost = isinstance(error, jax.errors.JaxRuntimeError) and _LOST_PEER.search(text)
    # orbax waits for the others as well, and its errors become ours; JAX makes some a ValueError.
    is_ours = isinstance(error, CheckpointError | ValueError)
    if is_lost or (is_ours and re.search("Gloo|NCCL", text)):
        return PeerError(
            f"another process was lost ({text.partition(chr(10))[0][:200]}); its own log says why."
            f" The last committed checkpoint stands"
        )
    return error


def _join(decision: Decision, num_gpus: int | None, config: ClusterConfig) -> tuple[str, ...]:
    if jax.distributed.is_initialized():
        raise ConfigError(
            "jax.distributed is initialized already, but not by jaxtrain, which would not know the"
            " nodes; remove the call of jax.distributed.initialize"
        )
    _require_no_backend()
    host, port = parse_address(decision.coordinator, "coordinator")
    me = {
        "process_id": decision.process_id,
        "num_processes": decision.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "node": decision.node or socket.gethostname(),
        "has_loopback_name": meeting.is_loopback(socket.gethostname()),
        "num_gpus": num_gpus,
        "versions": {**versions(), **_code()},
    }
    timeout = config.init_timeout_seconds
    everybody = meeting.meet(host, port, me, timeout_seconds=timeout, check=check_together)
    nodes = tuple(who["node"] for who in everybody)
    local_ids = None
    local_id, local_num = _place_on_node(decision, nodes)
    note_local_processes(local_num)
    if num_gpus is not None:
        local_ids = local_device_ids(num_gpus, local_id, local_num, config.process_per)
        _logger.info("devices of this process: %s of %d", list(local_ids), num_gpus)
    if decision.process_id:
        meeting.wait_for_listener(host, port, _INITIALIZE_SECONDS)
    # SIGTERM is ours, and a wish to stop travels with the batches (`agreement`).
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # only warns of them
    with _without_proxy(host):
        jax.distributed.initialize(
            decision.coordinator,
            decision.num_processes,
            decision.process_id,
            local_device_ids=local_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=_INITIALIZE_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=decision.coordinator if meeting.is_loopback(host) else None,
        )
    if decision.process_id:
        # Process 0 speaks for all; what goes wrong here is said here.
        _logger.setLevel(max(_logger.level, logging.WARNING))
    num_nodes = len(set(nodes))
    where = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
    _logger.info("joined: %d processes on %s", len(nodes), where)
    return nodes


def check_together(everybody: Sequence[Mapping[str, Any]]) -> None:
    """Checks, on process 0, that the processes fit together.

    Raises:
        ConfigError: naming the process that does not fit.
    """
    first = everybody[0]
    for who in everybody[1:]:
        differing = [
            f"{name} {version} instead of {first['versions'].get(name)}"
            for name, version in who["versions"].items()
            if version != first["versions"].get(name) and name != "python"
        ]
        if differing:
            raise ConfigError(
                f"process {who['process_id']} on {who['host']} has {', '.join(differing)} on"
                f" {first['host']}; install the same on all"
            )
    addresses = {who["address"] for who in everybody}
    misled = [who for who in everybody if who["has_loopback_name"] and not who["num_gpus"]]
    if len(addresses) > 1 and misled:
        hosts = ", ".join(sorted({str(who["host"]) for who in misled}))
        raise ConfigError(
            f"the processes are on several machines ({', '.join(sorted(addresses))}), but the host"
            f" name of {hosts} resolves to a loopback address there, and gloo gives it to the"
            f" others to connect to; map it to the machine's own address in /etc/hosts"
        )
    counts = collections.Counter(who["node"] for who in everybody)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{node}: {count}" for node, count in sorted(counts.items()))
        raise ConfigError(
            f"every node must run the same number of processes ({listed}); with Slurm give"
            f" --ntasks-per-node"
        )


def _code() -> dict[str, str]:
    """Digests of the sources of jaxtrain and of the script: other code computes something else."""
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(source)};".encode() + source)
    found = {"jaxtrain's code": digest.hexdigest()}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if script.is_file():
        own = hashlib.blake2b(script.read_bytes(), digest_size=6).hexdigest()
        found["experiment"] = f"{script.name} ({own})"
    return found


def _place_on_node(decision: Decision, nodes: Sequence[str]) -> tuple[int, int]:
    """(which of the processes on its node this is, how many they are).

    What the launcher says counts: in containers each process may have a host name of its own, and
    share the GPUs of the machine with others all the same.
    """
    local = [i for i, node in enumerate(nodes) if node == nodes[decision.process_id]]
    local_id, local_num = local.index(decision.process_id), len(local)
    if decision.local_process_id is not None:
        local_id = decision.local_process_id
    return local_id, max(decision.local_num_processes or 0, local_num)


def _num_gpus() -> int | None:
    """NVIDIA GPUs that this process can see; None where JAX would not look for any."""
    platforms = (jax.config.jax_platforms or "").split(",")
    if not any("cuda" in plugin for plugin in accelerators()) or platforms[0] == "cpu":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = count_visible(visible, num_installed_gpus() if visible is None else 0)
    if not num_gpus:
        what = "the driver shows none" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
        raise ConfigError(
            f"no GPU to train on: {what}; give this process one, or set JAX_PLATFORMS=cpu to train"
            f" on the CPU"
        )
    return num_gpus


def _require_no_backend() -> None:
    try:
        # A setting that JAX refuses to change once it uses devices.
        before = jax.config.jax_num_cpu_devices
        jax.config.update("jax_num_cpu_devices", before + 1)
        jax.config.update("jax_num_cpu_devices", before)
    except RuntimeError:
        raise ConfigError(
            "the processes are joined too late, JAX uses its devices already; move the first use"
            " (jax.devices(), jax.numpy, jax.random.key, ...) behind jaxtrain.distributed.join,"
            " or into what `main` calls"
        ) from None


@contextlib.contextmanager
def _without_proxy(host: str) -> Iterator[None]:
    """Keeps gRPC from a proxy on the way to `host`; the environment is as before afterwards."""
    before = os.environ.get(_NO_PROXY)
    exceptions = before or os.environ.get(_NO_PROXY_ELSE, "")
    os.environ[_NO_PROXY] = f"{exceptions},{host}".lstrip(",")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_PROXY]
        else:
            os.environ[_NO_PROXY] = before
