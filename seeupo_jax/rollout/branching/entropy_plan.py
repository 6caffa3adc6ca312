"""ARPO's trees (arXiv:2507.19849): branches where a turn began less certain than the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.rollout.branching.fork_plan import Branch, Budget, EpisodeSummary


@dataclass(frozen=True)
class EntropyPlan:
    """After turn t another episode continues this one where

        clamp(U - coef (H_t - H_0), 0, 1) <= probability,   U uniform in [0, 1).

    H_t is the entropy of the turn's first tokens (`Action.entropy`), H_0 that of the trajectory's
    first turn. The group is what its authors' loop makes of it (dongguanting/ARPO,
    vllm_rollout_with_tools.py, their beam_size 2): in each round every episode that is not over
    takes a turn; those that go on may then branch, in the order in which they began, as long as
    there is room; and once none goes on, one after the other begins with the task until the group
    is full. Which round an episode is in follows from where it began, so the rounds of episodes
    that are over are gone through once more, and end with the first that begins others.
    """

    roots: int
    coef: float
    probability: float
    budget: Budget

    def may_fork(self, turns: int, entropy: Sequence[float], chance: float) -> bool:
        score = min(1.0, max(0.0, chance - self.coef * (entropy[-1] - entropy[0])))
        return turns < self.budget.max_turns and score <= self.probability

    def branches(
        self, played: Sequence[EpisodeSummary], existing: Sequence[Branch]
    ) -> list[Branch]:
        began = [(0, 0)] * self.roots  # of each episode its first round, and its turns before
        wanted: list[Branch] = []
        number = 0
        while len(began) <= len(played) and len(began) < self.budget.group_size:
            going = [
                Branch(place, turns + number - first + 1)
                for place, (first, turns) in enumerate(began)
                if turns + number - first + 1 < played[place].turns and not played[place].failed
            ]
            new = [branch for branch in going if branch.turns in played[branch.place].fork_turns]
            new = new[: self.budget.group_size - len(began)] if going else [Branch(0, 0)]
            wanted += new
            number += 1
            began += [(number, branch.turns) for branch in new]
        return self.budget.affordable(wanted[len(existing) :], played)
