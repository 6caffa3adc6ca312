"""SLATE's candidates (arXiv:2602.23440): how many of each turn, and which one is executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.rollout.branching.fork_plan import Branch, Budget, EpisodeSummary


@dataclass(frozen=True)
class CandidatePlan:
    """One episode per group, with several candidates sampled for each of its turns.

    counts: candidates of each turn, including the one that is executed.
    temperature: of the softmax over their advantages from which it is drawn.
    """

    counts: tuple[int, ...]
    temperature: float
    budget: Budget

    @property
    def roots(self) -> int:
        return 1

    def may_fork(self, turns: int, entropy: Sequence[float], chance: float) -> bool:
        return False

    def branches(
        self, played: Sequence[EpisodeSummary], existing: Sequence[Branch]
    ) -> list[Branch]:
        return []

    def place(self, turn: int, candidate: int) -> int:
        """A candidate's place in its group, whose first one is the episode."""
        earlier = sum(count - 1 for count in self.counts[:turn])
        return earlier + candidate if candidate else 0


def candidate_counts(candidates: int, budget: Budget) -> tuple[int, ...]:
    """Candidates of each turn: at most `candidates`, and together at most the group's trajectories.

    The group's places besides the episode's own are divided evenly, the remainder to early turns.
    """
    remaining, counts = budget.group_size - 1, []
    for turn in range(budget.max_turns):
        more = min(candidates - 1, -(-remaining // (budget.max_turns - turn)))
        counts.append(1 + more)
        remaining -= more
    return tuple(counts)


def choose(score_C: Sequence[float], temperature: float, chance: float) -> int:
    """The candidate that the episode executes, drawn from softmax(A / temperature).

    A = (r - mean) / (deviation (n - 1) + 1e-6) over the turn's candidates (Eq. 5 and §3.2).

    Args:
      score_C: r, the judge's. chance: uniform in [0, 1).
    """
    over_C = np.asarray(score_C, np.float64) - np.mean(score_C)
    deviation = np.sqrt((over_C**2).sum() / max(len(over_C) - 1, 1))
    logit_C = over_C / (deviation + 1e-6) / temperature
    weight_C = np.exp(logit_C - logit_C.max())
    below_C = np.cumsum(weight_C) / weight_C.sum()
    return min(int(np.searchsorted(below_C, chance, side="right")), len(over_C) - 1)
