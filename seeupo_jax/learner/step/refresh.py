"""The refresh: cumulative ratios after a step has changed the policy (Eq. 8)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.surrogate import turn_ratio, update_weight
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.learner.step.loss_config import LossConfig
from seeupo_jax.learner.step.rows import logp_at, of_spans, own_slots, take
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.kernels.attention import KeyValues, Past, Tree
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TurnBatch


def refresh_spans(
    params: Any,
    network: Network,
    config: LossConfig,
    refresh_batch: RefreshBatch,
    index: jax.Array,
    past: tuple[list[KeyValues], Tree],
    cumulative_ratio_N: jax.Array,
) -> jax.Array:
    """Cumulative ratios after the step before, from the tokens that it updated: forward only.

    Args:
      index: of the microbatch. past: its keys and values, and its trees.
    """
    params, (keys, tree), cumulative_ratio_N = jax.lax.stop_gradient(
        (params, past, cumulative_ratio_N)
    )
    _, Q, R, C = refresh_batch.tokens_MQRC.shape

    def body(number: jax.Array, logp_PA: jax.Array) -> jax.Array:
        part = index * Q + number

        def chunk(x_MQR: jax.Array) -> jax.Array:
            return take(x_MQR.reshape(-1, *x_MQR.shape[2:]), part)

        expert_MQRCG = refresh_batch.expert_MQRCG
        hidden_RCD, _ = policy.hidden(
            network,
            params,
            chunk(refresh_batch.tokens_MQRC),
            tree=Tree(chunk(refresh_batch.depth_MQRC), chunk(refresh_batch.end_MQRC)),
            past=Past(keys, tree, chunk(refresh_batch.at_MQRC)),
            given_NLG=None if expert_MQRCG is None else chunk(expert_MQRCG),
        )
        parent_RC, target_RC = chunk(refresh_batch.parent_MQRC), chunk(refresh_batch.target_MQRC)
        logp_RC, _ = logp_at(network, params, hidden_RCD, parent_RC, target_RC, config.temperature)
        return logp_PA + of_spans(
            logp_RC, *own_slots(refresh_batch.slot_PA, refresh_batch.mask_PA, part, R * C)
        )

    with jax.named_scope("sweep/refresh"):
        zeros_PA = jnp.zeros_like(refresh_batch.mask_PA)
        logp_PA = jax.lax.fori_loop(0, refresh_batch.chunks_M[index], body, zeros_PA)
        _, mask_PA = own_slots(refresh_batch.slot_PA, refresh_batch.mask_PA, index, Q * R * C)
        return refreshed(config, cumulative_ratio_N, logp_PA, refresh_batch, mask_PA)


def refreshed(
    config: LossConfig,
    cumulative_ratio_N: jax.Array,
    logp_PA: jax.Array,
    batch: TurnBatch | RefreshBatch,
    mask_PA: jax.Array,
) -> jax.Array:
    """Cumulative ratios times ratios of actions with a mask, each in one or several spans."""
    N = cumulative_ratio_N.shape[0]
    trajectory_P = jnp.where(mask_PA.any(axis=1), batch.trajectory_P, N)

    def total(x_PA: jax.Array) -> jax.Array:
        return jnp.zeros(N).at[trajectory_P].add(x_PA.sum(axis=1), mode="drop")

    log_N = total(jnp.where(mask_PA > 0, logp_PA - batch.old_logp_PA, 0.0))
    count_N = total(mask_PA)
    if config.weight_ratio == "geometric":
        log_N = log_N / jnp.maximum(count_N, 1)
    # Of one number each, whose sum it is: for its bound.
    one_N1 = (count_N > 0)[:, None]
    ratio_N = turn_ratio(log_N[:, None], jnp.zeros((N, 1)), one_N1, level="product")
    updated_N = update_weight(cumulative_ratio_N, ratio_N, clip=config.options.weight_clip)
    return jnp.where(count_N > 0, updated_N, cumulative_ratio_N)
