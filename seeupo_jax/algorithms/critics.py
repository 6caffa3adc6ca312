"""The kinds of value function and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seeupo_jax.options import Group, Setting, above, choice, refused


@dataclass(frozen=True)
class NoCritic(Group):
    """No value function."""

    kind: str = choice("none")

    def check(self, setting: Setting) -> None:
        if _reads_values(setting.algorithm.estimator_entry):
            given = f"advantage={setting.algorithm.advantage}"
            raise refused("critic.kind", f"'none' with {given}", f"head or model with {given}")


@dataclass(frozen=True)
class CriticOptions(Group):
    """Options of every kind of value function."""

    coef: float = above(0, 0.5, most=1000)
    """Coefficient of the value function's loss."""
    clip: float | None = above(0, 0.2)
    """Change of a value per update, as in PPO; none: not clipped."""
    learning_rate: float | None = above(0, None, most=100)
    """Learning rate of the value function; none: the policy's."""

    def check(self, setting: Setting) -> None:
        algorithm, kind = setting.algorithm, vars(self)["kind"]
        if not _reads_values(algorithm.estimator_entry):
            given = f"{kind!r} with advantage={algorithm.advantage}"
            readers = " and ".join(algorithm.entries("advantage", _reads_values))
            raise refused("critic.kind", given, f"none unless {readers}, which reads it")


@dataclass(frozen=True)
class HeadCritic(CriticOptions):
    """A head on the policy's own last hidden states."""

    kind: str = choice("head")


@dataclass(frozen=True)
class ModelCritic(CriticOptions):
    """A transformer of its own, which begins as the policy."""

    kind: str = choice("model")


def _reads_values(entry: Any) -> bool:
    return "value_NL" in entry.needs
