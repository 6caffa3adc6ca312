"""The sweep's programs: one turn's step, log-probabilities, and the refresh of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.algorithms.objective import action_objective
from seeupo_jax.algorithms.surrogate import (
    kl_estimate,
    truncated_importance,
    turn_ratio,
    update_weight,
)
from seeupo_jax.learner.batching import RefreshBatch
from seeupo_jax.learner.critic import Critic, row_loss, row_value
from seeupo_jax.learner.layout import on_device
from seeupo_jax.learner.optimizer import apply_update
from seeupo_jax.parallel.mesh import constrain
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.attention import KeyValues
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TrainState, TurnBatch


@dataclass(frozen=True)
class Objective:
    """What is fixed about the objective; hashable, part of each program.

    actions: that a row of a step may have, each with a ratio of its own.
    """

    kind: str
    ratio: str
    loss_mean: str
    old_is_current: bool  # the ratio is to the policy just before this very step
    clip_low: float | None
    clip_high: float | None
    kl_coef: float
    weight_clip: float | None
    temperature: float
    tis_clip: float | None = None
    actions: int = 1

    @property
    def sums(self) -> tuple[str, ...]:
        """What a step counts for its metrics, beside the loss."""
        names = ("actions", "clipped", "kl", "weight_max")
        return names if self.tis_clip is None else (*names, "tis_weight", "tis_truncated")

    @property
    def weight_ratio(self) -> str:
        """The level of the ratio that updates M: always one number per action."""
        return "geometric" if self.ratio == "token" else self.ratio


def row_logp(
    network: Network, params: Any, row: TurnBatch, temperature: float
) -> tuple[jax.Array, jax.Array, list[KeyValues]]:
    """log π of one microbatch's action tokens, [R, A]; what predicts them; keys and values."""
    hidden_RLD, keys = policy.hidden(network, params, row.tokens_MRL)
    logp_RA, hidden_RAD = logp_at(
        network, params, hidden_RLD, row.tokens_MRL, row.position_MRA, temperature
    )
    return logp_RA, hidden_RAD, list(keys)


