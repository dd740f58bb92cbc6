"""A step estimated from its traced program, without compiling it: what the search prunes with.

One trace of the step (`traced`) serves every mesh and every number of micro-batches:

    operations   of matrix products in the gradient's jaxpr, as often as loops turn; fused
                 attention 2 products forward and 5 backward, half of it under a causal mask
    residuals    what `jax.vjp` keeps for the backward pass: exactly what remat decides

Then, with f, d, t devices on `fsdp`, `data`, `tensor`, A micro-batches and b rows of each on a
device, P parameters, P_L of them stacked in layers, G of them trained, c bytes of a computed and 4
of a summed number:

    memory         state, from the layout of every array; gradients of what trains, twice where XLA
                   keeps the copies that the optimizer reads; b x residuals; the work space of one
                   layer or of the loss, whichever is larger
    kernels        `cost.kernel_seconds` of the operations, and of the traffic of elementwise work
                   and of the update
    over fsdp      A x (f - 1)/f x (c P + c P_L + 4 G) / t
    over data      2 (d - 1)/d x 4 G / (f t)
    over tensor    A x 4 x 2 (t - 1)/t x b x (what full remat keeps), once per reduction
    step           kernels, and communication that they do not hide: over fsdp what exceeds the
                   kernels of its pass, over tensor half of it, over data all

Times of links are `cost.link_seconds`. docs/planning.md derives the bytes.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtrain.config import RunConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout_audit import Audit, Row, audit_state
from jaxtrain.mesh import AXES, factor_over_nodes, find_unnested, format_sizes, make_mesh
from jaxtrain.models.functional import as_model
from jaxtrain.plan import cost, traffic
from jaxtrain.plan.memory import available
from jaxtrain.plan.targets import Target
from jaxtrain.plan.traced import Residuals, residuals_of, row_flops
from jaxtrain.plan.work import Flops, Kernel
from jaxtrain.program import frozen_params, optimizer_of
from jaxtrain.rules import as_axes
from jaxtrain.state import abstract_state
from jaxtrain.tree import named_leaves, partition

_PASSES = {"none": 6.8, "dots": 3.7, "full": 3.7}
"""How often elementwise kernels move what a step without remat would keep, read off compiled steps
of llama3-8b; without remat all of it goes to the buffers of the loop over layers and back."""
_UPDATE_PASSES = 4
"""How often the update moves gradients and state: norm, clipping, moments, parameters."""
_COLLECTIVES_PER_LAYER = 4
"""Gathers of a layer's parameters after XLA merged some, read off compiled steps."""
_GRADIENT_BYTES = 4
_TENSOR_EXPOSED = 0.5
"""Share of the communication over `tensor` that nothing hides; compiled steps show 0.4 to 1."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step."""

    mesh: tuple[tuple[str, int], ...]
    """Size of every axis, outermost first."""
    remat: str
    accumulate_steps: int

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size."""
        return dict(self.mesh)

    def apply(self, config: RunConfig) -> RunConfig:
        """The configuration with these choices."""
        return dataclasses.replace(
            config,
            mesh=format_sizes(self.sizes),
            remat=self.remat,
            accumulate_steps=self.accumulate_steps,
        )

    def __str__(self) -> str:
        micro = f", {self.accumulate_steps} micro-batches" if self.accumulate_steps > 1 else ""
        return f"{format_sizes(self.sizes)}, remat {self.remat}{micro}"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the formulas of this module say of a candidate, per device."""

    candidate: Candidate
    state_bytes: int
    """Exact: from the layout."""
    work_bytes: int
    """All that a step adds to it."""
    kernel_seconds: float
    exposed_seconds: float

    @property
    def step_seconds(self) -> float:
        """Time of a step."""
        return self.kernel_seconds + self.exposed_seconds

    def num_bytes(self, correction: float = 1.0) -> int:
        """Bytes at the peak; `correction` is compiled over estimated work, of a like program."""
        return int(self.state_bytes + correction * self.work_bytes)

    def to_json(self, correction: float = 1.0) -> dict[str, Any]:
        """Plain values."""
        return {
            "mesh": self.candidate.sizes,
            "remat": self.candidate.remat,
            "accumulate_steps": self.candidate.accumulate_steps,
            "bytes_per_device": self.num_bytes(correction),
            "step_seconds": self.step_seconds,
        }


