"""From the environment to a decision: who started this process, as which one of how many, and where
the others are. Pure functions; nothing is connected, looked up or imported.

The sources, in this order: the flags, the variables JAXTRAIN_..., torchrun and its like, Slurm,
MPI, Kubernetes. A source counts when its evidence is complete. What is incomplete is not guessed
at: it is an error, or left aside with one line (`sources`).
"""

import dataclasses
import os
from typing import Protocol

from jaxtrain.errors import ConfigError
from jaxtrain.launch.decision import Decision, one_of_several, parse_address
from jaxtrain.launch.sources import SOURCES, Environ, NotUsedError


class LauncherConfig(Protocol):
    """The fields of a configuration that say who starts the processes."""

    @property
    def launcher(self) -> str: ...
    @property
    def coordinator(self) -> str: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def process_id(self) -> int: ...


def decide_for(config: LauncherConfig) -> Decision:
    """`decide` for the flags and the environment of this process."""
    return decide(
        os.environ,
        launcher=config.launcher,
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
    )


def decide(
    environ: Environ,
    *,
    launcher: str = "auto",
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
) -> Decision:
    """Decides which process of which run this is.

    Args:
        environ: the environment.
        launcher: `auto`; `none`: a single process, whatever all else says; or the only one of
            `SOURCES` to ask.
        coordinator: host:port. Without the next two it replaces what the launcher says.
        num_processes: 0: as the launcher says.
        process_id: -1: as the launcher says.

    Raises:
        ConfigError: for half-set or contradictory evidence, naming what is missing.
    """
    if coordinator:
        parse_address(coordinator, "coordinator")
    if launcher == "none":
        return Decision()
    if num_processes or process_id >= 0:
        return _from_flags(coordinator, num_processes, process_id)
    found = _from_environment(environ, launcher)
    if coordinator and found.num_processes == 1:
        reason = f" ({'; '.join(found.notes)})" if found.notes else ""
        raise ConfigError(
            f"coordinator={coordinator} needs num_processes and process_id beside it where no"
            f" launcher gives them{reason}"
        )
    if coordinator:
        found = dataclasses.replace(
            found,
            coordinator=coordinator,
            variables=(*found.variables, f"--coordinator={coordinator}"),
        )
    if found.num_processes > 1 and not found.coordinator:
        raise ConfigError(
            f"{' '.join(found.variables)} does not say where process 0 is; give"
            f" --coordinator=HOST:PORT with its host and a free port"
        )
    return found


def _from_flags(coordinator: str, num_processes: int, process_id: int) -> Decision:
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes or "",
        "process_id": process_id if process_id >= 0 else "",
    }
    variables = tuple(f"--{name}={value}" for name, value in given.items() if value != "")
    if num_processes == 1 and process_id <= 0:
        return Decision(launcher="flags", variables=variables)
    missing = [name for name, value in given.items() if value == ""]
    if missing:
        raise ConfigError(
            f"{' '.join(variables)} needs {' and '.join(f'--{name}' for name in missing)} beside"
            f" it: all three say which process of which run this is"
        )
    return one_of_several("flags", variables, process_id, num_processes, coordinator=coordinator)


def _from_environment(environ: Environ, launcher: str) -> Decision:
    """The first launcher whose evidence is complete."""
    notes: list[str] = []
    found: dict[str, Decision] = {}
    for name in tuple(SOURCES) if launcher == "auto" else (launcher,):
        try:
            decision = SOURCES[name](environ)
        except NotUsedError as reason:
            if launcher != "auto":
                raise ConfigError(f"launcher={launcher}, but {reason}") from None
            notes.append(f"{name} was not used: {reason}")
            continue
        if decision is not None:
            found[name] = decision
            if name != "slurm":  # whose variables reach what its tasks start
                break
        elif launcher != "auto":
            raise ConfigError(f"launcher={launcher}, but the environment has none of its variables")
    if "slurm" in found and "mpi" in found:
        place = lambda name: (found[name].process_id, found[name].num_processes)  # noqa: E731
        if place("slurm") != place("mpi"):
            # mpirun inside of a Slurm job: its daemons are Slurm's tasks, we are theirs.
            notes.append("slurm was not used: mpirun started this process inside of a Slurm task")
            del found["slurm"]
    chosen = next(iter(found.values()), Decision())
    return dataclasses.replace(chosen, notes=tuple(notes))
