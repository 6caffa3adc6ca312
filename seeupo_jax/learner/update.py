"""The sweep's programs: one turn's step, log-probabilities, and the refresh of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.algorithms.surrogate import (
    clipped_surrogate,
    kl_estimate,
    truncated_importance,
    turn_ratio,
    update_weight,
)
from seeupo_jax.learner.batching import RefreshBatch
from seeupo_jax.learner.layout import on_device
from seeupo_jax.learner.optimizer import apply_update
from seeupo_jax.parallel.mesh import constrain
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.attention import KeyValues
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TrainState, TurnBatch


@dataclass(frozen=True)
class Objective:
    """What is fixed about the objective; hashable, part of each program."""

    ratio: str
    old_is_current: bool  # the ratio is to the policy just before this very step
    clip_low: float | None
    clip_high: float | None
    kl_coef: float
    weight_clip: float | None
    temperature: float
    tis_clip: float | None = None

    @property
    def sums(self) -> tuple[str, ...]:
        """What a step counts for its metrics, beside the loss."""
        names = ("rows", "clipped", "kl", "weight_max")
        return names if self.tis_clip is None else (*names, "tis_weight", "tis_truncated")

    @property
    def weight_ratio(self) -> str:
        """The level of the ratio that updates M: always one number per action."""
        return "geometric" if self.ratio == "token" else self.ratio


def action_logp(
    network: Network, params: Any, row: TurnBatch, temperature: float
) -> tuple[jax.Array, list[KeyValues]]:
    """log π of the action tokens of one microbatch, [R, A], and the pass's keys and values."""
    hidden_RLD, keys = policy.hidden(network, params, row.tokens_MRL)
    logp_RA = logp_at(network, params, hidden_RLD, row.tokens_MRL, row.position_MRA, temperature)
    return logp_RA, list(keys)


def logp_at(
    network: Network,
    params: Any,
    hidden_RLD: jax.Array,
    tokens_RL: jax.Array,
    position_RA: jax.Array,
    temperature: float,
) -> jax.Array:
    """log π of the tokens at some positions, each predicted by the position before it."""
    target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
    hidden_RAD = policy.pick(hidden_RLD, position_RA - 1)
    return policy.token_logp(network, params, hidden_RAD, target_RA, temperature=temperature)


