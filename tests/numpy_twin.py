"""An independent float64 NumPy twin of one SeeUPO iteration, to test against.

Plain loops over trajectories, no batching, no padding; it imports nothing of the package. The
policy is `numpy_model`, its weights a dict of Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy_model import Architecture, Weights, token_logps


@dataclass(frozen=True)
class Segment:
    """Tokens, per token the turn that sampled it or -1, and what its sampler said of it."""

    tokens_L: Sequence[int]
    turn_L: Sequence[int]
    logp_L: Sequence[float] = ()  # needed by tis_clip alone


@dataclass(frozen=True)
class Trajectory:
    """One episode; the package's own `Trajectory` has these fields too and may stand in for it."""

    segments: Sequence[Segment]
    reward: float
    group: int
    failed: bool = False


@dataclass(frozen=True)
class Options:
    """Choices of the sweep, named as in the package's configuration.

    order: the turns of each step, e.g. [[2], [1], [0]]; several turns in one list are one step.
    """

    order: Sequence[Sequence[int]]
    baseline: str = "mean"
    scale: str = "batch"
    advantage_clip: float | None = 3.0
    ratio: str = "geometric"
    old_policy: str = "iteration"
    pool_mean: str = "all"
    weight_clip: float | None = 0.2
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    kl_coef: float = 0.002
    tis_clip: float | None = None
    inner_epochs: int = 1
    temperature: float = 1.0
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class Step:
    """One optimizer step: the negative objective, its gradients, the factors when it was over.

    The factors change with the last of a turn's inner epochs.
    """

    turns: tuple[int, ...]
    loss: float
    gradients: Weights
    factor_N: np.ndarray


@dataclass(frozen=True)
class Sweep:
    advantage_N: np.ndarray
    steps: list[Step]
    weights: Weights


@dataclass(frozen=True)
class Piece:
    """A step's part of one segment: one action, however many of the step's turns it spans."""

    trajectory: int
    segment: Segment
    position_A: np.ndarray

    @property
    def tokens_L(self) -> np.ndarray:
        return np.asarray(self.segment.tokens_L)


def sweep(
    weights: Weights,
    trajectories: Sequence[Trajectory],
    options: Options,
    arch: Architecture,
    *,
    ref_weights: Weights | None = None,
) -> Sweep:
    """One iteration: advantages, then a step per entry of `options.order`, then new weights.

    Args:
      weights: the parameters that sampled; not changed.
      ref_weights: of the reference policy; None: `weights`.
    """
    start, reference = (
        {name: np.asarray(value, np.float64) for name, value in w.items()}
        for w in (weights, weights if ref_weights is None else ref_weights)
    )
    advantage_N = group_relative_advantages(
        [t.reward for t in trajectories],
        [t.group for t in trajectories],
        [not t.failed for t in trajectories],
        baseline=options.baseline,
        scale=options.scale,
        clip=options.advantage_clip,
    )
    factor_N = np.ones(len(trajectories))
    current, optimizer, steps = start, Optimizer(options), []
    for turns in options.order:
        pieces = step_pieces(trajectories, turns)
        if not pieces:
            continue
        old = piece_logps(current if options.old_policy == "turn" else start, pieces, arch, options)
        ref = piece_logps(reference, pieces, arch, options)
        pool = len({piece.trajectory for piece in pieces})
        counted = pool if options.pool_mean == "active" else sum(not t.failed for t in trajectories)
        weight_N = advantage_N * factor_N
        importance = importances(piece_logps(start, pieces, arch, options), pieces, options)
        rest = (pieces, old, ref, weight_N, counted, arch, options, importance)
        losses = []
        for _ in range(options.inner_epochs):
            loss, grads = turn_loss(current, *rest)
            current = optimizer.step(current, grads)
            losses.append((loss, grads))
        before_N, factor_N = factor_N, factor_N.copy()
        new = piece_logps(current, pieces, arch, options)
        ratios: dict[int, float] = {}
        for piece, new_A, old_A in zip(pieces, new, old, strict=True):
            ratio = _weight_ratio(new_A - old_A, options)
            ratios[piece.trajectory] = ratios.get(piece.trajectory, 1.0) * ratio
        for i, ratio in ratios.items():
            factor_N[i] = _updated_factor(factor_N[i], ratio, options.weight_clip)
        for epoch, (loss, grads) in enumerate(losses, start=1):
            after_N = factor_N if epoch == options.inner_epochs else before_N
            steps.append(Step(tuple(turns), loss, grads, after_N))
    return Sweep(advantage_N, steps, current)


