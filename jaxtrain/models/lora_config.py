"""Configuration of LoRA. Imports no jax: `--help` needs only this."""

import dataclasses

from jaxtrain.config import Config, field
from jaxtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Config):
    """Low-rank adaptation of a transformer's projections; off unless `rank` is given."""

    rank: int = field(0, minimum=0, help="of the update of a projection; 0: no LoRA")
    alpha: float = field(16.0, positive=True, help="the update counts alpha / rank")
    targets: str = field(
        "attention/(q|v)/",
        pattern=True,
        help="which projections: searched in paths like layers/attention/q/kernel, "
        "layers/mlp/up/kernel",
    )
    base_dtype: str = field(
        "bfloat16",
        choices=("bfloat16", "float32"),
        help="how the parameters that do not train are kept",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank:
            return
        for name in ("alpha", "targets", "base_dtype"):
            value = getattr(self, name)
            if value != getattr(LoraConfig, name):
                raise ConfigError(
                    f"lora.{name}={value} does nothing without LoRA; give lora.rank, e.g. "
                    f"--lora.rank=8, or leave lora.{name} out"
                )

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied with."""
        return self.alpha / self.rank if self.rank else 0.0
