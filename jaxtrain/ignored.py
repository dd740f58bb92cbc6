"""Refuses options that nobody would read: each of them, left in silence, is a wrong run."""

from jaxtrain.config import RunConfig, changed
from jaxtrain.errors import ConfigError

__all__ = ["refuse_what_build_ignored", "refuse_what_fit_ignores"]

# What only `jaxtrain.main` acts on, and what does the same without it.
_MAINS = {
    "evaluate": "jaxtrain.evaluation.evaluate_run",
    "audit": "jaxtrain.audit",
    "plan": "jaxtrain.main.main",
    "peek": "jaxtrain.peek.peek",
}
# What an experiment has to hand to its model, and how.
_BUILDS = {
    "precision": "e.g. jaxtrain.functional(Net, precision=config.precision)",
    "remat": "e.g. jaxtrain.compile.remat(block, config.remat) around the model's blocks",
}


def refuse_what_fit_ignores(config: RunConfig, *, has_own_optimizer: bool) -> None:
    """Raises ConfigError where `fit` would pass over a field that was set."""
    for name, instead in _MAINS.items():
        if getattr(config, name):
            raise ConfigError(f"{name}={getattr(config, name)!r} is not for fit; call {instead}")
    optimizer = [
        path
        for path in changed(config)
        if path.startswith("optimizer.") and path != "optimizer.ema_decay"
    ]
    if has_own_optimizer and optimizer:
        raise ConfigError(
            f"{', '.join(optimizer)} would not be read, because the run has an optimizer of its "
            "own (tx); set it there, or leave one of the two out"
        )


def refuse_what_build_ignored(config: RunConfig, reads: set[str]) -> None:
    """Raises ConfigError where an experiment did not look at a field that was set.

    Args:
        config: what `build` was called with.
        reads: paths of the fields that it read, of `record_reads`.
    """
    for name in _BUILDS.keys() & changed(config).keys() - reads:
        raise ConfigError(
            f"{name}={getattr(config, name)!r} would do nothing: this experiment's build() does "
            f"not read config.{name}; pass it to the model ({_BUILDS[name]}), or leave it out"
        )
