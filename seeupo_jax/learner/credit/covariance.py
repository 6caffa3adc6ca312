"""Tokens whose log-probability and advantage vary together, which collapse a policy's entropy.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv:2505.22617), Clip-Cov and KL-Cov. Their code takes covariances within each microbatch; here
they are over the whole optimizer step, as in the paper, so that layouts do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.types import TurnBatch


def token_covariance(
    logp_PA: np.ndarray, advantage_PA: np.ndarray, mask_PA: np.ndarray
) -> np.ndarray:
    """(log π - its mean) (A - its mean) of every token, means over the mask.

    Returns: float64 [P, A], nats x reward units; -inf outside the mask.
    """
    mask_PA = np.asarray(mask_PA, bool)
    logp_PA, advantage_PA = (np.asarray(x, np.float64) for x in (logp_PA, advantage_PA))
    products = [x - x[mask_PA].mean() if mask_PA.any() else x for x in (logp_PA, advantage_PA)]
    return np.where(mask_PA, products[0] * products[1], -np.inf)


def largest(covariance_PA: np.ndarray, count: int) -> np.ndarray:
    """KL-Cov's tokens: those of the largest covariances; of equal ones the first. bool [P, A]."""
    selected = np.zeros(covariance_PA.size, bool)
    selected[np.argsort(-covariance_PA, axis=None, kind="stable")[:count]] = True
    return selected.reshape(covariance_PA.shape) & (covariance_PA > -np.inf)


def drawn(
    covariance_PA: np.ndarray, count: int, *, low: float, high: float, rng: np.random.Generator
) -> np.ndarray:
    """Clip-Cov's tokens: so many at random of those with low < covariance < high. bool [P, A]."""
    inside = np.flatnonzero((low < covariance_PA) & (covariance_PA < high))
    selected = np.zeros(covariance_PA.size, bool)
    selected[rng.permutation(inside)[:count]] = True
    return selected.reshape(covariance_PA.shape)


def ratio_is_clipped(
    difference_PA: np.ndarray,
    advantage_PA: np.ndarray,
    options: Algorithm,
    scale_PA: np.ndarray | None = None,
) -> np.ndarray:
    """The tokens whose min(s A, clip(s) A) is clipped and has no gradient: bool [P, A].

    Args:
      difference_PA: log s. scale_PA: of the clip range; None: 1.
    """
    scale = 1.0 if scale_PA is None else scale_PA
    low = 0.0 if options.clip_low is None else 1 - scale * options.clip_low
    high = np.inf if options.clip_high is None else 1 + scale * options.clip_high
    ratio_PA = np.exp(difference_PA)
    return np.where(advantage_PA > 0, ratio_PA > high, (advantage_PA < 0) & (ratio_PA < low))


class Limited(NamedTuple):
    """A step's batch with its selected tokens limited, and the metrics of the selection."""

    batch: TurnBatch
    counted: Mapping[str, float]


def limit_tokens(
    options: Algorithm, batch: TurnBatch, logp_PA: np.ndarray, rng: np.random.Generator
) -> Limited:
    """Applies `covariance` to a step's batch of host arrays.

    Clip-Cov gives the tokens that it draws an advantage of 0, hence no gradient. KL-Cov adds
    |log s| at those that it picks: as the sign of log s times log s, whose gradient is the same.
    The sign is that of the log-probabilities given here, so that it is 0, as the derivative of |x|
    at 0, wherever no step has changed the policy yet, and not that of a rounding error.

    Args:
      logp_PA: log-probabilities under the parameters that the step begins from, nats.
    """
    mask_PA = batch.mask_PA > 0
    advantage_PA = np.asarray(batch.advantage_PA)
    difference_PA = np.where(mask_PA, logp_PA - batch.old_logp_PA, 0.0)
    covariance_PA = token_covariance(logp_PA, advantage_PA, mask_PA)
    tokens = int(mask_PA.sum())
    counted = {"covariance": float(covariance_PA[mask_PA].mean()) if tokens else 0.0}
    count = max(1, int(options.covariance.share * tokens))
    if options.covariance.kind == "kl":
        selected = largest(covariance_PA, count)
        sign_PA = np.sign(np.where(selected, difference_PA, 0.0)).astype(np.float32)
        batch = batch._replace(drift_sign_PA=sign_PA)
    else:
        within = {"low": options.covariance.low, "high": options.covariance.high}
        clipped = ratio_is_clipped(difference_PA, advantage_PA, options, batch.clip_scale_PA)
        selected = drawn(np.where(clipped, -np.inf, covariance_PA), count, **within, rng=rng)
        batch = batch._replace(advantage_PA=np.where(selected, np.float32(0), advantage_PA))
    return Limited(batch, counted | {"covariance_tokens": float(selected.sum())})
