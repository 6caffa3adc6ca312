"""The interface of plans of a group's tree, and the group's budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class EpisodeSummary(NamedTuple):
    """A finished episode, as a plan sees it.

    shared: turns that it shares with its parent. turns: all turns. tokens: sampled in it.
    fork_turns: its own turns after which others may continue it (`ForkPlan.may_fork`).
    """

    shared: int
    turns: int
    tokens: int
    failed: bool
    fork_turns: tuple[int, ...] = ()


class Branch(NamedTuple):
    """An episode to begin. It continues the group's episode `place` after its first `turns` turns.

    With `turns` 0 it begins with the task.
    """

    place: int
    turns: int


@dataclass(frozen=True)
class Budget:
    """The budget of a group.

    group_size: trajectories. turn_tokens, max_turns: of a turn and an episode, at most.
    tokens: sampled ones; None: no bound.
    """

    group_size: int
    turn_tokens: int
    max_turns: int
    tokens: int | None = None

    def most_tokens(self, turns: int) -> int:
        """The most tokens that an episode may still sample after a number of turns."""
        return (self.max_turns - turns) * self.turn_tokens

    def affordable(
        self, wanted: Sequence[Branch], played: Sequence[EpisodeSummary]
    ) -> list[Branch]:
        """The first of the wanted branches, as many as fit the budget in the worst case."""
        fit = list(wanted[: self.group_size - len(played)])
        if self.tokens is None:
            return fit
        remaining = self.tokens - sum(one.tokens for one in played)
        for count, branch in enumerate(fit):
            remaining -= self.most_tokens(branch.turns)
            if remaining < 0:
                return fit[:count]
        return fit


class ForkPlan(Protocol):
    """Decides the trees of a collection's groups."""

    @property
    def budget(self) -> Budget: ...

    @property
    def roots(self) -> int:
        """Trajectories that a group begins with."""
        ...

    def may_fork(self, turns: int, entropy: Sequence[float], chance: float) -> bool:
        """Whether other episodes may branch off after a number of turns.

        Args:
          entropy: of the first tokens of each turn so far (`Action.entropy`), where it is known.
          chance: uniform in [0, 1), of this turn of this trajectory.
        """
        ...

    def branches(
        self, played: Sequence[EpisodeSummary], existing: Sequence[Branch]
    ) -> list[Branch]:
        """The next branches of a group whose episodes are all over; none: it is complete.

        Args:
          played: finished episodes by place. existing: the branches among them, in order.
        """
        ...
