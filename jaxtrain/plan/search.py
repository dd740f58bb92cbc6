"""`--mesh=auto`: which mesh, remat and number of micro-batches make the fastest step that fits.

All that model, batch and rules allow are estimated (`analytic`), a few are compiled, and what the
compiled programs say decides. Each of them also corrects the estimated memory and time of those
like it: XLA hides communication behind kernels only where memory and loops let it.
"""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AxisType

from jaxtrain.compile import REMAT_POLICIES
from jaxtrain.config import RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.plan.analytic import Analysis, Candidate, Estimate
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.reasons import reason, refusal
from jaxtrain.plan.result import Plan
from jaxtrain.plan.targets import HERE, Target, parse_target
from jaxtrain.units import seconds

_NUM_WANTED = 3
"""Compiled steps that fit, to choose among."""
_NUM_COMPILED = 5
"""Steps that are compiled at most for the choice."""
_NUM_LIKE = 2
"""Steps of one mesh that are compiled at most: the next best mesh is to be seen too."""
_NUM_CONFIRMED = 3
"""Steps that are compiled at most to find the smallest number of hosts."""
_SECONDS = 420.0
"""After so long no compilation is begun that is not needed; that of the last one is counted in."""
_NUM_LISTED = 20
"""Estimates that the plan keeps, the fastest."""
_CLEARLY_LESS = 0.97
"""What is estimated at less than this share of the device's memory is worth a compilation."""
_ROOM = 0.85
"""What is estimated at less than this share certainly fits."""
_SHARDS_MORE = 16
"""How many times the least number of hosts is looked at, where more are needed."""

_logger = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True)
class _Compiled:
    candidate: Candidate
    plan: Plan


class Search:
    """One search; `run` does it."""

    def __init__(self, planner: Planner, config: RunConfig, *, is_free: bool = True):
        """Traces the experiment.

        Args:
            planner: for the target.
            config: of the run; its mesh is not read.
            is_free: whether remat and micro-batches are searched too, or stay as they are.
        """
        self._planner, self._config, self._is_free = planner, config, is_free
        self._analysis = Analysis(planner, config)
        # Compiled over estimated, of the last program that was alike: work bytes and time.
        self._corrections: dict[str, float] = {}
        self._slowness: dict[tuple[str, bool], float] = {}
        self._failed: set[Candidate] = set()
        self._begin, self._last_seconds = time.monotonic(), 0.0

    def run(self) -> Plan:
        """The best plan, with the ranking of all that were compiled.

        Raises:
            ConfigError: when no mesh can use exactly these devices.
        """
        target = self._planner.target
        estimates = self._estimates(target)
        if not estimates:
            raise ConfigError(self._no_mesh(target))
        compiled = self._compile_best(estimates)
        compiled.sort(key=_place)
        hosts, confirmed = self._min_hosts(compiled)
        ranked = [
            dataclasses.replace(c.plan, reason=reason(c.plan, compiled[0].plan), min_hosts=hosts)
            for c in compiled
        ]
        best = ranked[0]
        if not best.fits:
            best = dataclasses.replace(best, warnings=refusal(best, hosts, confirmed))
        listed = [e for e in estimates if self._fits(e, target)] or estimates
        return dataclasses.replace(
            best,
            ranking=(best, *ranked[1:]),
            estimates=tuple(
                e.to_json(self._correction(e.candidate.remat)) for e in listed[:_NUM_LISTED]
            ),
            num_considered=len(estimates),
        )

    # Estimates --------------------------------------------------------------------------------

    def _estimates(self, target: Target) -> list[Estimate]:
        """All candidates on a target, fastest first."""
        remats = REMAT_POLICIES if self._is_free else (self._config.remat,)
        found = self._analysis.candidates(target, remats)
        steps = self._config.accumulate_steps
        is_there = functools.cache(functools.partial(_is_on_torus, self._planner, target))
        estimates = [
            self._analysis.estimate(candidate, target)
            for candidate in found
            if (self._is_free or candidate.accumulate_steps == steps) and is_there(candidate.mesh)
        ]
        return sorted(estimates, key=lambda e: (e.step_seconds, e.work_bytes))

    def _correction(self, remat: str) -> float:
        """Compiled over estimated work, of programs with this remat, else of any."""
        return self._corrections.get(remat, max(self._corrections.values(), default=1.0))

    def _bytes(self, estimate: Estimate) -> int:
        return estimate.num_bytes(self._correction(estimate.candidate.remat))

    def _seconds(self, estimate: Estimate) -> float:
        """Corrected by the last compiled step with this remat that accumulates or does not."""
        return estimate.step_seconds * self._slowness.get(_kind(estimate.candidate), 1.0)

    def _fits(self, estimate: Estimate, target: Target) -> bool:
        return self._bytes(estimate) < _CLEARLY_LESS * self._analysis.device_bytes(target)

    def _no_mesh(self, target: Target) -> str:
        rows = self._config.global_batch_size
        return (
            f"mesh=auto: no mesh uses all {target.num_devices} devices of {target.text} with"
            f" global_batch_size={rows} and this model; a batch that {target.num_devices} divides"
            f" always has one, if the model's width divides over it too"
        )

    # Compiling --------------------------------------------------------------------------------

    def _compile_best(self, estimates: Sequence[Estimate]) -> list[_Compiled]:
        compiled: list[_Compiled] = []
        while len(compiled) < _NUM_COMPILED:
            num_fitting = sum(c.plan.fits for c in compiled)
            if num_fitting >= _NUM_WANTED or (num_fitting and self._is_late()):
                break
            chosen = self._next(estimates, compiled)
            if chosen is None:
                break
            try:
                compiled.append(self._compile(self._planner, chosen))
            except ConfigError as error:
                _logger.warning("%s is left out: %s", chosen.candidate, error)
                self._failed.add(chosen.candidate)
                if not compiled and len(self._failed) == _NUM_LIKE:
                    raise
        return compiled

    def _next(
        self, estimates: Sequence[Estimate], compiled: Sequence[_Compiled]
    ) -> Estimate | None:
        """The fastest estimate that seems to fit and is unlike those that were compiled."""
        target = self._planner.target
        done = {(c.candidate.mesh, c.candidate.remat) for c in compiled if c.plan.fits}
        tried = {c.candidate for c in compiled} | self._failed
        meshes = [c.candidate.mesh for c in compiled]
        for estimate in sorted(estimates, key=self._seconds):
            candidate = estimate.candidate
            is_new = (candidate.mesh, candidate.remat) not in done and candidate not in tried
            if is_new and meshes.count(candidate.mesh) < _NUM_LIKE and self._fits(estimate, target):
                return estimate
        smallest = min(estimates, key=lambda e: (self._bytes(e), e.step_seconds))
        if done or smallest.candidate in tried:
            return None
        # Before a refusal the smallest is compiled, unless its state alone is too large.
        is_hopeless = smallest.state_bytes > self._analysis.device_bytes(target)
        return None if compiled and is_hopeless else smallest

    def _is_late(self) -> bool:
        """Whether one more compilation like the last would take too long."""
        return time.monotonic() - self._begin + self._last_seconds > _SECONDS

    def _compile(self, planner: Planner, estimate: Estimate) -> _Compiled:
        candidate = estimate.candidate
        _logger.info("estimated at %s: %s", seconds(estimate.step_seconds), candidate)
        begin = time.monotonic()
        plan = planner.plan(candidate.apply(self._config))
        self._last_seconds = time.monotonic() - begin
        work = plan.peak_bytes_per_device - estimate.state_bytes
        self._corrections[candidate.remat] = max(work / max(estimate.work_bytes, 1), 0.1)
        if plan.step_seconds:
            self._slowness[_kind(candidate)] = plan.step_seconds / estimate.step_seconds
        return _Compiled(candidate, plan)

    # Hosts ------------------------------------------------------------------------------------

    def _min_hosts(self, compiled: Sequence[_Compiled]) -> tuple[int | None, Plan | None]:
        """The smallest number of hosts for which a compiled step fits, and that step's plan."""
        target, best = self._planner.target, compiled[0].plan
        if target.kind.platform == "cpu" or target.is_simulated or target.text == HERE:
            return best.min_hosts, None
        num_tried = 0
        for other in hosts_like(target):
            if other.num_devices == target.num_devices:
                if best.fits:
                    return target.num_hosts, best
                continue
            estimates = self._estimates(other)
            if not estimates:
                continue
            has = self._analysis.device_bytes(other)
            chosen = min(estimates, key=lambda e: (self._bytes(e), e.step_seconds))
            if self._bytes(chosen) > has / _CLEARLY_LESS:
                continue
            if best.fits and self._is_late():
                _logger.warning(
                    "whether fewer hosts do is not tried, compiling takes too long; ask for"
                    " --plan=%s",
                    other.text,
                )
                return None, None
            # The fastest, where there is room.
            chosen = next((e for e in estimates if self._bytes(e) < _ROOM * has), chosen)
            _logger.info("does it fit %s?", other.describe())
            num_tried += 1
            try:
                plan = self._compile(self._planner.on(other), chosen).plan
            except ConfigError as error:
                _logger.warning("%s on %s is left out: %s", chosen.candidate, other.text, error)
            else:
                if plan.fits:
                    return plan.num_hosts, plan
            if num_tried == _NUM_CONFIRMED:
                break
        return (target.num_hosts, best) if best.fits else (None, None)


