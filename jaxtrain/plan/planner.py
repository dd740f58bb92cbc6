"""A plan: what a run needs on a target, and how fast it is there, from its compiled step.

planner = Planner(build, config, parse_target("h100:16x8"))
plan = planner.plan(config)            # compiles the step for one mesh
plan.fits, plan.memory, plan.step_seconds
"""

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxtrain.config import RunConfig
from jaxtrain.data.load import abstract_batch
from jaxtrain.data.sources import as_dataset
from jaxtrain.errors import ConfigError
from jaxtrain.host import memory_bytes
from jaxtrain.mesh import describe_mesh, format_sizes, make_mesh
from jaxtrain.models.functional import as_model
from jaxtrain.plan import advice, cost, traffic, work
from jaxtrain.plan.compile_target import (
    Compilation,
    DoesNotFit,
    compile_for,
    target_devices,
    target_here,
)
from jaxtrain.plan.memory import (
    Available,
    Memory,
    argument_classes,
    available,
    gradient_bytes,
    host_memory,
    host_total,
    memory_of,
    with_devices,
)
from jaxtrain.plan.result import Plan
from jaxtrain.plan.targets import HERE, Target, as_json
from jaxtrain.program import TrainProgram, train_program
from jaxtrain.units import nbytes

_logger = logging.getLogger("jaxtrain")


class Planner:
    """Compiles the step of an experiment for a target, for as many meshes as are asked for."""

    def __init__(
        self, build: Callable[[Any], Any], config: RunConfig, target: Target | None = None
    ):
        """Takes the devices' descriptions; `compile_target.prepare_backend` must come before.

        Args:
            build: configuration -> Experiment.
            config: of the run.
            target: None for the devices at hand.
        """
        self.target, self.devices = target_devices(target or target_here())
        self._build = build
        self._experiments: dict[str, Any] = {}
        self.experiment(config)

    def experiment(self, config: RunConfig) -> Any:
        """The experiment of a configuration; made once for each --remat, which the model holds."""
        if config.remat not in self._experiments:
            self._experiments[config.remat] = self._build(config)
        return self._experiments[config.remat]

    def on(self, target: Target) -> "Planner":
        """The same experiment on another number of such devices."""
        other = copy.copy(self)
        other.target, other.devices = target_devices(target)
        return other

    def mesh(self, config: RunConfig) -> Mesh:
        """The mesh of a configuration over the target's devices."""
        # Which of the devices at hand share a node, `make_mesh` finds out as it does for the run.
        per_host = None if self.target.text == HERE else self.target.devices_per_host
        try:
            return make_mesh(config.mesh, devices=self.devices, devices_per_node=per_host)
        except NotImplementedError as error:  # by `jax.make_mesh`, on a torus
            torus = "x".join(map(str, self.target.torus))
            raise ConfigError(
                f"mesh={config.mesh} cannot be laid on a torus of {torus} chips: every axis takes"
                f" whole dims of the torus, or several; --mesh=auto finds the meshes that do"
            ) from error

    def program(self, config: RunConfig) -> tuple[TrainProgram, dict[str, Any], Mesh]:
        """The step of a configuration, not compiled; its abstract batch; its mesh."""
        experiment, mesh = self.experiment(config), self.mesh(config)
        program = train_program(
            as_model(experiment.model),
            experiment.loss_fn,
            config,
            mesh,
            rules=experiment.rules,
            tx=experiment.tx,
        )
        batch = abstract_batch(
            experiment.train_data,
            mesh,
            rules=experiment.rules,
            global_batch_size=config.global_batch_size,
            accumulate_steps=config.accumulate_steps,
        )
        return program, batch, mesh

    def plan(self, config: RunConfig) -> Plan:
        """Compiles the step for the mesh of a configuration, and reads the program.

        Raises:
            ConfigError: for a mesh, batch or layout that cannot work, and when XLA fails.
        """
        program, batch, mesh = self.program(config)
        _logger.info("compiling the step for %s", describe_mesh(mesh))
        data = as_dataset(self.experiment(config).train_data)
        uses = host_memory(program, batch, data, self.target)
        common: dict[str, Any] = {
            "target": self.target.text,
            "description": self.target.describe(),
            "is_estimate": self.target.is_simulated,
            "num_devices": self.target.num_devices,
            "num_hosts": self.target.num_hosts,
            "devices_per_host": self.target.devices_per_host,
            "mesh": dict(mesh.shape),
            "flags": _flags(config, mesh),
            "host_memory": uses,
            "audit": program.layout,
            "figures": as_json(self.target.kind),
        }
        try:
            compiled = compile_for(self.target, program, batch, log_dir=config.workdir)
        except DoesNotFit as error:
            return self._refused(config, program, batch, error, common)
        return self._read(config, program, batch, mesh, compiled, common)

    def _read(
        self,
        config: RunConfig,
        program: TrainProgram,
        batch: Mapping[str, Any],
        mesh: Mesh,
        compiled: Compilation,
        common: dict[str, Any],
    ) -> Plan:
        module, target = compiled.module, self.target
        needs = memory_of(compiled.step, program, batch, compiled.assignment)
        collectives = traffic.communication(module, dict(mesh.shape), target.devices_per_host)
        has = available(target, config.memory_fraction, len({c.axis for c in collectives}))
        done = work.count(module)
        prediction = cost.predict(module, collectives, target.kind, **self._tokens(config, batch))
        warnings = [
            *advice.involuntary_remat(compiled.involuntary_remat),
            *advice.warnings(module, collectives, prediction),
        ]
        return self._finished(
            program,
            needs,
            has,
            [*warnings, *_estimate(target)],
            common,
            flops_per_device=done.total_flops,
            flops=done.flops,
            communication=prediction.communication,
            prediction=prediction,
            fused_attention=advice.attention_is_fused(module),
            compile_seconds=compiled.step.compile_seconds,
        )

    def _refused(self, config, program, batch, error: DoesNotFit, common: dict[str, Any]) -> Plan:
        """The plan of a program that the target's own compiler refused for want of memory."""
        classes = argument_classes(program, batch)
        left = max(error.needed_bytes - sum(classes.values()), 0)
        classes["activations_and_temporaries"] = left
        used = {name: size for name, size in classes.items() if size}
        needs = Memory(used, max(error.needed_bytes, sum(classes.values())), ())
        has = Available(error.capacity_bytes, "what the compiler has to give")
        nothing: dict[str, Any] = dict.fromkeys(
            ("flops_per_device", "prediction", "fused_attention", "compile_seconds")
        )
        nothing |= {"flops": {}, "communication": {}}
        return self._finished(program, needs, has, [], common, **nothing)

    def _finished(
        self, program: TrainProgram, needs: Memory, has: Available, warnings, common, **read: Any
    ) -> Plan:
        uses = with_devices(common["host_memory"], needs, self.target)
        common |= {"host_memory": uses, "host_bytes": host_total(uses)}
        host_has = self.target.kind.host_memory_bytes or memory_bytes()
        host_fits = not host_has or common["host_bytes"] <= host_has
        min_hosts = _min_hosts(needs, has, program, self.target)
        found = list(warnings)
        if needs.peak_bytes > has.num_bytes:
            found.insert(0, _too_large(needs, has, min_hosts, self.target))
        if not host_fits:
            text = f"a host needs {nbytes(common['host_bytes'])} and has {nbytes(host_has)}"
            found.insert(0, advice.Warned("host_memory", text))
        return Plan(
            fits=needs.peak_bytes <= has.num_bytes and host_fits,
            peak_bytes_per_device=needs.peak_bytes,
            device_bytes=has.num_bytes,
            device_text=has.text,
            memory=needs.classes,
            buffers=needs.buffers,
            warnings=tuple(found),
            min_hosts=min_hosts,
            **common,
            **read,
        )

    def _tokens(self, config: RunConfig, batch: Mapping[str, Any]) -> dict[str, float | None]:
        """What turns a step's time into tokens per second and a share of the peak."""
        if "tokens" not in batch:
            return {"tokens_per_device": None, "flops_per_token": None}
        tokens = batch["tokens"]
        model = as_model(self.experiment(config).model)
        per_token = model.flops_per_token and model.flops_per_token(tokens.shape[-1])
        return {
            "tokens_per_device": tokens.size / self.target.num_devices,
            "flops_per_token": per_token,
        }


