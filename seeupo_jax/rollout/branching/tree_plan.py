"""SPO's trees (arXiv:2505.23564): levels of nodes with a fixed number of children."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.rollout.branching.fork_plan import Branch, Budget, EpisodeSummary


@dataclass(frozen=True)
class TreePlan:
    """A tree with levels `every` turns apart and a number of children per node on each level.

    factors: children of the root, and of the nodes of each level. A node's first child is the
      episode that made it; the others branch off. An episode that ends before a level has no node
      there.
    """

    factors: tuple[int, ...]
    every: int
    budget: Budget

    @property
    def roots(self) -> int:
        return self.factors[0]

    def may_fork(self, turns: int, entropy: Sequence[float], chance: float) -> bool:
        return turns % self.every == 0 and turns // self.every < len(self.factors)

    def branches(
        self, played: Sequence[EpisodeSummary], existing: Sequence[Branch]
    ) -> list[Branch]:
        made = Counter(existing)
        for level, factor in enumerate(self.factors[1:], start=1):
            turns = level * self.every
            nodes = [
                Branch(place, turns)
                for place, one in enumerate(played)
                if one.shared < turns < one.turns and not one.failed
            ]
            # A second child for every node before a third for any.
            wanted = [node for child in range(1, factor) for node in nodes if made[node] < child]
            if begin := self.budget.affordable(wanted, played):
                return begin
        return []


def scaled_factors(factors: Sequence[int], group_size: int) -> tuple[int, ...]:
    """A tree's factors, reduced to a largest number of leaves: large ones first, deep ones first.

    The root's factor is then raised as far as the group allows.
    """
    scaled = list(factors)
    while math.prod(scaled) > group_size:
        largest = max(scaled)
        last = len(scaled) - 1 - scaled[::-1].index(largest)
        scaled[last] -= 1
    return (group_size // math.prod(scaled[1:]), *scaled[1:])
