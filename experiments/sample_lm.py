"""Generates text from a checkpoint of train_lm.py, or of `jaxtrain import-hf`.

python experiments/sample_lm.py --workdir=runs/lm --prompt="def main("
"""

import dataclasses
import logging

from jaxtrain.config import Config, field
from jaxtrain.errors import ConfigError
from jaxtrain.main import run_tool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """What --flags set."""

    workdir: str = field("runs/lm", help="directory of the run that trained the model")
    step: int = field(-1, minimum=-1, help="checkpoint to take; -1: the newest")
    prompt: str = field("import ", help="text to go on from")
    num_tokens: int = field(100, unit="tokens", minimum=1, help="how much to generate")
    num_samples: int = field(1, minimum=1, help="how many continuations")
    temperature: float = field(0.8, minimum=0, help="divides the scores; 0: the likeliest token")
    top_k: int = field(0, unit="tokens", minimum=0, help="draw from the k likeliest; 0: from all")
    top_p: float = field(
        0.95, above=0, maximum=1, help="draw from the likeliest that reach this probability"
    )
    seed: int = field(0, minimum=0, maximum=2**32 - 1, help="of the draws")


def sample(config: SampleConfig) -> None:
    """Restores the parameters of a run, without its optimizer, and prints continuations."""
    from train_lm import LmConfig

    from jaxtrain.data.shards import shard_roots
    from jaxtrain.data.text import tokenizer_of
    from jaxtrain.hf.keep import kept_tokenizer
    from jaxtrain.models.sample import generate
    from jaxtrain.models.transformer import transformer
    from jaxtrain.runs import load_params, read_config

    if not config.prompt:
        raise ConfigError("prompt is empty; give at least one character to go on from.")
    run = read_config(config.workdir, LmConfig)
    # Of a model that was imported, unless it has been trained on shards since.
    imported = None if shard_roots(run.data.source) else kept_tokenizer(config.workdir)
    tokenizer = imported or tokenizer_of(run.data)
    (prompt,) = tokenizer.encode([config.prompt.encode()])
    length = len(prompt) + config.num_tokens
    practised = run.model.max_length if imported else run.data.sequence_length
    if length > practised:
        logging.getLogger("jaxtrain").warning(
            "prompt and num_tokens=%d make %d tokens; the model was trained on %d at a time and has"
            " not learned to go on after them",
            config.num_tokens,
            length,
            practised,
        )
    model = transformer(run.model, precision=run.precision)
    params = load_params(model, config.workdir, step=config.step)
    continuations = generate(
        model,
        params,
        [prompt] * config.num_samples,
        num_tokens=config.num_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    for tokens in continuations:
        print(f"{config.prompt}{tokenizer.decode(tokens)}\n")


if __name__ == "__main__":
    run_tool(SampleConfig, sample)
