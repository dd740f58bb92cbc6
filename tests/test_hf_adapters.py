"""`export-hf --adapter`: what LoRA trained in the format of PEFT, against merged exports."""

import dataclasses
import json

import hugging
import jax
import numpy as np
import optax
import pytest
import safetensors.numpy

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import OptimizerConfig, dump, field
from jaxtrain.errors import ConfigError
from jaxtrain.hf import adapters, exporting, keep
from jaxtrain.hf.exporting import ExportConfig, export_model
from jaxtrain.hf.importing import ImportedRun
from jaxtrain.hf.load import opening_model
from jaxtrain.models.lora import is_adapter
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer import transformer
from jaxtrain.state import init_state
from jaxtrain.tree import path_str

pytestmark = pytest.mark.usefixtures("compile_cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned(ImportedRun):
    """What the workdir of a fine-tuning says of itself."""

    lora: LoraConfig = field(default_factory=LoraConfig)


def write_run(workdir, name, lora, *, ema=False, freeze=""):
    """A run that began with a committed model and whose adapters are random numbers."""
    config, _, base, mesh = hugging.load(hugging.ROOT / name)
    model = transformer(config, lora=lora)
    state = init_state(model, optax.identity(), mesh)
    rng = np.random.default_rng(0)
    leaves = {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(base)}

    def value(path, leaf):
        path = path_str(path)
        if is_adapter(path):
            return jax.numpy.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype)
        return leaves[path].astype(leaf.dtype)

    params = jax.tree_util.tree_map_with_path(value, state.params)
    state = state.replace(params=params)
    if ema:
        frozen = jax.tree_util.tree_map_with_path(
            lambda path, _: not is_adapter(path_str(path)), params
        )
        average = jax.tree.map(lambda kept, leaf: None if kept else 2 * leaf, frozen, params)
        state = state.replace(ema_params=average)
    workdir.mkdir()
    optimizer = OptimizerConfig(freeze=freeze)
    (workdir / "config.json").write_text(dump(Tuned(model=config, lora=lora, optimizer=optimizer)))
    with opening_model(hugging.ROOT / name) as source:
        keep.keep(hugging.ROOT / name, workdir, prefix=source.prefix, dtypes=source.dtypes())
    checkpointer = Checkpointer(workdir / "checkpoints")
    checkpointer.save(3, state, {})
    checkpointer.close()
    return workdir


def export(workdir, directory, **options):
    said = export_model(directory, ExportConfig(workdir=str(workdir), **options))
    return said, directory


def pattern_of(patterns, module, default):
    """As PEFT looks one up: by the end of the module's name."""
    found = [value for key, value in patterns.items() if module.endswith(f".{key}")]
    return found[0] if found else default


def updates(directory):
    """Tensor of the model -> alpha / r B A [O, I], in float64, from the files of an adapter."""
    config = json.loads((directory / adapters.ADAPTER_CONFIG).read_text())
    tensors = safetensors.numpy.load_file(directory / adapters.ADAPTER)
    found = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        b = tensors[f"{module}.lora_B.weight"]
        rank = pattern_of(config["rank_pattern"], module, config["r"])
        alpha = pattern_of(config["alpha_pattern"], module, config["lora_alpha"])
        assert a.shape[0] == b.shape[1] == rank
        assert any(module.endswith(f".{target}") for target in config["target_modules"])
        update = alpha / rank * np.float64(b) @ np.float64(a)
        module = module.removeprefix("base_model.model.")
        found[f"{module}.weight"] = update.T if config["fan_in_fan_out"] else update
    assert len(tensors) == 2 * len(found)
    return found, config


MODELS = {
    "llama": ("attention|mlp/down", {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}),
    "gemma3": ("attention/(q|v)/", {"q_proj", "v_proj"}),
    # Queries and values are parts of one tensor.
    "gpt2": ("attention/(q|v)/", {"c_attn"}),
}


