"""Configuration of the transformer and its presets. Imports no jax: `--help` needs only this."""

import dataclasses
import math
from typing import Any

from jaxtrain.config import Config, field
from jaxtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """A decoder-only transformer; the defaults are the preset `nano`."""

    vocab_size: int = field(256, unit="tokens", minimum=1, help="size of the vocabulary")
    vocab_multiple: int = field(
        128, minimum=1, help="the vocabulary is stored padded to a multiple of this"
    )
    num_layers: int = field(4, minimum=1, help="number of blocks")
    embed_dim: int = field(128, minimum=1, help="width of the residual stream")
    num_heads: int = field(4, minimum=1, help="query heads")
    num_kv_heads: int = field(0, minimum=0, help="key and value heads; 0: as many as num_heads")
    head_dim: int = field(0, minimum=0, help="size of a head; 0: embed_dim / num_heads")
    mlp_dim: int = field(384, minimum=1, help="width inside the feed-forward layers")
    activation: str = field(
        "swiglu", choices=("gelu", "swiglu", "geglu"), help="of the feed-forward layers"
    )
    norm: str = field(
        "rms",
        choices=("layer", "rms", "rms_plus_one"),
        help="LayerNorm, RMSNorm, or Gemma's RMSNorm, which multiplies with 1 + scale",
    )
    norm_epsilon: float = field(1e-5, positive=True, help="added to the variance in norms")
    block_norms: str = field(
        "before",
        choices=("before", "after", "both"),
        help="norm what goes into attention and feed-forward layers, what comes out, or both",
    )
    qk_norm: bool = field(False, help="RMSNorm of queries and keys, before rotation")
    qk_norm_over: str = field(
        "head",
        choices=("head", "heads"),
        used_when={"qk_norm": (True,)},
        help="over each head by itself, or over all heads together (OLMo 2)",
    )
    use_bias: bool = field(False, help="biases in attention and feed-forward layers")
    qkv_bias: bool = field(
        False,
        used_when={"use_bias": (False,)},
        help="biases of queries, keys and values only (Qwen 2)",
    )
    window: int = field(
        0, unit="tokens", minimum=0, help="how many tokens attention sees, itself included; 0: all"
    )
    full_attention_every: int = field(
        0,
        unit="layers",
        minimum=0,
        help="every n-th layer sees all tokens in spite of a window; 0: none does",
    )
    attention_scalar: float = field(
        0.0, minimum=0, help="scores are divided by the square root of this; 0: the head size"
    )
    attention_softcap: float = field(
        0.0, minimum=0, help="limit c of attention scores: c * tanh(score / c); 0: none"
    )
    logit_softcap: float = field(0.0, minimum=0, help="the same for the output layer; 0: none")
    embed_scale: bool = field(False, help="multiply embeddings by the square root of embed_dim")
    positions: str = field("rotary", choices=("learned", "rotary"), help="how positions enter")
    max_length: int = field(
        1024,
        unit="tokens",
        minimum=1,
        used_when={"positions": ("learned",)},
        help="rows of the table of learned positions",
    )
    rope_theta: float = field(
        10_000.0,
        positive=True,
        used_when={"positions": ("rotary",)},
        help="base of the wavelengths of rotary positions",
    )
    rope_local_theta: float = field(
        0.0,
        minimum=0,
        used_when={"positions": ("rotary",)},
        help="rope_theta, and no rope_scaling, of the layers with a window; 0: as the other layers",
    )
    rope_scaling: str = field(
        "none",
        choices=("none", "linear", "llama3"),
        used_when={"positions": ("rotary",)},
        help="longer wavelengths for contexts beyond those of pretraining: linear stretches all, "
        "llama3 the long ones",
    )
    rope_factor: float = field(
        32.0,
        minimum=1,
        used_when={"rope_scaling": ("linear", "llama3")},
        help="stretch of the longest wavelengths",
    )
    rope_low_frequency_factor: float = field(
        1.0,
        positive=True,
        used_when={"rope_scaling": ("llama3",)},
        help="original length / this: shortest wavelength that is stretched whole",
    )
    rope_high_frequency_factor: float = field(
        4.0,
        positive=True,
        used_when={"rope_scaling": ("llama3",)},
        help="original length / this: longest wavelength that is left alone",
    )
    rope_original_length: int = field(
        8192,
        unit="tokens",
        minimum=1,
        used_when={"rope_scaling": ("llama3",)},
        help="context of the pretraining",
    )
    tie_embeddings: bool = field(False, help="the output layer is the embedding, transposed")
    dropout: float = field(
        0.0, minimum=0, below=1, help="rate, on the embedding and on what each layer adds"
    )
    scan_unroll: int = field(
        0,
        unit="layers",
        minimum=0,
        on_resume="free",
        help="layers per iteration of the loop over them; 0: all on CPU up to 8 layers, else 1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_dim and self.embed_dim % self.num_heads:
            raise ConfigError(
                f"embed_dim={self.embed_dim} is not divisible by num_heads={self.num_heads}; "
                "change one of them or give head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads="
                f"{self.num_kv_heads}; every key head serves the same number of query heads"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"rotary positions turn pairs and need an even head size; got {self.head_size}"
            )
        for name in ("full_attention_every", "rope_local_theta"):
            if getattr(self, name) and not self.window:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is for layers with a window, and window=0; give "
                    f"window, or leave {name} out"
                )
        if self.rope_low_frequency_factor >= self.rope_high_frequency_factor:
            raise ConfigError(
                f"rope_low_frequency_factor={self.rope_low_frequency_factor} must be below "
                f"rope_high_frequency_factor={self.rope_high_frequency_factor}"
            )

    @property
    def head_size(self) -> int:
        """Size of a head, resolved."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied with."""
        return 1 / math.sqrt(self.attention_scalar or self.head_size)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


PRESETS: dict[str, dict[str, Any]] = {
    # About a million parameters over bytes: learns Python source in minutes on two cores.
    "nano": {},
    "gpt2": {
        "vocab_size": 50_257,
        "num_layers": 12,
        "embed_dim": 768,
        "num_heads": 12,
        "mlp_dim": 3072,
        "activation": "gelu",
        "norm": "layer",
        "use_bias": True,
        "positions": "learned",
        "max_length": 1024,
        "tie_embeddings": True,
    },
    "llama3.2-1b": {
        "vocab_size": 128_256,
        "num_layers": 16,
        "embed_dim": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_dim": 8192,
        "rope_theta": 500_000.0,
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
        "tie_embeddings": True,
    },
    "llama3-8b": {
        "vocab_size": 128_256,
        "num_layers": 32,
        "embed_dim": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_dim": 14_336,
        "rope_theta": 500_000.0,
    },
    "llama3-70b": {
        "vocab_size": 128_256,
        "num_layers": 80,
        "embed_dim": 8192,
        "num_heads": 64,
        "num_kv_heads": 8,
        "mlp_dim": 28_672,
        "rope_theta": 500_000.0,
    },
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "num_layers": 28,
        "embed_dim": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_dim": 3072,
        "norm_epsilon": 1e-6,
        "qk_norm": True,
        "rope_theta": 1_000_000.0,
        "tie_embeddings": True,
    },
}
"""Name -> what differs from the defaults."""