class Analysis:
    """Estimates steps of one experiment for any number of devices of a kind."""

    def __init__(self, planner: Any, config: RunConfig):
        """Takes experiment and a device to trace for from a `Planner`."""
        self._planner, self._config = planner, config
        experiment = planner.experiment(config)
        self._rules, model = experiment.rules, as_model(experiment.model)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        tx = optimizer_of(config, model, params, experiment.tx)
        has_own = experiment.tx is not None
        self._frozen = frozen_params(config, model, params, has_own_optimizer=has_own)
        _, trained = partition(params, self._frozen)
        self._trained = {f"params/{path}" for path, _ in named_leaves(trained)}
        ema = config.optimizer.ema_decay > 0
        self._state = abstract_state(model, tx, ema=ema, frozen=self._frozen)
        self._model = model
        # Of a parameter, when it is gathered.
        self._computed_bytes = 2 if config.precision == "bfloat16" else 4
        self.layout = functools.cache(self._layout)
        self.residuals = functools.cache(self._residuals)
        self.flops = functools.cache(self._flops)
        whole = self.layout(tuple((axis, 1) for axis in AXES))
        self._params = [row for row in whole.rows if row.group == "params"] if whole else []

    def candidates(self, target: Target, remats: Sequence[str]) -> Iterator[Candidate]:
        """All that model, batch, rules and hosts allow."""
        has_torus = self._planner.devices[0].platform == "tpu"
        for mesh in meshes(target.num_devices):
            rows = self._rows(dict(mesh))
            if rows != int(rows) or self.layout(mesh) is None:
                continue
            factors = factor_over_nodes(dict(mesh), target.devices_per_host)
            if not has_torus and find_unnested(factors) is not None:
                continue
            for remat, steps in itertools.product(remats, micro_batches(int(rows))):
                yield Candidate(mesh, remat, steps)

    def estimate(self, candidate: Candidate, target: Target) -> Estimate:
        """Estimates a candidate, which must come from `candidates`."""
        layout = self.layout(candidate.mesh)
        if layout is None:
            raise ValueError(f"the model does not divide over {candidate}")
        kernels = self._kernel_seconds(candidate, layout, target)
        exposed = self._exposed_seconds(candidate, layout, kernels, target)
        work = self._work_bytes(candidate, layout)
        return Estimate(candidate, layout.bytes_per_device, int(work), kernels, exposed)

    def device_bytes(self, target: Target) -> int:
        """What a step may use of a device."""
        return available(target, self._config.memory_fraction, len(AXES)).num_bytes

    def _rows(self, sizes: Mapping[str, int]) -> float:
        """Rows of a step on each device."""
        axes = as_axes(self._rules.compute["batch"]) or ()
        return self._config.global_batch_size / math.prod(sizes[axis] for axis in axes)

    # Memory -----------------------------------------------------------------------------------

    def _work_bytes(self, candidate: Candidate, layout: Audit) -> float:
        sizes, tensor = candidate.sizes, candidate.sizes["tensor"]
        rows = self._rows(sizes) / candidate.accumulate_steps
        kept = rows * self.residuals(candidate.remat, tensor > 1).kept(tensor)
        params = [row for row in layout.rows if row.group == "params"]
        layers = _num_layers(params)
        # A layer's gathered parameters, those of the next one, and its gradients before they are
        # scattered; beside it what a layer computes again.
        stacked = [row for row in params if _is_stacked(row)]
        one_layer = rows * self.residuals("none", False).kept(tensor) / layers
        gathered = 2 * self._gathered(stacked, sizes) + self._gradients(stacked, sizes)
        layer = gathered / layers + one_layer
        # The loss holds its head, gathered, and the gradient of it.
        others = [[row] for row in params if not _is_stacked(row)]
        heads = (self._gathered(row, sizes) + self._gradients(row, sizes) for row in others)
        return 2 * self._gradients(params) + kept + max(layer, *heads, 0)

    def _gathered(self, params: Sequence[Row], sizes: Mapping[str, int]) -> float:
        """Bytes of parameters on a device when they are used."""
        return self._computed_bytes * sum(_num_held(row, sizes) for row in params)

    def _gradients(self, params: Sequence[Row], sizes: Mapping[str, int] | None = None) -> float:
        """Bytes of gradients on a device as they are stored; with sizes of axes, as they come."""
        trained = (row for row in params if row.path in self._trained)
        return _GRADIENT_BYTES * sum(_num_held(row, sizes) for row in trained)

    # Time -------------------------------------------------------------------------------------

    def _kernel_seconds(self, candidate: Candidate, layout: Audit, target: Target) -> float:
        tensor, rows = candidate.sizes["tensor"], self._rows(candidate.sizes)
        flops = tuple(
            Flops(kind, dtype, count * rows / tensor)
            for (kind, dtype), count in self.flops(candidate.remat).items()
        )
        moved = _PASSES[candidate.remat] * rows * self.residuals("none", False).kept(1) / tensor
        params = [row for row in layout.rows if row.group == "params"]
        gradients = self._gradients(params)
        frozen = sum(row.bytes_per_device for row in params if row.path not in self._trained)
        moved += _UPDATE_PASSES * (layout.bytes_per_device - frozen + gradients)
        moved += 2 * gradients * (candidate.accumulate_steps - 1)
        return sum(cost.kernel_seconds(Kernel(flops, int(moved)), target.kind))

    def _exposed_seconds(
        self, candidate: Candidate, layout: Audit, kernels: float, target: Target
    ) -> float:
        sizes, steps = candidate.sizes, candidate.accumulate_steps
        factors = factor_over_nodes(sizes, target.devices_per_host)
        link = functools.partial(_link_seconds, factors=factors, target=target)
        params = [row for row in layout.rows if row.group == "params"]
        stacked = [row for row in params if _is_stacked(row)]
        # What the steps of a ring take adds up: the more layers, the more collectives.
        layers = _num_layers(params)
        num_merged = _COLLECTIVES_PER_LAYER * layers
        gathers = link("all-gather", "fsdp", self._gathered(params, sizes), num_merged)
        again = link("all-gather", "fsdp", self._gathered(stacked, sizes), num_merged)
        scatters = link("reduce-scatter", "fsdp", self._gradients(params, sizes), num_merged)
        # Products forward, of the gradients of what goes in, and of those of what trains.
        num_trained = self._gradients(params) / _GRADIENT_BYTES
        share = 1 / (2 + num_trained / sum(map(_num_held, params)))
        forward = max(steps * gathers - share * kernels, 0.0)
        backward = max(steps * (again + scatters) - (1 - share) * kernels, 0.0)
        over_data = link("all-reduce", "data", self._gradients(params), 1)
        stream = self.residuals("full", False).whole_bytes * self._rows(sizes)
        over_tensor = 4 * link("all-reduce", "tensor", stream, steps * layers)
        return forward + backward + over_data + _TENSOR_EXPOSED * over_tensor

    # What is traced ---------------------------------------------------------------------------

    def _layout(self, mesh: tuple[tuple[str, int], ...]) -> Audit | None:
        """The layout on a mesh; None where the model does not divide over it."""
        names, sizes = zip(*mesh, strict=True)
        abstract = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
        try:
            return audit_state(
                self._state,
                self._model,
                abstract,
                rules=self._rules,
                allow_replicated=self._config.allow_replicated,
            )
        except ConfigError:
            return None

    def _residuals(self, remat: str, is_split: bool) -> Residuals:
        config = dataclasses.replace(self._config, remat=remat)
        experiment, mesh = self._planner.experiment(config), self._small_mesh(is_split)
        return residuals_of(experiment, self._state, self._frozen, self._params, mesh)

    def _flops(self, remat: str) -> dict[tuple[str, str], float]:
        config = dataclasses.replace(self._config, remat=remat)
        experiment, mesh = self._planner.experiment(config), self._small_mesh(False)
        return row_flops(experiment, self._state, self._frozen, mesh)

    def _small_mesh(self, is_split: bool) -> Mesh:
        devices = self._planner.devices
        size = 2 if is_split and len(devices) > 1 else 1
        return make_mesh({"tensor": size}, devices=devices[:size], devices_per_node=size)


