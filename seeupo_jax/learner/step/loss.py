"""The loss of one microbatch of a turn's step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.action_objective import action_objective
from seeupo_jax.algorithms.distillation import UNTAUGHT
from seeupo_jax.algorithms.surrogate import kl_estimate
from seeupo_jax.configuration.algorithm import LossOptions
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.learner.step.actions import SplitActions, action_means, by_action
from seeupo_jax.learner.step.critic import Critic, row_value, span_loss
from seeupo_jax.learner.step.expert_balance import RouterLosses, router_terms
from seeupo_jax.learner.step.expert_load import routing_sums
from seeupo_jax.learner.step.loss_config import LossConfig
from seeupo_jax.learner.step.refresh import refresh_spans
from seeupo_jax.learner.step.rows import RowLogp, of_spans, row_logp
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.kernels.attention import Tree
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TurnBatch


def turn_loss(
    trained: tuple[Any, Any],
    frozen: Any,
    network: Network,
    config: LossConfig,
    critic: Critic | None,
    row: TurnBatch,
    refresh_batch: RefreshBatch | None,
    index: jax.Array,
    cumulative_ratio_N: jax.Array,
    split: SplitActions | None,
    routers: RouterLosses | None = None,
) -> tuple[jax.Array, tuple[tuple[jax.Array, ...], jax.Array, dict[str, jax.Array]]]:
    """One microbatch's share of the negative objective (Eq. 6), not yet divided by anything.

    Args:
      trained: the parameters that the loss is differentiated by: the policy's and the critic's,
        whose loss is added.
      frozen: the policy's other parameters.
      row: one microbatch, of this index.
      refresh_batch, split, routers: of all microbatches.

    Returns: the loss's sum, and ((logp_PA, any entropy_PA), cumulative_ratio_N, sums for metrics).
    """
    params, options = policy.join_params(trained[0], frozen), config.options
    of_tokens = {"entropy": config.needs_entropy, "forward_kl": config.teacher_coef is not None}
    scored = row_logp(network, params, row, config.temperature, **of_tokens)
    if refresh_batch is not None:
        past = (scored.keys, Tree(row.depth_MRL, row.end_MRL))
        cumulative_ratio_N = refresh_spans(
            params, network, config, refresh_batch, index, past, cumulative_ratio_N
        )
    cumulative_ratio_P = cumulative_ratio_N.at[row.trajectory_P].get(mode="clip")
    of_own = functools.partial(of_spans, slot_PA=row.slot_PA, mask_PA=row.mask_PA)
    logp_PA = of_own(scored.logp_RX)
    mask_PJA = by_action(row, config.actions)
    count_PJ = mask_PJA.sum(axis=2)
    mean = functools.partial(action_means, mask_PJA=mask_PJA)
    term_PJ, clipped_PJ = _action_terms(config, row, logp_PA, cumulative_ratio_P, mask_PJA, split)
    # How much of an action the span holds.
    part_PJ = (count_PJ > 0) * (1 if split is None else split.part)
    # An action's terms are means over its tokens.
    size_PJ = part_PJ if options.loss_aggregation == "action" else count_PJ
    counted = functools.partial(_sum_of_parts, part_PJ)
    gain_PJ, means, taught = _regularized(config, row, scored, term_PJ, logp_PA, mean)
    router_loss, router_sums = router_terms(routers, network.arch, row, scored)
    loss = router_loss - jnp.sum(size_PJ * gain_PJ)
    sums = {
        "actions": part_PJ.sum(dtype=jnp.float32),
        "clipped": counted(clipped_PJ),
        "weight_max": _largest_weight(config, row, cumulative_ratio_P, mask_PJA, split),
        **{name: counted(mean_PJ) for name, mean_PJ in means.items()},
        **routing_sums(config, network.arch.routing, row, scored.routed_RLG),
        **router_sums,
        **taught,
    }
    if critic is not None:
        value_PA = of_own(row_value(network, critic, params, trained[1], row, scored.hidden_RXD))
        error_PJ, clipped_PJ = map(mean, span_loss(critic, value_PA, row))
        loss += critic.options.coef * jnp.sum(size_PJ * error_PJ)
        sums |= {"value_loss": counted(error_PJ), "value_clipped": counted(clipped_PJ)}
    found = (logp_PA, *([of_own(scored.entropy_RX)] if config.finds_entropy else []))
    return loss, jax.lax.stop_gradient((found, cumulative_ratio_N, sums))


def _regularized(
    config: LossConfig,
    row: TurnBatch,
    scored: RowLogp,
    term_PJ: jax.Array,
    logp_PA: jax.Array,
    mean: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """The objective of each action [P, J] with the terms beside it, which are means over tokens;
    these means by name; and sums for the metrics of teachers."""
    of_own = functools.partial(of_spans, slot_PA=row.slot_PA, mask_PA=row.mask_PA)
    options = config.options
    means = {"kl": mean(_token_kl(options, row, logp_PA))}
    gain_PJ = term_PJ - (config.kl_coef if row.kl_coef is None else row.kl_coef) * means["kl"]
    if row.drift_sign_PA is not None:  # |log s| of some tokens
        gain_PJ -= options.covariance.coef * mean(row.drift_sign_PA * (logp_PA - row.old_logp_PA))
    if config.entropy:
        means["entropy"] = mean(of_own(scored.entropy_RX))
        gain_PJ += options.entropy_coef * means["entropy"]
    if config.teacher_coef is None:
        return gain_PJ, means, {}
    forward_kl_PA = of_own(scored.forward_kl_RX)
    taught_RX = (row.teacher_top_logp_MRXJ > UNTAUGHT).any(axis=-1)
    count = of_own(taught_RX).sum(dtype=jnp.float32)
    gain_PJ -= config.teacher_coef * mean(forward_kl_PA)
    return gain_PJ, means, {"taught": count, "forward_kl": forward_kl_PA.sum()}


def _token_kl(options: LossOptions, row: TurnBatch, logp_PA: jax.Array) -> jax.Array:
    """KL to the reference policy at every token; to the step's own where none is scored: 0."""
    ref_logp_PA = jax.lax.stop_gradient(logp_PA) if row.ref_logp_PA is None else row.ref_logp_PA
    return kl_estimate(logp_PA, ref_logp_PA, kind=options.kl_estimate, mask=row.mask_PA)


