"""The sweep's programs: one turn's step, log-probabilities, and the refresh of weights."""

from __future__ import annotations

import functools
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
from seeupo_jax.learner.critic import Critic, piece_loss, row_value
from seeupo_jax.learner.layout import on_device
from seeupo_jax.learner.optimizer import apply_update
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.learner.rows import microbatch, of_pieces, own, row_hidden, take
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.attention import KeyValues, Past, Tree
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
    """log π of what one microbatch predicts, [R, X]; what predicts it; keys and values."""
    hidden_RLD, keys = row_hidden(network, params, row)
    predicted = (row.parent_MRX, row.target_MRX)
    logp_RX, hidden_RXD = logp_at(network, params, hidden_RLD, *predicted, temperature)
    return logp_RX, hidden_RXD, list(keys)


def logp_at(
    network: Network,
    params: Any,
    hidden_RLD: jax.Array,
    parent_RX: jax.Array,
    target_RX: jax.Array,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """log π of some tokens, each predicted by its parent, and the parents' hidden states."""
    hidden_RXD = policy.pick(hidden_RLD, parent_RX)
    logp_RX = policy.token_logp(network, params, hidden_RXD, target_RX, temperature=temperature)
    return logp_RX, hidden_RXD


def score(network: Network, params: Any, batch: TurnBatch, *, temperature: float) -> jax.Array:
    """log π of every action token of a batch under `params`: float32 [P, A], 0 without a mask."""

    def body(index: jax.Array, logp_PA: jax.Array) -> jax.Array:
        row = microbatch(batch, index)
        logp_RX, *_ = row_logp(network, params, row, temperature)
        return logp_PA + of_pieces(logp_RX, row.slot_PA, row.mask_PA)

    with jax.named_scope("sweep/score"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros_like(batch.mask_PA))


def score_and_entropy(
    network: Network, params: Any, batch: TurnBatch, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """`score`, and the entropy in nats of what each action token was drawn from; both [P, A]."""

    def body(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        row = microbatch(batch, index)
        hidden_RLD, _ = row_hidden(network, params, row)
        hidden_RXD = policy.pick(hidden_RLD, row.parent_MRX)
        new = policy.token_logp_and_entropy(
            network, params, hidden_RXD, row.target_MRX, temperature=temperature
        )
        pairs = zip(found, new, strict=True)
        return tuple(sum_PA + of_pieces(x_RX, row.slot_PA, row.mask_PA) for sum_PA, x_RX in pairs)

    with jax.named_scope("sweep/score"):
        nothing_PA = jnp.zeros_like(batch.mask_PA)
        return jax.lax.fori_loop(0, batch.microbatches, body, (nothing_PA, nothing_PA))


def value(
    network: Network, critic: Critic, params: Any, critic_params: Any, batch: TurnBatch
) -> jax.Array:
    """The value before every action token of a batch: float32 [P, A], 0 without a mask."""

    def body(index: jax.Array, value_PA: jax.Array) -> jax.Array:
        row = microbatch(batch, index)
        value_RX = row_value(network, critic, params, critic_params, row)
        return value_PA + of_pieces(value_RX, row.slot_PA, row.mask_PA)

    with jax.named_scope("sweep/value"):
        return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros_like(batch.mask_PA))


def refresh(
    network: Network, objective: Objective, params: Any, batch: TurnBatch, factor_N: jax.Array
) -> jax.Array:
    """The separate refresh: factors after the step that updated `batch`, by a pass of its own."""
    logp_PA = score(network, params, batch, temperature=objective.temperature)
    return _refreshed(objective, factor_N, logp_PA, batch, batch.mask_PA)


def _refreshed(
    objective: Objective,
    factor_N: jax.Array,
    logp_PA: jax.Array,
    batch: TurnBatch | RefreshBatch,
    mask_PA: jax.Array,
) -> jax.Array:
    """Factors times the ratios of the pieces that have a mask."""
    level = objective.weight_ratio
    ratio_P = turn_ratio(logp_PA, batch.old_logp_PA, mask_PA, level=level)
    nobody = factor_N.shape[0]
    trajectory_P = jnp.where(mask_PA.any(axis=1), batch.trajectory_P, nobody)
    return _multiply(factor_N, trajectory_P, ratio_P, objective.weight_clip)


def _multiply(
    factor_N: jax.Array, trajectory_X: jax.Array, ratio_X: jax.Array, clip: float | None
) -> jax.Array:
    """Multiplies pieces' ratios into their trajectories' factors; those of none are dropped.

    A merged step may hold several pieces of one trajectory: their ratios multiply first.
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
    index: jax.Array,
    factor_N: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, dict[str, jax.Array]]]:
    """One microbatch's share of the negative objective (Eq. 6), not yet divided by anything.

    Args:
      trained: the parameters that the loss is differentiated by: the policy's and the critic's,
        whose loss is added.
      frozen: the policy's other parameters.
      row: one microbatch, of this index.
      continued: of all microbatches.

    Returns: the loss's sum, and (logp_PA, refreshed factor_N, sums for metrics).
    """
    params = policy.join(trained[0], frozen)
    logp_RX, hidden_RXD, keys = row_logp(network, params, row, objective.temperature)
    if continued is not None:
        past = (keys, Tree(row.depth_MRL, row.end_MRL))
        factor_N = _refresh_pieces(params, network, objective, continued, index, past, factor_N)
    factor_P = factor_N[jnp.minimum(row.trajectory_P, factor_N.shape[0] - 1)]
    of_own = functools.partial(of_pieces, slot_PA=row.slot_PA, mask_PA=row.mask_PA)
    logp_PA = of_own(logp_RX)
    old_logp_PA = row.old_logp_PA
    if objective.old_is_current:
        old_logp_PA = jax.lax.stop_gradient(logp_PA)
    mask_PJA = _by_action(row, objective.actions)
    count_PJ = mask_PJA.sum(axis=2)
    wide = lambda x_PA: x_PA[:, None, :]  # noqa: E731
    mean = lambda x_PA: (wide(x_PA) * mask_PJA).sum(axis=2) / jnp.maximum(count_PJ, 1)  # noqa: E731
    importance, shares = _importance(objective, row, mask_PJA)
    term_PJ, clipped_PJ = action_objective(
        wide(logp_PA),
        wide(old_logp_PA),
        mask_PJA,
        wide(row.advantage_PA),
        factor_P[:, None],
        objective=objective.kind,
        ratio=objective.ratio,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        importance=importance,
    )
    kl_PJ = mean(kl_estimate(logp_PA, row.ref_logp_PA, mask=row.mask_PA))
    real_PJ = count_PJ > 0
    # An action's terms are means over its tokens.
    size_PJ = real_PJ if objective.loss_mean == "action" else count_PJ
    loss = -jnp.sum(size_PJ * (term_PJ - objective.kl_coef * kl_PJ))
    weight_PA = jnp.where(row.mask_PA > 0, row.advantage_PA * factor_P[:, None], 0.0)
    sums = {
        "actions": real_PJ.sum(dtype=jnp.float32),
        "clipped": clipped_PJ.sum(),
        "kl": kl_PJ.sum(),
        "weight_max": jnp.max(jnp.abs(weight_PA)),
        **{name: jnp.sum(real_PJ * share_PJ) for name, share_PJ in shares.items()},
    }
    if critic is not None:
        value_PA = of_own(row_value(network, critic, params, trained[1], row, hidden_RXD))
        error_PJ, clipped_PJ = map(mean, piece_loss(critic, value_PA, row))
        loss += critic.coef * jnp.sum(size_PJ * error_PJ)
        sums |= {"value_loss": error_PJ.sum(), "value_clipped": clipped_PJ.sum()}
    return loss, (logp_PA, factor_N, jax.lax.stop_gradient(sums))


def _by_action(row: TurnBatch, actions: int) -> jax.Array:
    """The mask of each of a piece's actions, [P, J, A]."""
    if row.action_PA is None:
        return row.mask_PA[:, None, :]
    own_PJA = row.action_PA[:, None, :] == jnp.arange(actions)[None, :, None]
    return own_PJA * row.mask_PA[:, None, :]


def _importance(
    objective: Objective, row: TurnBatch, mask_PJA: jax.Array
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """What surrogates weigh against the sampler's mismatch, in the ratio's shape; and metrics."""
    if objective.tis_clip is None:
        return None, {}
    weight = truncated_importance(
        row.start_logp_PA[:, None, :],
        row.sampler_logp_PA[:, None, :],
        mask_PJA,
        level=objective.ratio,
        clip=objective.tis_clip,
    )
    shares = {"tis_weight": weight, "tis_truncated": weight >= objective.tis_clip}
    if objective.ratio == "token":
        count_PJ = jnp.maximum(mask_PJA.sum(axis=2), 1)
        shares = jax.tree.map(lambda x: (x * mask_PJA).sum(axis=2) / count_PJ, shares)
    return weight, shares


def _refresh_pieces(
    params: Any,
    network: Network,
    objective: Objective,
    continued: RefreshBatch,
    index: jax.Array,
    past: tuple[list[KeyValues], Tree],
    factor_N: jax.Array,
) -> jax.Array:
    """Factors after the step before this one, from the tokens that it updated: forward only.

    Args:
      index: of the microbatch. past: its keys and values, and its trees.
    """
    params, (keys, tree), factor_N = jax.lax.stop_gradient((params, past, factor_N))
    _, Q, R, C = continued.tokens_MQRC.shape

    def body(number: jax.Array, logp_PA: jax.Array) -> jax.Array:
        part = index * Q + number
        chunk = [take(x.reshape(-1, R, C), part) for x in continued[:6]]
        tokens, depth, end, at, parent, target = chunk
        hidden_RCD, _ = policy.hidden(
            network, params, tokens, tree=Tree(depth, end), past=Past(keys, tree, at)
        )
        logp_RC, _ = logp_at(network, params, hidden_RCD, parent, target, objective.temperature)
        return logp_PA + of_pieces(logp_RC, *own(continued.slot_PA, continued.mask_PA, part, R * C))

    with jax.named_scope("sweep/refresh"):
        nothing_PA = jnp.zeros_like(continued.mask_PA)
        logp_PA = jax.lax.fori_loop(0, continued.chunks_M[index], body, nothing_PA)
        _, mask_PA = own(continued.slot_PA, continued.mask_PA, index, Q * R * C)
        return _refreshed(objective, factor_N, logp_PA, continued, mask_PA)


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

    Returns: the new state; the factors with the refresh in them; the action tokens' [P, A]
      log-probabilities before the step; metrics (float32 scalars).
    """
    grad, trained = jax.value_and_grad(turn_loss, has_aux=True), _trained(state)

    def place(grads: Any) -> Any:
        where = None if layout is None else _trained(layout)
        return grads if where is None else jax.lax.with_sharding_constraint(grads, where)

    def body(index: jax.Array, carry: Any) -> Any:
        grads, factor_N, logp_PA, total = carry
        row = microbatch(batch, index)
        (loss, (own_logp_PA, factor_N, sums)), new = grad(
            trained, frozen, network, objective, critic, row, continued, index, factor_N
        )
        # Placed before they are added: each device receives its own part of the sum over rows only.
        grads = jax.tree.map(jnp.add, grads, place(new))
        return grads, factor_N, logp_PA + own_logp_PA, _accumulate(total, sums | {"loss": loss})

    with jax.named_scope("sweep/turn"):
        zeros = place(jax.tree.map(jnp.zeros_like, trained))
        names = (*objective.sums, *(() if critic is None else critic.sums), "loss")
        total = {name: jnp.zeros(()) for name in names}
        start = (zeros, factor_N, jnp.zeros_like(batch.mask_PA), total)
        grads, factor_N, logp_PA, total = jax.lax.fori_loop(0, batch.microbatches, body, start)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        state, metrics = _apply(optimizer, critic, grads, state, batch.microbatches > 0)
    return state, factor_N, logp_PA, metrics | total | {"loss": total["loss"] / denominator}


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
