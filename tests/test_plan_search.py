"""`--mesh=auto`: the estimates, what is compiled because of them, the ranking, and its reasons."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from planning import MACHINE, lm_builder, needs_tpu

from jaxtrain import ConfigError, RunConfig
from jaxtrain.data.sources import ArrayDataset
from jaxtrain.losses import classification_loss, lm_loss
from jaxtrain.main import Experiment
from jaxtrain.mesh import factor_over_nodes, find_unnested, format_sizes, parse_mesh
from jaxtrain.models.convnet import convnet
from jaxtrain.models.convnet_config import ConvNetConfig
from jaxtrain.models.transformer import TransformerConfig, transformer
from jaxtrain.plan import commands, compile_target, cost, reasons, search, work
from jaxtrain.plan.analytic import Analysis, Candidate, meshes, micro_batches
from jaxtrain.plan.planner import Planner
from jaxtrain.plan.targets import parse_target
from jaxtrain.plan.traced import row_flops

LENGTH = 64
MODEL = TransformerConfig(
    vocab_size=256, num_layers=3, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=192
)
build = lm_builder(MODEL, LENGTH)


def config(**changes):
    return RunConfig(**{"global_batch_size": 8, "mesh": "auto", **changes})


@pytest.fixture(scope="module")
def analysis():
    return Analysis(Planner(build, config()), config())


@functools.cache
def a_plan():
    """A real plan, from which the fake ones are made."""
    run = config(mesh="fsdp:8", remat="full")
    return Planner(build, run, parse_target("cpu:8")).plan(run)


class FakePlanner(Planner):
    """Plans for GPUs without compiling: as much memory and time as `needs` says."""

    device = 10**6

    def __init__(self, target, run, needs):
        super().__init__(build, run)
        self.target = parse_target(target)
        self.needs, self.planned = needs, []

    def on(self, target):
        other = FakePlanner.__new__(FakePlanner)
        other.__dict__ |= self.__dict__
        other.target = target
        return other

    def plan(self, config):
        self.planned.append((self.target.text, config.mesh, config.remat, config.accumulate_steps))
        peak, kernels, exposed = self.needs(self.target, config)
        device = self.device
        return dataclasses.replace(
            a_plan(),
            target=self.target.text,
            num_devices=self.target.num_devices,
            num_hosts=self.target.num_hosts,
            devices_per_host=self.target.devices_per_host,
            flags=(f"--mesh={config.mesh}", "", f"--accumulate_steps={config.accumulate_steps}",
                   f"--remat={config.remat}"),
            peak_bytes_per_device=peak,
            device_bytes=device,
            fits=peak <= device,
            prediction=dataclasses.replace(
                a_plan().prediction,
                step_seconds=kernels + exposed, kernel_seconds=kernels, exposed_seconds=exposed,
            ),
            communication={"fsdp": cost.AxisTime(1e9, 2 * exposed, exposed)},
            warnings=(),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _trace_once(monkeypatch, analysis):
    monkeypatch.setattr(search, "Analysis", lambda *_: analysis)


def small_devices(monkeypatch, num_bytes):
    """H100s with so little memory."""
    monkeypatch.setattr(Analysis, "device_bytes", lambda *_: num_bytes)
    monkeypatch.setattr(FakePlanner, "device", num_bytes)


# ---------------------------------------------------------------------------------------------
# Candidates and estimates
# ---------------------------------------------------------------------------------------------


def test_meshes_are_all_factorings():
    found = meshes(12)
    assert len(found) == len(set(found)) == 18
    assert all(math.prod(size for _, size in mesh) == 12 for mesh in found)
    assert micro_batches(12) == [1, 2, 4]
    assert micro_batches(1) == [1]


def test_candidates_are_those_that_batch_and_model_allow(analysis):
    target = parse_target("h100:1x8")
    found = {tuple(size for _, size in c.mesh) for c in analysis.candidates(target, ("full",))}
    # Two kv_heads split over two devices at most; 8 rows over at most 8.
    assert found == {(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2)}
    steps = {
        c.accumulate_steps for c in analysis.candidates(target, ("full",)) if c.sizes["tensor"] > 1
    }
    assert steps == {1, 2}
    assert not list(analysis.candidates(parse_target("h100:4x8"), ("full",)))


def test_no_axis_leaves_the_hosts_while_an_outer_one_stays_inside():
    assert find_unnested(factor_over_nodes({"data": 3, "fsdp": 8, "tensor": 1}, 8)) is None
    assert find_unnested(factor_over_nodes({"data": 1, "fsdp": 4, "tensor": 4}, 8)) is None
    found = find_unnested(factor_over_nodes({"data": 1, "fsdp": 8, "tensor": 3}, 8))
    assert found == ("tensor", "fsdp")


def test_state_is_that_of_the_layout(analysis):
    run = config(mesh="fsdp:4,tensor:2")
    program, _, _ = Planner(build, run).program(run)
    mesh = (("data", 1), ("fsdp", 4), ("tensor", 2))
    estimate = analysis.estimate(Candidate(mesh, "full", 1), parse_target("h100:1x8"))
    assert estimate.state_bytes == program.layout.bytes_per_device


def test_operations_of_a_traced_row_are_those_of_the_compiled_step(analysis):
    # On one device, where XLA merges nothing of two layers; remat of a scan stays.
    run = config(global_batch_size=4, mesh="fsdp:1", remat="full")
    model = dataclasses.replace(MODEL, scan_unroll=1)
    planner = Planner(build, run, parse_target("cpu:8"))
    planner.devices = planner.devices[:1]
    planner.target = dataclasses.replace(planner.target, devices_per_host=1)
    experiment = dataclasses.replace(
        build(run),
        model=transformer(model, remat="full"),
        loss_fn=lm_loss(transformer(model, remat="full")),
    )
    planner._experiments = {"full": experiment}
    program, _, mesh = planner.program(run)
    flops = row_flops(experiment, program.abstract, program.frozen, mesh)
    counted = planner.plan(run).flops_per_device
    assert 4 * sum(flops.values()) == pytest.approx(counted, rel=0.02)


def test_models_with_state_and_convolutions_are_estimated_too():
    model = convnet(ConvNetConfig())
    data = ArrayDataset(
        {"image": np.zeros((4, 8, 8, 1), np.float32), "label": np.zeros(4, np.int32),
         "loss_mask": np.ones(4, np.float32)}
    )  # fmt: skip
    experiment = Experiment(model=model, loss_fn=classification_loss(), train_data=data)
    planner = Planner(lambda _: experiment, config())
    analysis = Analysis(planner, config())
    (kind, dtype), count = max(analysis.flops("none").items(), key=lambda item: item[1])
    assert (kind, dtype) == ("convolution", "f32")
    assert count > 0
    assert analysis.residuals("none", False).whole_bytes > 8 * 8 * 16 * 4
    sizes = {tuple(dict(c.mesh).values()) for c in analysis.candidates(planner.target, ("none",))}
    assert sizes == {(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1)}


def test_full_remat_keeps_the_input_of_each_layer(analysis):
    full, none = analysis.residuals("full", False), analysis.residuals("none", False)
    stream = MODEL.num_layers * LENGTH * MODEL.embed_dim * 4
    # And what the last norm keeps, and the loss.
    assert stream <= full.whole_bytes <= stream + 6 * LENGTH * MODEL.embed_dim * 4
    assert full.split_bytes == 0
    assert none.split_bytes >= 3 * MODEL.num_layers * LENGTH * MODEL.mlp_dim * 4
    assert none.kept(2) == none.whole_bytes + none.split_bytes / 2
    # Splitting a layer keeps its sum, once per layer.
    split = analysis.residuals("full", True)
    assert split.kept(2) - full.kept(2) == pytest.approx(stream, rel=0.01)


def test_more_micro_batches_need_less_and_more_remat_computes_more(analysis):
    target, mesh = parse_target("h100:1x2"), (("data", 1), ("fsdp", 2), ("tensor", 1))
    found = {
        (remat, steps): analysis.estimate(Candidate(mesh, remat, steps), target)
        for remat in ("none", "dots", "full")
        for steps in (1, 4)
    }
    for remat in ("none", "dots", "full"):
        assert found[remat, 4].work_bytes < found[remat, 1].work_bytes
    assert found["none", 1].work_bytes > found["dots", 1].work_bytes > found["full", 1].work_bytes
    flops = [sum(analysis.flops(r).values()) for r in ("none", "dots", "full")]
    assert flops[0] <= flops[1] < flops[2]


def test_axes_between_hosts_wait_longer(analysis):
    mesh = (("data", 1), ("fsdp", 4), ("tensor", 2))
    inside = analysis.estimate(Candidate(mesh, "full", 1), parse_target("h100:1x8"))
    between = analysis.estimate(Candidate(mesh, "full", 1), parse_target("h100:8x1"))
    assert between.exposed_seconds > 2 * inside.exposed_seconds
    assert between.kernel_seconds == inside.kernel_seconds


def test_estimates_use_the_formula_of_compiled_plans(analysis, monkeypatch):
    target = parse_target("h100:1x8")
    assert target is not None
    kind = dataclasses.replace(target.kind, link_latency=0.0)
    target = dataclasses.replace(target, kind=kind)
    candidate = Candidate((("data", 8), ("fsdp", 1), ("tensor", 1)), "none", 1)
    estimate = analysis.estimate(candidate, target)
    monkeypatch.setattr(cost, "LINK_EFFICIENCY", cost.LINK_EFFICIENCY / 2)
    slower = analysis.estimate(candidate, target)
    assert slower.exposed_seconds == pytest.approx(2 * estimate.exposed_seconds)
    late = dataclasses.replace(target, kind=dataclasses.replace(kind, link_latency=1.0))
    # One sum of gradients, twice round a ring of 8.
    waits = analysis.estimate(candidate, late).exposed_seconds - slower.exposed_seconds
    assert waits == pytest.approx(14.0)
    kernel = work.Kernel((work.Flops("matmul", "f32", 1e12),), 0)
    assert cost.kernel_seconds(kernel, MACHINE)[0] == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------


def test_the_compiled_step_decides_and_the_ranking_is_explained(monkeypatch):
    small_devices(monkeypatch, 10**9)
    # Whatever the estimates say, the second step that is compiled waits least.
    needs = lambda *_: (10**5, 1.0, 0.2 if len(planner.planned) == 2 else 0.6)  # noqa: E731
    planner = FakePlanner("h100:1x8", config(), needs)
    plan = search.Search(planner, config()).run()
    assert 3 <= len(plan.ranking) <= 5
    assert plan.ranking[0].flags == plan.flags
    times = [ranked.step_seconds for ranked in plan.ranking]
    assert times == sorted(times)
    assert len({planned[1:] for planned in planner.planned}) == len(planner.planned)
    assert "is the fastest: 1.20 s a step, 200 ms of it" in plan.ranking[0].reason
    slow = [ranked.reason for ranked in plan.ranking if ranked.step_seconds > 1.3]
    assert slow
    assert all("1.33x slower: its gathers of parameters" in text for text in slow)
    assert all("1.20 s, do not hide behind 1.00 s of compute" in text for text in slow)
    assert plan.min_hosts == 1
    assert plan.num_considered > len(plan.estimates) > 0
    assert plan.to_json()["ranking"][0]["reason"] == plan.ranking[0].reason


def test_what_does_not_fit_is_ranked_last_and_corrects_the_estimates(monkeypatch):
    small_devices(monkeypatch, 10**6)
    # All but full remat needs far more than estimated.
    needs = lambda _, run: (10**5 if run.remat == "full" else 10**7, 1.0, 0.0)  # noqa: E731
    planner = FakePlanner("h100:1x8", config(), needs)
    plan = search.Search(planner, config()).run()
    assert plan.fits
    assert "--remat=full" in plan.flags
    last = plan.ranking[-1]
    if not last.fits:
        assert "does not fit: 9.54 MiB of 977 KiB" in last.reason
    assert [r.fits for r in plan.ranking] == sorted((r.fits for r in plan.ranking), reverse=True)


def test_a_slow_step_makes_those_like_it_wait(monkeypatch):
    small_devices(monkeypatch, 10**9)
    # A second instead of the microseconds that are estimated: the next is of another kind.
    planner = FakePlanner("h100:1x8", config(), lambda *_: (10**5, 1.0, 0.0))
    search.Search(planner, config()).run()
    kinds = [(remat, steps > 1) for _, _, remat, steps in planner.planned[:3]]
    assert len(set(kinds)) == 3


def test_slow_compilers_are_asked_less_often(monkeypatch):
    small_devices(monkeypatch, 4 * 10**6)
    monkeypatch.setattr(search, "_SECONDS", 0.0)
    planner = FakePlanner("h100:8x1", config(), lambda *_: (10**5, 1.0, 0.0))
    plan = search.Search(planner, config()).run()
    assert len(planner.planned) == len(plan.ranking) == 1
    assert plan.min_hosts is None


def test_the_smallest_is_compiled_before_all_is_refused(monkeypatch):
    small_devices(monkeypatch, 4 * 10**6)
    # Twenty times as much as is estimated, but for full remat on all of fsdp.
    small = lambda run: run.mesh == "fsdp:8" and run.remat == "full"  # noqa: E731
    needs = lambda _, run: (3 * 10**6 if small(run) else 2 * 10**7, 1.0, 0.0)  # noqa: E731
    planner = FakePlanner("h100:1x8", config(), needs)
    plan = search.Search(planner, config()).run()
    assert plan.fits == any(mesh == "fsdp:8" and r == "full" for _, mesh, r, _ in planner.planned)
    assert [ranked.fits for ranked in plan.ranking].count(True) == plan.fits


def test_a_step_that_xla_cannot_compile_is_left_out(monkeypatch):
    small_devices(monkeypatch, 10**9)

    def needs(_, run):
        if run.mesh == "fsdp:8":
            raise ConfigError("XLA cannot compile this step")
        return 10**5, 1.0, 0.0

    planner = FakePlanner("h100:1x8", config(), needs)
    plan = search.Search(planner, config()).run()
    assert len(plan.ranking) == 3
    assert all(ranked.flags[0] != "--mesh=fsdp:8" for ranked in plan.ranking)

    def fails(*_):
        raise ConfigError("XLA cannot compile this step")

    with pytest.raises(ConfigError, match="XLA cannot compile"):
        search.Search(FakePlanner("h100:1x8", config(), fails), config()).run()


def test_the_smallest_number_of_hosts_is_confirmed_by_a_plan(monkeypatch):
    small_devices(monkeypatch, 4 * 10**6)
    needs = lambda target, _: (6_000_000 // target.num_hosts, 1.0, 0.0)  # noqa: E731
    planner = FakePlanner("h100:8x1", config(), needs)
    plan = search.Search(planner, config()).run()
    assert plan.fits
    assert plan.min_hosts == 2
    assert any(target == "h100:2x1" for target, *_ in planner.planned)


def test_a_model_too_large_is_refused_with_the_number_of_hosts(monkeypatch):
    small_devices(monkeypatch, 4 * 10**6)
    monkeypatch.setattr(
        Analysis, "device_bytes", lambda _, target: 4 * 10**6 if target.num_hosts >= 3 else 1000
    )
    needs = lambda target, _: (4_500_000 // target.num_hosts, 1.0, 0.0)  # noqa: E731
    planner = FakePlanner("h100:1x1", config(), needs)
    plan = search.Search(planner, config()).run()
    assert not plan.fits
    assert plan.exit_code == 2
    # Three hosts do not divide 8 rows.
    assert plan.min_hosts == 4
    kind, text = plan.warnings[0]
    assert kind == "does_not_fit"
    assert "no mesh fits" in text
    assert "it needs at least 4 hosts of 1 such devices (--plan=h100:4x1 --mesh=" in text


def test_no_mesh_for_the_batch_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(search, "Analysis", Analysis)
    run = config(global_batch_size=3)
    planner = FakePlanner("h100:1x8", run, lambda *_: (1, 1.0, 0.0))
    with pytest.raises(ConfigError, match=r"no mesh uses all 8 devices of h100:1x8.*batch_size=3"):
        search.Search(planner, run).run()


def test_slices_of_tpus_double():
    sizes = [target.torus for target in search.hosts_like(parse_target("tpu-v5p:2x2x2"))]
    assert sizes[:6] == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8)]
    flat = [target.torus for target in search.hosts_like(parse_target("tpu-v5e:2x2"))]
    assert flat[:4] == [(2, 2), (2, 4), (4, 4), (4, 8)]


def test_kernels_and_remat_are_reasons_too():
    plan = a_plan()
    slower = dataclasses.replace(plan.prediction, kernel_seconds=2.0, step_seconds=2.0)
    faster = dataclasses.replace(plan.prediction, kernel_seconds=1.0, step_seconds=1.0, phases={})
    best = dataclasses.replace(plan, fits=True, prediction=faster, communication={})
    other = dataclasses.replace(plan, fits=True, prediction=slower, communication={})
    assert "2.00x slower: its kernels take 2.00 s, those of the fastest 1.00 s" in reasons.reason(
        other, best
    )
    again = dataclasses.replace(slower, phases={"remat": (0.9, 0.0)})
    flags = ("--mesh=", "", "--accumulate_steps=4", "--remat=dots")
    other = dataclasses.replace(other, prediction=again, flags=flags)
    assert "fsdp:8 with 4 micro-batches and remat dots is 2.00x slower" in reasons.reason(
        other, best
    )
    assert "it computes 900 ms of the forward pass again" in reasons.reason(other, best)


# ---------------------------------------------------------------------------------------------
# Without --plan
# ---------------------------------------------------------------------------------------------


def test_one_device_is_instant(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(commands, "Planner", None)
    assert commands.with_best_mesh(None, config()).mesh == "fsdp:1"


def test_the_devices_at_hand_keep_remat_and_micro_batches(monkeypatch):
    run = config(remat="dots", accumulate_steps=2, global_batch_size=16)
    planned = []

    def plan(self, config):
        planned.append((config.mesh, config.remat, config.accumulate_steps))
        return dataclasses.replace(a_plan(), flags=(f"--mesh={config.mesh}", "", "", ""))

    monkeypatch.setattr(search, "Analysis", Analysis)
    monkeypatch.setattr(Planner, "plan", plan)
    found = commands.with_best_mesh(build(run), run)
    assert 3 <= len(planned) <= 5
    assert {(remat, steps) for _, remat, steps in planned} == {("dots", 2)}
    assert found == dataclasses.replace(run, mesh=planned[0][0])


@needs_tpu
def test_meshes_of_tpus_lie_on_their_torus():
    run = config()
    planner = Planner(build, run, parse_target("tpu-v5p:2x2x4"))
    possible = [
        sizes for sizes in meshes(16) if search._is_on_torus(planner, planner.target, sizes)
    ]
    assert (("data", 1), ("fsdp", 16), ("tensor", 1)) in possible
    assert (("data", 4), ("fsdp", 4), ("tensor", 1)) in possible
    assert all(planner.mesh(config(mesh=format_sizes(dict(sizes)))) for sizes in possible)
    planner = Planner(build, run, parse_target("tpu-v5p:4x4x8"))
    with pytest.raises(ConfigError, match=r"mesh=data:2,fsdp:64 cannot .* torus of 4x4x8"):
        planner.mesh(config(mesh="data:2,fsdp:64"))


def test_a_mesh_that_nobody_searches_for_is_an_error():
    with pytest.raises(ConfigError, match="mesh=auto is searched for by scripts that start with"):
        parse_mesh("auto")


@pytest.mark.parametrize(
    "message",
    [
        "Used 113.10G of 95.73G hbm. Exceeded hbm capacity",
        "the total memory required for HLO temporaries (113.10G) exceeds available HBM (95.73G).",
    ],
)
def test_the_messages_of_the_tpu_compiler_are_understood(message):
    with pytest.raises(compile_target.DoesNotFit) as caught:
        compile_target._refuse(parse_target("tpu-v5p:2x2x1"), RuntimeError(message), "", "", 1.0)
    assert caught.value.needed_bytes == int(113.10 * 2**30)
    assert caught.value.capacity_bytes == int(95.73 * 2**30)
