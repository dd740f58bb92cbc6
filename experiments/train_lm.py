"""Trains a decoder-only language model on text.

python experiments/train_lm.py --workdir=runs/lm
"""

import dataclasses
import functools

from jaxtrain.config import OptimizerConfig, RunConfig, field, override
from jaxtrain.data.text import TextDataConfig
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
    from jaxtrain.data.text import text_datasets
    from jaxtrain.losses import lm_loss
    from jaxtrain.models.transformer import transformer

    train_data, eval_data, info = text_datasets(config.data)
    info.check_vocabulary(config.model.vocab_size)
    model = transformer(config.model, precision=config.precision, remat=config.remat)
    return Experiment(
        model=model,
        loss_fn=lm_loss(model, z_loss=config.z_loss),
        train_data=train_data,
        eval_data=eval_data,
        describe=info.facts(eval_data),
    )


if __name__ == "__main__":
    main(LmConfig, build, presets={"model": PRESETS})
