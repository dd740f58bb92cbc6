"""config.json of Hugging Face <-> `TransformerConfig`, by the tables of `architectures`.

A value that would change the computation to one that we do not have is an error before any weight
is read. Rotary positions have two spellings, `rope_theta` with `rope_scaling`, and since
transformers 5 `rope_parameters`; both are read, and the older one, which every version knows, is
written.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.hf.architectures import ARCHITECTURES, Architecture
from jaxtrain.models.transformer_config import TransformerConfig

CONFIG = "config.json"

_SLIDING, _FULL = "sliding_attention", "full_attention"


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        CheckpointError: if it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON ({error})"
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; it holds a {type(content)}.")
    return content


def is_model_directory(path: Path) -> bool:
    """Whether a directory holds a model of Hugging Face, and not a run of ours."""
    if not (path / CONFIG).is_file() or (path / "checkpoints").exists():
        return False
    with contextlib.suppress(CheckpointError):
        return "model_type" in load_json(path / CONFIG)
    return False


def read_model_config(directory: Path) -> tuple[Architecture, TransformerConfig]:
    """What the config.json of a directory describes."""
    if not directory.is_dir():
        raise CheckpointError(f"DIR={directory} must be the directory of a model; there is none.")
    if not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"{directory} holds no {CONFIG}; give the directory of a model of Hugging Face, with "
            "config.json and safetensors files."
        )
    return read_config(load_json(directory / CONFIG), str(directory / CONFIG))


class ModelPresets(dict[str, Any]):
    """Presets of the transformer by name, and by the path of a model of Hugging Face."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not name:
            return bool(name)
        return is_model_directory(Path(str(name)).expanduser())

    def __getitem__(self, name: str) -> Any:
        if super().__contains__(name):
            return super().__getitem__(name)
        _, config = read_model_config(Path(name).expanduser())
        return {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != field.default
        }


def read_config(content: Mapping[str, Any], where: str) -> tuple[Architecture, TransformerConfig]:
    """What a config.json describes.

    Args:
        content: of the file.
        where: its path, for errors.

    Raises:
        ConfigError: naming every value that is not supported, or missing.
    """
    architecture = _architecture(content, where)
    problems: list[str] = []
    values = dict(architecture.fixed)
    for key, field in architecture.keys.items():
        value = content.get(key, architecture.defaults.get(key, _MISSING))
        if value is _MISSING:
            problems.append(f"{key} is missing")
            continue
        values[field] = 0 if value is None else value
    if not values.get("mlp_dim"):  # n_inner of GPT-2
        values["mlp_dim"] = 4 * int(values.get("embed_dim") or 0)
    for key, value in architecture.only.items():
        if content.get(key) not in (None, value):
            problems.append(f"{key}={content[key]!r} is not supported, only {value!r} is")
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "unknown")
        problems.append(
            f"quantization_config (quant_method {method!r}) is not supported; take the weights in "
            "float32, bfloat16 or float16"
        )
    if not problems:
        values |= _windows(content, architecture, values["num_layers"], problems)
    if values["positions"] == "rotary":
        values |= _rope(content, architecture, bool(values.get("window")), problems)
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}.")
    try:
        return architecture, TransformerConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def write_config(config: TransformerConfig, *, max_length: int) -> dict[str, Any]:
    """The config.json of a model that was not imported.

    Args:
        config: of the model.
        max_length: tokens that it was trained on at a time.

    Raises:
        ConfigError: if no architecture computes what the model does.
    """
    wanted = _normal(config)
    for architecture in ARCHITECTURES.values():
        content = _written(wanted, architecture, max_length)
        try:
            _, again = read_config(content, CONFIG)
        except ConfigError:
            continue
        if _normal(again) == wanted:
            return content
    raise ConfigError(
        "no architecture of Hugging Face that is known here computes what this model does; they "
        f"are {', '.join(ARCHITECTURES)}."
    )


def differences(ours: TransformerConfig, theirs: TransformerConfig) -> list[str]:
    """What differs between two models, as flags that make the first like the second."""
    mine, other = _normal(ours), _normal(theirs)
    return [
        f"--model.{field.name}={getattr(other, field.name)}"
        for field in dataclasses.fields(TransformerConfig)
        if getattr(mine, field.name) != getattr(other, field.name)
    ]


# Inside

_MISSING = object()


def _architecture(content: Mapping[str, Any], where: str) -> Architecture:
    model_type = content.get("model_type")
    if model_type not in ARCHITECTURES:
        hint = (
            "; of gemma3 only the text models (gemma3_text) are" if model_type == "gemma3" else ""
        )
        raise ConfigError(
            f"{where}: model_type={model_type!r} is not supported, these are: "
            f"{', '.join(ARCHITECTURES)}{hint}."
        )
    architecture = ARCHITECTURES[model_type]
    named = content.get("architectures") or [architecture.class_name]
    if architecture.class_name not in named:
        raise ConfigError(
            f"{where}: architectures={named} is not supported; of model_type {model_type!r} only "
            f"{architecture.class_name} is."
        )
    return architecture


