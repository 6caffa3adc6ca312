"""Group-relative algorithms with a bound of their own on what an update changes."""

from __future__ import annotations

from seeupo_jax.configuration.recipes.outcome_recipes import dr_grpo, grpo
from seeupo_jax.configuration.recipes.seeupo_recipes import Choices


def sapo() -> Choices:
    """Max 1/N Σ_i 1/|o_i| Σ_j (4/τ) sigmoid(τ (s_ij - 1)) A_i, A as in GRPO, no KL.

    τ is 1.0 where A_i > 0 and 1.05 elsewhere. SAPO, arXiv:2511.20347. Numbers as of the paper's
    Qwen3-30B-A3B-Base: volcengine/verl, examples/sapo_trainer/run_qwen30b_sapo.sh. The learning
    rate there is 1e-6.
    """
    return grpo() | {"objective": "sapo", "tau_pos": 1.0, "tau_neg": 1.05, "kl_coef": 0.0}


def gmpo() -> Choices:
    """Max 1/N Σ_i (Π_j s_ij)^(1/|o_i|) A_i, log s_ij bounded on the side where the term rises.

    A as in GRPO, no KL. GMPO, arXiv:2507.20673, Eq. 4. The bounds are (e^-0.4, e^0.4), as its
    authors train: callsys/GMPO, scripts/qwen2.5-math-7b-gmpo.sh; they advise smaller ones for
    mixtures of experts. Their learning rate is 1e-6, their groups have 8.
    """
    return grpo() | {
        "objective": "gmpo",
        "ratio": "geometric",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "kl_coef": 0.0,
    }


def dppo_tv() -> Choices:
    """Max 1/N Σ_i Σ_j m_ij stop_gradient(s_ij) A_i log π_ij / a constant, A as in Dr. GRPO, no KL.

    m_ij is 0 where |π_ij - π_old,ij| > 0.15 and the step would move π_ij further away, else 1.
    DPPO-Binary-TV, arXiv:2602.04879. Numbers as of volcengine/verl,
    examples/dppo_trainer/run_qwen30b_dppo.sh, by its authors (sail-sg/Stable-RL), who take the
    sampler's log-probabilities for those of the old policy. Their learning rate is 1e-6, their
    groups have 16.
    """
    return dr_grpo() | {
        "objective": "dppo_tv",
        "clip_low": 0.15,
        "clip_high": 0.15,
        "clip_dual": None,
    }


def dppo_kl() -> Choices:
    """DPPO with KL(old || now) of "this token or another" at most 0.05 nats instead.

    DPPO-Binary-KL, arXiv:2602.04879; numbers as of the same script.
    """
    return dppo_tv() | {"objective": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05}
