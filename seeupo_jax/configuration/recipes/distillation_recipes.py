"""Algorithms that learn from a teacher."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.seeupo_recipes import Choices, one_action


def opd() -> Choices:
    """Max the mean over tokens of s_ij A_ij, A_ij = log π_teacher - log π of token j alone.

    The reverse KL to config.teacher on the policy's own samples (arXiv:2306.13649, §3, with
    lambda = 1), as a policy gradient with discount 0, without a reward and without a bound on the
    ratio: https://thinkingmachines.ai/blog/on-policy-distillation.
    """
    return one_action() | {
        "advantage": "zero",
        "estimator": {},
        "scale": "none",
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": None,
        "clip_high": None,
        "kl_coef": 0.0,
    }
