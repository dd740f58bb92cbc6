"""What each launcher tells the processes that it starts, in variables of the environment.

Each function of `SOURCES` returns a decision where the evidence is complete, None where there is
none, and raises where it is half-set: `NotUsedError` if this may well be a process of its own (a
login to a node of one's own Slurm job), `ConfigError` if it is one of several, because each would
otherwise train alone.
"""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence

from jaxtrain.errors import ConfigError
from jaxtrain.launch.decision import Decision, one_of_several
from jaxtrain.launch.nodes import expand_counts, expand_nodes

Environ = Mapping[str, str]

COORDINATOR, NUM_PROCESSES, PROCESS_ID, NODE = (
    "JAXTRAIN_COORDINATOR",
    "JAXTRAIN_NUM_PROCESSES",
    "JAXTRAIN_PROCESS_ID",
    "JAXTRAIN_NODE",
)
"""Our own variables, for whoever starts the processes."""

# Kubernetes gives each pod an address of its own, so one number serves all jobs.
_KUBERNETES_PORT = 8476
# Above what Linux hands out to outgoing connections by default (32768 to 60999).
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_MPI = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


class NotUsedError(Exception):
    """Evidence of a launcher that did not start this process as one of several."""


def _jaxtrain(environ: Environ) -> Decision | None:
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    if not any(environ.get(name) for name in names):
        return None
    if missing := _missing(environ, names):
        raise ConfigError(
            f"{_shown(environ, names)} is set but not {missing}; all of {', '.join(names)} say"
            f" which process of which run this is"
        )
    return one_of_several(
        "jaxtrain",
        _variables(environ, names),
        _number(environ, PROCESS_ID),
        _number(environ, NUM_PROCESSES),
        coordinator=environ[COORDINATOR],
        node=environ.get(NODE, ""),
    )


