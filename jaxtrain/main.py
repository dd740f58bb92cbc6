"""What an experiment script calls: flags to configuration, then train, or evaluate, audit, peek.

    if __name__ == "__main__":
        main(LmConfig, build, presets={"model": PRESETS})

Nothing heavy is imported before the flags are known to be right: `--help` and a bad flag answer at
once and start no backend.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jaxtrain import flags, phases
from jaxtrain.config import Config, RunConfig, record_reads, summary
from jaxtrain.errors import ConfigError, ExitCode, JaxtrainError, PeerError
from jaxtrain.host import restart_with_huge_pages
from jaxtrain.phases import Phase
from jaxtrain.preemption import leaving
from jaxtrain.progress import setup_logging

__all__ = ["INTERRUPTED", "Experiment", "main", "run_tool"]

INTERRUPTED = 130
"""Exit code after SIGINT outside of training, when there is nothing to save: the shell's own."""

_logger = logging.getLogger("jaxtrain")


def _default_rules() -> Any:
    from jaxtrain.rules import DEFAULT_RULES  # imports jax, which `--help` has no use for

    return DEFAULT_RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What a configuration builds, and `jaxtrain.fit` trains."""

    model: Any
    """A `Model`, or a pair of functions (init, apply)."""
    loss_fn: Callable[..., Any]
    """(outputs, batch, params) -> Sums."""
    train_data: Any
    """A dataset, or a dict of arrays."""
    eval_data: Any = None
    rules: Any = dataclasses.field(default_factory=_default_rules)
    """The `ShardingRules`."""
    tx: Any = None
    """An optax optimizer of your own instead of the one in `config.optimizer`."""
    describe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts about model and data, name -> value: logged at the start, shown in the report."""
    writers: Sequence[Any] = ()
    """Metric writers besides the usual ones."""
    on_step: Callable[..., None] | None = None
    """Called after every step, one step late; see `fit`."""
    on_start: Callable[[Any, Mapping[str, float]], None] | None = None
    """Called with the state and its evaluation before the first step; see `fit`."""
    on_end: Callable[[Any], None] | None = None
    """Called with the `FitResult` when all steps are done, not after a preemption."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Tokens -> text, for `--peek`."""
    class_names: Sequence[str] = ()
    """Of the labels 0, 1, ..., for `--peek`."""


