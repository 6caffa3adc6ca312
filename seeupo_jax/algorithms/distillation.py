"""On-policy distillation: the policy's own samples, judged token by token by a teacher."""

from __future__ import annotations

import jax

from seeupo_jax.algorithms.estimators.returns import reward_to_go


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