def logp_at(
    network: Network,
    params: Any,
    hidden_RLD: jax.Array,
    tokens_RL: jax.Array,
    position_RA: jax.Array,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """log π of the tokens at some positions, and the hidden states before, which predict them."""
    target_RA = jnp.take_along_axis(tokens_RL, position_RA, axis=1)
    hidden_RAD = policy.pick(hidden_RLD, position_RA - 1)
    logp_RA = policy.token_logp(network, params, hidden_RAD, target_RA, temperature=temperature)
    return logp_RA, hidden_RAD


def microbatch(batch: Any, index: jax.Array) -> Any:
    """Microbatch `index` of a batch whose arrays begin with [M, R]; rows spread over the mesh."""

    def take(x: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return constrain(x, "rows", *(None,) * (x.ndim - 1))

    return jax.tree.map(lambda x: take(x) if x.ndim else x, batch)


def score(network: Network, params: Any, batch: TurnBatch, *, temperature: float) -> jax.Array:
    """log π of every action token of a batch under `params`: float32 [M, R, A], 0 in empty rows."""

    def body(index: jax.Array, logp_MRA: jax.Array) -> jax.Array:
        logp_RA, *_ = row_logp(network, params, microbatch(batch, index), temperature)
        return jax.lax.dynamic_update_index_in_dim(logp_MRA, logp_RA, index, 0)

    with jax.named_scope("sweep/score"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros_like(batch.mask_MRA))


def value(
    network: Network, critic: Critic, params: Any, critic_params: Any, batch: TurnBatch
) -> jax.Array:
    """The value before every action token of a batch: float32 [M, R, A], 0 in empty rows."""

    def body(index: jax.Array, value_MRA: jax.Array) -> jax.Array:
        row = microbatch(batch, index)
        value_RA = row_value(network, critic, params, critic_params, row)
        return jax.lax.dynamic_update_index_in_dim(value_MRA, value_RA, index, 0)

    with jax.named_scope("sweep/value"):
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
    trained: tuple[Any, Any],
    frozen: Any,
    network: Network,
    objective: Objective,
    critic: Critic | None,
    row: TurnBatch,
    continued: RefreshBatch | None,
    factor_R: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """One microbatch's share of the negative objective (Eq. 6), not yet divided by anything.

    Args:
      trained: the parameters that the loss is differentiated by: the policy's and the critic's,
        whose loss is added.
      frozen: the policy's other parameters.
      row, continued: one microbatch each, without their leading axis M.
      factor_R: of the rows' trajectories.

    Returns: the loss's sum, and (logp_RA, refreshed factor_R, sums for metrics).
    """
    params = policy.join(trained[0], frozen)
    logp_RA, hidden_RAD, keys = row_logp(network, params, row, objective.temperature)
    if continued is not None:
        factor_R = _refresh_rows(params, network, objective, continued, keys, factor_R)
    old_logp_RA = row.old_logp_MRA
    if objective.old_is_current:
        old_logp_RA = jax.lax.stop_gradient(logp_RA)
    mask_RJA = _by_action(row, objective.actions)
    count_RJ = mask_RJA.sum(axis=2)
    wide = lambda x_RA: x_RA[:, None, :]  # noqa: E731
    mean = lambda x_RA: (wide(x_RA) * mask_RJA).sum(axis=2) / jnp.maximum(count_RJ, 1)  # noqa: E731
    importance, shares = _importance(objective, row, mask_RJA)
    term_RJ, clipped_RJ = action_objective(
        wide(logp_RA),
        wide(old_logp_RA),
        mask_RJA,
        wide(row.advantage_MRA),
        factor_R[:, None],
        objective=objective.kind,
        ratio=objective.ratio,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        importance=importance,
    )
    kl_RJ = mean(kl_estimate(logp_RA, row.ref_logp_MRA, mask=row.mask_MRA))
    real_RJ = count_RJ > 0
    # An action's terms are means over its tokens.
    size_RJ = real_RJ if objective.loss_mean == "action" else count_RJ
    loss = -jnp.sum(size_RJ * (term_RJ - objective.kl_coef * kl_RJ))
    weight_RA = jnp.where(row.mask_MRA > 0, row.advantage_MRA * factor_R[:, None], 0.0)
    sums = {
        "actions": real_RJ.sum(dtype=jnp.float32),
        "clipped": clipped_RJ.sum(),
        "kl": kl_RJ.sum(),
        "weight_max": jnp.max(jnp.abs(weight_RA)),
        **{name: jnp.sum(real_RJ * share_RJ) for name, share_RJ in shares.items()},
    }
    if critic is not None:
        value_RA = row_value(network, critic, params, trained[1], row, hidden_RAD)
        error_RJ, clipped_RJ = map(mean, row_loss(critic, value_RA, row))
        loss += critic.coef * jnp.sum(size_RJ * error_RJ)
        sums |= {"value_loss": error_RJ.sum(), "value_clipped": clipped_RJ.sum()}
    return loss, (logp_RA, factor_R, jax.lax.stop_gradient(sums))


def _by_action(row: TurnBatch, actions: int) -> jax.Array:
    """The mask of each of a row's actions, [R, X, A]."""
    if row.action_MRA is None:
        return row.mask_MRA[:, None, :]
    own_RJA = row.action_MRA[:, None, :] == jnp.arange(actions)[None, :, None]
    return own_RJA * row.mask_MRA[:, None, :]


def _importance(
    objective: Objective, row: TurnBatch, mask_RJA: jax.Array
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """What surrogates weigh against the sampler's mismatch, in the ratio's shape; and metrics."""
    if objective.tis_clip is None:
        return None, {}
    weight = truncated_importance(
        row.start_logp_MRA[:, None, :],
        row.sampler_logp_MRA[:, None, :],
        mask_RJA,
        level=objective.ratio,
        clip=objective.tis_clip,
    )
    shares = {"tis_weight": weight, "tis_truncated": weight >= objective.tis_clip}
    if objective.ratio == "token":
        count_RJ = jnp.maximum(mask_RJA.sum(axis=2), 1)
        shares = jax.tree.map(lambda x: (x * mask_RJA).sum(axis=2) / count_RJ, shares)
    return weight, shares


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
        logp_RA, _ = logp_at(
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
    factor_N: jax.Array,
    denominator: jax.Array,
    *,
    critic: Critic | None = None,
) -> tuple[TrainState, jax.Array, jax.Array, dict[str, jax.Array]]:
    """One optimizer step on one turn: one program a bucket shape, microbatches accumulated inside.

    Args:
      layout: shardings of the state: gradients lie as the parameters do. None: one device.
      frozen: the parameters that training leaves alone; empty where all train.
      continued: the refresh of the step before, or None.
      factor_N: float32 [N]; a trajectory's weight is M = advantage x factor.
      denominator: what the sum over all rows is divided by, once.
      critic: the value function that `state.critic` is of, trained beside the policy.

    Returns: the new state; the factors with the refresh in them; the action tokens' [M, R, A]
      log-probabilities before the step; metrics (float32 scalars).
    """
    grad, trained = jax.value_and_grad(turn_loss, has_aux=True), _trained(state)

    def place(grads: Any) -> Any:
        where = None if layout is None else _trained(layout)
        return grads if where is None else jax.lax.with_sharding_constraint(grads, where)

    def body(index: jax.Array, carry: Any) -> Any:
        grads, factor_N, logp_MRA, total = carry
        row = microbatch(batch, index)
        more = None if continued is None else microbatch(continued, index)
        who_R = jnp.minimum(row.trajectory_MR, factor_N.shape[0] - 1)
        (loss, (logp_RA, factor_R, sums)), new = grad(
            trained,
            frozen,
            network,
            objective,
            critic,
            row,
            more,
            factor_N[who_R],
        )
        # Placed before they are added: each device receives its own part of the sum over rows only.
        grads = jax.tree.map(jnp.add, grads, place(new))
        if continued is not None:
            factor_N = factor_N.at[row.trajectory_MR].set(factor_R, mode="drop")
        logp_MRA = jax.lax.dynamic_update_index_in_dim(logp_MRA, logp_RA, index, 0)
        return grads, factor_N, logp_MRA, _accumulate(total, sums | {"loss": loss})

    with jax.named_scope("sweep/turn"):
        zeros = place(jax.tree.map(jnp.zeros_like, trained))
        names = (*objective.sums, *(() if critic is None else critic.sums), "loss")
        total = {name: jnp.zeros(()) for name in names}
        start = (zeros, factor_N, jnp.zeros_like(batch.mask_MRA), total)
        grads, factor_N, logp_MRA, total = jax.lax.fori_loop(0, batch.microbatches, body, start)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        state, metrics = _apply(optimizer, critic, grads, state, batch.microbatches > 0)
    return state, factor_N, logp_MRA, metrics | total | {"loss": total["loss"] / denominator}


def _apply(
    optimizer: optax.GradientTransformation,
    critic: Critic | None,
    grads: tuple[Any, Any],
    state: TrainState,
    any_rows: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Steps the policy and the critic; nothing where the batch has no rows."""
    state = state._replace(opt_state=on_device(state.opt_state), critic=on_device(state.critic))
    others = () if critic is None else (critic.optimizer, grads[1])
    norms = ("grad_norm",) if critic is None else ("grad_norm", "critic_grad_norm")
    return jax.lax.cond(
        any_rows,
        lambda: apply_update(optimizer, grads[0], state, *others),
        lambda: (state, {name: jnp.zeros(()) for name in (*norms, "update_skipped")}),
    )


def _trained(state: TrainState) -> tuple[Any, Any]:
    """What the loss is differentiated by: the policy's parameters, and the critic's or None."""
    return state.params, None if state.critic is None else state.critic.params


def _accumulate(total: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
    combine: dict[str, Callable[..., jax.Array]] = {"weight_max": jnp.maximum}
    return {name: combine.get(name, jnp.add)(total[name], new[name]) for name in total}
