"""Our models behind the interface of lm-eval; the only import of it, which is an extra."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

from jaxtrain.errors import ConfigError
from jaxtrain.evals.answers import Answers
from jaxtrain.values import did_you_mean

__all__ = ["HarnessModel", "open_tasks", "run_tasks"]


class HarnessModel(LM):
    """Hands what lm-eval asks to `Answers`."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        found = self._answers.log_likelihoods(_args(requests))
        return [(score.log_likelihood, score.is_greedy) for score in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        return self._answers.rolling_log_likelihoods([text for (text,) in _args(requests)])

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        return self._answers.generate_until(_args(requests))

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._answers.chat_prompt(chat_history, asks=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._answers.subject.template_place if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        return self._answers.subject.tokenizer.name


def _args(requests: Sequence[Any]) -> list[Any]:
    return [request.args for request in requests]


def open_tasks(names: Sequence[str], paths: Sequence[str]) -> TaskManager:
    """Where the tasks are, all of which must be there.

    Args:
        names: of tasks and groups, with * for any letters.
        paths: folders with task files besides those of lm-eval.

    Raises:
        ConfigError: for a name that no task has.
    """
    manager = TaskManager(include_path=list(paths) or None)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"tasks={','.join(unknown)} must be tasks of lm-eval or of --task_path"
            f"{did_you_mean(unknown[0], manager.all_tasks)}"
        )
    return manager


def run_tasks(
    answers: Answers,
    manager: TaskManager,
    names: Sequence[str],
    *,
    num_fewshot: int,
    limit: int,
    apply_chat_template: bool,
) -> dict[str, Any]:
    """What lm-eval finds.

    Args:
        answers: of the model.
        manager: from `open_tasks`.
        names: of tasks and groups.
        num_fewshot: examples before each question; -1: as the task says.
        limit: questions of each task; 0: all.
        apply_chat_template: whether questions are put as a user of a chat would.
    """
    evaluate: Any = simple_evaluate  # a decorator hides its parameters from type checkers
    found = evaluate(
        model=HarnessModel(answers),
        tasks=manager.match_tasks(list(names)),
        task_manager=manager,
        num_fewshot=None if num_fewshot < 0 else num_fewshot,
        limit=limit or None,
        apply_chat_template=apply_chat_template,
        fewshot_as_multiturn=apply_chat_template,
        log_samples=False,
    )
    return dict(found)
