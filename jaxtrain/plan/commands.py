"""What `--plan` and `--mesh=auto` do: plan, print, write the files of a plan."""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.agreement import from_primary, together
from jaxtrain.checkpoint_files import absolute
from jaxtrain.config import RunConfig
from jaxtrain.errors import ConfigError, ExitCode
from jaxtrain.mesh import AUTO
from jaxtrain.output_files import replace_file
from jaxtrain.plan import html, table
from jaxtrain.plan.compile_target import target_here
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.result import Plan
from jaxtrain.plan.search import Search
from jaxtrain.plan.targets import Target

_logger = logging.getLogger("jaxtrain")


def run_plan(build: Callable[[Any], Any], config: RunConfig, target: Target | None) -> ExitCode:
    """What `--plan` does: plans, prints, and writes `plan.json` and `plan.html` into the workdir.

    Args:
        build: configuration -> Experiment.
        config: of the run.
        target: None for the devices at hand.
    """
    planner = Planner(build, config, target)
    plan = Search(planner, config).run() if config.mesh == AUTO else planner.plan(config)
    print(table.as_text(plan))
    if config.workdir:
        directory = pathlib.Path(absolute(config.workdir, "workdir"))
        directory.mkdir(parents=True, exist_ok=True)
        values = plan.to_json()
        replace_file(directory / "plan.json", json.dumps(values, indent=1).encode())
        replace_file(directory / "plan.html", html.page(values).encode())
        print(f"written to {directory}/plan.json and plan.html")
    else:
        print("plan.json and plan.html are not written: the run has no workdir")
    return plan.exit_code


def with_best_mesh[R: RunConfig](experiment: Any, config: R) -> R:
    """What `--mesh=auto` does without `--plan`: the run with the best mesh for the devices at hand.

    Remat and micro-batches stay as they are. One device has one mesh, and nothing is compiled.
    Every process searches, and what process 0 found counts: a search minds the time.
    """
    if jax.device_count() == 1:
        return dataclasses.replace(config, mesh="fsdp:1")
    with together():
        plan = _search_here(experiment, config)
    mesh = from_primary(lambda: plan.flags[0].removeprefix("--mesh="))
    return dataclasses.replace(config, mesh=mesh)


def _search_here(experiment: Any, config: RunConfig) -> Plan:
    try:
        target = target_here()
    except ConfigError as error:
        raise ConfigError(f"mesh=auto cannot search: {error}; or name a mesh") from None
    planner = Planner(lambda _: experiment, config, target)
    plan = Search(planner, config, is_free=False).run()
    for ranked in plan.ranking:
        _logger.info("mesh=auto: %s", ranked.reason)
    if not plan.fits:
        raise ConfigError(f"mesh=auto: {plan.warnings[0].text}")
    return plan


def device_count(target: Target | None) -> int:
    """How many devices a plan is for."""
    return jax.device_count() if target is None else target.num_devices