def _sum_of_parts(part_PJ: jax.Array, x_PJ: jax.Array) -> jax.Array:
    return jnp.sum(part_PJ * x_PJ)


def _largest_weight(
    config: LossConfig,
    row: TurnBatch,
    cumulative_ratio_P: jax.Array,
    mask_PJA: jax.Array,
    split: SplitActions | None,
) -> jax.Array:
    """The largest |M|: of actions, or of tokens where ratios are per token."""
    advantage = jnp.where(row.mask_PA > 0, row.advantage_PA, 0.0)
    if config.options.ratio != "token":
        advantage = action_means(advantage, mask_PJA)
        if split is not None:
            advantage += jnp.where(mask_PJA.any(axis=2), split.advantage, 0.0)
    return jnp.max(jnp.abs(advantage * cumulative_ratio_P[:, None]))


def _action_terms(
    config: LossConfig,
    row: TurnBatch,
    logp_PA: jax.Array,
    cumulative_ratio_P: jax.Array,
    mask_PJA: jax.Array,
    split: SplitActions | None,
) -> tuple[jax.Array, jax.Array]:
    """The term of each action and how much of it is clipped [P, J]."""
    options, old_logp_PA = config.options, row.old_logp_PA
    if config.old_is_current or old_logp_PA is None:
        old_logp_PA = jax.lax.stop_gradient(logp_PA)
    logps_PJA = logp_PA[:, None, :], old_logp_PA[:, None, :]
    advantage = row.advantage_PA[:, None, :]
    clip_scale = None if row.clip_scale_PA is None else row.clip_scale_PA[:, None, :]
    importance = None if row.importance_PA is None else row.importance_PA[:, None, :]
    whole = None
    if split is not None:
        whole = functools.partial(split.pair, behind_PJ=split.ratio, level=options.ratio)
        if options.ratio != "token":
            advantage += split.advantage[..., None]
            if split.clip_scale is not None:
                clip_scale += split.clip_scale[..., None]
            if split.importance is not None:
                importance += split.importance[..., None]
    return action_objective(
        *logps_PJA,
        mask_PJA,
        advantage,
        cumulative_ratio_P[:, None],
        objective=config.objective,
        ratio=options.ratio,
        importance_NL=importance,
        clip_scale_NL=clip_scale,
        whole=whole,
        **config.bounds,
    )
