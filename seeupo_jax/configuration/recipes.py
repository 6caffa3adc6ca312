"""Named algorithms, each as values of the shared options.

N trajectories i; K turns t, whose action a_it has tokens j; |o_i| all action tokens of trajectory
i; s a probability ratio to the policy that sampled (`turn_ratio`), of a token, an action or a whole
trajectory; r the reward; "group" the trajectories of one task.
"""

from __future__ import annotations

from collections.abc import Callable
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
        "weight": "on",
        "advantage": "grae",
        "baseline": "mean",
        "scale": "batch",
        "objective": "clipped",
        "ratio": "geometric",
        "loss_mean": "action",
        "kl_in": "loss",
        "critic": "none",
        "dynamic_sampling": 0,
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
    return seeupo() | {"weight": "off"}


def seeupo_group_std() -> Choices:
    """SeeUPO with A_i divided by its group's standard deviation instead of the batch's."""
    return seeupo() | {"scale": "group"}


def seeupo_noscale() -> Choices:
    """SeeUPO with A_i in units of the reward: the ablation of the scale (Eq. 9 as written)."""
    return seeupo() | {"scale": "none"}


def parallel() -> Choices:
    """SeeUPO in one step on all turns: max 1/N Σ_i Σ_t min(s_it A_i, clip(s_it) A_i) - β KL."""
    return seeupo() | {"order": "parallel", "weight": "off"}


def grpo() -> Choices:
    """Max 1/N Σ_i 1/|o_i| Σ_j min(s_ij A_i, clip(s_ij) A_i) - β KL_ij, a ratio per token.

    A_i = (r_i - the group's mean) / the group's standard deviation.
    DeepSeekMath, arXiv:2402.03300, Eq. 3 and §4.1.2.
    """
    return _one_action() | {"ratio": "token", "scale": "group"}


def dr_grpo() -> Choices:
    """GRPO without its two biases: A_i = r_i - the group's mean, Σ_j divided by a constant, no KL.

    The constant is the length that a trajectory's actions may have at most.
    Understanding R1-Zero-Like Training, arXiv:2503.20783, §3.2.
    """
    return _one_action() | {
        "ratio": "token",
        "scale": "none",
        "loss_mean": "constant",
        "kl_coef": 0.0,
    }


def gspo() -> Choices:
    """Max 1/N Σ_i min(s_i A_i, clip(s_i) A_i) - β KL, s_i = (π(o_i) / π_old(o_i))^(1/|o_i|).

    A_i as in GRPO. Its authors clip to [1 - 3e-4, 1 + 4e-4], for updates of large models.
    GSPO, arXiv:2507.18071, Eq. 5 to 7.
    """
    return _one_action() | {"ratio": "geometric", "scale": "group"}


def rloo() -> Choices:
    """Max 1/N Σ_i A_i log π(o_i), A_i = R_i - the mean R of the group's other trajectories.

    R_i = r_i - β log(π_old(o_i) / π_ref(o_i)).
    Back to Basics, arXiv:2402.14740, §3.3.
    """
    return reinforce() | {"baseline": "leave_one_out", "scale": "none", "kl_in": "reward"}


def reinforce() -> Choices:
    """Max 1/N Σ_i A_i log π(o_i) - β KL, with SeeUPO's advantage.

    Williams 1992, "Simple statistical gradient-following algorithms"; GRAE: arXiv:2602.06554 §4.2.
    """
    return _one_action() | {"objective": "logp", "ratio": "product"}


def reinforce_plus_plus() -> Choices:
    """Max the mean over all tokens of min(s_ij A_ij, clip(s_ij) A_ij), without groups or critic.

    A_ij = r_i - β Σ_(j' >= j) log(π_old / π_ref)_ij', standardised over all tokens of the batch.
    REINFORCE++, arXiv:2501.03262, §3; as written with discount=1, the default.
    """
    return _one_action() | {
        "advantage": "returns",
        "advantage_clip": None,
        "ratio": "token",
        "kl_in": "reward",
        "loss_mean": "token",
    }


def ppo() -> Choices:
    """Max the mean over tokens of min(s_ij A_ij, clip(s_ij) A_ij) - c/2 (V_ij - R_ij)^2 - β KL.

    A_ij: generalized advantage estimation over action tokens only, standardised over the batch;
    R_ij = A_ij + V_ij before that. No entropy bonus. The value's error is clipped too, as in its
    authors' code. Schulman et al., arXiv:1707.06347, Eq. 7 and 9; GAE: arXiv:1506.02438.
    """
    return _one_action() | {
        "advantage": "gae",
        "advantage_clip": None,
        "critic": "head",
        "ratio": "token",
        "loss_mean": "token",
    }


def dapo() -> Choices:
    """GRPO with a wider clip above, the mean over all tokens, and no groups of equal rewards.

    Such groups are replaced by others of new tasks, for at most so many rounds. No KL. Here the
    mean is over a step's tokens, in the paper over a task's; its overlong shaping of the reward is
    left to the environment. DAPO, arXiv:2503.14476, Eq. 8 to 12.
    """
    return grpo() | {
        "loss_mean": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "dynamic_sampling": 4,
    }


def cispo() -> Choices:
    """Max the mean over all tokens of stop_gradient(min(s_ij, 1 + ε)) A_ij log π_ij, A as in GRPO.

    MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5: no bound below, no KL. ε = 4 is not from the paper.
    """
    return grpo() | {
        "objective": "cispo",
        "loss_mean": "token",
        "clip_low": None,
        "clip_high": 4.0,
        "kl_coef": 0.0,
    }


def gigpo() -> Choices:
    """Max the mean over all tokens of min(s_ij A_it, clip(s_ij) A_it) - β KL_ij, a ratio per token.

    A_it, which the tokens j of turn t share, is the episode's advantage plus the turn's among those
    from its state, either over its group's standard deviation. GiGPO, arXiv:2505.10978, Eq. 8 and
    9. Numbers, and the mean over tokens where Eq. 9 has one over turns, as its authors train
    ALFWorld: langfengQ/verl-agent, examples/gigpo_trainer/run_alfworld.sh, and their
    verl/trainer/config/ppo_trainer.yaml. Their learning rate is 1e-6.
    """
    return _one_action() | {
        "advantage": "gigpo",
        "scale": "group",
        "discount": 0.95,
        "step_coef": 1.0,
        "ratio": "token",
        "loss_mean": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.01,
    }


def hgpo() -> Choices:
    """GiGPO's objective with A_it averaged over groups of turns that share more and more past.

    Groups of 0 to 2 turns before the state, the deeper ones weighing more, no part of the episode.
    HGPO, arXiv:2602.22817, Eq. 3 to 7. Numbers as its authors train ALFWorld: langfengQ/verl-agent,
    recipe/hgpo/run_qwen2.5_1.5b_alfworld_train.sh (K = 2; they also report K = 4).
    """
    return gigpo() | {"advantage": "hgpo", "history": 2, "history_power": 1.0}


def _one_action() -> Choices:
    """One step per iteration: all turns of a trajectory are one action."""
    return seeupo() | {"turns_per_update": None, "weight": "off"}


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
    gigpo,
    hgpo,
)

# Recipe -> the fields of `config.algorithm` that it sets.
RECIPES: dict[str, Choices] = {recipe.__name__: recipe() for recipe in _TABLE}
