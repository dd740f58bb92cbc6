"""Evaluations: between the steps of a run (`Evaluation`), or of a checkpoint (`evaluate_run`)."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxtrain import phases, resume
from jaxtrain.agreement import Agreement, ToldToStop, carrying_eval_step
from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.config import RunConfig
from jaxtrain.data.load import eval_batches
from jaxtrain.data.sources import Dataset, as_dataset, parts_of
from jaxtrain.errors import ConfigError
from jaxtrain.evaluate import combine, evaluate
from jaxtrain.mesh import make_mesh
from jaxtrain.metrics import encode
from jaxtrain.models.functional import Model, as_model
from jaxtrain.nonfinite import NonFiniteGuard
from jaxtrain.phases import Phase
from jaxtrain.preemption import Preemption
from jaxtrain.program import frozen_params, program_options
from jaxtrain.rules import DEFAULT_RULES, ShardingRules
from jaxtrain.sharding import check_batch_size
from jaxtrain.state import TrainState, placed_state
from jaxtrain.step import make_eval_step
from jaxtrain.tree import merge


def evaluate_run(
    model: Model | tuple[Callable, Callable],
    loss_fn: Callable[..., Any],
    eval_data: Any,
    *,
    config: RunConfig,
    rules: ShardingRules = DEFAULT_RULES,
) -> dict[str, float]:
    """Evaluates a checkpoint over all of `eval_data`; writes no file and needs no right to.

    Args:
        model: a `Model` or a pair of functions (init, apply).
        loss_fn: (outputs, batch, params) -> name -> (sum, weight) over the rows given.
        eval_data: a dataset, or a dict of arrays.
        config: `workdir` and `checkpoint.restore_step` say which checkpoint.
        rules: which logical axes go over which mesh axes.

    Returns:
        The mean of every name of the loss, `weight` and `rows`.

    Raises:
        NonFiniteError: when the loss is not finite and `config.nonfinite` is "stop".
    """
    if eval_data is None:
        raise ConfigError("evaluate: this experiment has no evaluation data.")
    model = as_model(model)
    mesh = make_mesh(config.mesh)
    batch_size = config.global_batch_size // config.accumulate_steps
    check_batch_size(batch_size, 1, mesh, rules)
    ema = config.optimizer.ema_decay > 0
    abstract_params, _ = jax.eval_shape(model.init, jax.random.key(0))
    frozen = frozen_params(config, model, abstract_params)
    abstract = placed_state(model, optax.identity(), mesh, rules=rules, ema=ema, frozen=frozen)
    phases.report(Phase.RESTORE)
    state, _, step = resume.load(config.workdir, abstract, step=config.checkpoint.restore_step)
    xla = program_options(config, mesh)
    evaluation = Evaluation(model, loss_fn, as_dataset(eval_data), mesh, rules, batch_size, xla)
    found = evaluation.run(state, 0, Agreement(mesh, Preemption()))
    assert found is not None
    phases.report(Phase.END)
    if jax.process_index() == 0:
        print(encode({"step": step, "eval": True, **found}).decode().rstrip())
    if failure := NonFiniteGuard(config.max_skipped).refuse_evaluation(step, found):
        raise failure
    return found


class Evaluation:
    """The evaluation step, compiled once, and the data it runs over."""

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[..., Any],
        data: Dataset,
        mesh: Mesh,
        rules: ShardingRules,
        batch_size: int,
        xla: Mapping[str, Any],
    ) -> None:
        self._step = make_eval_step(model, loss_fn, mesh, rules)
        self._parts = parts_of(data)
        self._shares: Mapping[str, float] = getattr(data, "shares", {})
        self.num_batches = sum(-(-len(part) // batch_size) for part in self._parts.values())
        self._batch_size = batch_size
        self._compiled: CompiledStep | None = None
        self._batches = functools.partial(eval_batches, mesh=mesh, rules=rules)
        self._xla = xla

    def run(
        self,
        state: TrainState,
        max_batches: int,
        agreement: Agreement,
    ) -> dict[str, float] | None:
        """Means over the first `max_batches` batches (0: all); None if told to stop on the way.

        Where the state has a moving average of the parameters, it is evaluated too, and the
        means of the loss are named `ema_...`. Data with parts gives the means of each (`combine`),
        and its share of the batches is at least one.
        """
        begin = time.perf_counter()
        phases.report(Phase.EVALUATION)
        means: dict[str, float] = {}
        for prefix, changed in (("", state.params), ("ema_", state.ema_params)):
            if changed is None:
                continue
            params = merge(changed, state.params)
            found = {}
            for name, data in self._parts.items():
                limit = math.ceil(max_batches * self._shares.get(name, 1))
                try:
                    found[name] = self._means(params, state.model_state, data, limit, agreement)
                except ToldToStop:
                    return None
            combined = combine(found, self._shares) if self._shares else found[""]
            # The rows and their weight are the same for both.
            skipped = ("weight", "rows") if prefix else ()
            means |= {prefix + name: v for name, v in combined.items() if name not in skipped}
        return means | {"eval_seconds": time.perf_counter() - begin}

    def _means(
        self, params: Any, model_state: Any, data: Dataset, max_batches: int, agreement: Agreement
    ) -> dict[str, float]:
        size, num_rows = self._batch_size, len(data)
        num_batches = -(-num_rows // size)
        num_batches = min(num_batches, max_batches or num_batches)

        def stand_in(first: tuple[Any, int], number: int) -> tuple[Any, int]:
            """A batch with as many true rows as the one of that number: no step differs."""
            return first[0], min(size, num_rows - number * size)

        batches = self._batches(data, batch_size=size, max_batches=max_batches)
        with contextlib.closing(batches):
            each = agreement.each(batches, num_batches, stand_in)
            step = functools.partial(self._run, agreement)
            return evaluate(step, params, model_state, each)

    def attempt(
        self,
        state: TrainState,
        max_batches: int,
        agreement: Agreement,
        refuse: Callable[[Mapping[str, float]], Exception | None],
    ) -> tuple[dict[str, float] | None, Exception | None]:
        """(what `run` returns, None), or (None, the error to end with when the state is saved)."""
        try:
            found = self.run(state, max_batches, agreement)
        except Exception as error:
            if not agreement.is_alone:
                raise  # the others may be waiting for this process, which can save nothing alone
            return None, error
        failure = None if found is None else refuse(found)
        return (found if failure is None else None), failure

    def _run(
        self, agreement: Agreement, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> Any:
        args = (params, model_state, agreement.mark(batch))
        if self._compiled is None:
            phases.report(Phase.COMPILE)
            step = self._step if agreement.is_alone else carrying_eval_step(self._step)
            self._compiled = compile_step(step, args, options=self._xla)
        phases.report(Phase.EVALUATION)
        return agreement.note(self._compiled(*args))
