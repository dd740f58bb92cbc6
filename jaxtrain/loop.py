"""The training loop: `fit`, one long function whose order is a contract.

    at each step boundary:
        1. evaluate, if due            (nothing is in flight but the last step)
        2. save, if due                (after the flag of the state's own step was read)
        3. stop, if done or asked to
        4. take the next batch         (a thread has put it on the devices already; a signal ends
                                        the wait for one that does not come)
        5. dispatch the step           (asynchronous: the devices begin, Python goes on)
        6. fetch the metrics of the step *before* it, and log them

Step 6 is one step late on purpose: reading the metrics of the step just dispatched would wait for
the devices, and they would then wait for Python. "Step s" is the number of optimizer steps done:
record s, checkpoint s and `state.step == s` belong together.

    import jaxtrain, optax

    result = jaxtrain.fit(
        model, loss_fn, {"image": images, "label": labels}, {"image": ..., "label": ...},
        config=jaxtrain.RunConfig(workdir="runs/first", num_steps=1000),
    )
    result.state.params, result.eval_metrics["loss"]
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxtrain import checkpoint_files, phases, preflight, resume, run_files, run_lock
from jaxtrain.agreement import WISH, Agreement, together
from jaxtrain.backend import configure_backend
from jaxtrain.compile import CompiledStep
from jaxtrain.config import RunConfig
from jaxtrain.data.load import Loader
from jaxtrain.data.prefetch import Interrupted, interrupt
from jaxtrain.data.sources import as_dataset, require_rows
from jaxtrain.evaluation import Evaluation
from jaxtrain.ignored import refuse_what_fit_ignores
from jaxtrain.mesh import describe_mesh, make_mesh
from jaxtrain.metrics import Writer
from jaxtrain.models.functional import Model, as_model
from jaxtrain.nonfinite import NonFiniteGuard
from jaxtrain.phases import Phase
from jaxtrain.preemption import Preemption
from jaxtrain.profiling import ProfileWindow
from jaxtrain.program import train_program
from jaxtrain.progress import Progress, setup_logging
from jaxtrain.sharding import DEFAULT_RULES, ShardingRules
from jaxtrain.start import samples_at
from jaxtrain.state import TrainState, init_state, num_params
from jaxtrain.step import PackedMetrics
from jaxtrain.step_clock import StepClock
from jaxtrain.throughput import Throughput, peak_flops
from jaxtrain.units import nbytes

_logger = logging.getLogger("jaxtrain")

OnStep = Callable[[int, Mapping[str, float]], None]
"""(step, its metrics as floats). Called after every step, one step late."""

OnStart = Callable[[TrainState, Mapping[str, float]], None]
"""(state, its evaluation). Called before the first step of a run that begins at step 0."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` leaves."""

    state: Any = dataclasses.field(repr=False)
    """The TrainState after the last step, on the mesh."""
    step: int
    """Optimizer steps done, over all resumes."""
    samples_seen: int
    """Rows consumed, over all resumes and batch sizes."""
    status: str
    """"finished", "complete" (there was nothing left to do) or "preempted"."""
    metrics: Mapping[str, float]
    """Metrics of the last step; empty if there was none. With "complete", of its record."""
    eval_metrics: Mapping[str, float]
    """The last evaluation; empty if there was none. With "complete", its record."""


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A step that was dispatched and whose metrics have not been read yet."""

    step: int
    samples: range
    """Positions of its samples in the order of the run."""
    metrics: PackedMetrics


def fit(
    model: Model | tuple[Callable, Callable],
    loss_fn: Callable[..., Any],
    train_data: Any,
    eval_data: Any = None,
    *,
    config: RunConfig,
    rules: ShardingRules = DEFAULT_RULES,
    tx: optax.GradientTransformation | None = None,
    writers: Sequence[Writer] = (),
    on_step: OnStep | None = None,
    on_start: OnStart | None = None,
    describe: Mapping[str, Any] | None = None,
) -> FitResult:
    """Trains a model until `config.num_steps`, from the newest checkpoint of `config.workdir`.

    Works the same in a script and in a notebook. With an empty `config.workdir` no file is
    written and nothing can be resumed. SIGTERM and SIGINT (Ctrl-C, a notebook's stop button) end
    the run after the step at hand, with a checkpoint; a second one at once (see `preemption`).

    Args:
        model: a `Model` (see `jaxtrain.functional`) or a pair of functions (init, apply).
        loss_fn: (outputs, batch, params) -> name -> (sum, weight) over the rows given.
        train_data: a dataset (`jaxtrain.data`), or a dict of arrays whose dim 0 is the rows.
        eval_data: the same; None for no evaluation.
        config: of the run.
        rules: which logical axes go over which mesh axes.
        tx: an optax optimizer of your own instead of the one in `config.optimizer`.
        writers: take every record, besides `metrics.jsonl` and TensorBoard.
        on_step: called after every step, one step late.
        on_start: called before the first step of a run that begins at step 0, with the state and
            its evaluation, which is made then for it.
        describe: facts for `run.json` and the report, e.g. {"validation bigram entropy": 2.37}.

    Raises:
        ConfigError: for anything that cannot work, before the first compilation.
        NonFiniteError: when a loss, gradient or parameter is not finite (`config.nonfinite`).
        CheckpointError, DataError, OutputError: when a checkpoint, the data or the disk cannot be
            used.
    """
    began = time.perf_counter()
    setup_logging()
    refuse_what_fit_ignores(config, has_own_optimizer=tx is not None)
    configure_backend(config)  # `main` has done so already, a notebook has not
    is_alone = jax.process_count() == 1
    # With others, a wait for data ends with the data: a step is left out by all or by none.
    preemption = Preemption(wake=interrupt) if is_alone else Preemption()
    # What is on `held` is let go of last, when every file of the run is written.
    with preemption.watch(), contextlib.ExitStack() as held, contextlib.ExitStack() as stack:
        # Everything that can be refused is refused here, before anything is compiled.
        if config.workdir:
            # The same directory for every file, also for `~/run` and after a change of directory.
            workdir = checkpoint_files.absolute(config.workdir, "workdir")
            config = config.replace(workdir=str(workdir))
        model = as_model(model)
        preflight.check_writers(writers)
        mesh = make_mesh(config.mesh)
        is_primary = jax.process_index() == 0
        agreement = Agreement(mesh, preemption)
        if not is_alone:
            preemption.progress_begins()  # nobody leaves alone
        train_data = as_dataset(train_data)
        require_rows(train_data, "training")
        eval_data = None if eval_data is None else as_dataset(eval_data)
        if eval_data is not None:
            require_rows(eval_data, "evaluation")
        program = train_program(model, loss_fn, config, mesh, rules=rules, tx=tx)
        _logger.info("devices: %s", describe_mesh(mesh))
        _logger.info("model: %s parameters; %s", f"{num_params(model):,}", program.layout.short())

        # Where the run begins: a checkpoint, or the initial values.
        def init() -> TrainState:
            ema = config.optimizer.ema_decay > 0
            options = {"rules": rules, "seed": config.seed, "ema": ema, "frozen": program.frozen}
            return init_state(model, program.tx, mesh, **options)

        fingerprint = train_data.fingerprint  # it may hash all of the data
        with together():
            if is_primary:
                held.enter_context(run_lock.hold(config.workdir))
        phases.report(Phase.RESTORE)
        checkpointer, start = resume.begin(
            config, program.abstract, init=init, data_fingerprint=fingerprint
        )
        stack.push(checkpointer.leave)
        if tx is not None and start.step:
            _logger.info("the optimizer is your own: changes to it are not seen")
        evaluated_step = max(
            start.host.get("evaluated_step", 0), run_files.evaluated_step(config, start.step)
        )
        is_evaluated = eval_data is None or evaluated_step >= start.step
        if start.step >= config.num_steps and is_evaluated:
            phases.report(Phase.END, start.step)
            _logger.info("the run is complete: %s", _say_end(start.step, config.num_steps))
            if is_primary and config.workdir:
                run_files.write_report(config, only_if_stale=True)
            last = run_files.last_metrics(config, start.step)
            return FitResult(start.state, start.step, start.samples_seen, "complete", *last)
        state = init() if start.state is None else start.state
        if on_start is not None and start.step == 0:
            evaluated_step = -1  # the initial state is evaluated too

        # The data, and the programs: each is compiled once, here.
        phases.report(Phase.INPUT, start.step)
        loader = stack.enter_context(
            Loader(
                train_data,
                mesh,
                rules=rules,
                global_batch_size=config.global_batch_size,
                accumulate_steps=config.accumulate_steps,
                seed=config.seed,
                position=start.samples_seen,
                num_workers=config.num_workers,
            )
        )
        with together():
            loaded = next(loader)
        preflight.require_same_run(config, fingerprint, loaded.arrays)
        preflight.check_segments(model, program.abstract, loaded.arrays, config.accumulate_steps)
        kernels = model.kernels(mesh.devices.flat[0], loaded.arrays) if model.kernels else {}
        for name, value in kernels.items():
            _logger.info("%s: %s", name, value)
        if eval_data is not None:
            with together():
                preflight.check_evaluation(
                    model,
                    loss_fn,
                    eval_data,
                    train_batch=loaded.arrays,
                    config=config,
                    state=program.abstract,
                    mesh=mesh,
                    rules=rules,
                )
        progress = Progress(config.num_steps, start_step=start.step, enabled=is_primary)
        stack.callback(progress.close)
        progress.status("compiling the step")
        phases.report(Phase.COMPILE)
        train_step = program.compile(agreement.mark(loaded.arrays))
        needs = describe_program(train_step)
        _logger.info("step: compiled in %.1f s; %s", train_step.compile_seconds, needs)
        evaluation = None
        if eval_data is not None:
            batch_size = config.global_batch_size // config.accumulate_steps
            evaluation = Evaluation(model, loss_fn, eval_data, mesh, rules, batch_size, program.xla)

        # What is written besides checkpoints.
        records = stack.enter_context(
            run_files.open_writers(config, start.step, writers, is_primary=is_primary)
        )
        if is_primary and config.workdir:
            facts = {"compile_seconds": train_step.compile_seconds, "memory": train_step.memory}
            run_files.write_start(
                config,
                start.step,
                layout=program.layout,
                describe={**(describe or {}), **kernels},
                **facts,
            )
        profile = ProfileWindow(config.profile, config.workdir)
        stack.callback(profile.close)

        step = saved_step = start.step
        guard = NonFiniteGuard(config.max_skipped, **start.host.get("nonfinite", {}))
        throughput = make_throughput(model, config, mesh, loaded.arrays)
        clock = StepClock()
        metrics: dict[str, float] = {}
        eval_metrics: dict[str, float] = {}
        in_flight: _InFlight | None = None

        def finish_step() -> None:
            """6. Fetches the metrics of the step in flight, checks them and logs them."""
            nonlocal metrics, in_flight
            if in_flight is None:
                return
            done, in_flight = in_flight, None
            begin = time.perf_counter()
            metrics = done.metrics.read()
            clock.done(time.perf_counter() - begin)
            agreement.learn(int(metrics.pop(WISH, 0)))
            is_applied, is_finite = (metrics.pop(n) == 1 for n in ("is_applied", "is_finite"))
            is_logged = is_due(config.log_every_steps, done.step) or done.step == config.num_steps
            if is_logged or not is_finite:
                times = clock.read()
                record = {
                    "step": done.step,
                    **metrics,
                    **throughput.record(done.samples.stop, times),
                }
                records.write(record)
                progress.update(record, num_workers=loader.num_workers)
            if not is_finite:
                records.flush()
            guard.check(
                done.step,
                done.samples,
                metrics,
                is_applied=is_applied,
                is_finite=is_finite,
                has_checkpoint=bool(config.workdir) and saved_step > 0,
            )
            if on_step is not None:
                on_step(done.step, metrics)

        preemption.progress_begins()
        batches = itertools.chain([loaded], loader)
        while True:
            is_end = step >= config.num_steps

            # 1. Evaluate; the last one is whole. An evaluation that a signal cuts short is given
            #    up: it is done, from the same state, when the run goes on.
            #    One that fails costs no step: it ends the run after the save.
            is_evaluating = is_end or step == 0 or is_due(config.eval_every_steps, step)
            failure: Exception | None = None
            if evaluation is not None and is_evaluating and step > evaluated_step:
                finish_step()
                with clock.other():
                    if is_end:
                        progress.note(f"evaluating all {evaluation.num_batches} batches")
                    progress.status("evaluating")
                    max_batches = 0 if is_end else config.eval_batches * config.accumulate_steps
                    refuse = functools.partial(guard.refuse_evaluation, step)
                    found, failure = evaluation.attempt(state, max_batches, agreement, refuse)
                    if found is not None:
                        eval_metrics, evaluated_step = found, step
                        record = {"step": step, "eval": True, **found}
                        records.write(record)
                        progress.evaluation(record)

            is_known = evaluation is None or evaluated_step == 0
            if on_start is not None and step == 0 and is_known and failure is None:
                with clock.other():
                    phases.report(Phase.COMPILE)
                    on_start(state, eval_metrics)

            # 2. Save: the flag of this very state was read, and its records are on the disk.
            agreement.attempt(checkpointer.check, None)
            progress.committed(checkpointer.newly_committed())
            is_saving = is_end or is_due(config.checkpoint.every_steps, step) or failure is not None
            # Asked once: a signal between here and 3 must not stop a run that was not saved.
            is_told_to_stop = agreement.is_stopping
            if step > saved_step and (is_saving or is_told_to_stop):
                finish_step()
                with clock.saving():
                    progress.status("saving")
                    phases.report(Phase.SAVE)
                    records.flush()
                    host = start.record(
                        config,
                        step,
                        data_fingerprint=fingerprint,
                        evaluated_step=evaluated_step,
                        nonfinite=guard.counts(),
                    )
                    checkpointer.save(step, state, host)
                    saved_step = step

            # 3. Stop.
            if failure is not None:
                raise failure
            if is_end or is_told_to_stop:
                break

            # 4. Take the next batch.
            phases.report(Phase.INPUT)
            begin = time.perf_counter()
            try:
                loaded = agreement.attempt(functools.partial(next, batches), loaded)
            except Interrupted:
                continue  # to save the state of the last step and stop, as after any step
            clock.batch(time.perf_counter() - begin, loaded.read_seconds, loaded.h2d_seconds)

            # 5. Dispatch the step: the devices begin. The loader's thread makes its next batch only
            #    then, since both need the interpreter's lock.
            profile.step(step, state)
            phases.report(Phase.TRAIN_STEP, step + 1, clock.busy_seconds)
            begin = time.perf_counter()
            with profile.annotate(step), jax.transfer_guard_host_to_device("disallow"):
                state, step_metrics = train_step(state, agreement.mark(loaded.arrays))
            clock.dispatched(time.perf_counter() - begin)
            step += 1
            loader.refill()

            # 6. Fetch and log the step before it.
            finish_step()
            samples = range(loaded.position, loaded.position + config.global_batch_size)
            in_flight = _InFlight(step, samples, step_metrics)

        finish_step()
        progress.status("waiting for the checkpoint")
        phases.report(Phase.SAVE)
        with clock.saving(), together():
            checkpointer.wait()
        progress.committed(checkpointer.newly_committed())
        is_evaluated = evaluation is None or evaluated_step >= step
        status = "finished" if is_end and is_evaluated else "preempted"
        phases.report(Phase.END)
        stack.close()
        if is_primary and config.workdir:
            run_files.write_end(
                config,
                wall_seconds=time.perf_counter() - began,
                checkpoint_seconds=clock.checkpoint_seconds,
            )
            run_files.write_report(config)
    samples_seen = samples_at(step, start.batch_sizes)
    return FitResult(state, step, samples_seen, status, metrics, eval_metrics)


def _say_end(step: int, num_steps: int) -> str:
    if step <= num_steps:
        return f"{step} of {num_steps} steps"
    return f"it has done {step} steps, so it is already past num_steps={num_steps}"


def is_due(every_steps: int, step: int) -> bool:
    """Whether a cadence falls on a step; a cadence of 0 never does."""
    return every_steps > 0 and step % every_steps == 0


def make_throughput(
    model: Model, config: RunConfig, mesh: Mesh, batch: Mapping[str, jax.Array]
) -> Throughput:
    """What a step processes, and the peak of the devices it runs on."""
    length = flops = None
    if "tokens" in batch:
        length = batch["tokens"].shape[-1]
        flops = model.flops_per_token and model.flops_per_token(length)
    peak = peak_flops(mesh.devices.flat[0].device_kind, config.precision)
    return Throughput(
        config.global_batch_size,
        tokens_per_row=length,
        flops_per_token=flops,
        peak_flops=peak and peak * mesh.size,
    )


def describe_program(step: CompiledStep) -> str:
    """What a compiled step needs on each device, in words."""
    memory = {name: nbytes(size) for name, size in step.memory.items()}
    if not memory:
        return "its memory is unknown"
    return (
        f"{memory['total']} per device: {memory['argument']} of state and batch, "
        f"{memory['temp']} of activations and temporaries"
    )
