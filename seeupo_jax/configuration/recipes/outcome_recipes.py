"""Algorithms that credit a whole trajectory, or tokens with what is still to come."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.seeupo_recipes import Choices, one_action


def grpo() -> Choices:
    """Max 1/N Σ_i 1/|o_i| Σ_j min(s_ij A_i, clip(s_ij) A_i) - β KL_ij, a ratio per token.

    A_i = (r_i - the group's mean) / the group's standard deviation.
    DeepSeekMath, arXiv:2402.03300, Eq. 3 and §4.1.2.
    """
    return one_action() | {"ratio": "token", "scale": "group"}


def dr_grpo() -> Choices:
    """GRPO without its two biases: A_i = r_i - the group's mean, Σ_j divided by a constant, no KL.

    The constant is the length that a trajectory's actions may have at most.
    Understanding R1-Zero-Like Training, arXiv:2503.20783, §3.2.
    """
    return one_action() | {
        "ratio": "token",
        "scale": "none",
        "loss_aggregation": "constant",
        "kl_coef": 0.0,
    }


def gspo() -> Choices:
    """Max 1/N Σ_i min(s_i A_i, clip(s_i) A_i) - β KL, s_i = (π(o_i) / π_old(o_i))^(1/|o_i|).

    A_i as in GRPO. Its authors clip to [1 - 3e-4, 1 + 4e-4], for updates of large models.
    GSPO, arXiv:2507.18071, Eq. 5 to 7.
    """
    return one_action() | {"ratio": "geometric", "scale": "group"}


def rloo() -> Choices:
    """Max 1/N Σ_i A_i log π(o_i), A_i = R_i - the mean R of the group's other trajectories.

    R_i = r_i - β log(π_old(o_i) / π_ref(o_i)).
    Back to Basics, arXiv:2402.14740, §3.3.
    """
    return reinforce() | {
        "estimator": {"baseline": "leave_one_out"},
        "scale": "none",
        "kl_in": "reward",
    }


def reinforce() -> Choices:
    """Max 1/N Σ_i A_i log π(o_i) - β KL, with SeeUPO's advantage.

    Williams 1992, "Simple statistical gradient-following algorithms"; GRAE: arXiv:2602.06554 §4.2.
    """
    return one_action() | {"objective": "logp", "ratio": "product"}


def reinforce_plus_plus() -> Choices:
    """Max the mean over all tokens of min(s_ij A_ij, clip(s_ij) A_ij), without groups or critic.

    A_ij = r_i - β Σ_(j' >= j) log(π_old / π_ref)_ij', standardised over all tokens of the batch.
    REINFORCE++, arXiv:2501.03262, §3; as written with discount=1.
    """
    return one_action() | {
        "advantage": "returns",
        "estimator": {"discount": 1.0},
        "advantage_clip": None,
        "ratio": "token",
        "kl_in": "reward",
        "loss_aggregation": "token",
    }


def ppo() -> Choices:
    """Max the mean over tokens of min(s_ij A_ij, clip(s_ij) A_ij) - c/2 (V_ij - R_ij)^2 - β KL.

    A_ij: generalized advantage estimation over action tokens only, standardised over the batch;
    R_ij = A_ij + V_ij before that. No entropy bonus. The value's error is clipped too, as in its
    authors' code. Schulman et al., arXiv:1707.06347, Eq. 7 and 9; GAE: arXiv:1506.02438.
    """
    return one_action() | {
        "advantage": "gae",
        "estimator": {"bootstrap_truncated": False},
        "advantage_clip": None,
        "critic": {"kind": "head"},
        "ratio": "token",
        "loss_aggregation": "token",
    }


def dapo() -> Choices:
    """GRPO with a wider clip above, the mean over all tokens, and no groups of equal rewards.

    Such groups are replaced by others of new tasks, for at most so many rounds. No KL. Here the
    mean is over a step's tokens, in the paper over a task's. Its overlong shaping of the reward
    (Eq. 13) depends on the lengths that are allowed: algorithm.overlong.length sets it. DAPO,
    arXiv:2503.14476, Eq. 8 to 12.
    """
    return grpo() | {
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "dynamic_sampling": 4,
    }


def a_grae() -> Choices:
    """Max the mean over all tokens of min(s_ij A_i, clip(s_ij) A_i), A_i GRPO's times two factors.

    The first shifts weight from easy to hard tasks as the mean reward, in [0, 1], rises; the second
    is below 1 where A_i > 0 and the mean reward below alpha. A-GRAE, arXiv:2602.05548. Numbers as
    its authors train on MATH: Yu7-code/A-GRAE, run_qwen2.5-math-7b-grpo-agrae.sh, no KL, and the
    entropy bonus of their verl/trainer/config/ppo_trainer.yaml; alpha = 1, in others of their
    experiments 0.5. Their learning rate is 1e-6, their groups have 8. Their
    trainer's dual clip (3.0) is left out; it matters where an iteration has several steps.
    """
    return grpo() | {
        "advantage": "a_grae",
        "estimator": {"alpha": 1.0},
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "entropy_coef": 0.001,
    }


def canon() -> Choices:
    """Dr. GRPO with A_i = r_i - the mean r of the half of its group with more, or less, entropy.

    The half that i is not in (mu = 1). CANON, arXiv:2509.23962, Eq. 5. Numbers as in its authors'
    biuboomc/CANON, scripts/setups.sh; they also use the length as metric, mu = 0 and schedules of
    mu. Their learning rate is 1e-6, their groups have 16.
    """
    return dr_grpo() | {
        "advantage": "canon",
        "estimator": {"metric": "entropy", "mu": 1.0},
        "clip_low": 0.2,
        "clip_high": 0.28,
    }


def cispo() -> Choices:
    """Max the mean over all tokens of stop_gradient(min(s_ij, 1 + ε)) A_ij log π_ij, A as in GRPO.

    MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5: no bound below, no KL. ε = 4 is not from the paper.
    """
    return grpo() | {
        "objective": "cispo",
        "loss_aggregation": "token",
        "clip_low": None,
        "clip_high": 4.0,
        "kl_coef": 0.0,
    }


def gdpo() -> Choices:
    """GRPO's objective, mean over all tokens, with every named reward normalised by itself; no KL.

    A_i = Σ_q w_q (r_iq - the group's mean) / (the group's standard deviation + 1e-6), standardised
    over the batch. Weights: config.rewards; without named rewards the one reward is the only one.
    GDPO, arXiv:2601.05242, Eq. 4 to 6; `normalize_then_sum` in TRL. Numbers as its authors train
    tool calls: NVlabs/GDPO, verl-GDPO/train_gdpo.sh, and the entropy bonus of their
    verl/trainer/config/ppo_trainer.yaml. Their learning rate is 1e-6, with groups of 4 and 4
    minibatches of an iteration's 512 tasks.
    """
    return one_action() | {
        "advantage": "gdpo",
        "estimator": {},
        "scale": "batch",
        "advantage_clip": None,
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "entropy_coef": 0.001,
    }


def dvao() -> Choices:
    """GRPO's objective with A_i = Σ_q b_q (r_iq - the group's mean) / Σ_q b_q σ_q of the group.

    Weights b >= 0: config.rewards; without named rewards the one reward is the only one. DVAO,
    arXiv:2605.25604, which replaces GRPO's advantage and nothing else; its clip range and KL
    coefficient are the configuration's.
    """
    return grpo() | {"advantage": "dvao", "estimator": {}, "scale": "none"}


def maxrl() -> Choices:
    """GRPO's objective, mean over all tokens, with A_i = (r_i - mu) / (mu + 1e-6); no KL.

    mu is the group's mean reward; rewards are 0 to 1. MaxRL, arXiv:2602.02710. Numbers as its
    authors train Qwen3: tajwarfahim/maxrl, qwen3_experiments/run_qwen3_training.sh and
    verl/trainer/config/ppo_trainer.yaml. Their learning rate is 1e-6, their groups have 16. Their
    trainer's dual clip (3.0) is left out; it matters where an iteration has several steps.
    """
    return grpo() | {
        "advantage": "maxrl",
        "estimator": {},
        "scale": "none",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
    }


def otb() -> Choices:
    """GRPO's objective, mean over all tokens, with a baseline for each token (OTB); no KL.

    A_ij = G_ij - Σ_i G_ij W_ij / (Σ_i W_ij + 1e-8), G the reward to go, W the energy of the tokens
    so far. Optimal token baseline, arXiv:2602.07078. Numbers as of volcengine/verl,
    examples/otb_trainer/run_qwen2_5-7b.sh, and the estimator of its `tir_optimal_token_baseline`
    for several turns. The learning rate there is 1e-6, groups have 8; its dual clip (3.0) is left
    out.
    """
    return maxrl() | {"advantage": "otb", "estimator": {"zero_tail": True}}