def _torchrun(environ: Environ) -> Decision | None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not any(environ.get(name) for name in names):
        return None
    if missing := _missing(environ, names):
        reason = (
            f"{_shown(environ, names)} is set but not {missing}; torchrun and its like set all of"
            f" {', '.join(names)}"
        )
        # A container may leave an address behind; a rank among several is meant.
        is_one_of_several = {"RANK", "WORLD_SIZE"} <= environ.keys() and environ[
            "WORLD_SIZE"
        ] != "1"
        raise ConfigError(reason) if is_one_of_several else NotUsedError(reason)
    port = _number(environ, "MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's agent listens on the first one itself
    return one_of_several(
        "torchrun",
        _variables(environ, (*names, "LOCAL_RANK")),
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        coordinator=_join(environ["MASTER_ADDR"], port),
        local_process_id=_optional_number(environ, "LOCAL_RANK"),
        local_num_processes=_optional_number(environ, "LOCAL_WORLD_SIZE"),
    )


def _slurm(environ: Environ) -> Decision | None:
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_NTASKS")
    if not environ.get("SLURM_JOB_ID"):
        return None
    if environ.get("SLURM_STEP_NUM_TASKS"):
        # SLURM_NTASKS may be that of the job around the step.
        names = (*names[:-1], "SLURM_STEP_NUM_TASKS")
    if missing := _missing(environ, names):
        raise NotUsedError(
            f"{_shown(environ, names)} is set but not {missing}; srun sets them for the tasks that"
            f" it starts"
        )
    nodes = expand_nodes(environ["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    node = environ.get("SLURMD_NODENAME", "")
    local_num_processes = None
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if per_node:
        counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE")
        if len(counts) != len(nodes):
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={per_node} is for {len(counts)} nodes, but"
                f" SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} has {len(nodes)}"
            )
        if node in nodes:
            local_num_processes = counts[nodes.index(node)]
    step = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return one_of_several(
        "slurm",
        _variables(environ, names),
        _number(environ, "SLURM_PROCID"),
        _number(environ, names[-1]),
        coordinator=_join(nodes[0], _port(step)),
        local_process_id=_number(environ, "SLURM_LOCALID"),
        local_num_processes=local_num_processes,
        node=node,
    )


def _mpi(environ: Environ) -> Decision | None:
    for flavour, names in _MPI.items():
        rank, size, local_rank, local_size = names
        if not environ.get(rank):
            continue
        if missing := _missing(environ, (rank, size)):
            raise ConfigError(
                f"{_shown(environ, names)} is set but not {missing}; mpirun of {flavour} sets both"
            )
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri", "mpi")
        variables = _variables(environ, names)
        host = ""
        if environ.get(local_size) == environ[size]:
            host = "127.0.0.1"
        elif found := _mpirun_host(environ):
            host, variable = found
            variables += _variables(environ, (variable,))
        return one_of_several(
            "mpi",
            variables,
            _number(environ, rank),
            _number(environ, size),
            coordinator=host and _join(host, _port(job.partition(";")[0])),
            local_process_id=_optional_number(environ, local_rank),
            local_num_processes=_optional_number(environ, local_size),
        )
    return None


def _mpirun_host(environ: Environ) -> tuple[str, str] | None:
    """(host of mpirun, variable that says so); process 0 runs beside it unless told otherwise."""
    # Open MPI 4: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,2620::2]:43370
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if found := re.search(r"tcp6?://(?:\[([^,\]]+)|([^,:;\[]+))", uri):
        return found[1] or found[2], "OMPI_MCA_orte_hnp_uri"
    # Open MPI 5: prterun-HOST-PID@1
    namespace = environ.get("PMIX_NAMESPACE", "")
    if found := re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", namespace):
        return found[1], "PMIX_NAMESPACE"
    return None


def _kubernetes(environ: Environ) -> Decision | None:
    """An Indexed Job, alone or in a JobSet; docs/cluster.md names the variables to set."""
    if not environ.get("JOB_COMPLETION_INDEX"):
        return None
    if not environ.get("PROCESSES_IN_JOB"):
        raise NotUsedError(
            f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']} is set but not"
            f" PROCESSES_IN_JOB, the number of completions, so this may be a task of its own"
        )
    names = ["JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB"]
    per_job = _number(environ, "PROCESSES_IN_JOB")
    job_index = _optional_number(environ, "JOB_INDEX") or 0
    num_jobs = _optional_number(environ, "REPLICATED_JOB_REPLICAS") or 1
    names += [name for name in ("JOB_INDEX", "REPLICATED_JOB_REPLICAS") if name in environ]
    if address := environ.get("JAX_COORDINATOR_ADDRESS", ""):
        names.append("JAX_COORDINATOR_ADDRESS")
        has_port = re.search(r"[^:]:\d+$", address)
        address = address if has_port else _join(address.strip("[]"), _KUBERNETES_PORT)
    elif not _missing(environ, ("JOBSET_NAME", "REPLICATED_JOB_NAME")):
        names += ["JOBSET_NAME", "REPLICATED_JOB_NAME"]
        jobset, job = environ["JOBSET_NAME"], environ["REPLICATED_JOB_NAME"]
        address = f"{jobset}-{job}-0-0.{jobset}:{_KUBERNETES_PORT}"
    return one_of_several(
        "kubernetes",
        _variables(environ, names),
        job_index * per_job + _number(environ, "JOB_COMPLETION_INDEX"),
        per_job * num_jobs,
        coordinator=address,
    )


def _port(job: str) -> int:
    """A port that all processes of a job know and other jobs hardly have."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _missing(environ: Environ, names: Sequence[str]) -> str:
    return ", ".join(name for name in names if not environ.get(name))


def _variables(environ: Environ, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}={environ[name]}" for name in names if environ.get(name))


def _shown(environ: Environ, names: Sequence[str]) -> str:
    return " ".join(_variables(environ, names))


def _number(environ: Environ, name: str) -> int:
    if not environ[name].strip().isdecimal():
        raise ConfigError(f"{name}={environ[name]} must be a whole number")
    return int(environ[name])


def _optional_number(environ: Environ, name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


SOURCES: dict[str, Callable[[Environ], Decision | None]] = {
    "jaxtrain": _jaxtrain,
    "torchrun": _torchrun,
    "slurm": _slurm,
    "mpi": _mpi,
    "kubernetes": _kubernetes,
}
"""By name, in the order in which they are asked."""