@pytest.mark.parametrize("name", [*MODELS, "gpt2 whole", "gpt2 one"])
def test_the_adapter_on_the_model_is_the_merged_export(name, tmp_path):
    name, _, kind = name.partition(" ")
    targets, modules = {
        "": MODELS[name],
        "whole": ("attention|mlp", {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"}),
        "one": ("attention/k|mlp/up", {"c_attn", "c_fc"}),
    }[kind]
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets, base_dtype="float32")
    workdir = write_run(tmp_path / "run", name, lora)
    said, adapter = export(workdir, tmp_path / "adapter", adapter=True)
    _, merged = export(workdir, tmp_path / "merged")
    assert f"adapter of {'gemma3_text' if name == 'gemma3' else name}" in said
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    found, config = updates(adapter)
    assert set(config["target_modules"]) == modules
    assert config["fan_in_fan_out"] == (name == "gpt2")
    before, after = hugging.read_tensors(hugging.ROOT / name), hugging.read_tensors(merged)
    assert found.keys() == {key for key in before if np.any(before[key] != after[key])}
    assert len(found) == 3 * len(modules)
    for key, update in found.items():
        np.testing.assert_allclose(after[key], before[key] + update, atol=1e-6, err_msg=key)
        assert np.abs(update).max() > 0.1


def test_what_adapter_config_says(tmp_path):
    lora = LoraConfig(rank=2, alpha=8.0, targets="attention|mlp", base_dtype="float32")
    workdir = write_run(tmp_path / "run", "gpt2", lora)
    _, adapter = export(workdir, tmp_path / "adapter", adapter=True)
    config = hugging.read_json(adapter / adapters.ADAPTER_CONFIG)
    assert config == config | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(hugging.ROOT / "gpt2"),
        "bias": "none",
        "r": 6,
        "lora_alpha": 24.0,
        "rank_pattern": {"attn.c_proj": 2, "c_fc": 2, "mlp.c_proj": 2},
        "alpha_pattern": {"attn.c_proj": 8.0, "c_fc": 8.0, "mlp.c_proj": 8.0},
    }
    header = safetensors.numpy.load_file(adapter / adapters.ADAPTER)
    first = "base_model.model.transformer.h.0.attn.c_attn"
    assert header[f"{first}.lora_A.weight"].shape == (6, 32)
    assert header[f"{first}.lora_B.weight"].shape == (96, 6)
    assert {str(value.dtype) for value in header.values()} == {"float32"}


def test_the_average_of_the_adapter_is_exported_if_asked_for(tmp_path):
    lora = LoraConfig(rank=3, alpha=5.0, base_dtype="float32")
    workdir = write_run(tmp_path / "run", "llama", lora, ema=True)
    (last, _), (average, _) = (
        updates(export(workdir, tmp_path / f"adapter_{ema}", adapter=True, ema=ema)[1])
        for ema in (False, True)
    )
    for key, update in last.items():
        np.testing.assert_allclose(average[key], 4 * update, atol=1e-5)
    _, merged = export(workdir, tmp_path / "merged", ema=True)
    before, after = hugging.read_tensors(hugging.ROOT / "llama"), hugging.read_tensors(merged)
    for key in before:
        expected = before[key] + average.get(key, 0)
        np.testing.assert_allclose(after[key], expected, atol=1e-5, err_msg=key)


def test_the_base_is_not_read(tmp_path, monkeypatch):
    from jaxtrain import checkpoint_orbax

    lora = LoraConfig(rank=3, alpha=5.0)
    workdir = write_run(tmp_path / "run", "llama", lora)
    read, asked = checkpoint_orbax.read, []

    def noting_read(path, wanted, *rest):
        asked.extend(wanted)
        return read(path, wanted, *rest)

    monkeypatch.setattr(checkpoint_orbax, "read", noting_read)
    export(workdir, tmp_path / "adapter", adapter=True)
    names = [name for name in asked if name.startswith("params/")]
    assert names
    assert all(is_adapter(name) for name in names)


def test_a_run_without_lora_has_no_adapter(tmp_path):
    (tmp_path / "run").mkdir()
    config, *_ = hugging.load(hugging.ROOT / "llama")
    (tmp_path / "run" / "config.json").write_text(dump(ImportedRun(model=config)))
    with pytest.raises(ConfigError, match=r"adapter=true is for runs with LoRA, and workdir=.*ru"):
        export(tmp_path / "run", tmp_path / "out", adapter=True)
    with pytest.raises(ConfigError, match=r"shard_bytes=7 is read only with adapter=false"):
        ExportConfig(adapter=True, shard_bytes=7)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_kill_leaves_no_half_of_an_adapter(tmp_path, monkeypatch):
    workdir = write_run(tmp_path / "run", "llama", LoraConfig(rank=2))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        export(workdir, tmp_path / "out", adapter=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
