"""Targets: their figures and sources, their syntax, and what is said of wrong ones."""

import subprocess
import sys
import tomllib
from importlib import resources

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.plan import targets
from jaxtrain.plan.targets import device_kind, gpu_target_config, kind_names, kind_of, parse_target
from jaxtrain.throughput import peak_flops

ALL = kind_names()
GPUS = [name for name in ALL if device_kind(name).platform == "gpu"]


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_a_source(name):
    file = resources.files("jaxtrain.plan") / "targets" / f"{name}.toml"
    figures = tomllib.loads(file.read_text())
    sources = figures.pop("sources")
    assert set(sources) == set(figures) - {"description", "platform"}
    assert all(len(text) > 2 for text in sources.values())


def test_the_figures_are_those_of_the_tables_of_the_run():
    """The run's share of the peak and that of the plan must mean the same."""
    for name in ALL:
        kind = device_kind(name)
        known = peak_flops(kind.device_kind, "bfloat16")
        # bf16 units there are none on a V100; its rate is that of fp16.
        if name not in ("cpu", "v100-16"):
            assert known == pytest.approx(kind.peak_flops, rel=0.01), name


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "torus"),
    [
        ("h100:16x8", 16, 8, ()),
        ("h200:1x4", 1, 4, ()),
        ("a100-80:4x8", 4, 8, ()),
        ("v100-16:2x8", 2, 8, ()),
        ("b200:1x1", 1, 1, ()),
        ("cpu:8", 1, 8, ()),
        ("tpu-v5p:4x4x8", 32, 4, (4, 4, 8)),
        ("tpu-v5e:2x4", 1, 8, (2, 4)),
        ("tpu-v6e:16x16", 64, 4, (16, 16)),
        ("h100:2048x8", 2048, 8, ()),
    ],
)
def test_targets_are_parsed(text, hosts, per_host, torus):
    target = parse_target(text)
    assert target is not None
    assert (target.num_hosts, target.devices_per_host, target.torus) == (hosts, per_host, torus)
    assert target.num_devices == hosts * per_host
    assert target.text == text
    assert not target.is_simulated


def test_here_is_left_to_the_backend():
    assert parse_target("here") is None


def test_an_estimate_keeps_the_figures_of_its_target():
    target = parse_target("h100:2x8@cpu")
    assert target is not None
    assert target.is_simulated
    assert target.num_devices == 16
    assert target.kind is device_kind("h100")
    assert target.on_hosts(4).text == "h100:4x8@cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h300:1x8", r"no target 'h300'.*a100-40, a100-80, b200, cpu, h100"),
        ("", r"no target ''"),
        ("h100", r"shape ''; behind h100: stands hosts x GPUs per host, e.g. h100:2x8"),
        ("h100:8", r"shape '8'.*hosts x GPUs"),
        ("h100:2x8x2", r"shape '2x8x2'"),
        ("h100:0x8", r"shape '0x8'"),
        ("h100:-1x8", r"shape '-1x8'"),
        ("h100:2x16", r"at most 8 h100 devices; use h100:4x8"),
        ("tpu-v5p:8x8", r"the 3 sizes of a slice of chips, e.g. tpu-v5p:4x4x4"),
        ("tpu-v5e:4x4x4", r"the 2 sizes of a slice"),
        ("cpu:2x4", r"a number of simulated devices, e.g. cpu:8"),
        ("cpu:8@cpu", r"compiled for simulated CPU devices anyway"),
    ],
)
def test_wrong_targets_are_refused_with_the_way_out(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_target(text)


def test_a_tpu_slice_has_no_number_of_hosts_to_change():
    target = parse_target("tpu-v5e:4x4")
    assert target is not None
    with pytest.raises(ValueError, match="a shape"):
        target.on_hosts(2)


@pytest.mark.parametrize("name", GPUS)
def test_the_description_for_the_compiler_has_all_fields(name):
    kind = device_kind(name)
    text = gpu_target_config(kind)
    for field in ("core_count", "device_memory_size", "shared_memory_per_block_optin"):
        assert f"{field}: {kind.gpu_device_info[field]}" in text
    assert kind.gpu_device_info["device_memory_size"] == kind.memory_bytes
    assert kind.gpu_device_info["memory_bandwidth"] == kind.memory_bandwidth


def test_attached_devices_find_their_figures():
    assert kind_of("gpu", "NVIDIA H100 80GB HBM3").name == "h100"
    assert kind_of("tpu", "TPU v5 lite").name == "tpu-v5e"
    assert kind_of("tpu", "TPU v5").name == "tpu-v5p"
    assert kind_of("gpu", "NVIDIA GeForce RTX 4090") is None


def test_a_wrong_target_is_refused_before_anything_heavy_is_imported():
    code = (
        "import sys\n"
        "from jaxtrain import ConfigError\n"
        "from jaxtrain.plan.targets import parse_target\n"
        "try: parse_target('h1000:1x8')\n"
        "except ConfigError: print('jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names_are_those_of_the_files():
    assert targets.HERE not in ALL
    assert {"h100", "h200", "a100-80", "a100-40", "b200", "tpu-v5e", "tpu-v5p", "tpu-v6e"} <= {*ALL}
