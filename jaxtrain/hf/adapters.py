"""What LoRA trained, as PEFT reads it: adapter_config.json and adapter_model.safetensors.

PEFT has one adapter for each tensor of the model. Where several parameters are one tensor (GPT-2's
c_attn holds queries, keys and values), those that are adapted, n of them, become one adapter of
rank n r: their A below each other, their B in blocks, zero elsewhere. With n alpha it is scaled as
they are.

Shapes: lora_A [n R, I], lora_B [O, n R]; ours [L, *inputs, R] and [L, R, *outputs]; L layers, R
rank, I inputs, O outputs of the tensor, W outputs of a parameter.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.hf import tables
from jaxtrain.hf.files import Wanted
from jaxtrain.models.layers import LORA_A, LORA_B
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.tree import named_leaves

__all__ = ["ADAPTER", "ADAPTER_CONFIG", "Adapter", "adapter_config", "adapter_tensors", "adapters"]

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_KERNEL, _WEIGHT = "/kernel", ".weight"


class Adapter(NamedTuple):
    """A tensor of every layer whose parameters, or some of them, are adapted."""

    rule: tables.Rule
    parts: tuple[int, ...]
    """Which of the rule's parameters."""

    def paths(self, name: str) -> list[str]:
        """Where the A or B of the parts are."""
        return [_beside(self.rule.paths[part], name) for part in self.parts]


def adapters(model_type: str, params: Any) -> list[Adapter]:
    """The adapters of a model, in the order of the tensors.

    Args:
        model_type: as in config.json.
        params: tree of arrays, with those of LoRA at least.
    """
    present = {path for path, _ in named_leaves(params)}
    found = []
    for rule in tables.RULES[model_type]:
        parts = tuple(
            part
            for part, path in enumerate(rule.paths)
            if path.endswith(_KERNEL) and _beside(path, LORA_A) in present
        )
        if parts:
            found.append(Adapter(rule, parts))
    return found


def adapter_tensors(model_type: str, params: Any) -> list[Wanted]:
    """The tensors of the adapters, float32; each is made when it is written.

    Args:
        model_type: as in config.json.
        params: tree of arrays, with those of LoRA at least; on any mesh of this process.
    """
    leaves = {
        path: np.asarray(leaf)
        for path, leaf in named_leaves(params)
        if path.endswith((f"/{LORA_A}", f"/{LORA_B}"))
    }
    wanted = []
    for adapter in adapters(model_type, params):
        first, second = (
            [leaves[path] for path in adapter.paths(name)] for name in (LORA_A, LORA_B)
        )
        num_layers, rank = second[0].shape[:2]
        inputs, width = (first[0][0].size // rank, second[0][0].size // rank)
        shapes = {
            "lora_A": (len(first) * rank, inputs),
            "lora_B": (len(adapter.rule.paths) * width, len(first) * rank),
        }
        for layer in range(num_layers):
            module = tables.prefix_of(model_type) + _module(adapter.rule).format(layer)
            makers = {
                "lora_A": functools.partial(_stacked, first, layer),
                "lora_B": functools.partial(_in_blocks, second, layer, adapter),
            }
            for name, make in makers.items():
                full = f"base_model.model.{module}.{name}.weight"
                wanted.append(Wanted(full, "F32", shapes[name], make))
    return wanted


def adapter_config(
    model_type: str, found: Sequence[Adapter], lora: LoraConfig, *, base: str
) -> dict[str, Any]:
    """adapter_config.json.

    Args:
        model_type: as in config.json.
        found: the adapters.
        lora: how the run adapted its projections.
        base: the model that is adapted, as PEFT is to find it; "" if it is nowhere.
    """
    names = _targets(model_type, found)
    counts = {name: len(adapter.parts) for name, adapter in zip(names, found, strict=True)}
    usual = counts[names[0]]
    others = {name: count for name, count in counts.items() if count != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": usual * lora.rank,
        "lora_alpha": usual * lora.alpha,
        "rank_pattern": {name: count * lora.rank for name, count in others.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in others.items()},
        "target_modules": names,
        "fan_in_fan_out": not found[0].rule.form.is_transposed,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _stacked(matrices: Sequence[np.ndarray], layer: int) -> np.ndarray:
    """A of all parts, [n R, I]."""
    return np.concatenate([a[layer].reshape(-1, a.shape[-1]).T for a in matrices])


def _in_blocks(matrices: Sequence[np.ndarray], layer: int, adapter: Adapter) -> np.ndarray:
    """B of all parts, [O, n R]."""
    rank = matrices[0].shape[1]
    width = matrices[0][layer].size // rank
    whole = np.zeros((len(adapter.rule.paths), width, len(matrices), rank), np.float32)
    for column, (part, b) in enumerate(zip(adapter.parts, matrices, strict=True)):
        whole[part, :, column] = b[layer].reshape(rank, width).T
    return whole.reshape(-1, len(matrices) * rank)


def _targets(model_type: str, found: Sequence[Adapter]) -> list[str]:
    """Ends of the modules' names: the last part, or with the one before where two end alike."""
    projections = [rule for rule in tables.RULES[model_type] if rule.paths[0].endswith(_KERNEL)]
    ends = [_module(rule).rpartition(".")[2] for rule in projections]
    names = []
    for adapter in found:
        block, _, end = _module(adapter.rule).rpartition(".")
        names.append(end if ends.count(end) == 1 else f"{block.rpartition('.')[2]}.{end}")
    return names


def _module(rule: tables.Rule) -> str:
    """The module of a tensor, within the body; `{}` is the number of the layer."""
    return rule.name.removesuffix(_WEIGHT)


def _beside(path: str, name: str) -> str:
    return f"{path.rpartition('/')[0]}/{name}"
