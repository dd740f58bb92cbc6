"""Configuration of the transformer and its presets. Imports no jax: `--help` needs only this."""

import dataclasses
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
    activation: str = field("swiglu", choices=("gelu", "swiglu"), help="of the feed-forward layers")
    norm: str = field("rms", choices=("layer", "rms"), help="LayerNorm or RMSNorm")
    norm_epsilon: float = field(1e-5, positive=True, help="added to the variance in norms")
    qk_norm: bool = field(False, help="RMSNorm over each head's queries and keys, before rotation")
    use_bias: bool = field(False, help="biases in attention and feed-forward layers")
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
    rope_scaling: str = field(
        "none",
        choices=("none", "llama3"),
        used_when={"positions": ("rotary",)},
        help="llama3: longer wavelengths for contexts beyond those of pretraining",
    )
    rope_factor: float = field(
        32.0,
        minimum=1,
        used_when={"rope_scaling": ("llama3",)},
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
