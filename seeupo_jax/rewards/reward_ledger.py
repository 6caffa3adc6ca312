"""The rewards of an episode while it is played."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from seeupo_jax.envs.base import TurnRewards
from seeupo_jax.envs.validation import OWN_REWARD
from seeupo_jax.types import RewardRow, RewardTable


@dataclass
class RewardLedger:
    """Adds up what an episode earns and makes its table; every reward of a rollout passes here.

    Rewards by name are added before their weights. Their weighted sums, which `RolloutWorker.weigh`
    has checked, are added separately: recomputed from the names they would round differently.

    turns: the weighted sum of each sampled turn.
    turnless: the weighted sum of an episode that ended before its first turn.
    named: rewards of the episode by name; the environment's own is always among them.
    named_turns: `named` of each turn.
    roles: rewards of single roles, beside all others.
    """

    turns: list[float] = field(default_factory=list)
    turnless: float = 0.0
    named: dict[str, float] = field(default_factory=lambda: {OWN_REWARD: 0.0})
    named_turns: dict[str, list[float]] = field(default_factory=dict)
    roles: dict[str, float] = field(default_factory=dict)

    @property
    def earned(self) -> float:
        """The sum of all turns, rounded once: the order of the rewards does not change it."""
        return math.fsum((self.turnless, *self.turns))

    def copy(self) -> RewardLedger:
        """A ledger that later rewards of this one do not change."""
        named_turns = {name: list(turns) for name, turns in self.named_turns.items()}
        named, roles = dict(self.named), dict(self.roles)
        return RewardLedger(list(self.turns), self.turnless, named, named_turns, roles)

    def open_turn(self) -> None:
        """Begins a turn that was sampled; it earned 0 until its environment answers."""
        self.turns.append(0.0)

    def add_step(self, named: Mapping[str, TurnRewards], weighted: Sequence[float]) -> None:
        """Adds the rewards of the step that answers the last turn.

        Args:
          named: by name; a list has one number per turn so far, a number is the last turn's.
          weighted: their weighted sums, of the last turn or of every turn so far.
        """
        *earlier, self.turns[-1] = weighted
        for turn, reward in enumerate(earlier):
            self.turns[turn] += reward
        self._add_named(named)

    def add_roles(self, rewards: Mapping[str, float]) -> None:
        """Adds rewards of single roles."""
        for role, reward in rewards.items():
            self.roles[role] = self.roles.get(role, 0.0) + reward

    def add(self, named: Mapping[str, TurnRewards], weighted: Sequence[float]) -> None:
        """Adds rewards of the last turns, such as those of `finish` and of reward functions."""
        self._add_named(named)
        if not self.turns:
            self.turnless += sum(weighted)
            return
        for turn, reward in enumerate(weighted, len(self.turns) - len(weighted)):
            self.turns[turn] += reward

    def set_all(
        self,
        own: float,
        own_turns: Sequence[float],
        named: Mapping[str, TurnRewards],
        weighted: Sequence[float],
    ) -> None:
        """Sets the rewards of an episode whose agent reports all of them at its end.

        Args:
          own, own_turns: of the episode and of its turns, under the environment's own name.
          named: the others. weighted: the weighted sums of all.
        """
        turns = len(self.turns)
        if turns:
            self.turns = list(weighted)
        else:
            self.turnless = sum(weighted)
        self._add_named({OWN_REWARD: own, **named})
        self.named_turns[OWN_REWARD] = list(own_turns[:turns])

    def table(self, *, with_names: bool) -> RewardTable:
        """The table of the rewards so far.

        Args:
          with_names: keeps the names even where the environment's own is the only one.
        """
        named: dict[str, RewardRow] = {}
        if with_names or len(self.named) > 1:
            named = {
                name: RewardRow(each, self._turns_of(name)) for name, each in self.named.items()
            }
        return RewardTable(RewardRow(self.earned, tuple(self.turns)), named, dict(self.roles))

    def _turns_of(self, name: str) -> tuple[float, ...] | None:
        if name not in self.named_turns:
            return None
        turns = self.named_turns[name]
        return (*turns, *[0.0] * (len(self.turns) - len(turns)))

    def _add_named(self, rewards: Mapping[str, TurnRewards]) -> None:
        count = len(self.turns)
        for name, reward in rewards.items():
            by_turn = reward if isinstance(reward, Sequence) else [reward]
            total = sum(reward) if isinstance(reward, Sequence) else reward
            self.named[name] = self.named.get(name, 0.0) + total
            turns = self.named_turns.setdefault(name, [])
            turns += [0.0] * (count - len(turns))
            for turn, each in zip(reversed(range(count)), reversed(by_turn), strict=False):
                turns[turn] += each
