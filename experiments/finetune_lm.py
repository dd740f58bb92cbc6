"""Fine-tunes a language model on prompts with completions, or on chats.

python experiments/finetune_lm.py --model=DIR --checkpoint.restore_from=DIR --lora.rank=8 \\
    --data.source=chats.jsonl --workdir=runs/tuned

Says loss, perplexity and an answer before and after. Without --lora.rank all parameters train.
"""

import dataclasses
import logging
import math
from typing import Any

from jaxtrain.config import OptimizerConfig, RunConfig, field, override
from jaxtrain.data.examples_config import ExamplesConfig
from jaxtrain.hf.configs import ModelPresets
from jaxtrain.hf.keep import tokenizer_folder
from jaxtrain.main import Experiment, main
from jaxtrain.models.lora_config import LoraConfig
from jaxtrain.models.transformer_config import PRESETS, TransformerConfig

_logger = logging.getLogger("jaxtrain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """The run's fields, and what fine-tuning adds."""

    workdir: str = override(RunConfig, "workdir", "runs/tuned")
    num_steps: int = override(RunConfig, "num_steps", 200)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: ExamplesConfig = field(default_factory=ExamplesConfig)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=2e-4, warmup_steps=-1)
    )
    sample_tokens: int = field(32, minimum=0, help="length of the answers shown; 0: none")


def build(config: FinetuneConfig) -> Experiment:
    """Makes model, loss and data. Heavy imports are here, so that --help answers at once."""
    import jax

    from jaxtrain.data.examples import examples_datasets, open_model_tokenizer, stand_in
    from jaxtrain.losses import lm_loss
    from jaxtrain.models.sample import greedy_answer
    from jaxtrain.models.transformer import transformer

    kinds = {"precision": config.precision, "remat": config.remat}
    model = transformer(config.model, lora=config.lora, **kinds)
    if config.plan and not config.data.source:
        return Experiment(model=model, loss_fn=lm_loss(model), train_data=stand_in(config.data))
    folder = tokenizer_folder(config.checkpoint.restore_from, config.workdir)
    tokenizer, template = open_model_tokenizer(config.data, folder)
    train_data, eval_data, info = examples_datasets(config.data, tokenizer, template)
    info.check_vocabulary(config.model.vocab_size)
    end, room = tokenizer.end_of_document, config.data.sequence_length - config.sample_tokens
    prompt = info.prompt[-max(room, 1) :] or (end,)

    def show(when: str, params: Any, means: Any) -> None:
        if loss := means.get("loss"):
            _logger.info("%s: loss %.4f nats, perplexity %.5g", when, loss, math.exp(loss))
        if config.sample_tokens and jax.process_count() == 1:
            answer = greedy_answer(model, params, prompt, num_tokens=config.sample_tokens, end=end)
            _logger.info("%s: %r -> %r", when, *map(tokenizer.decode, (prompt, answer)))

    return Experiment(
        model=model,
        loss_fn=lm_loss(model),
        train_data=train_data,
        eval_data=eval_data,
        describe=info.facts(None),
        on_start=lambda state, means: show("before", state.params, means),
        on_end=lambda result: show("after", result.state.params, result.eval_metrics),
        decode=tokenizer.decode,
    )


if __name__ == "__main__":
    main(FinetuneConfig, build, presets={"model": ModelPresets(PRESETS)})