def _flags(config: RunConfig, mesh: Mesh) -> tuple[str, ...]:
    return (
        f"--mesh={format_sizes(dict(mesh.shape))}",
        f"--global_batch_size={config.global_batch_size}",
        f"--accumulate_steps={config.accumulate_steps}",
        f"--remat={config.remat}",
        f"--precision={config.precision}",
    )


def _estimate(target: Target) -> list[advice.Warned]:
    if not target.is_simulated:
        return []
    text = (
        f"an estimate: compiled for simulated CPU devices, not for {target.kind.description};"
        f" kernels, fusions and memory differ"
    )
    return [advice.Warned("estimate", text)]


def _min_hosts(needs: Memory, has: Available, program: TrainProgram, target: Target) -> int | None:
    """Hosts over which the state has to be shared for a step to fit, all else as it is now."""
    state = ("parameters", "ema_parameters", "gradients", "optimizer_state")
    local = sum(needs.classes.get(name, 0) for name in state)
    room = has.num_bytes - (needs.peak_bytes - local)
    if room <= 0:
        return None
    if needs.peak_bytes <= has.num_bytes:
        room = max(room, local)
    total = program.layout.total_bytes + gradient_bytes(program, is_whole=True)
    return max(1, -(-total // (room * target.devices_per_host)))


def _too_large(
    needs: Memory, has: Available, min_hosts: int | None, target: Target
) -> advice.Warned:
    largest = max(needs.classes, key=lambda name: needs.classes[name]).replace("_", " ")
    text = (
        f"it does not fit: {nbytes(needs.peak_bytes)} per device, and {nbytes(has.num_bytes)} are"
        f" there ({has.text}); the most goes into {largest}"
    )
    if min_hosts is None:
        text += "; more hosts do not help: use --remat, --accumulate_steps or a shorter length"
    else:
        text += f"; it needs at least {min_hosts} hosts of {target.devices_per_host} such devices"
    return advice.Warned("does_not_fit", text)