def meshes(num_devices: int) -> list[tuple[tuple[str, int], ...]]:
    """All ways to write a number of devices as sizes of the axes."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    found = itertools.product(sizes, repeat=len(AXES) - 1)
    return [
        tuple(zip(AXES, (num_devices // math.prod(inner), *inner), strict=True))
        for inner in found
        if num_devices % math.prod(inner) == 0
    ]


def micro_batches(rows: int) -> list[int]:
    """Numbers of micro-batches to look at for so many rows on a device."""
    powers = [2**exponent for exponent in range(rows.bit_length())]
    return [steps for steps in powers if rows % steps == 0]


def _link_seconds(
    kind: str,
    axis: str,
    num_bytes: float,
    num_collectives: int,
    *,
    factors: Mapping[str, tuple[int, int]],
    target: Target,
) -> float:
    """Time of collectives over an axis that share some bytes, by the formula of `cost`."""
    across, inside = factors[axis]
    size = across * inside
    num_bytes /= num_collectives
    collective = traffic.Collective(
        name="",
        kind=kind,
        axis=axis,
        group_size=size,
        devices_inside=inside,
        num_bytes=int(num_bytes),
        bytes_sent=traffic.bytes_sent(kind, num_bytes, size),
        dtypes=(),
        times=1,
        loops=(),
        source="",
    )
    return num_collectives * cost.link_seconds(collective, target.kind)


def _is_stacked(row: Row) -> bool:
    return bool(row.logical_axes) and row.logical_axes[0] == "layers"


def _num_layers(params: Sequence[Row]) -> int:
    return max((row.shape[0] for row in params if _is_stacked(row)), default=1)


def _num_held(row: Row, sizes: Mapping[str, int] | None = None) -> float:
    """Numbers that a device holds of a stored parameter; with sizes of axes, when gathered."""
    used = {axis for entry in row.spec for axis in as_axes(entry) or ()}
    num_stored = row.bytes_per_device / jnp.dtype(row.dtype).itemsize
    return num_stored * (sizes["fsdp"] if sizes and "fsdp" in used else 1)
