"""What a batch for the transformer must be; checked while tracing."""

from jaxtrain.errors import ConfigError
from jaxtrain.models.functional import Batch
from jaxtrain.models.transformer_config import TransformerConfig

__all__ = ["check_batch", "check_length"]


def check_batch(config: TransformerConfig, batch: Batch) -> None:
    """Refuses shapes that do not fit each other.

    Raises:
        ConfigError: naming the shapes.
    """
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise ConfigError(f"tokens must be [rows, length], got the shape {list(shape)}.")
    check_length(config, shape[1])
    if "segment_ids" in batch and batch["segment_ids"].shape != shape:
        raise ConfigError(
            f"segment_ids must have the shape of tokens, {list(shape)}; got "
            f"{list(batch['segment_ids'].shape)}."
        )


def check_length(config: TransformerConfig, length: int) -> None:
    """Refuses rows that are longer than the table of learned positions.

    Raises:
        ConfigError: with both lengths.
    """
    if config.positions == "learned" and length > config.max_length:
        raise ConfigError(
            f"{length} tokens do not fit the {config.max_length} learned positions; use shorter "
            "rows or a larger model.max_length."
        )
