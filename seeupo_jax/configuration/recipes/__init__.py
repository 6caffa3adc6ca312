"""Named algorithms, each as values of the shared options.

N trajectories i; K turns t, whose action a_it has tokens j; |o_i| all action tokens of trajectory
i; s a probability ratio to the policy that sampled (`turn_ratio`), of a token, an action or a whole
trajectory; r the reward; "group" the trajectories of one task.
"""

from __future__ import annotations

from collections.abc import Callable

from seeupo_jax.configuration.recipes.distillation_recipes import opd
from seeupo_jax.configuration.recipes.fork_recipes import arpo, slate, spo_tree
from seeupo_jax.configuration.recipes.objective_recipes import dppo_kl, dppo_tv, gmpo, sapo
from seeupo_jax.configuration.recipes.outcome_recipes import (
    a_grae,
    canon,
    cispo,
    dapo,
    dr_grpo,
    dvao,
    gdpo,
    grpo,
    gspo,
    maxrl,
    otb,
    ppo,
    reinforce,
    reinforce_plus_plus,
    rloo,
)
from seeupo_jax.configuration.recipes.seeupo_recipes import (
    Choices,
    parallel,
    seeupo,
    seeupo_forward,
    seeupo_group_std,
    seeupo_noscale,
    seeupo_random,
    seeupo_unweighted,
)
from seeupo_jax.configuration.recipes.turn_recipes import (
    a2tgpo,
    gigpo,
    hgpo,
    istar,
    matchtir,
    prorl,
    spa,
)

_TABLE: tuple[Callable[[], Choices], ...] = (
    seeupo,
    seeupo_forward,
    seeupo_random,
    seeupo_unweighted,
    seeupo_group_std,
    seeupo_noscale,
    parallel,
    grpo,
    dr_grpo,
    gspo,
    rloo,
    reinforce,
    reinforce_plus_plus,
    ppo,
    dapo,
    cispo,
    sapo,
    gmpo,
    dppo_tv,
    dppo_kl,
    maxrl,
    otb,
    a_grae,
    canon,
    gigpo,
    hgpo,
    istar,
    a2tgpo,
    gdpo,
    dvao,
    matchtir,
    spa,
    prorl,
    spo_tree,
    arpo,
    slate,
    opd,
)

# Recipe -> the fields of `config.algorithm` that it sets.
RECIPES: dict[str, Choices] = {recipe.__name__: recipe() for recipe in _TABLE}
