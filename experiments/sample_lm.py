"""Generates text from a run of train_lm.py or finetune_lm.py, or of `jaxtrain import-hf`.

python experiments/sample_lm.py --workdir=runs/lm --prompt="def main("
"""

import dataclasses
import logging

from jaxtrain.config import Config, field
from jaxtrain.main import run_tool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """What --flags set."""

    workdir: str = field("runs/lm", help="directory of the run that trained the model")
    step: int = field(-1, minimum=-1, help="checkpoint to take; -1: the newest")
    prompt: tuple[str, ...] = field(
        ("import ",), repeated=True, used_when={"prompts_file": ("",)}, help="text to go on from"
    )
    prompts_file: str = field(
        "", help="a prompt in each line; or .jsonl: records with prompt, or with messages (--chat)"
    )
    chat: bool = field(False, help="prompts are messages of a user, in the model's chat template")
    chat_template: str = field(
        "", used_when={"chat": (True,)}, help="file with a Jinja template; empty: the run's"
    )
    num_tokens: int = field(100, unit="tokens", minimum=1, help="how much to generate at most")
    num_samples: int = field(1, minimum=1, help="how many continuations of each prompt")
    stop: tuple[str, ...] = field((), repeated=True, help="text before which an answer ends")
    batch_size: int = field(16, minimum=1, help="how many are generated at once")
    temperature: float = field(0.8, minimum=0, help="divides the scores; 0: the likeliest token")
    top_k: int = field(0, unit="tokens", minimum=0, help="draw from the k likeliest; 0: from all")
    top_p: float = field(
        0.95, above=0, maximum=1, help="draw from the likeliest that reach this probability"
    )
    seed: int = field(0, minimum=0, maximum=2**32 - 1, help="of the draws")


def sample(config: SampleConfig) -> None:
    """Restores the parameters of a run, without its optimizer, and prints continuations."""
    from jaxtrain.answers import answer
    from jaxtrain.lm_runs import read_lm_run
    from jaxtrain.prompts import make_prompts, read_prompts

    run = read_lm_run(config.workdir)
    text = run.open_text()
    asked = read_prompts(config.prompts_file) if config.prompts_file else config.prompt
    template = text.chat_template(config.chat_template) if config.chat else None
    prompts = make_prompts(asked, text.tokenizer, beginning=text.beginning, template=template)
    run.warn_of_length(max(len(one.tokens) for one in prompts), config.num_tokens)
    model, params = run.load(step=config.step)
    prompts = [prompt for prompt in prompts for _ in range(config.num_samples)]
    texts, speed = answer(
        model,
        params,
        prompts,
        text.tokenizer,
        num_tokens=config.num_tokens,
        stop_strings=config.stop,
        stop_tokens=text.stop_tokens,
        batch_size=config.batch_size,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    for prompt, continuation in zip(prompts, texts, strict=True):
        print(f"{prompt.shown}{continuation}\n")
    logging.getLogger("jaxtrain").info("%s", speed)


if __name__ == "__main__":
    run_tool(SampleConfig, sample)
