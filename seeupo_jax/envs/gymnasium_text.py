"""`gymnasium_text`: a Gymnasium environment with observations as text or a text rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.envs.base import Message, StepResult, Tool
from seeupo_jax.envs.seeded_tasks import (
    FIRST_TEST,
    last_line,
    normalized_score,
    numbered_tasks,
    opening_messages,
    text_result,
)


@dataclass
class GymnasiumText:
    """Wraps `gymnasium.make(id, **kwargs)`; the last line of a response is the action.

    Args:
      id: as in Gymnasium's registry; `module:Id` imports the module first.
      kwargs: of `gymnasium.make`. With `render_mode='ansi'` the policy gets the rendering (as for
        FrozenLake-v1 and Taxi-v4), otherwise the observation, which must be text.
      actions: names of the actions of a Discrete space, in order; empty for a Text space.
      instruction: the system message.
      train_tasks, test_tasks: each task is one seed of `reset`; training seeds count from 0.
      full_reward: the sum of rewards that scores 1; 0 scores 0.
      test_seed: seed of the first test task; the default is above the training seeds of any run.
    """

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    actions: Sequence[str] = ()
    instruction: str | None = None
    train_tasks: int = 1000
    test_tasks: int = 100
    full_reward: float = 1.0
    test_seed: int = FIRST_TEST

    def __post_init__(self) -> None:
        gymnasium = _gymnasium()
        self._tasks = numbered_tasks(
            "gymnasium_text", self.train_tasks, self.test_tasks, self.full_reward, self.test_seed
        )
        try:
            self._env = gymnasium.make(self.id, **self.kwargs)
        except gymnasium.error.Error as error:
            raise ValueError(f"gymnasium_text id: got {self.id!r}: {error}") from None
        self._generator = gymnasium.utils.seeding.np_random
        self._rendered = self._env.render_mode == "ansi"
        spaces = gymnasium.spaces
        if not self._rendered and not isinstance(self._env.observation_space, spaces.Text):
            raise ValueError(
                f"gymnasium_text: {self.id} shows {self._env.observation_space}; allowed: a Text"
                " space, or kwargs={'render_mode': 'ansi'} if it supports that."
            )
        space, names = self._env.action_space, self.actions
        if isinstance(space, spaces.Discrete):
            named = len(names) == space.n and len(set(names)) == space.n
            named &= not isinstance(names, str)  # every substring, also "", would be `in` it
        else:
            named = isinstance(space, spaces.Text) and not names
        if not named:
            raise ValueError(
                f"gymnasium_text actions: got {names!r} for {space}; allowed: a list with a name"
                " for each action of a Discrete space, none for a Text space."
            )
        self._total: float | None = None
        self._done = False

    def task_ids(self, split: str) -> Sequence[str]:
        return self._tasks.ids(split)

    def reset(
        self, task_id: str, seed: int, episode_seed: int | None = None
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts the task's game: its seed sets the initial state, `episode_seed` later randomness.

        Without `episode_seed` the task's seed sets both. `seed` is unused.
        """
        observation, _ = self._env.reset(seed=self._tasks.seed(task_id))
        if episode_seed is not None:
            # The innermost environment's generator is also the one of its wrappers.
            self._env.unwrapped.np_random, _ = self._generator(episode_seed)
        self._total, self._done = 0.0, False
        return opening_messages(self.instruction, self._shown(observation)), ()

    def step(self, text: str) -> StepResult:
        """Executes the action; an unknown action has no effect and is answered with an error."""
        if self._total is None or self._done:
            raise ValueError("gymnasium_text: reset() must come before step().")
        command, space = last_line(text), self._env.action_space
        if self.actions and command not in self.actions:
            return text_result(f"No action {command!r}. Actions: {', '.join(self.actions)}.")
        if not self.actions and not space.contains(command):
            return text_result(f"The last line must be an action: {space}.")
        action = self.actions.index(command) + int(space.start) if self.actions else command
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        self._done = bool(terminated or truncated)
        return text_result(self._shown(observation), float(reward), self._done)

    def score(self) -> float:
        if self._total is None:
            raise ValueError("gymnasium_text: reset() must come before score().")
        return normalized_score(self._total, self.full_reward)

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any) -> str:
        return str(self._env.render() if self._rendered else observation)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ValueError(
            "env gymnasium_text needs Gymnasium: pip install 'seeupo_jax[gymnasium]'."
        ) from None
    return gymnasium
