"""jaxtrain: train Flax models with JAX, the same script on a laptop, a GPU box and a cluster.

Names are imported on first use: `import jaxtrain` costs nothing, starts no backend, and a script
answers `--help` before jax is loaded.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.config import CheckpointConfig, Config, OptimizerConfig, RunConfig, field
    from jaxtrain.data.sources import ArrayDataset, Dataset
    from jaxtrain.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        ExitCode,
        JaxtrainError,
        NonFiniteError,
    )
    from jaxtrain.layout_audit import audit
    from jaxtrain.loop import FitResult, fit
    from jaxtrain.losses import classification_loss, lm_loss
    from jaxtrain.mesh import make_mesh
    from jaxtrain.metrics import Writer
    from jaxtrain.models.functional import Model, functional, row_keys
    from jaxtrain.optim import make_optimizer
    from jaxtrain.sharding import DEFAULT_RULES, ShardingRules, shard_batch
    from jaxtrain.state import TrainState, init_state, num_params
    from jaxtrain.step import make_eval_step, make_train_step

_MODULE_OF = {
    "ArrayDataset": "data.sources",
    "CheckpointConfig": "config",
    "CheckpointError": "errors",
    "Config": "config",
    "ConfigError": "errors",
    "DEFAULT_RULES": "sharding",
    "DataError": "errors",
    "Dataset": "data.sources",
    "ExitCode": "errors",
    "FitResult": "loop",
    "JaxtrainError": "errors",
    "Model": "models.functional",
    "NonFiniteError": "errors",
    "OptimizerConfig": "config",
    "RunConfig": "config",
    "ShardingRules": "sharding",
    "TrainState": "state",
    "Writer": "metrics",
    "audit": "layout_audit",
    "classification_loss": "losses",
    "field": "config",
    "fit": "loop",
    "functional": "models.functional",
    "init_state": "state",
    "lm_loss": "losses",
    "make_eval_step": "step",
    "make_mesh": "mesh",
    "make_optimizer": "optim",
    "make_train_step": "step",
    "num_params": "state",
    "row_keys": "models.functional",
    "shard_batch": "sharding",
}

__all__ = [
    "DEFAULT_RULES",
    "ArrayDataset",
    "CheckpointConfig",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Dataset",
    "ExitCode",
    "FitResult",
    "JaxtrainError",
    "Model",
    "NonFiniteError",
    "OptimizerConfig",
    "RunConfig",
    "ShardingRules",
    "TrainState",
    "Writer",
    "audit",
    "classification_loss",
    "field",
    "fit",
    "functional",
    "init_state",
    "lm_loss",
    "make_eval_step",
    "make_mesh",
    "make_optimizer",
    "make_train_step",
    "num_params",
    "row_keys",
    "shard_batch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jaxtrain.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
