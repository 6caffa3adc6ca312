"""`lab_problem`: a problem of the laboratory in text, for language policies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.seeded_tasks import SeedTasks, check_count
from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem

# The actions, in the order of a problem's axes. Of two bytes each: a tokenizer with bytes as its
# fallback could write an ASCII letter as one token in two ways.
LETTERS = "αβγδ"
_MOST_TURNS = max(make().turns for make in PROBLEMS.values())


class TextProblem:
    """A problem whose actions are the texts `α`, `β`, ...; any other text ends the episode.

    The user's message says which turn it is, and which letters act. Rewards are those of the
    tabular problem, drawn by `episode_seed`: of single turns where it has those, else after the
    last turn. All tasks are the same.

    Args:
      problem: a name in `PROBLEMS`; not one whose turns earn something else than its reward, or
        that has more than four actions.
      tasks: of each split.

    Raises:
      ValueError: an unknown problem, or a number of tasks that is no whole number >= 1.
    """

    def __init__(self, problem: str = "deceptive", tasks: int = 64):
        playable = {name: made for name, make in PROBLEMS.items() if _is_playable(made := make())}
        check_choice("lab_problem problem", problem, playable)
        check_count("lab_problem tasks", tasks)
        self._problem = playable[problem]
        self._tasks = SeedTasks("lab_problem", dict.fromkeys(("train", "test"), range(tasks)))
        self._actions: list[int] = []
        self._dice = random.Random()
        self._left = False  # by a text that is no action

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns `SPLIT/INDEX`; the tasks differ in their ids only."""
        return self._tasks.ids(split)

    def reset(
        self, task_id: str, seed: int, episode_seed: int = 0
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Begins with the first turn; `episode_seed` seeds the rewards."""
        self._tasks.seed(task_id)
        self._actions, self._left = [], False
        self._dice = random.Random(episode_seed)
        return (_shown(0, self._problem.actions),), ()

    def step(self, text: str) -> StepResult:
        """Takes an action."""
        if text not in self.action_texts():
            self._left = True
            return StepResult((), 0.0, True)
        self._actions.append(LETTERS.index(text))
        turn, problem = len(self._actions), self._problem
        reward, done = self._reward(), turn == problem.turns
        return StepResult(() if done else (_shown(turn, problem.actions),), reward, done)

    def score(self) -> float:
        """The mean reward of all actions over the optimum, at least 0; 0 before the last turn."""
        problem = self._problem
        if self._left or len(self._actions) < problem.turns:
            return 0.0
        return float(max(0.0, problem.mean[tuple(self._actions)] / problem.optimum))

    def close(self) -> None:
        """Nothing is open."""

    def action_texts(self) -> Sequence[str]:
        """The texts that act, in every turn."""
        return tuple(LETTERS[: self._problem.actions])

    def expected_reward(self, task_id: str, actions: Sequence[str]) -> float:
        """The mean reward of an episode of these actions."""
        self._tasks.seed(task_id)
        if len(actions) < self._problem.turns:
            return self._earlier_mean([LETTERS.index(action) for action in actions])
        return float(self._problem.mean[tuple(LETTERS.index(action) for action in actions)])

    def demonstrations(
        self, split: str, *, episodes: int = 1000, repeat: float = 0.0, seed: int = 0
    ) -> Sequence[Demonstration]:
        """Conversations of random actions, of problems of all sizes alike.

        Args:
          repeat: the probability that an action is the one before it; else it is uniformly random.
        """
        check_count("lab_problem episodes", episodes)
        if not 0 <= repeat <= 1:
            raise ValueError(f"lab_problem repeat: got {repeat}; allowed: a number from 0 to 1.")
        dice = random.Random(seed)
        return [_random_conversation(dice, repeat) for _ in range(episodes)]

    def vocabulary(self) -> Sequence[str]:
        """Each letter and each digit is a token without help."""
        return ()

    def _reward(self) -> float:
        problem, turn = self._problem, len(self._actions) - 1
        if problem.turn_mean is not None:
            coin = self._dice.choice((-1.0, 1.0))
            return self._turn_mean(self._actions, turn) + coin * float(problem.noise)
        if turn + 1 < problem.turns:
            return 0.0
        probability = problem.probability[tuple(self._actions)]
        pays = self._dice.random() < probability
        return float(problem.mean[tuple(self._actions)] / probability) if pays else 0.0

    def _earlier_mean(self, actions: Sequence[int]) -> float:
        """What the turns of an episode that was left have earned."""
        if self._problem.turn_mean is None:
            return 0.0
        return sum(self._turn_mean(actions, turn) for turn in range(len(actions)))

    def _turn_mean(self, actions: Sequence[int], turn: int) -> float:
        """The mean reward of a turn, which depends on no later action."""
        later = (0,) * (self._problem.turns - turn - 1)
        return float(self._problem.turn_mean[(turn, *actions[: turn + 1], *later)])


def _is_playable(problem: Problem) -> bool:
    paid = problem.turn_mean is None or np.allclose(problem.turn_mean.sum(axis=0), problem.mean)
    return paid and problem.actions <= len(LETTERS)


def _shown(turn: int, actions: int) -> Message:
    return {"role": "user", "content": f"{turn + 1}{LETTERS[:actions]}"}


def _random_conversation(dice: random.Random, repeat: float) -> Demonstration:
    letters, messages = LETTERS[: dice.randint(2, len(LETTERS))], list[Message]()
    letter = ""
    for turn in range(dice.randint(1, _MOST_TURNS)):
        if not letter or dice.random() >= repeat:
            letter = dice.choice(letters)
        messages += [_shown(turn, len(letters)), {"role": "assistant", "content": letter}]
    return Demonstration(tuple(messages))
