"""The losses of routers and the selection biases of experts, in an optimizer step.

All tokens of a step's rows count, context included, as they all load the experts: each once, also
where sequences share it, and no padding. Where a step has several microbatches, the load of the
whole step is found by a pass before the gradient's, so that the losses are those of the step,
however its tokens lie in rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.algorithms.expert_balance import balance_loss, router_z_loss, updated_bias
from seeupo_jax.algorithms.expert_options import ExpertBalance
from seeupo_jax.learner.step.expert_load import count_routed
from seeupo_jax.learner.step.rows import RowLogp, compute_row, microbatch
from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture
from seeupo_jax.policy.moe import expert_scores
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TrainState, TurnBatch

# Names among the sums of a step: of the losses, and of the tokens of each expert.
ROUTER_LOSSES = ("balance_loss", "router_z_loss")
LOAD = "expert_load"


class RouterLosses(NamedTuple):
    """The losses of the routers in a step.

    tokens: that count. load_YE: tokens of each expert; None: those of the only microbatch.
    weight: of the losses beside the sum that the step divides by it.
    """

    balance: ExpertBalance
    tokens: jax.Array
    load_YE: jax.Array | None
    weight: jax.Array


def router_terms(
    losses: RouterLosses | None, arch: Architecture, row: TurnBatch, scored: RowLogp
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One microbatch's part of the weighted losses, and its sums for metrics and biases."""
    sums, loss = {}, jnp.zeros(())
    if losses is None:
        return loss, sums
    balance = losses.balance
    counted_X = row.counted_MRL.reshape(-1)
    logits_XYE = scored.router_RLYE.reshape(counted_X.size, *scored.router_RLYE.shape[2:])
    own_YE = count_routed(arch.routing, row, scored.routed_RLG).load_YE.astype(jnp.float32)
    if balance.balance_coef:
        probability_XYE = expert_scores(logits_XYE, arch.moe)
        if arch.moe.scores == "sigmoid":  # as in DeepSeek-V3, arXiv:2412.19437 Eq. 19
            probability_XYE /= probability_XYE.sum(axis=-1, keepdims=True)
        load_YE = own_YE if losses.load_YE is None else losses.load_YE
        sums["balance_loss"] = balance_loss(probability_XYE, counted_X, load_YE, losses.tokens)
        loss += balance.balance_coef * sums["balance_loss"]
    if balance.z_coef:
        sums["router_z_loss"] = router_z_loss(logits_XYE, counted_X, losses.tokens)
        loss += balance.z_coef * sums["router_z_loss"]
    if balance.bias_rate:
        sums[LOAD] = own_YE
    return losses.weight * loss, sums


def router_losses(
    network: Network, balance: ExpertBalance, params: Any, batch: TurnBatch, weight: jax.Array
) -> RouterLosses | None:
    """The losses of the routers in a step on a batch; None: nothing of `balance` is on.

    Args:
      weight: see `RouterLosses`.
    """
    if not balance.active:
        return None
    tokens = jnp.maximum(batch.counted_MRL.sum(), 1).astype(jnp.float32)
    if not balance.balance_coef or len(batch.tokens_MRL) == 1:
        return RouterLosses(balance, tokens, None, weight)
    routing = network.arch.routing

    def add(index: jax.Array, load_YE: jax.Array) -> jax.Array:
        row = microbatch(batch, index)
        routed_RLG = compute_row(network, params, row).routed_NLG
        return load_YE + count_routed(routing, row, routed_RLG).load_YE

    zeros_YE = jnp.zeros((routing.layers, routing.experts), jnp.int32)
    with jax.named_scope("expert_load"):
        load_YE = jax.lax.fori_loop(0, batch.microbatches, add, zeros_YE)
    return RouterLosses(balance, tokens, load_YE.astype(jnp.float32), weight)


def zero_sums(arch: Architecture, balance: ExpertBalance) -> dict[str, jax.Array]:
    """The zeros that the sums of `router_terms` are added to."""
    coefs = balance.balance_coef, balance.z_coef
    names = [name for name, coef in zip(ROUTER_LOSSES, coefs, strict=True) if coef]
    sums = dict.fromkeys(names, jnp.zeros(()))
    if balance.bias_rate:
        sums[LOAD] = jnp.zeros((arch.routing.layers, arch.routing.experts))
    return sums


def step_biases(
    arch: Architecture,
    balance: ExpertBalance,
    state: TrainState,
    sums: dict[str, jax.Array],
    skipped: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state with the selection biases of the policy stepped, and the sums that are scalars.

    Args:
      skipped: 1.0 where the optimizer's step was skipped, and so is this one.
    """
    if not balance.bias_rate:
        return state, sums
    rate = balance.bias_rate * (1 - skipped)
    row_of = {layer: row for row, layer in enumerate(filter(arch.is_sparse, range(arch.layers)))}

    def stepped(path: Any, leaf: jax.Array) -> jax.Array:
        keys = [key.key for key in path]
        if keys[-1] != SELECTION_BIAS:
            return leaf
        if arch.scan_layers:
            return updated_bias(leaf, sums[LOAD], rate=rate)
        load_YE = sums[LOAD][row_of[keys[1]]][None]
        return updated_bias(leaf[None], load_YE, rate=rate)[0]

    params = jax.tree_util.tree_map_with_path(stepped, state.params)
    return state._replace(params=params), {k: x for k, x in sums.items() if k != LOAD}
