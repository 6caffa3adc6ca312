"""ARPO's trees (arXiv:2507.19849): branches where a turn began less certain than the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seeupo_jax.rollout.branching.fork_plan import Branch, Budget, EpisodeSummary


@dataclass(frozen=True)
class EntropyPlan:
    """After turn t a new episode branches off if

        clamp(U - coef (H_t - H_0), 0, 1) <= probability,   U uniform in [0, 1).

    H_t is the entropy of the turn's first tokens (`Action.entropy`), H_0 that of the trajectory's
    first turn. The group follows the authors' loop (dongguanting/ARPO, vllm_rollout_with_tools.py,
    beam_size 2): in each round every unfinished episode takes a turn; those still unfinished may
    then branch, in the order in which they began, as long as the group has room. Once all are
    finished, further episodes begin with the task, one at a time, until the group is full. The
    round of an episode follows from where it began, so `branches` replays the rounds of finished
    episodes and stops at the first that begins new ones.
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
