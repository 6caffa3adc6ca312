"""Algorithms that learn from a teacher."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.seeupo_recipes import Choices, one_action


def opd() -> Choices:
    """Max the mean over tokens of s_ij A_ij, A_ij = log π_teacher - log π of token j alone.

    The policy's own samples, no reward, no bound on the ratio: On-Policy Distillation,
    https://thinkingmachines.ai/blog/on-policy-distillation (discount 0, importance sampling).
    config.teacher says who teaches.
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