def group_relative_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    valid: Sequence[bool],
    *,
    baseline: str,
    scale: str,
    clip: float | None,
) -> np.ndarray:
    """Advantages [N]; 0 for invalid trajectories and for groups with one valid member."""
    advantage_N, group_std_N = np.zeros(len(rewards)), np.zeros(len(rewards))
    kept = [i for i in range(len(rewards)) if valid[i]]
    for i in kept:
        members = [rewards[j] for j in kept if groups[j] == groups[i]]
        others = [rewards[j] for j in kept if groups[j] == groups[i] and j != i]
        if not others:
            continue
        advantage_N[i] = rewards[i] - np.mean({"mean": members, "leave_one_out": others}[baseline])
        group_std_N[i] = np.std(members, ddof=1)
    if scale == "group":
        return advantage_N / (group_std_N + 1e-6)
    if scale == "none" or not kept:
        return advantage_N
    assert scale == "batch", scale
    advantage_N[kept] -= advantage_N[kept].mean()
    std = advantage_N[kept].std(ddof=1) if len(kept) > 1 else 0.0
    if std > 1e-6:
        advantage_N = advantage_N / std
    return advantage_N if clip is None else np.clip(advantage_N, -clip, clip)


def turn_loss(
    weights: Weights,
    pieces: Sequence[Piece],
    old: Sequence[np.ndarray],
    ref: Sequence[np.ndarray],
    weight_N: np.ndarray,
    counted: int,
    arch: Architecture,
    options: Options,
    importance: Sequence[np.ndarray] | None = None,
) -> tuple[float, Weights]:
    """The negative objective of one step, and its gradients.

    Args:
      old, ref: per piece, log-probabilities [A] under the old and the reference policy.
      counted: how many trajectories the mean is over.
      importance: per piece, what each token's surrogate [A] weighs; None: 1.
    """
    loss, grads = 0.0, {}
    if importance is None:
        importance = [np.ones(len(old_A)) for old_A in old]
    for piece, old_A, ref_A, importance_A in zip(pieces, old, ref, importance, strict=True):
        logp_L, backward = token_logps(weights, piece.tokens_L, arch, options.temperature)
        weight_A = weight_N[piece.trajectory] * importance_A
        value, slope_A = piece_objective(logp_L[piece.position_A], old_A, ref_A, weight_A, options)
        loss -= value / counted
        dlogp_L = np.zeros_like(logp_L)
        dlogp_L[piece.position_A] = -slope_A / counted
        backward(dlogp_L, grads)
    return loss, grads


def step_pieces(trajectories: Sequence[Trajectory], turns: Sequence[int]) -> list[Piece]:
    """The actions that a step on `turns` updates: one a segment that has any of them."""
    pieces = []
    for i, trajectory in enumerate(trajectories):
        for segment in () if trajectory.failed else trajectory.segments:
            position_A = np.flatnonzero(np.isin(segment.turn_L, turns))
            if len(position_A):
                pieces.append(Piece(i, segment, position_A))
    return pieces


def importances(
    start: Sequence[np.ndarray], pieces: Sequence[Piece], options: Options
) -> list[np.ndarray]:
    """Per piece and token [A], how much likelier the trainer finds it than its sampler did.

    One number an action, repeated for its tokens, unless ratios are per token; 1 without a clip.

    Args:
      start: per piece, log-probabilities [A] under the parameters that sampled.
    """
    if options.tis_clip is None:
        return [np.ones(len(start_A)) for start_A in start]
    weights = []
    for piece, start_A in zip(pieces, start, strict=True):
        odds_A = np.exp(start_A) / np.exp(np.asarray(piece.segment.logp_L)[piece.position_A])
        if options.ratio != "token":
            root = len(odds_A) if options.ratio == "geometric" else 1
            odds_A = np.full(len(odds_A), np.prod(odds_A) ** (1 / root))
        weights.append(np.array([min(odds, options.tis_clip) for odds in odds_A]))
    return weights


