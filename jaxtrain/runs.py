"""Reading a run that is there: its configuration and its trained parameters."""

import json
from pathlib import Path
from typing import Any

import optax

from jaxtrain import resume
from jaxtrain.config import RunConfig, from_dict
from jaxtrain.errors import CheckpointError
from jaxtrain.mesh import make_mesh
from jaxtrain.models.functional import Model
from jaxtrain.rules import DEFAULT_RULES, ShardingRules
from jaxtrain.state import placed_state

__all__ = ["load_params", "read_config", "read_content"]


def read_config[C: RunConfig](workdir: str | Path, config_class: type[C]) -> C:
    """The configuration that a run resolved.

    Raises:
        CheckpointError: if the directory holds no run.
        ConfigError: if the run was one of another class.
    """
    path, values = read_content(workdir)
    return from_dict(config_class, values, source=str(path))


def read_content(workdir: str | Path) -> tuple[Path, dict[str, Any]]:
    """(path of a run's config.json, the values in it), whatever experiment it was.

    Raises:
        CheckpointError: if the directory holds no run.
    """
    path = Path(workdir).expanduser() / "config.json"
    try:
        return path, json.loads(path.read_text())["config"]
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON of a run"
        raise CheckpointError(f"workdir={workdir} holds no run: {path}: {reason}.") from error


def load_params(
    model: Model,
    workdir: str | Path,
    *,
    step: int = -1,
    mesh: str = "fsdp:-1",
    rules: ShardingRules = DEFAULT_RULES,
) -> Any:
    """The parameters of a checkpoint on the devices at hand; nothing else of it is read.

    Args:
        model: the one that was trained.
        workdir: of the run; only read.
        step: which checkpoint; -1: the newest.
        mesh: any; it need not be that of the run.
        rules: which logical axes go over which mesh axes.
    """
    abstract = placed_state(model, optax.identity(), make_mesh(mesh), rules=rules)
    state, _, _ = resume.load(workdir, abstract, step=step)
    return state.params