def microbatch(batch: Any, index: jax.Array) -> Any:
    """Microbatch `index` of a batch whose arrays begin with [M, R]; rows spread over the mesh."""

    def take(x: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return constrain(x, "rows", *(None,) * (x.ndim - 1))

    return jax.tree.map(lambda x: take(x) if x.ndim else x, batch)


def score(network: Network, params: Any, batch: TurnBatch, *, temperature: float) -> jax.Array:
    """log π of every action token of a batch under `params`: float32 [M, R, A], 0 in empty rows."""

    def body(index: jax.Array, logp_MRA: jax.Array) -> jax.Array:
        logp_RA, _ = action_logp(network, params, microbatch(batch, index), temperature)
        return jax.lax.dynamic_update_index_in_dim(logp_MRA, logp_RA, index, 0)

    with jax.named_scope("sweep/score"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros_like(batch.mask_MRA))


def refresh(
    network: Network, objective: Objective, params: Any, batch: TurnBatch, factor_N: jax.Array
) -> jax.Array:
    """The separate refresh: factors after the step that updated `batch`, by a pass of its own."""
    logp_MRA = score(network, params, batch, temperature=objective.temperature)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    ratio = turn_ratio(
        flat(logp_MRA),
        flat(batch.old_logp_MRA),
        flat(batch.mask_MRA),
        level=objective.weight_ratio,
    )
    return _multiply(factor_N, batch.trajectory_MR.reshape(-1), ratio, objective.weight_clip)


def _multiply(
    factor_N: jax.Array, trajectory_X: jax.Array, ratio_X: jax.Array, clip: float | None
) -> jax.Array:
    """Multiplies rows' ratios into their trajectories' factors; rows of no trajectory are dropped.

    A merged step may hold several rows of one trajectory: their ratios multiply first.
    """
    N = factor_N.shape[0]
    ratio_N = jnp.ones(N).at[trajectory_X].multiply(ratio_X, mode="drop")
    touched_N = jnp.zeros(N, bool).at[trajectory_X].set(True, mode="drop")
    return jnp.where(touched_N, update_weight(factor_N, ratio_N, clip=clip), factor_N)


def turn_loss(
    params: Any,
    frozen: Any,
    network: Network,
    objective: Objective,
    row: TurnBatch,
    continued: RefreshBatch | None,
    factor_R: jax.Array,
    advantage_R: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """One microbatch's share of the negative objective (Eq. 6), not yet divided by anything.

    Args:
      params, frozen: the parameters that the loss is differentiated by, and the others.
      row, continued: one microbatch each, without their leading axis M.
      factor_R, advantage_R: of the rows' trajectories; empty rows have advantage 0.

    Returns: the loss's sum, and (logp_RA, refreshed factor_R, sums for metrics).
    """
    params = policy.join(params, frozen)
    logp_RA, keys = action_logp(network, params, row, objective.temperature)
    if continued is not None:
        factor_R = _refresh_rows(params, network, objective, continued, keys, factor_R)
    weight_R = advantage_R * factor_R
    old_logp_RA = row.old_logp_MRA
    if objective.old_is_current:
        old_logp_RA = jax.lax.stop_gradient(logp_RA)
    mask_RA, count_R = row.mask_MRA, jnp.maximum(row.mask_MRA.sum(axis=1), 1)
    ratio = turn_ratio(logp_RA, old_logp_RA, mask_RA, level=objective.ratio)
    weight = weight_R if ratio.ndim == 1 else jnp.broadcast_to(weight_R[:, None], ratio.shape)
    clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    surrogate = clipped_surrogate(ratio, weight, **clip)
    shares = {"clipped": surrogate < ratio * weight}
    if objective.tis_clip is not None:
        importance = _importance(objective, row)
        surrogate = importance * surrogate
        shares |= {
            "tis_weight": importance,
            "tis_truncated": importance >= objective.tis_clip,
        }
    if ratio.ndim == 2:
        surrogate, shares = jax.tree.map(
            lambda x: (x * mask_RA).sum(axis=1) / count_R, (surrogate, shares)
        )
    kl_R = kl_estimate(logp_RA, row.ref_logp_MRA, mask=mask_RA).sum(axis=1) / count_R
    real_R = row.mask_MRA[:, 0]
    loss = -jnp.sum(real_R * (surrogate - objective.kl_coef * kl_R))
    sums = {
        "rows": real_R.sum(),
        **{name: jnp.sum(real_R * share) for name, share in shares.items()},
        "kl": jnp.sum(real_R * kl_R),
        "weight_max": jnp.max(jnp.abs(real_R * weight_R)),
    }
    return loss, (logp_RA, factor_R, jax.lax.stop_gradient(sums))


def _importance(objective: Objective, row: TurnBatch) -> jax.Array:
    """What the rows' surrogates weigh against the sampler's mismatch, in the ratio's shape."""
    return truncated_importance(
        row.start_logp_MRA,
        row.sampler_logp_MRA,
        row.mask_MRA,
        level=objective.ratio,
        clip=objective.tis_clip,
    )


def _refresh_rows(
    params: Any,
    network: Network,
    objective: Objective,
    continued: RefreshBatch,
    keys: list[KeyValues],
    factor_R: jax.Array,
) -> jax.Array:
    """Factors after the step before this one, from the tokens that it updated: forward only."""
    params, keys, factor_R = jax.lax.stop_gradient((params, keys, factor_R))

    def refreshed() -> jax.Array:
        hidden_RSD, _ = policy.hidden(
            network, params, continued.tokens_MRS, keys, continued.start_MR
        )
        logp_RA = logp_at(
            network,
            params,
            hidden_RSD,
            continued.tokens_MRS,
            continued.position_MRA,
            objective.temperature,
        )
        ratio_R = turn_ratio(
            logp_RA,
            continued.old_logp_MRA,
            continued.mask_MRA,
            level=objective.weight_ratio,
        )
        updated_R = update_weight(factor_R, ratio_R, clip=objective.weight_clip)
        return jnp.where(continued.mask_MRA[:, 0] > 0, updated_R, factor_R)

    with jax.named_scope("sweep/refresh"):
        return jax.lax.cond(continued.mask_MRA.any(), refreshed, lambda: factor_R)


def turn_step(
    network: Network,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    layout: TrainState | None,
    frozen: Any,
    state: TrainState,
    batch: TurnBatch,
    continued: RefreshBatch | None,
    advantage_N: jax.Array,
    factor_N: jax.Array,
    denominator: jax.Array,
) -> tuple[TrainState, jax.Array, jax.Array, dict[str, jax.Array]]:
    """One optimizer step on one turn: one program a bucket shape, microbatches accumulated inside.

    Args:
      layout: shardings of the state: gradients lie as the parameters do. None: one device.
      frozen: the parameters that training leaves alone; empty where all train.
      continued: the refresh of the step before, or None.
      advantage_N, factor_N: float32 [N]; a trajectory's weight is M = advantage x factor.
      denominator: what the sum over all rows is divided by, once.

    Returns: the new state; the factors with the refresh in them; the action tokens' [M, R, A]
      log-probabilities before the step; metrics (float32 scalars).
    """
    grad = jax.value_and_grad(turn_loss, has_aux=True)

    def place(grads: Any) -> Any:
        return grads if layout is None else jax.lax.with_sharding_constraint(grads, layout.params)

    def body(index: jax.Array, carry: Any) -> Any:
        grads, factor_N, logp_MRA, total = carry
        row = microbatch(batch, index)
        more = None if continued is None else microbatch(continued, index)
        real_R = row.mask_MRA[:, 0]
        who_R = jnp.minimum(row.trajectory_MR, factor_N.shape[0] - 1)
        (loss, (logp_RA, factor_R, sums)), new = grad(
            state.params,
            frozen,
            network,
            objective,
            row,
            more,
            factor_N[who_R],
            advantage_N[who_R] * real_R,
        )
        # Placed before they are added: each device receives its own part of the sum over rows only.
        grads = jax.tree.map(jnp.add, grads, place(new))
        if continued is not None:
            factor_N = factor_N.at[row.trajectory_MR].set(factor_R, mode="drop")
        logp_MRA = jax.lax.dynamic_update_index_in_dim(logp_MRA, logp_RA, index, 0)
        return grads, factor_N, logp_MRA, _accumulate(total, sums | {"loss": loss})

    with jax.named_scope("sweep/turn"):
        zeros = place(jax.tree.map(jnp.zeros_like, state.params))
        total = {name: jnp.zeros(()) for name in (*objective.sums, "loss")}
        start = (zeros, factor_N, jnp.zeros_like(batch.mask_MRA), total)
        grads, factor_N, logp_MRA, total = jax.lax.fori_loop(0, batch.microbatches, body, start)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        state = state._replace(opt_state=on_device(state.opt_state))
        state, metrics = jax.lax.cond(
            batch.microbatches > 0,
            lambda: apply_update(optimizer, grads, state),
            lambda: (state, {"grad_norm": jnp.zeros(()), "update_skipped": jnp.zeros(())}),
        )
    return state, factor_N, logp_MRA, metrics | total | {"loss": total["loss"] / denominator}


def _accumulate(total: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
    combine: dict[str, Callable[..., jax.Array]] = {"weight_max": jnp.maximum}
    return {name: combine.get(name, jnp.add)(total[name], new[name]) for name in total}
