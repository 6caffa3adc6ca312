"""Tokens of a sweep's pools, worked by hand."""

import dataclasses

import numpy as np

from seeupo_jax.benchmarks.update_benchmark import Pools, budgets
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.types import Segment, Trajectory


def trajectory(turn, group, **rest):
    turn_L = np.array(turn)
    return Trajectory.of((Segment(turn_L * 0, turn_L, turn_L * 0.0),), 0.0, group, **rest)


def test_a_prompt_counts_once_a_group_and_pools_end_with_their_turn():
    first = trajectory([-1, -1, -1, 0, -1, 1, 1], 0)
    short = trajectory([-1, -1, -1, 0, 0], 0)
    failed = dataclasses.replace(first, stop="env_error")
    others = [trajectory([-1, 0], 1), trajectory([-1, 0, -1], 1)]
    pools = Pools.of([first, short, failed, *others])
    # Turn 0: 3 + 1 + 2 and 1 + 1 + 1; turn 1: 7. Whole: 3 + 4 + 2 and 3, no last context.
    assert pools == Pools(whole=12, pools=9 + 7, rows=(4 + 5 + 2 + 2) + 7)


def test_budgets_are_the_formulas():
    arch = Architecture(
        vocab_size=9, width=4, layers=1, heads=2, kv_heads=1, head_dim=2, mlp_width=3
    )
    P = parameters(arch)
    found = budgets(arch, Pools(whole=10, pools=100, rows=1000))
    assert found == {"budget": 1.15 * P * (600 + 40), "recipe": 12.0 * P * 1000}
