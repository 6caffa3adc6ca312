"""On-policy distillation: the policy's own samples, judged token by token by a teacher."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.estimators.returns import reward_to_go

# The log-probability of every outcome where no teacher is: its divergence there is 0, and finite.
UNTAUGHT = -1e30


@jax.jit
def reverse_kl_advantage(
    logp_NL: jax.Array,
    teacher_logp_NL: jax.Array,
    mask_NL: jax.Array,
    *,
    coef: float = 1.0,
    discount: float = 0.0,
) -> jax.Array:
    """A_l = coef Σ_(l' >= l) discount^(l' - l) (log π_teacher - log π) of token l'.

    With discount 0, which counts as 0^0 = 1 at the token itself, A_l = -(log π - log π_teacher), a
    sample of the reverse KL divergence: https://thinkingmachines.ai/blog/on-policy-distillation and
    `incorporate_kl_penalty` of tinker-cookbook.

    Args:
      logp_NL, teacher_logp_NL: [N, L], nats, of sampled tokens.
      mask_NL: nonzero at tokens that a teacher has scored; nothing outside is read, and may be NaN.
      coef: >= 0.
      discount: in [0, 1], a token; only masked tokens count.

    Returns:
      float32 [N, L], nats times `coef`; 0 outside the mask.
    """
    return coef * reward_to_go(teacher_logp_NL - logp_NL, mask_NL, discount=discount)


def forward_kl(logp_XJ: jax.Array, teacher_logp_XJ: jax.Array) -> jax.Array:
    """KL(π_teacher || π) = Σ_j π_teacher(j) (log π_teacher(j) - log π(j)) over J outcomes.

    Of next tokens the outcomes are the teacher's K likeliest tokens and, as the last, all others
    together. That is the KL divergence of the two distributions on the coarser set: at least 0, 0
    only where they agree on it, and at most that of all tokens (log sum inequality). The forward KL
    of arXiv:2306.13649, §3, on the policy's own samples (lambda = 1).

    Args:
      logp_XJ, teacher_logp_XJ: [X, J], nats; the probabilities of each row add up to 1, or all of
        the teacher's are `UNTAUGHT`.

    Returns:
      float32 [X], nats; its derivative by log π(j) is -π_teacher(j).
    """
    chex.assert_equal_shape([logp_XJ, teacher_logp_XJ])
    return jnp.sum(jnp.exp(teacher_logp_XJ) * (teacher_logp_XJ - logp_XJ), axis=-1)
