"""How each architecture of Hugging Face writes its config.json: tables that are read both ways.

Keys, defaults and layer types are those of transformers 5.24 (`GPT2Config`, `LlamaConfig`, ...).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one architecture writes its configuration."""

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    """Key of config.json -> field of `TransformerConfig`. null there is 0 here."""
    fixed: Mapping[str, Any]
    """Field -> value that all models of the architecture have."""
    defaults: Mapping[str, Any]
    """Key -> what transformers takes where it is absent."""
    only: Mapping[str, Any]
    """Key -> the only value that is computed here."""
    window: str = "never"
    """Which layers have a window: "never"; "always"; "asked", where use_sliding_window is true;
    "pattern", all but every n-th."""
    pattern: int = 0
    """The n of "pattern", unless the file says otherwise."""


_KEYS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_bidirectional_attention": False,
}
_SWIGLU = {"activation": "swiglu", "norm": "rms", "positions": "rotary"}
_GEMMA_KEYS = _KEYS | {
    "query_pre_attn_scalar": "attention_scalar",
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logit_softcap",
}
_GEMMA_DEFAULTS = _DEFAULTS | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_ONLY = {key: value for key, value in _ONLY.items() if key != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh"
}
_GEMMA = {
    "activation": "geglu",
    "norm": "rms_plus_one",
    "positions": "rotary",
    "block_norms": "both",
    "embed_scale": True,
}


def _llama_like(model_type: str, class_name: str, **more: Any) -> Architecture:
    return Architecture(
        model_type=model_type,
        class_name=class_name,
        keys=_KEYS,
        fixed=_SWIGLU | more.pop("fixed", {}),
        defaults=_DEFAULTS | more.pop("defaults", {}),
        only=_ONLY,
        **more,
    )


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture(
            model_type="gpt2",
            class_name="GPT2LMHeadModel",
            keys={
                "vocab_size": "vocab_size",
                "n_layer": "num_layers",
                "n_embd": "embed_dim",
                "n_inner": "mlp_dim",
                "n_head": "num_heads",
                "n_positions": "max_length",
                "layer_norm_epsilon": "norm_epsilon",
                "tie_word_embeddings": "tie_embeddings",
            },
            fixed={
                "activation": "gelu",
                "norm": "layer",
                "positions": "learned",
                "use_bias": True,
            },
            defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
            only={
                "activation_function": "gelu_new",
                "add_cross_attention": False,
                "reorder_and_upcast_attn": False,
                "scale_attn_by_inverse_layer_idx": False,
                "scale_attn_weights": True,
            },
        ),
        _llama_like("llama", "LlamaForCausalLM"),
        _llama_like(
            "mistral",
            "MistralForCausalLM",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            window="always",
        ),
        _llama_like(
            "qwen2",
            "Qwen2ForCausalLM",
            fixed={"qkv_bias": True},
            defaults={"num_key_value_heads": 32, "sliding_window": 4096},
            window="asked",
        ),
        _llama_like(
            "qwen3",
            "Qwen3ForCausalLM",
            fixed={"qk_norm": True},
            defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
            window="asked",
        ),
        _llama_like(
            "olmo2",
            "Olmo2ForCausalLM",
            fixed={"qk_norm": True, "qk_norm_over": "heads", "block_norms": "after"},
            defaults={"rms_norm_eps": 1e-5},
        ),
        Architecture(
            model_type="gemma2",
            class_name="Gemma2ForCausalLM",
            keys=_GEMMA_KEYS,
            fixed=_GEMMA,
            defaults=_GEMMA_DEFAULTS
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            only=_GEMMA_ONLY,
            window="pattern",
            pattern=2,
        ),
        Architecture(
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            keys=_GEMMA_KEYS,
            fixed=_GEMMA | {"qk_norm": True},
            defaults=_GEMMA_DEFAULTS
            | {
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            only=_GEMMA_ONLY,
            window="pattern",
            pattern=6,
        ),
    )
}
"""model_type -> architecture."""
