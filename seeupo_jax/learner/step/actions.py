"""The actions of a step's spans, and those that lie in several spans."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.action_objective import limited_logp, scaled_bounds
from seeupo_jax.learner.step.loss_config import LossConfig
from seeupo_jax.types import TurnBatch


def by_action(row: TurnBatch, actions: int) -> jax.Array:
    """The mask of each of a span's actions, [P, J, A]."""
    if row.action_PA is None:
        return row.mask_PA[:, None, :]
    own_PJA = row.action_PA[:, None, :] == jnp.arange(actions)[None, :, None]
    return own_PJA * row.mask_PA[:, None, :]


def action_means(x_PA: jax.Array, mask_PJA: jax.Array) -> jax.Array:
    """The mean over each action's tokens, [P, J]; 0 of an action that the span has none of."""
    total_PJ = (x_PA[:, None, :] * mask_PJA).sum(axis=2)
    return total_PJ / jnp.maximum(mask_PJA.sum(axis=2), 1)


class SplitActions(NamedTuple):
    """Actions whose tokens lie in several spans: what each span lacks of them; [P, J].

    part: of the action's tokens that the span holds. times: 1 / part.
    Means over the action's tokens, less those over the span's own, which are 0 in a span that
    holds all of them:
    advantage.
    ratio: log(π / π_old) under the parameters that the step begins from; None: not needed.
    importance: the weight; None without importance weights.
    clip_scale: of the clip range; None: it is not scaled.
    """

    part: jax.Array
    times: jax.Array
    advantage: jax.Array
    ratio: jax.Array | None
    importance: jax.Array | None
    clip_scale: jax.Array | None

    def pair(
        self,
        logp_PJA: jax.Array,
        other_logp_PJA: jax.Array,
        behind_PJ: jax.Array | None,
        level: str,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities that have, over a span's own tokens, the ratio of the whole action.

        Each span's loss counts by its share of the action's tokens: these add up to f(ratio of the
        action), and their gradients to its gradient, with the other spans held constant in each.

        Args:
          behind_PJ: `ratio`; None: 0. level: of the ratio.
        """
        if level == "token":
            return logp_PJA, other_logp_PJA
        behind_PJ1 = 0.0 if behind_PJ is None else behind_PJ[..., None]
        times_PJ1 = self.times[..., None] if level == "product" else 1.0
        return times_PJ1 * logp_PJA, times_PJ1 * (other_logp_PJA - behind_PJ1)


def split_actions(config: LossConfig, batch: TurnBatch, trajectories: int) -> SplitActions | None:
    """Splits of the actions of a batch; None where each action is one turn, in one span."""
    unmoved = batch.old_logp_PA is None  # ratios are 1
    if batch.logp_PA is None and not unmoved:
        return None
    mask_PJA = by_action(batch, config.actions)
    count_PJ = mask_PJA.sum(axis=2)

    def total(x_PJA: jax.Array) -> jax.Array:
        return jnp.where(mask_PJA > 0, x_PJA, 0.0).sum(axis=2)

    def over_spans(x_PJ: jax.Array) -> jax.Array:
        """Sums over all spans of a trajectory, at each of them."""
        none_NJ = jnp.zeros((trajectories, x_PJ.shape[1]))
        sum_NJ = none_NJ.at[batch.trajectory_P].add(x_PJ, mode="drop")
        return sum_NJ[jnp.minimum(batch.trajectory_P, trajectories - 1)]

    tokens_PJ = jnp.maximum(over_spans(count_PJ), 1)

    def behind(x_PJA: jax.Array) -> jax.Array:
        own_PJ = total(x_PJA)
        difference_PJ = over_spans(own_PJ) / tokens_PJ - own_PJ / jnp.maximum(count_PJ, 1)
        # Not by subtraction alone: infinity less itself is not a number.
        return jnp.where(count_PJ < tokens_PJ, difference_PJ, 0.0)

    def whole_mean(x_PJA: jax.Array) -> jax.Array:
        return over_spans(total(x_PJA)) / tokens_PJ

    ratio = importance = scale_PJA = clip_scale = None
    advantage_PJA = batch.advantage_PA[:, None, :]
    if batch.clip_scale_PA is not None:
        scale_PJA = batch.clip_scale_PA[:, None, :]
        clip_scale = behind(scale_PJA)
    if config.reads_action_ratio and not unmoved:
        logps_PJA = batch.logp_PA[:, None, :], batch.old_logp_PA[:, None, :]
        scale_PJ = None if scale_PJA is None else whole_mean(scale_PJA)
        # The cumulative ratio leaves the sign of the weight, which is all that limits read of it.
        limited_PJA = limited_logp(
            *logps_PJA,
            mask_PJA,
            whole_mean(advantage_PJA),
            config.objective,
            scaled_bounds(config.objective, config.bounds, scale_PJ),
        )
        ratio = behind(limited_PJA - logps_PJA[1])
    if batch.importance_PA is not None:
        importance = behind(batch.importance_PA[:, None, :])
    part_PJ, times_PJ = count_PJ / tokens_PJ, tokens_PJ / jnp.maximum(count_PJ, 1)
    advantage = behind(advantage_PJA)
    return SplitActions(part_PJ, times_PJ, advantage, ratio, importance, clip_scale)
