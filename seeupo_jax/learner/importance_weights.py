"""Weights of the sampled tokens against their sampler, and those that are rejected for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.algorithms.importance import importance_weights
from seeupo_jax.algorithms.importance_options import Importance
from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.sweep_plan import action_numbers
from seeupo_jax.learner.sweep_state import PerToken
from seeupo_jax.types import CONTEXT

_weights = jax.jit(importance_weights, static_argnames=("units", "method", "level"))


class WeighedTokens(NamedTuple):
    """The segments whose tokens are learned from, and the weight of each token.

    rows: with rejected tokens as context.
    per_token: `importance`, 1 at context; empty without importance weights.
    metrics: of the weights; likewise.
    """

    rows: SegmentBatch
    per_token: PerToken
    metrics: dict[str, float]


def weigh_tokens(learner: Learner, rows: SegmentBatch, initial: PerToken) -> WeighedTokens:
    """Weighs every sampled token by the policy before the sweep and by what its sampler recorded.

    Args:
      rows: after `mask_above`, so that tokens which it excludes are in no quotient.
      initial: as of `SweepData`.

    Raises:
      ValueError: the sampler recorded no log-probability of a token.
    """
    algorithm = learner.algorithm
    options: Importance | None = algorithm.importance
    if options is None or not rows.updated_turns:
        return WeighedTokens(rows, {}, {})
    turn_X = np.concatenate(rows.turn)
    acted_X = turn_X != CONTEXT
    logp_X, sampler_logp_X = map(np.concatenate, (initial["trainer_logp"], rows.logp))
    unknown = int(np.isnan(sampler_logp_X[acted_X]).sum())
    if unknown:
        raise ValueError(
            f"logp: got none for {unknown} of {acted_X.sum()} sampled tokens; allowed: a number for"
            " each, which config.algorithm.importance reads."
        )
    action_X = numbered(rows, action_numbers(algorithm, rows.updated_turns, turn_X))
    unit_X = {
        "token": np.arange(turn_X.size),
        "turn": numbered(rows, turn_X),
        "action": action_X,
        "trajectory": numbered(rows, np.zeros_like(turn_X)),
    }[options.unit(algorithm.ratio)]
    # Padded to a power of 2: few shapes, each compiled once.
    size = 1 << (turn_X.size - 1).bit_length()
    unit_X = np.where(acted_X, unit_X, size)
    weight_X, kept_X, quotient_X = (
        np.asarray(x)
        for x in _weights(
            *(_padded(x_X, size, 0) for x_X in (logp_X, sampler_logp_X)),
            _padded(unit_X, size, size),
            units=size,
            method=options.method,
            level=options.level,
            clip=options.clip,
            low=options.low,
        )
    )
    weight_X, kept_X = weight_X[: turn_X.size], kept_X[: turn_X.size]
    quotient_X = quotient_X[np.minimum(unit_X, size - 1)]
    split = functools.partial(np.split, indices_or_sections=_ends(rows))
    weight_U = weight_X[acted_X][np.unique(unit_X[acted_X], return_index=True)[1]]
    metrics = {"sweep/importance_ess": effective_share(weight_U)}
    own = acted_X & kept_X
    if options.method == "truncate":
        metrics["sweep/tis_truncated"] = _mean_of_units(
            (quotient_X >= options.clip)[own], action_X[own]
        )
    else:
        metrics["sweep/importance_rejected"] = float(np.mean(~kept_X[acted_X]))
        rows = rows.without(split(~kept_X))
    metrics["sweep/tis_weight_mean"] = _mean_of_units(weight_X[own], action_X[own])
    return WeighedTokens(rows, {"importance": split(weight_X)}, metrics)


def effective_share(weight_U: np.ndarray) -> float:
    """(sum of w)^2 / (U sum of w^2), Kish's effective sample size of U weights divided by U.

    Returns: in [1 / U, 1]; 0 where all weights are 0, NaN without any.
    """
    weight_U = np.asarray(weight_U, np.float64)
    squares = np.sum(weight_U**2)
    if not squares:
        return 0.0 if weight_U.size else float("nan")
    share = float(weight_U.sum() ** 2 / (weight_U.size * squares))
    return min(share, 1.0)  # equal weights: rounding can exceed it


def numbered(rows: SegmentBatch, part_X: np.ndarray) -> np.ndarray:
    """A number of each pair of a token's trajectory and part [X], from 0 without gaps."""
    lengths = [len(tokens) for tokens in rows.tokens]
    trajectory_X = np.repeat(rows.trajectory_S, lengths).astype(np.int64)
    pair_X = trajectory_X * (part_X.max() + 2) + part_X + 1
    return np.unique(pair_X, return_inverse=True)[1].reshape(-1)


def _mean_of_units(x_X: np.ndarray, unit_X: np.ndarray) -> float:
    """The mean over units of the means over their tokens; NaN without any."""
    if not x_X.size:
        return float("nan")
    count_U = np.bincount(unit_X)
    total_U = np.bincount(unit_X, x_X.astype(np.float64))
    return float(np.mean(total_U[count_U > 0] / count_U[count_U > 0]))


def _padded(x_X: np.ndarray, size: int, value: float) -> np.ndarray:
    return np.pad(x_X, (0, size - x_X.size), constant_values=value)


def _ends(rows: SegmentBatch) -> Sequence[int]:
    return np.cumsum([len(tokens) for tokens in rows.tokens])[:-1].tolist()
