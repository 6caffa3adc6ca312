"""Algorithms that credit each turn."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.outcome_recipes import ppo
from seeupo_jax.configuration.recipes.seeupo_recipes import Choices, one_action, parallel


def gigpo() -> Choices:
    """Max the mean over all tokens of min(s_ij A_it, clip(s_ij) A_it) - β KL_ij, a ratio per token.

    A_it, which the tokens j of turn t share, is the episode's advantage plus the turn's among those
    from its state, either over its group's standard deviation. GiGPO, arXiv:2505.10978, Eq. 8 and
    9. Numbers, and the mean over tokens where Eq. 9 has one over turns, as its authors train
    ALFWorld: langfengQ/verl-agent, examples/gigpo_trainer/run_alfworld.sh, and their
    verl/trainer/config/ppo_trainer.yaml, which has the entropy bonus. Their learning rate is 1e-6.
    """
    return one_action() | {
        "advantage": "gigpo",
        "scale": "group",
        "estimator": {"anchor": "state", "discount": 0.95, "step_coef": 1.0},
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.01,
        "entropy_coef": 0.001,
    }


def hgpo() -> Choices:
    """GiGPO's objective with A_it averaged over groups of turns that share more and more past.

    Groups of 0 to 2 turns before the state, the deeper ones weighing more, no part of the episode.
    HGPO, arXiv:2602.22817, Eq. 3 to 7. Numbers as its authors train ALFWorld: langfengQ/verl-agent,
    recipe/hgpo/run_qwen2.5_1.5b_alfworld_train.sh (K = 2; they also report K = 4).
    """
    return gigpo() | {
        "advantage": "hgpo",
        "estimator": {"anchor": "state", "discount": 0.95, "history": 2, "power": 1.0},
    }


def istar() -> Choices:
    """Max the mean over all tokens of min(s_ij A_it, clip(s_ij) A_it), a ratio per token, no KL.

    A_it is the reward less the mean of the group's other trajectories, plus the turn's implicit
    reward less the mean of the group's other turns; r_it = β Σ_j log π_φ / π_old of the turn's
    tokens, over the largest |r_it| of the batch. π_φ begins as the policy and minimises
    -log σ(v_i - v_l) over all pairs of a success i and a failure l of a group, v the mean of a
    trajectory's r_it. iStar, arXiv:2509.19199, which divides by deviations of the group. Numbers,
    and the estimator `istar_rloo` with `batch_norm`, as its authors train WebShop and Sokoban:
    Tongyi-ConvAI/Qwen-Character, CharacterRL-iStar, examples/istar_trainer and
    verl/trainer/config/ppo_trainer.yaml. Their policy's learning rate is 5e-7, the other's 1e-6.
    """
    return one_action() | {
        "advantage": "istar",
        "estimator": {
            "baseline": "leave_one_out",
            "step_coef": 1.0,
            "implicit_coef": 0.05,
            "norm": "batch_max",
            "pair_score": "mean",
            "success_above": 0.0,
            "scorer_rate": 2.0,
        },
        "scale": "none",
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "entropy_coef": 0.001,
    }


def a2tgpo() -> Choices:
    """Max the mean over all tokens of min(s_it A_it, clip_it(s_it) A_it), a ratio per turn.

    A_it = α D_it / √n_it + O_i: the gains from turn t on, each over the deviation of those at its
    index in the group, and the outcome's advantage. clip_it is to 1 - c_it ε_low and 1 + c_it
    ε_high, and the turn's gain sets c_it. A²TGPO, arXiv:2605.06200, with its published numbers
    (γ = 1, α = β = 0.3, no KL); the mean over tokens is the default of verl, which its authors use.
    Their groups have 16 trajectories, their learning rate is 1e-6.
    """
    return parallel() | {
        "advantage": "a2tgpo",
        "scale": "group",
        "estimator": {"discount": 1.0, "step_coef": 0.3, "adaptation": 0.3},
        "loss_aggregation": "token",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
        "kl_coef": 0.0,
    }


def matchtir() -> Choices:
    """GRPO's objective with A_it = half of the trajectory's advantage and of the turn's.

    The latter among the turns of the same index, either over its group's standard deviation.
    MatchTIR, arXiv:2601.10712. Numbers as its authors train: quchangle1/MatchTIR, Scripts/run.sh,
    and their verl/trainer/config/ppo_trainer.yaml. Their learning rate is 1e-6, their groups have
    16.
    """
    return one_action() | {
        "advantage": "matchtir",
        "scale": "group",
        "estimator": {"discount": 0.9},
        "ratio": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.001,
        "entropy_coef": 0.001,
    }


def spa() -> Choices:
    """PPO on rewards per turn, r_it = α c_it + β g_it, from a progress estimator.

    c_it is the estimator's contribution of turn t to the trajectory's reward, trained by
    (Σ_t c_it - r_i)^2; g_it is 1 if the environment could execute the turn's action. SPA-RL,
    arXiv:2505.20732, which gives no α and β: here 1 and, as in its authors' prm/rl_data_org.py
    (WangHanLinHenry/SPA-RL-Agent), 0.5. There the estimator is trained before the policy, on
    separate trajectories; here together with it.
    """
    return ppo() | {
        "advantage": "spa",
        "estimator": {"progress_coef": 1.0, "grounding_coef": 0.5},
    }


def prorl() -> Choices:
    """Max 1/N Σ_i Σ_t A_it (the mean of log π over the tokens of turn t) - β KL, one step on all.

    A_it: the rewards from turn t on, each less its running mean over max(its running deviation,
    0.1), less their mean over the group's turns t. Weights: config.rewards. ProRL,
    arXiv:2605.28293. Numbers as its authors train: hongruhou89/ProRL, trainer_RL_prorl.py and
    scripts/RL/run_ml1m_prorl.sh, in groups of 16; their learning rate, 1e-4, is of a small model.
    """
    return parallel() | {
        "advantage": "prorl",
        "objective": "logp",
        "scale": "none",
        "estimator": {"discount": 1.0, "std_floor": 0.1},
        "kl_coef": 0.01,
    }
