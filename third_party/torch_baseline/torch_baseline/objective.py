"""The clipped surrogate, the KL penalty and the factors of the weights, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_baseline.options import Algorithm
from torch_baseline.samples import Microbatch

_MAX_LOG_RATIO = 80.0  # float32 ends at exp(88.7)
# Nats; of k3, as in volcengine/verl, verl/trainer/ppo/core_algos.py, `kl_penalty_forward`.
_MAX_K3_DIFFERENCE, _MAX_K3 = 20.0, 10.0


@dataclass(frozen=True)
class Terms:
    """Of each row [R], 0 where it is not real.

    loss: the negative objective; the gradient flows through it. kl: its estimate, nats a token.
    clipped: the share of the action whose clipped ratio counted.
    """

    loss: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor


def row_terms(
    algorithm: Algorithm,
    batch: Microbatch,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor | None,
    weight: torch.Tensor,
) -> Terms:
    """The terms that one microbatch adds to the loss, before any normalisation.

    Args:
      logp, old_logp, ref_logp: [X], of the action tokens; no reference: the KL is NaN.
      weight: [R], M of the rows' trajectories.
    """
    low = -torch.inf if algorithm.clip_low is None else 1 - algorithm.clip_low
    high = torch.inf if algorithm.clip_high is None else 1 + algorithm.clip_high
    by_token = algorithm.ratio == "token"
    ratio = _ratio(batch, logp - old_logp, algorithm.ratio)
    weight = weight[batch.row] if by_token else weight
    plain, bounded = ratio * weight, ratio.clamp(low, high) * weight
    # Not torch.minimum: where the two are equal the gradient is to be that of ratio x weight.
    term = torch.where(plain <= bounded, plain, bounded)
    clipped = (term < plain).float().detach()
    if by_token:
        term, clipped = (_sum(batch, x) / batch.size for x in (term, clipped))
    if ref_logp is None:
        kl = torch.full_like(batch.size, torch.nan)
        loss = -term
    else:
        difference = (ref_logp - logp).clamp(-_MAX_K3_DIFFERENCE, _MAX_K3_DIFFERENCE)
        k3 = (torch.expm1(difference) - difference).clamp(max=_MAX_K3)
        kl = _sum(batch, k3) / batch.size
        loss = -term + algorithm.kl_coef * kl if algorithm.kl_coef else -term
    zero = torch.zeros_like(batch.size)
    loss, kl, clipped = (torch.where(batch.real, x, zero) for x in (loss, kl, clipped))
    return Terms(loss, kl.detach(), clipped)


def updated_factor(
    algorithm: Algorithm,
    batch: Microbatch,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    factor: torch.Tensor,
) -> torch.Tensor:
    """The factors of all trajectories [N] with a microbatch's ratios multiplied into them.

    A trajectory's weight is M = advantage x factor.

    Args:
      logp: after the step.
    """
    level = "product" if algorithm.ratio == "product" else "geometric"
    ratio = _ratio(batch, logp - old_logp, level)
    own = factor[batch.trajectory]
    if algorithm.weight_clip is None:
        new = own * ratio
    else:
        low, high = 1 - algorithm.weight_clip, 1 + algorithm.weight_clip
        new = (own * ratio.clamp(low, high)).clamp(low, high)
    return factor.index_put((batch.trajectory,), torch.where(batch.real, new, own))


def _sum(batch: Microbatch, values: torch.Tensor) -> torch.Tensor:
    """Each row's sum over its action tokens, [R]."""
    return torch.zeros_like(batch.size).index_add(0, batch.row, values)


def _ratio(batch: Microbatch, difference: torch.Tensor, level: str) -> torch.Tensor:
    """exp of the difference's mean or sum over a row's action, [R], or of each token's, [X]."""
    log_ratio = {
        "geometric": lambda: _sum(batch, difference) / batch.size,
        "product": lambda: _sum(batch, difference),
        "token": lambda: difference,
    }[level]()
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()
