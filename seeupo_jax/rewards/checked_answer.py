"""A reward by a built-in checker: `seeupo_jax.rewards.checked_answer:CheckedAnswer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.envs.checkers import make_checker
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.rewards.finished_episode import FinishedEpisode


class CheckedAnswer:
    """Checks the policy's last message; the rows of checkers are `info`.

    Args:
      check, check_options: as the name and options of `make_checker`.
      answer: the field of `info` where the environment puts what the checker compares with; None:
        the checker reads none.
    """

    def __init__(
        self,
        *,
        check: str | Mapping[str, float],
        check_options: Mapping[str, Any] | None = None,
        answer: str | None = None,
    ):
        self._checker = make_checker(check, check_options or {}, answer)

    def __call__(self, episode: FinishedEpisode) -> float:
        """The score of the last message, in [0, 1].

        Raises:
          ValueError: the environment gave no answer, or one that the checker cannot read.
        """
        text = episode.answer
        if not self._checker.reads_thoughts:
            text = text[thoughts_end(text) :]
        return self._checker.check(text, episode.info).score

    def close(self) -> None:
        self._checker.close()
