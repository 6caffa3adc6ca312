"""The sweep's programs: one turn's step, log-probabilities, and the refresh of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.algorithms.expert_options import NO_BALANCE, ExpertBalance
from seeupo_jax.learner.optimization.optimizer import apply_update, select_or_cond
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.learner.state_layout import in_host_memory, on_device
from seeupo_jax.learner.step.actions import split_actions
from seeupo_jax.learner.step.critic import Critic, ValueModel, row_value
from seeupo_jax.learner.step.expert_balance import router_losses, step_biases, zero_sums
from seeupo_jax.learner.step.expert_load import RouterCounts, count_routed
from seeupo_jax.learner.step.loss import turn_loss
from seeupo_jax.learner.step.loss_config import LossConfig
from seeupo_jax.learner.step.refresh import refreshed
from seeupo_jax.learner.step.rows import microbatch, of_spans, row_logp, row_top
from seeupo_jax.metric_table import MAXIMA
from seeupo_jax.parallel.mesh import constrain
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import Network, join_params
from seeupo_jax.types import TrainState, TurnBatch


def score(network: Network, params: Any, batch: TurnBatch, *, temperature: float) -> jax.Array:
    """log π of every action token of a batch under `params`: float32 [P, A], 0 without a mask."""
    with jax.named_scope("sweep/score"):
        return _of_actions(batch, lambda row: row_logp(network, params, row, temperature).logp_RX)


class TokenScores(NamedTuple):
    """The outputs of a scoring pass over a batch: of every action token, and of its routers.

    logp_PA: as of `score`. entropy_PA: nats, of the distribution of each token; None: not computed.
    routers: counts of the routers' choices; None without experts.
    routed_MRLG: every choice of theirs; None: not recorded.
    collision_PA: the sum of the squared probabilities of that distribution; None: not computed.
    """

    logp_PA: jax.Array
    entropy_PA: jax.Array | None = None
    routers: RouterCounts | None = None
    routed_MRLG: jax.Array | None = None
    collision_PA: jax.Array | None = None


def score_in_full(
    network: Network,
    params: Any,
    batch: TurnBatch,
    *,
    temperature: float,
    entropy: bool = False,
    collision: bool = False,
    record: bool = False,
) -> TokenScores:
    """`score`, and the other results of the first pass of a sweep.

    Args:
      entropy, collision: whether these are computed.
      record: whether the routers' choices are recorded.
    """
    routing = network.arch.routing
    (M, R, L), zeros_PA = batch.tokens_MRL.shape, jnp.zeros_like(batch.mask_PA)

    def body(index: jax.Array, scored: TokenScores) -> TokenScores:
        row = microbatch(batch, index)
        of_tokens = {"entropy": entropy, "collision": collision}
        row_scored = row_logp(network, params, row, temperature, **of_tokens)

        def added(x_PA: jax.Array, x_RX: jax.Array) -> jax.Array:
            return x_PA + of_spans(x_RX, row.slot_PA, row.mask_PA)

        scored = scored._replace(logp_PA=added(scored.logp_PA, row_scored.logp_RX))
        if entropy:
            scored = scored._replace(entropy_PA=added(scored.entropy_PA, row_scored.entropy_RX))
        if collision:
            collision_PA = added(scored.collision_PA, row_scored.collision_RX)
            scored = scored._replace(collision_PA=collision_PA)
        if scored.routers is not None:
            counts = count_routed(routing, row, row_scored.routed_RLG)
            scored = scored._replace(routers=scored.routers.plus(counts))
        if record:
            held = jax.lax.dynamic_update_index_in_dim(
                scored.routed_MRLG, row_scored.routed_RLG, index, axis=0
            )
            scored = scored._replace(routed_MRLG=constrain(held, None, "rows", None, None))
        return scored

    start = TokenScores(
        zeros_PA,
        zeros_PA if entropy else None,
        None if routing is None else RouterCounts.zeros(routing),
        jnp.zeros((M, R, L, routing.size), routing.dtype) if record else None,
        zeros_PA if collision else None,
    )
    with jax.named_scope("sweep/score"):
        return jax.lax.fori_loop(0, batch.microbatches, body, start)


class TopScores(NamedTuple):
    """A teacher's scores of every action token of a batch; 0 without a mask.

    logp_PA: as of `score`. top_PAK, top_logp_PAJ: its likeliest tokens in their places, and
    log-probabilities, as of `network.token_logp_and_top`.
    """

    logp_PA: jax.Array
    top_PAK: jax.Array
    top_logp_PAJ: jax.Array


def score_top(
    network: Network,
    params: Any,
    batch: TurnBatch,
    *,
    temperature: float,
    count: int,
    among: Architecture,
) -> TopScores:
    """`score`, and the likeliest tokens of every action token's distribution.

    Args:
      count, among: as of `network.token_logp_and_top`.
    """

    def body(index: jax.Array, scored: TopScores) -> TopScores:
        row = microbatch(batch, index)
        found = row_top(network, params, row, temperature, count, among)
        of_own = (of_spans(x, row.slot_PA, row.mask_PA) for x in found)
        return TopScores(*map(jnp.add, scored, of_own))

    of_tokens = batch.mask_PA.shape
    start = TopScores(
        jnp.zeros(of_tokens),
        jnp.zeros((*of_tokens, count), jnp.int32),
        jnp.zeros((*of_tokens, count + 1)),
    )
    with jax.named_scope("sweep/score"):
        return jax.lax.fori_loop(0, batch.microbatches, body, start)


def value(
    network: Network, critic: ValueModel, params: Any, critic_params: Any, batch: TurnBatch
) -> jax.Array:
    """The value before every action token of a batch: float32 [P, A], 0 without a mask."""

    def of_row(row: TurnBatch) -> jax.Array:
        return row_value(network, critic, params, critic_params, row)

    with jax.named_scope("sweep/value"):
        return _of_actions(batch, of_row)


def _of_actions(batch: TurnBatch, of_row: Callable[[TurnBatch], jax.Array]) -> jax.Array:
    """The results [R, X] of `of_row` for each microbatch, at the action tokens."""

    def body(index: jax.Array, x_PA: jax.Array) -> jax.Array:
        row = microbatch(batch, index)
        return x_PA + of_spans(of_row(row), row.slot_PA, row.mask_PA)

    return jax.lax.fori_loop(0, batch.microbatches, body, jnp.zeros_like(batch.mask_PA))


def refresh(
    network: Network,
    config: LossConfig,
    params: Any,
    batch: TurnBatch,
    cumulative_ratio_N: jax.Array,
) -> jax.Array:
    """The separate refresh: a pass for the cumulative ratios after the step on `batch`."""
    logp_PA = score(network, params, batch, temperature=config.temperature)
    return refreshed(config, cumulative_ratio_N, logp_PA, batch, batch.mask_PA)


class TurnStepResult(NamedTuple):
    """The result of an optimizer step.

    cumulative_ratio_N: after the refresh of the step before: the ratios in the step's weights.
    logp_PA: of the action tokens, before the step. entropy_PA: likewise; None: not computed.
    metrics: float32 scalars.
    """

    train: TrainState
    cumulative_ratio_N: jax.Array
    logp_PA: jax.Array
    metrics: dict[str, jax.Array]
    entropy_PA: jax.Array | None = None


def turn_step(
    network: Network,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    state_shardings: TrainState | None,
    frozen: Any,
    state: TrainState,
    batch: TurnBatch,
    refresh_batch: RefreshBatch | None,
    cumulative_ratio_N: jax.Array,
    denominator: jax.Array,
    *,
    critic: Critic | None = None,
    balance: ExpertBalance = NO_BALANCE,
) -> TurnStepResult:
    """One optimizer step on one turn: one program a bucket shape, microbatches accumulated inside.

    Args:
      state_shardings: gradients get the shardings of the state's parameters. None: one device.
      frozen: the parameters that do not train; empty if all do.
      refresh_batch: the refresh of the step before, or None.
      cumulative_ratio_N: float32 [N]; a trajectory's weight is M = advantage x this.
      denominator: of the sum over all rows.
      critic: the value function of `state.critic`, trained with the policy.
      balance: of the experts' load.
    """
    grad, trained = jax.value_and_grad(turn_loss, has_aux=True), _trained(state)
    if config.options.kl_in == "loss":
        batch = batch._replace(kl_coef=state.kl_coef)
    split = split_actions(config, batch, cumulative_ratio_N.shape[0])
    params = join_params(state.params, frozen)
    routers = router_losses(network, balance, params, batch, denominator)

    def body(index: jax.Array, carry: Any) -> Any:
        grads, ratio_N, found, total = carry
        row = microbatch(batch, index)
        fixed = frozen, network, config, critic, row, refresh_batch
        (loss, (own, ratio_N, sums)), new = grad(trained, *fixed, index, ratio_N, split, routers)
        # Placed before they are added: each device receives its own part of the sum over rows only.
        grads = jax.tree.map(jnp.add, grads, place_gradients(state_shardings, new))
        total = _accumulate(total, sums | {"loss": loss})
        return grads, ratio_N, tuple(map(jnp.add, found, own)), total

    with jax.named_scope("sweep/turn"):
        zeros = place_gradients(state_shardings, jax.tree.map(jnp.zeros_like, trained))
        names = (*config.sums, *(() if critic is None else critic.sums), "loss")
        total = {name: jnp.zeros(()) for name in names} | zero_sums(network.arch, balance)
        found = (jnp.zeros_like(batch.mask_PA),) * (1 + config.finds_entropy)
        start = (zeros, cumulative_ratio_N, found, total)
        grads, ratio_N, found, total = jax.lax.fori_loop(0, batch.microbatches, body, start)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        active_K = _adapters_in(batch, network.arch.turn_adapters)
        any_rows = batch.microbatches > 0
        state, metrics = apply_gradients(optimizer, critic, grads, state, any_rows, active_K)
        skipped = metrics["update_skipped"]
        state, total = step_biases(network.arch, balance, state, total, skipped)
    metrics |= total | {"loss": total["loss"] / denominator}
    return TurnStepResult(state, ratio_N, found[0], metrics, *found[1:])


def place_gradients(state_shardings: TrainState | None, grads: Any) -> Any:
    """Gradients with the shardings of the parameters."""
    if state_shardings is None:
        return grads
    return jax.lax.with_sharding_constraint(grads, _trained(state_shardings))


def apply_gradients(
    optimizer: optax.GradientTransformation,
    critic: Critic | None,
    grads: tuple[Any, Any],
    state: TrainState,
    any_rows: jax.Array,
    active_K: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Steps the policy and the critic; nothing where the batch has no rows.

    Args:
      active_K: as of `apply_update`.
    """
    # These wait for the iteration's end, maybe in the host's memory: they go by the branch.
    not_optimized = {name: getattr(state, name) for name in ("ema", "scorer", "reference")}
    streamed = in_host_memory(state.opt_state)
    opt_state, critic_state = on_device(state.opt_state), on_device(state.critic)
    state = state._replace(opt_state=opt_state, critic=critic_state, **dict.fromkeys(not_optimized))
    others = () if critic is None else (critic.optimizer, grads[1])
    norms = ("grad_norm",) if critic is None else ("grad_norm", "critic_grad_norm")
    state, metrics = select_or_cond(
        any_rows,
        lambda: apply_update(
            optimizer, grads[0], state, *others, streamed=streamed, active_K=active_K
        ),
        lambda: (state, {name: jnp.zeros(()) for name in (*norms, "update_skipped")}),
        streamed=streamed,
    )
    return state._replace(**not_optimized), metrics


def _adapters_in(batch: TurnBatch, adapters: int) -> jax.Array | None:
    """Which adapters' turns a batch has, bool [K]; None: adapters are not per turn."""
    if batch.adapter_MRL is None:
        return None
    none_K = jnp.zeros(adapters, bool)
    return none_K.at[batch.adapter_MRL.reshape(-1)].set(True, mode="drop")


def _trained(state: TrainState) -> tuple[Any, Any]:
    """The parameters that the loss is differentiated by: the policy's, and the critic's or None."""
    return state.params, None if state.critic is None else state.critic.params


def _accumulate(total: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {
        name: (jnp.maximum if name in MAXIMA else jnp.add)(total[name], new[name]) for name in total
    }
