"""Algorithms whose conversations branch at the ends of turns."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.seeupo_recipes import Choices, one_action, parallel


def spo_tree() -> Choices:
    """Max the mean over all tokens of min(s_ij A_it, clip(s_ij) A_it) - β KL_ij, a ratio per token.

    A_it = V(the node that turn t's branch ends in) - V(the one where it begins), V the mean reward
    of a node's leaves; each shared turn counts once, and tokens that the policy finds likelier than
    0.9 do not. Trees of 6-6-6 children, scaled to the group. SPO-tree, arXiv:2505.23564; numbers as
    its authors train MATH: AIFrameResearch/SPO, configs/polIter_qwen1b_spo_tree_MATH.jsonnet. Their
    learning rate is 1e-6; their segments are of equal numbers of tokens, ours of turns.
    """
    return one_action() | {
        "advantage": "tree",
        "estimator": {"baseline": "parent"},
        "scale": "none",
        "forks": {"kind": "tree", "factors": (6, 6, 6), "every": 1},
        "mask_above": 0.9,
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 1e-4,
    }


def arpo() -> Choices:
    """Max the mean over all tokens of min(s_ij A_it, clip(s_ij) A_it), a ratio per token, no KL.

    A_it = the mean over the trajectories that share turn t of (r - the group's mean) / its
    deviation: ARPO's "hard" estimate. Half of a group are whole episodes; after turn t another
    continues one where clamp(U - 0.2 (H_t - H_0), 0, 1) <= 0.5, U uniform, H the entropy of a
    turn's first 20 tokens. ARPO, arXiv:2507.19849; numbers as its authors train reasoning:
    dongguanting/ARPO, ARPO/scripts/ARPO_7B_Reasoning_1node.sh, with groups of 16 that begin with 8,
    and a learning rate of 1e-6.
    """
    return one_action() | {
        "advantage": "tree",
        "estimator": {"baseline": "root"},
        "scale": "group",
        "forks": {
            "kind": "entropy",
            "roots": None,
            "probability": 0.5,
            "entropy_coef": 0.2,
            "entropy_tokens": 20,
        },
        "ratio": "token",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "clip_dual": 3.0,
        "kl_coef": 0.0,
    }


def slate() -> Choices:
    """All turns in one step: max 1/N Σ_i Σ_t min(s_it A_it, clip(s_it) A_it) - β KL.

    A_it = (r - mean) / deviation of a judge's scores r over the candidates of the turn, which are
    sampled from one context before any is executed. One of them, drawn from softmax(A / 0.7), is
    executed; each is trained once. SLATE, arXiv:2602.23440, Eq. 5 and 7; numbers as in
    algoprog/SLATE, configs/slate.yaml, with five candidates and a learning rate of 1e-6.
    """
    return parallel() | {
        "advantage": "tree",
        "estimator": {"baseline": "siblings"},
        "scale": "group",
        "forks": {"kind": "candidates", "candidates": 5, "temperature": 0.7},
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.001,
    }