def _windows(
    content: Mapping[str, Any], architecture: Architecture, num_layers: int, problems: list[str]
) -> dict[str, Any]:
    """Fields about sliding windows."""
    window = content.get("sliding_window", architecture.defaults.get("sliding_window"))
    types = content.get("layer_types")
    if types is None:
        types = _default_types(content, architecture, window, num_layers)
    if len(types) != num_layers or set(types) - {_SLIDING, _FULL}:
        problems.append(
            f"layer_types must name {_SLIDING} or {_FULL} for each of {num_layers} layers; it is "
            f"{types}"
        )
        return {}
    if _SLIDING not in types:
        return {}
    if not window or architecture.window == "never":
        problems.append(
            f"layer_types has {_SLIDING}, and sliding_window={window}"
            if not window
            else f"sliding windows are not supported for model_type {architecture.model_type!r}"
        )
        return {}
    for every in (0, *range(2, num_layers + 1)):
        if types == _types(every, num_layers):
            return {"window": window, "full_attention_every": every}
    problems.append(
        f"layer_types is not supported unless all layers, or all but every n-th one, are {_SLIDING}"
    )
    return {}


def _default_types(
    content: Mapping[str, Any], architecture: Architecture, window: Any, num_layers: int
) -> list[str]:
    if architecture.window == "always" and window:
        return [_SLIDING] * num_layers
    if architecture.window == "asked" and content.get("use_sliding_window"):
        first = content.get("max_window_layers", 28)
        return [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    if architecture.window == "pattern":
        every = content.get("sliding_window_pattern", content.get("_sliding_window_pattern"))
        return _types(every or architecture.pattern, num_layers)
    return [_FULL] * num_layers


def _types(every: int, num_layers: int) -> list[str]:
    """Layer types where every n-th layer sees all tokens; 0: none does."""
    return [
        _FULL if every and layer % every == 0 else _SLIDING for layer in range(1, num_layers + 1)
    ]


def _rope(
    content: Mapping[str, Any], architecture: Architecture, has_window: bool, problems: list[str]
) -> dict[str, Any]:
    """Fields about rotary positions, from either spelling."""
    defaults = architecture.defaults
    whole = content.get("rope_parameters")
    local = {
        "rope_theta": content.get("rope_local_base_freq", defaults.get("rope_local_base_freq"))
    }
    if whole and {_SLIDING, _FULL} & whole.keys():
        local = whole.get(_SLIDING) or local
        whole = whole.get(_FULL)
    whole = dict(whole or content.get("rope_scaling") or {})
    theta = whole.get("rope_theta") or content.get("rope_theta") or defaults.get("rope_theta", 1e4)
    values: dict[str, Any] = {"rope_theta": theta}
    kind = _rope_type(whole)
    names = {
        "linear": {"factor": "rope_factor"},
        "llama3": {
            "factor": "rope_factor",
            "low_freq_factor": "rope_low_frequency_factor",
            "high_freq_factor": "rope_high_frequency_factor",
            "original_max_position_embeddings": "rope_original_length",
        },
        "default": {},
    }
    if kind not in names or _rope_type(local) != "default":
        problems.append(
            f"rope_type={kind if kind not in names else _rope_type(local)!r} is not supported"
            f"{'' if kind not in names else f' for {_SLIDING}'}; these are: {', '.join(names)}"
        )
        return {}
    if (factor := whole.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor={factor} is not supported, only 1.0 is")
    missing = [key for key in names[kind] if whole.get(key) is None]
    if missing:
        problems.append(f"rope_type={kind!r} needs {', '.join(missing)}")
        return {}
    values |= {field: whole[key] for key, field in names[kind].items()}
    if kind != "default":
        values["rope_scaling"] = kind
    is_own = local.get("rope_theta") and (local["rope_theta"] != theta or kind != "default")
    if has_window and is_own:
        values["rope_local_theta"] = local["rope_theta"]
    return values


def _rope_type(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _normal(config: TransformerConfig) -> TransformerConfig:
    """The configuration with derived sizes filled in, and without what changes no result."""
    default = TransformerConfig()
    return config.replace(
        num_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        attention_scalar=config.attention_scalar or config.head_size,
        vocab_multiple=default.vocab_multiple,
        dropout=default.dropout,
        scan_unroll=default.scan_unroll,
    )


def _written(
    config: TransformerConfig, architecture: Architecture, max_length: int
) -> dict[str, Any]:
    """The file of a configuration, if it is one of this architecture; else some other one."""
    softcaps = ("attention_softcap", "logit_softcap")
    content: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{key: value for key, value in architecture.only.items() if key in _SAID},
    }
    for key, field in architecture.keys.items():
        value = getattr(config, field)
        content[key] = None if field in softcaps and not value else value
    if config.positions == "rotary":
        content["max_position_embeddings"] = max_length
        content["rope_theta"] = config.rope_theta
        if config.rope_scaling != "none":
            content["rope_scaling"] = {
                "rope_type": config.rope_scaling,
                "factor": config.rope_factor,
            }
        if config.rope_scaling == "llama3":
            content["rope_scaling"] |= {
                "low_freq_factor": config.rope_low_frequency_factor,
                "high_freq_factor": config.rope_high_frequency_factor,
                "original_max_position_embeddings": config.rope_original_length,
            }
    if config.rope_local_theta:
        content["rope_local_base_freq"] = config.rope_local_theta
    if architecture.window in ("always", "pattern"):
        content["sliding_window"] = config.window or None
    if architecture.window == "pattern":
        content["layer_types"] = _types(config.full_attention_every, config.num_layers)
    return content


_SAID = ("hidden_act", "hidden_activation", "activation_function", "attention_bias")
