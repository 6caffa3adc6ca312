"""The FLOPs that a sweep should cost, and those of the reference implementation's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.types import Trajectory, learnable

ALLOWED = 1.15  # of the sum below: padding, attention and the refresh


@dataclass(frozen=True)
class Pools:
    """Tokens of a sweep's trajectories.

    whole: of all of them to their last action, a group's prompt once. pools: of each turn's
    trajectories to the end of that turn, the prompt of those of a group once; the sum over turns.
    rows: the same with the prompt in every row.
    """

    whole: int
    pools: int
    rows: int

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Pools:
        """Of trajectories of one segment each."""
        kept = [t for t, keep in zip(trajectories, learnable(trajectories), strict=True) if keep]
        turn = [t.segments[0].turn_L for t in kept]
        prompt = [int(np.argmax(turn_L >= 0)) for turn_L in turn]
        group = [t.group for t in kept]

        def tokens(end: list[int]) -> tuple[int, int]:
            """To these ends, 0 for who is not there: with a group's prompt once, and in all."""
            there = [i for i, e in enumerate(end) if e]
            once = {group[i]: prompt[i] for i in there}
            return sum(end[i] - prompt[i] for i in there) + sum(once.values()), sum(end)

        ends = [
            [
                int(np.flatnonzero(turn_L == t)[-1]) + 1 if (turn_L == t).any() else 0
                for turn_L in turn
            ]
            for t in range(max(t.turns for t in kept))
        ]
        last = [int(np.flatnonzero(turn_L >= 0)[-1]) + 1 for turn_L in turn]
        shared, rows = zip(*map(tokens, ends), strict=True)
        return cls(tokens(last)[0], sum(shared), sum(rows))


def budgets(arch: Architecture, pools: Pools) -> dict[str, float]:
    """FLOPs by name; P is the number of parameters, a table that is tied counted once.

    goal: 1.15 x [6 P tokens of every pool + 4 P tokens of the whole], a step's forward and backward
      pass, and one pass each for the old and the reference policy.
    recipe: 12 P tokens of every pool's rows: the step, and passes for the old, the reference and
      the new policy, of every turn.

    P times the tokens is what a language model costs whose logits are computed everywhere, the
    usual estimate; logits are needed at action tokens only, so both sides stay below it there.
    Attention is not in it, and counts in what is measured.
    """
    P = parameters(arch)
    return {
        "goal": ALLOWED * P * (6 * pools.pools + 4 * pools.whole),
        "recipe": 12.0 * P * pools.rows,
    }
