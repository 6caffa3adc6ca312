"""SeeUPO, its ablations, and all turns as one action."""

from __future__ import annotations

from typing import Any

Choices = dict[str, Any]  # fields of `config.algorithm`


def seeupo() -> Choices:
    """Turns t = K ... 1, one step each: max 1/N Σ_i min(s_it M_it, clip(s_it) M_it) - β KL.

    M_iK = A_i = r_i - the group's mean, standardised over the batch; M_i,t-1 = s_it(θ after) M_it.
    SeeUPO, arXiv:2602.06554, Eq. 6 to 9.
    """
    return {
        "order": "reverse",
        "custom_order": (),
        "turns_per_update": 1,
        "cumulative_ratio": True,
        "advantage": "grae",
        "estimator": {"baseline": "mean"},
        "scale": "batch",
        "objective": "clipped",
        "ratio": "geometric",
        "loss_aggregation": "action",
        "kl_in": "loss",
        "critic": {"kind": "none"},
        "dynamic_sampling": 0,
        "mask_above": None,
        "forks": {"kind": "none"},
        "refresh": "auto",
    }


def seeupo_forward() -> Choices:
    """SeeUPO with turns t = 1 ... K: the ablation of the order (arXiv:2602.06554)."""
    return seeupo() | {"order": "forward"}


def seeupo_random() -> Choices:
    """SeeUPO with the turns in an order drawn anew each iteration: the ablation of the order."""
    return seeupo() | {"order": "random"}


def seeupo_unweighted() -> Choices:
    """SeeUPO with M_it = A_i at every turn: the ablation of Eq. 8."""
    return seeupo() | {"cumulative_ratio": False}


def seeupo_group_std() -> Choices:
    """SeeUPO with A_i divided by its group's standard deviation instead of the batch's."""
    return seeupo() | {"scale": "group"}


def seeupo_noscale() -> Choices:
    """SeeUPO with A_i in units of the reward: the ablation of the scale (Eq. 9 as written)."""
    return seeupo() | {"scale": "none"}


def parallel() -> Choices:
    """SeeUPO in one step on all turns: max 1/N Σ_i Σ_t min(s_it A_i, clip(s_it) A_i) - β KL."""
    return seeupo() | {"order": "parallel", "cumulative_ratio": False}


def one_action() -> Choices:
    """One step per iteration: all turns of a trajectory are one action."""
    return seeupo() | {"turns_per_update": None, "cumulative_ratio": False}