def main[R: RunConfig](
    config_class: type[R],
    build: Callable[[R], Experiment],
    *,
    presets: flags.Presets | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Runs an experiment and exits with one of `ExitCode`, or with 130 when interrupted.

    Args:
        config_class: a subclass of `RunConfig`.
        build: makes the experiment from the configuration.
        presets: section -> name -> values, e.g. `{"model": PRESETS}` for `--model=NAME`.
        argv: program name and arguments; None: those of the process.
    """

    def run(config: R) -> ExitCode:
        if argv is None and (config.is_training or config.evaluate):
            from jaxtrain.launch.guarding import become_guardian

            become_guardian(config)
        if argv is None and config.huge_pages == "auto" and not config.plan:
            _logger.info("huge pages: %s", restart_with_huge_pages())
        with leaving() if config.is_training else contextlib.nullcontext():
            return _run(config, functools.partial(_experiment, build))

    _main(config_class, run, presets, argv)


def run_tool[C: Config](
    config_class: type[C], run: Callable[[C], None], *, argv: Sequence[str] | None = None
) -> NoReturn:
    """Runs a script that does not train, with the same flags, errors and exit codes.

    Args:
        config_class: its fields are the flags.
        run: does the work.
        argv: program name and arguments; None: those of the process.
    """

    def run_and_succeed(config: C) -> ExitCode:
        run(config)
        return ExitCode.OK

    _main(config_class, run_and_succeed, None, argv)


def _experiment[R: RunConfig](build: Callable[[R], Experiment], config: R) -> Experiment:
    """What `build` makes; refused if it is nothing that `fit` could train."""
    experiment = build(config)
    if not isinstance(experiment, Experiment):
        name = getattr(build, "__name__", type(build).__name__)
        raise ConfigError(
            f"{name}(config) must return a jaxtrain.main.Experiment; it returned "
            f"{'None' if experiment is None else type(experiment).__name__}."
        )
    return experiment


def _main[C: Config](
    config_class: type[C],
    run: Callable[[C], ExitCode],
    presets: flags.Presets | None,
    argv: Sequence[str] | None,
) -> NoReturn:
    """Parses, runs, and turns what is raised into a message and an exit code."""
    setup_logging()
    words = sys.argv if argv is None else argv
    description = sys.modules["__main__"].__doc__ or ""
    try:
        code = run(flags.parse(words, config_class, presets=presets, description=description))
    except (JaxtrainError, KeyboardInterrupt) as error:
        code = _report(error)
    sys.exit(int(code))


def _report(error: BaseException) -> int:
    """Says what ended the process; returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted outside of training; there is nothing to save", file=sys.stderr)
        return INTERRUPTED
    if isinstance(error, JaxtrainError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    traceback.print_exception(error)
    return ExitCode.ERROR


def _run[R: RunConfig](config: R, build: Callable[[R], Experiment]) -> ExitCode:
    """Does what the configuration asks for, as one of several processes if there are others."""
    if config.plan:
        return _plan(config, build)
    from jaxtrain import distributed
    from jaxtrain.preemption import note_signals

    if distributed.join(config) is None:
        return _run_joined(config, build)
    try:
        if config.is_training:
            note_signals()
        code = _run_joined(config, build)
        distributed.wait_for_all()
        phases.report(Phase.LEAVE)
    except BaseException as error:
        # What is left of JAX waits for processes that may never come: nothing is taken down.
        error = distributed.explain(error)
        code = _report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # The guardian knows now, and may end this process before it has left.
        phases.report_exit(code)
        if not isinstance(error, PeerError):
            distributed.leave(is_orderly=False)
        os._exit(code)
    distributed.leave()
    return code


def _run_joined[R: RunConfig](config: R, build: Callable[[R], Experiment]) -> ExitCode:
    # The order matters: the backend starts with the first array, often in `build`, and keeps the
    # settings that it finds then.
    import jax

    from jaxtrain.agreement import together
    from jaxtrain.backend import configure_backend
    from jaxtrain.mesh import AUTO, parse_mesh, resolve_mesh

    configure_backend(config)
    # `fit` makes the mesh; a wrong one is refused here, before `build` reads data.
    if config.mesh != AUTO:
        resolve_mesh(parse_mesh(config.mesh), jax.device_count(), jax.default_backend())
    for line in summary(config).splitlines():
        _logger.info(line)
    with together():
        experiment = _build(build, config)
    for name, value in experiment.describe.items():
        _logger.info("%s: %s", name, f"{value:.4g}" if isinstance(value, float) else value)
    if config.peek:
        return _peek(experiment, config)
    if config.mesh == AUTO:
        from jaxtrain.plan.commands import with_best_mesh

        config = with_best_mesh(experiment, config)
    if config.audit:
        return _audit(experiment, config)
    if config.evaluate:
        from jaxtrain.evaluation import evaluate_run

        evaluate_run(
            experiment.model,
            experiment.loss_fn,
            experiment.eval_data,
            config=config,
            rules=experiment.rules,
        )
        return ExitCode.OK
    from jaxtrain.loop import fit

    result = fit(
        experiment.model,
        experiment.loss_fn,
        experiment.train_data,
        experiment.eval_data,
        config=config,
        rules=experiment.rules,
        tx=experiment.tx,
        describe=experiment.describe,
        writers=experiment.writers,
        on_step=experiment.on_step,
        on_start=experiment.on_start,
    )
    if result.status == "preempted":
        return ExitCode.PREEMPTED
    if experiment.on_end is not None:
        experiment.on_end(result)
    return ExitCode.OK


def _build[R: RunConfig](build: Callable[[R], Experiment], config: R) -> Experiment:
    """Calls `build`, and refuses what was set for the model but not looked at."""
    from jaxtrain.ignored import refuse_what_build_ignored

    with record_reads() as reads:
        experiment = build(config)
    refuse_what_build_ignored(config, reads)
    return experiment


def _plan[R: RunConfig](config: R, build: Callable[[R], Experiment]) -> ExitCode:
    """Says what the run would need on other devices; compiles and runs nothing on those at hand."""
    from jaxtrain.plan.targets import parse_target

    target = parse_target(config.plan)
    from jaxtrain.backend import configure_backend
    from jaxtrain.mesh import AUTO, parse_mesh, resolve_mesh
    from jaxtrain.plan.commands import device_count, run_plan
    from jaxtrain.plan.compile_target import prepare_backend

    prepare_backend(target)
    if target is None:
        configure_backend(config)
    # A wrong mesh is refused here, before `build` reads data.
    if config.mesh != AUTO:
        resolve_mesh(parse_mesh(config.mesh), device_count(target))
    for line in summary(config).splitlines():
        _logger.info(line)
    return run_plan(functools.partial(_build, build), config, target)


def _peek(experiment: Experiment, config: RunConfig) -> ExitCode:
    """Shows the first rows of the training data; compiles and trains nothing."""
    import jax

    from jaxtrain.peek import peek

    text = peek(
        experiment.train_data,
        config,
        decode=experiment.decode,
        class_names=experiment.class_names,
    )
    if jax.process_index() == 0:
        print(text)
    return ExitCode.OK


def _audit(experiment: Experiment, config: RunConfig) -> ExitCode:
    """Prints where every array of the train state would live; compiles and trains nothing."""
    import jax

    from jaxtrain.layout_audit import audit
    from jaxtrain.mesh import make_mesh
    from jaxtrain.models.functional import as_model
    from jaxtrain.program import optimizer_of

    model, mesh = as_model(experiment.model), make_mesh(config.mesh)
    params, _ = jax.eval_shape(model.init, jax.random.key(config.seed))
    tx = optimizer_of(config, model, params, experiment.tx)
    # All of it may be replicated here: who looks for the cause wants the table, not the error.
    print(audit(model, mesh, tx, rules=experiment.rules, allow_replicated=1.0).table())
    return ExitCode.OK
