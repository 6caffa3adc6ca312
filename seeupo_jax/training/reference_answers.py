"""The tasks' reference answers as tokens, for the information gain of turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import Tasks
from seeupo_jax.envs.tasks import list_tasks, task_reference
from seeupo_jax.learner.credit.information_gain import AnswerTokens
from seeupo_jax.policy.files.tokenizer import Tokenizer

PLACE = "{answer}"  # in `config.algorithm.estimator.gain_template`
CHECKED = 64  # tasks whose answers are asked for before a run begins


def check_references(config: Config, tasks: Tasks) -> None:
    """Whether the training tasks have the reference answers that the algorithm scores.

    Raises:
      ValueError: one sentence: one of the first tasks has none.
    """
    if not config.algorithm.estimator.scores_answers:
        return
    for task_id in list_tasks(tasks, "train")[:CHECKED]:
        if task_reference(tasks, task_id) is None:
            raise ValueError(
                "config.algorithm.estimator.gain: got reference with"
                f" advantage={config.algorithm.advantage}, but task {task_id!r} has no reference"
                " answer; allowed: turn_reward, where the environment rewards turns, or tasks with"
                " reference(task_id)."
            )


class ReferenceAnswers:
    """Asks each task once, and keeps what its answer is as the closing message.

    Args:
      tasks: what knows the answers. template: a message with `PLACE` once.
      warn: gets a sentence for a task whose answer cannot be scored, which has no gains.
    """

    def __init__(
        self, tasks: Tasks, tokenizer: Tokenizer, template: str, warn: Callable[[str], None]
    ):
        self._tasks, self._tokenizer, self._warn = tasks, tokenizer, warn
        self._before, _, self._after = template.partition(PLACE)
        self._sizes = np.array([len(text) for text in tokenizer.token_bytes()])
        self._answers: dict[str, AnswerTokens | None] = {}

    def of(self, task_ids: Iterable[str]) -> dict[str, AnswerTokens]:
        """The answers of those tasks that have one."""
        for task_id in dict.fromkeys(task_ids):
            if task_id not in self._answers:
                self._answers[task_id] = self._ask(task_id)
        answers = ((task_id, self._answers[task_id]) for task_id in task_ids)
        return {task_id: answer for task_id, answer in answers if answer is not None}

    def _ask(self, task_id: str) -> AnswerTokens | None:
        try:
            answer = task_reference(self._tasks, task_id)
            if answer is None:
                self._warn(f"task {task_id!r} has no reference answer: its turns have no gain.")
                return None
            return self._tokenize(answer)
        except ValueError as error:
            self._warn(f"task {task_id!r} has no gains: {error}")
            return None

    def _tokenize(self, answer: str) -> AnswerTokens:
        """The answer's own tokens are those that hold any of its bytes."""
        message = self._before + answer + self._after
        tokens_L = np.array(self._tokenizer.action(message), np.int32)
        while tokens_L.size and int(tokens_L[-1]) in self._tokenizer.end_ids:
            tokens_L = tokens_L[:-1]
        stop_L = np.cumsum(self._sizes[tokens_L])
        # Some tokenizers begin every text with a space of their own.
        extra = int(stop_L[-1]) - len(message.encode()) if tokens_L.size else -1
        if extra not in (0, 1):
            raise ValueError(f"the tokenizer writes the message {message!r} in other bytes.")
        begin = extra + len(self._before.encode())
        start_L = stop_L - self._sizes[tokens_L]
        scored_L = (stop_L > begin) & (start_L < begin + len(answer.encode()))
        size = int(np.flatnonzero(scored_L)[-1]) + 1
        return AnswerTokens(tokens_L[:size], scored_L[:size])
