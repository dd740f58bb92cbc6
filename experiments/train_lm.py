"""Trains a decoder-only language model on text.

python experiments/train_lm.py --workdir=runs/lm

The default, nano (918,656 parameters) on the source of Python's standard library, takes 500 steps:
about 4 minutes on 2 cores, to a validation loss of 1.36 nats per byte.
"""

import dataclasses
import functools
from typing import Any

from jaxtrain.config import OptimizerConfig, RunConfig, field, override
from jaxtrain.data.text_config import TextDataConfig
from jaxtrain.hf.configs import ModelPresets
from jaxtrain.main import Experiment, main
from jaxtrain.models.transformer_config import PRESETS, TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmConfig(RunConfig):
    """The run's fields, and what a language model adds."""

    workdir: str = override(RunConfig, "workdir", "runs/lm")
    num_steps: int = override(RunConfig, "num_steps", 500)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    data: TextDataConfig = field(default_factory=TextDataConfig)
    optimizer: OptimizerConfig = field(
        default_factory=functools.partial(OptimizerConfig, learning_rate=3e-3, warmup_steps=-1)
    )
    z_loss: float = field(
        0.0, minimum=0, help="weight of the squared logarithm of the softmax's normaliser; 0: none"
    )


def build(config: LmConfig) -> Experiment:
    """Makes model, loss and data. Heavy imports are here, so that --help answers at once."""
    import jax

    from jaxtrain.data.text import tokenizer_of
    from jaxtrain.data.text_mixture import lm_datasets
    from jaxtrain.losses import lm_loss
    from jaxtrain.models.transformer import transformer

    train_data, eval_data, info = lm_datasets(config.data)
    info.check_vocabulary(config.model.vocab_size)
    model = transformer(config.model, precision=config.precision, remat=config.remat)
    facts = info.facts(eval_data)

    def compare(result: Any) -> None:
        orders = [facts.get(f"validation_entropy_order_{order}") for order in (1, 2)]
        loss = result.eval_metrics.get("loss")
        if jax.process_index() == 0 and loss is not None and None not in orders:
            print(
                f"validation loss {loss:.3f} nats per byte; given one byte before, the same bytes "
                f"have an entropy of {orders[0]:.3f}, given two of {orders[1]:.3f}"
            )

    return Experiment(
        model=model,
        loss_fn=lm_loss(model, z_loss=config.z_loss),
        train_data=train_data,
        eval_data=eval_data,
        describe=facts,
        on_end=compare,
        decode=lambda tokens: tokenizer_of(config.data).decode(tokens),
    )


if __name__ == "__main__":
    main(LmConfig, build, presets={"model": ModelPresets(PRESETS)})
