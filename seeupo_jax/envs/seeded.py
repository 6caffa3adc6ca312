"""For worlds that are made from seeds and acted on by short commands: tasks, actions, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seeupo_jax.envs.base import Message


class SeedTasks:
    """Tasks `SPLIT/INDEX`, each one seed.

    Args:
      name: of the environment, for messages.
      seeds: of each split's tasks.
    """

    def __init__(self, name: str, seeds: Mapping[str, range]):
        self._name, self._seeds = name, seeds

    def ids(self, split: str) -> Sequence[str]:
        """Raises ValueError on an unknown split."""
        if split not in self._seeds:
            allowed = ", ".join(self._seeds)
            raise ValueError(f"{self._name} split: got {split!r}; allowed: {allowed}.")
        return [f"{split}/{index}" for index in range(len(self._seeds[split]))]

    def seed(self, task_id: str) -> int:
        """The seed of a task. Raises ValueError if there is no such task."""
        split, _, index = task_id.partition("/")
        seeds = self._seeds.get(split, range(0))
        if not (index.isascii() and index.isdigit()) or int(index) >= len(seeds):
            allowed = ", ".join(f"{name}/0 to {len(s) - 1}" for name, s in self._seeds.items())
            raise ValueError(f"{self._name} task: got {task_id!r}; allowed: {allowed}.")
        return seeds[int(index)]


def last_line(text: str) -> str:
    """The command in a response: its last line that is not empty, so that it may think before."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def opening(instruction: str | None, observation: str) -> tuple[Message, ...]:
    """What an episode starts with: the instruction as the system message, then the world."""
    system = () if instruction is None else ({"role": "system", "content": instruction},)
    return (*system, {"role": "user", "content": observation})


def score_of(total: float, full: float) -> float:
    """An episode's rewards as a score: `full` or more is 1, nothing or less is 0."""
    return min(max(total / full, 0.0), 1.0)