def _place(compiled: _Compiled) -> tuple[bool, float]:
    """What is ranked by: the fastest that fits, then what comes nearest to fitting."""
    plan = compiled.plan
    return not plan.fits, (plan.step_seconds or math.inf) if plan.fits else (
        plan.peak_bytes_per_device
    )


def _kind(candidate: Candidate) -> tuple[str, bool]:
    """What decides how well communication hides, besides the mesh."""
    return candidate.remat, candidate.accumulate_steps > 1


def _is_on_torus(planner: Planner, target: Target, mesh: tuple[tuple[str, int], ...]) -> bool:
    """Whether the axes of a mesh can be laid along those of a TPU's torus."""
    if planner.devices[0].platform != "tpu":
        return True
    devices = planner.devices if target == planner.target else planner.on(target).devices
    names, sizes = zip(*mesh, strict=True)
    try:
        jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    except NotImplementedError:  # by `jax.make_mesh`, where no dims of the torus fit
        return False
    return True


def hosts_like(target: Target) -> Iterator[Target]:
    """Targets of the same kind of host, from the fewest hosts on; slices of TPUs by doubling."""
    if not target.torus:
        for num_hosts in range(1, _SHARDS_MORE * target.num_hosts + 1):
            yield target.on_hosts(num_hosts)
        return
    name = target.text.partition(":")[0]
    shape = [2, 2, 1][: len(target.torus)]
    while math.prod(shape) <= _SHARDS_MORE * target.num_devices:
        text = f"{name}:{'x'.join(map(str, shape))}"
        found = parse_target(text)
        if found is not None:
            yield found
        # 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4: the last of the smallest sizes doubles.
        index = max(i for i, size in enumerate(shape) if size == min(shape))
        shape[index] *= 2