def piece_logps(
    weights: Weights, pieces: Sequence[Piece], arch: Architecture, options: Options
) -> list[np.ndarray]:
    """Per piece, log-probabilities [A] of its action's tokens."""
    return [
        token_logps(weights, p.tokens_L, arch, options.temperature)[0][p.position_A] for p in pieces
    ]


def piece_objective(
    logp_A: np.ndarray, old_A: np.ndarray, ref_A: np.ndarray, weight_A: np.ndarray, options: Options
) -> tuple[float, np.ndarray]:
    """One action's objective, to maximise, and its derivative by each token's log-probability.

    Args:
      weight_A: M of each token, or one for all of them; all equal unless ratios are per token.
    """
    count = len(logp_A)
    weight_A = np.broadcast_to(weight_A, count)
    to_ref_A = ref_A - logp_A
    value = -options.kl_coef * np.mean(np.exp(to_ref_A) - to_ref_A - 1)
    slope_A = -options.kl_coef * (1 - np.exp(to_ref_A)) / count
    if options.ratio == "token":
        for j in range(count):
            term, slope = _clipped_term(np.exp(logp_A[j] - old_A[j]), weight_A[j], options)
            value += term / count
            slope_A[j] += slope / count
        return value, slope_A
    ratio = _weight_ratio(logp_A - old_A, options)
    term, slope = _clipped_term(ratio, weight_A[0], options)
    per_token = {"geometric": slope / count, "product": slope}[options.ratio]
    return value + term, slope_A + per_token


def _clipped_term(ratio: float, weight: float, options: Options) -> tuple[float, float]:
    """min(s W, clip(s) W) and its derivative by log s; at a tie the derivative is that of s W."""
    low = -np.inf if options.clip_low is None else 1 - options.clip_low
    high = np.inf if options.clip_high is None else 1 + options.clip_high
    plain, clipped = ratio * weight, min(max(ratio, low), high) * weight
    return (plain, plain) if plain <= clipped else (clipped, 0.0)


def _weight_ratio(difference_A: np.ndarray, options: Options) -> float:
    """An action's ratio: of all its tokens for `product`, else their geometric mean."""
    return np.exp(difference_A.sum() if options.ratio == "product" else difference_A.mean())


def _updated_factor(factor: float, ratio: float, clip: float | None) -> float:
    if clip is None:
        return factor * ratio
    low, high = 1 - clip, 1 + clip
    return min(max(factor * min(max(ratio, low), high), low), high)


class Optimizer:
    """Plain gradient descent or Adam, after an optional bound on the gradients' global norm."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = 0
        self._mean: Weights = {}
        self._square: Weights = {}

    def step(self, weights: Weights, grads: Weights) -> Weights:
        bound = self._options.max_grad_norm
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        if bound is not None and norm >= bound:
            grads = {name: g / norm * bound for name, g in grads.items()}
        direction = {"sgd": self._sgd, "adam": self._adam}[self._options.optimizer](grads)
        rate = self._options.learning_rate
        return {name: value - rate * direction[name] for name, value in weights.items()}

    def _sgd(self, grads: Weights) -> Weights:
        return grads

    def _adam(self, grads: Weights) -> Weights:
        self._count += 1
        direction = {}
        for name, g in grads.items():
            self._mean[name] = 0.9 * self._mean.get(name, 0.0) + 0.1 * g
            self._square[name] = 0.999 * self._square.get(name, 0.0) + 0.001 * g**2
            mean = self._mean[name] / (1 - 0.9**self._count)
            square = self._square[name] / (1 - 0.999**self._count)
            direction[name] = mean / (np.sqrt(square) + 1e-8)
        return direction
