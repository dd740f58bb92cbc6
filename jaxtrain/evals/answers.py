"""The three kinds of requests of lm-eval, answered by a `Subject`; without lm-eval itself."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.errors import ConfigError
from jaxtrain.evals.generating import Generator
from jaxtrain.evals.pairs import Coder
from jaxtrain.evals.scoring import Score, Scorer
from jaxtrain.evals.subject import Subject

__all__ = ["Answers", "GenerationSettings"]

_MAX_TOKENS = 256
"""lm-eval's own default."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Without a meaning where the likeliest token is taken.
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class GenerationSettings(NamedTuple):
    """When an answer ends."""

    stops: tuple[str, ...]
    max_tokens: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "GenerationSettings":
        """Those of the generation_kwargs of a task.

        Raises:
            ConfigError: for sampling, and for options that would change the answers.
        """
        rest = dict(given)
        until = rest.pop("until", None) or ()
        lengths = [rest.pop(name) for name in _LENGTHS if rest.get(name) is not None]
        is_sampled = rest.pop("do_sample", None)
        temperature = float(rest.get("temperature") or 0)
        if temperature and is_sampled is not False:
            raise ConfigError(
                "answers are the likeliest ones, and generation_kwargs of a task ask for samples "
                f"(do_sample={is_sampled}, temperature={temperature:g}); set do_sample: false "
                "there."
            )
        unread = [f"{name}={value}" for name, value in rest.items() if name not in _OF_SAMPLING]
        if unread:
            raise ConfigError(
                f"generation_kwargs of a task hold {', '.join(unread)}, which is not done here; "
                f"until, {_LENGTHS[0]} and do_sample are. Leave the others out."
            )
        stops = (until,) if isinstance(until, str) else tuple(until)
        return cls(stops, int(lengths[0]) if lengths else _MAX_TOKENS)


class Answers:
    """A model that answers requests."""

    def __init__(self, subject: Subject, *, global_batch_size: int = 0) -> None:
        """Takes a model.

        Args:
            subject: from `open_run` or `open_directory`.
            global_batch_size: rows at a time; 0: 8 for each batch shard.

        Raises:
            ConfigError: for a batch that the mesh does not divide, and in a run of several
                processes.
        """
        self.subject = subject
        self._coder = Coder(subject.tokenizer, subject.prefix)
        self._scorer = Scorer(
            subject.model,
            subject.params,
            subject.mesh,
            max_length=subject.max_length,
            global_batch_size=global_batch_size,
        )
        self._generator = Generator(
            subject.model,
            subject.params,
            subject.mesh,
            self._coder,
            ends=subject.ends,
            max_length=subject.max_length,
            global_batch_size=global_batch_size,
        )

    def log_likelihoods(self, requests: Sequence[tuple[str, str]]) -> list[Score]:
        """Of each (context, continuation)."""
        return self._scorer.score([self._coder.pair(*request) for request in requests])

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Of each whole text, in windows as long as the model reads at a time."""
        windows = [self._coder.windows(text, self.subject.max_length) for text in texts]
        scores = iter(self._scorer.score([pair for pairs in windows for pair in pairs]))
        return [math.fsum(next(scores).log_likelihood for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What follows each context, as its generation_kwargs say."""
        settings = [GenerationSettings.of(given) for _, given in requests]
        found: dict[int, str] = {}
        for one in dict.fromkeys(settings):
            chosen = [number for number, other in enumerate(settings) if other == one]
            prompts = [requests[number][0] for number in chosen]
            answers = self._generator.generate(prompts, stops=one.stops, max_tokens=one.max_tokens)
            found.update(zip(chosen, answers, strict=True))
        return [found[number] for number in range(len(requests))]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        """A conversation as text.

        Args:
            messages: each with role and content.
            asks: whether the assistant answers next; else it goes on with the last message.
        """
        template = self.subject.template()
        return template.prompt(messages) if asks else template.begun(messages)
