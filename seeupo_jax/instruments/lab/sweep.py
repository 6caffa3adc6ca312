"""An iteration's updates in the laboratory: turn after turn, as in `learner/sweep.py`.

Every turn is an action of one token, or of equally many; every trajectory has all turns, all
groups are of the one task, and there is no KL term. What follows from that: `normalize_by` has no
effect unless `mask_above` or `importance` leaves out tokens. Dynamic sampling is left out: with
`dapo` too, groups of equal rewards stay in the batch, where they have advantages of 0 and count in
the mean. Recipes that update all turns together make `inner_epochs` steps an iteration; those that
update turn by turn make K times as many, each of which touches one turn. With one table per turn
only the weights connect turns: `seeupo_unweighted` and `parallel` are equal there. Of several turns
a step, spans are counted from turn K also where `mask_above` leaves no trajectory that turn.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.algorithms.action_objective import action_objective
from seeupo_jax.algorithms.importance import importance_weights
from seeupo_jax.algorithms.surrogate import turn_ratio, update_weight
from seeupo_jax.algorithms.value import clipped_value_loss
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.instruments.lab.advantages import TurnCredit
from seeupo_jax.instruments.lab.policies import TabularPolicy, log_probability
from seeupo_jax.instruments.lab.trajectories import Batch
from seeupo_jax.learner.optimization.optimizer import apply_update
from seeupo_jax.learner.sweep_plan import action_numbers, plan_sweep
from seeupo_jax.types import CONTEXT, TrainState

_LEAST = 1e-30  # of a share: what is divided by it is 0


class LabParams(NamedTuple):
    """All parameters of a run."""

    policy: Any
    value_C: jax.Array | None  # the critic: a value for each context; None without one


class TurnInputs(NamedTuple):
    """Tokens and the inputs of their updates: [N, K], or [N, U, L] of the tokens of one step.

    kept: which `mask_above` does not exclude. clip_scale: None where clip ranges are not scaled.
    importance, accepted: their weights, and which are not rejected; None: without such weights.
    """

    context: jax.Array
    action: jax.Array
    kept: jax.Array
    advantage: jax.Array
    returns: jax.Array
    clip_scale: jax.Array | None
    old_logp: jax.Array
    old_value: jax.Array
    importance: jax.Array | None = None
    accepted: jax.Array | None = None


def values_of(params: LabParams, context: jax.Array) -> jax.Array:
    """The critic's values of contexts, in their shape; 0 without a critic."""
    return jnp.zeros(context.shape) if params.value_C is None else params.value_C[context]


def sweep(
    policy: TabularPolicy,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    state: TrainState,
    batch: Batch,
    credit: TurnCredit,
    key: jax.Array,
    *,
    turn_tokens: int = 1,
) -> TrainState:
    """Step after step, each weighted by the steps before it; `key` seeds the random order."""
    inputs = sweep_inputs(policy, algorithm, state.params, batch, credit, turn_tokens)
    steps = update_steps(algorithm, batch.context_NK.shape[1], turn_tokens)
    turns_SUL, present_SUL = map(jnp.asarray, steps)
    if algorithm.order == "random":
        shuffled_S = jax.random.permutation(jax.random.fold_in(key, 1), turns_SUL.shape[0])
        turns_SUL, present_SUL = turns_SUL[shuffled_S], present_SUL[shuffled_S]

    def step(carry: Any, turns: Any) -> Any:
        turns_UL, present_UL = turns
        parts = jax.tree.map(lambda x_NK: x_NK[:, turns_UL], inputs)
        return _step(policy, optimizer, algorithm, carry, batch.share_N, parts, present_UL), None

    start = state, jnp.ones(batch.share_N.shape)
    (state, _), _ = jax.lax.scan(step, start, (turns_SUL, present_SUL))
    return state


def sweep_inputs(
    policy: TabularPolicy,
    algorithm: Algorithm,
    params: LabParams,
    batch: Batch,
    credit: TurnCredit,
    turn_tokens: int = 1,
) -> TurnInputs:
    """All tokens as a sweep that begins from the parameters learns from them, [N, K]."""
    actions = batch.context_NK, batch.action_NK
    logp_NK = log_probability(policy, params.policy, *actions)
    kept_NK = jnp.ones(logp_NK.shape, bool)
    if algorithm.mask_above is not None:
        kept_NK = jnp.exp(logp_NK) <= algorithm.mask_above
    importance_NK = accepted_NK = None
    if algorithm.importance is not None:
        sampler_NK = batch.sampler_logp_NK
        logps = logp_NK, logp_NK if sampler_NK is None else sampler_NK
        importance_NK, accepted_NK = _weigh_tokens(algorithm, *logps, kept_NK, turn_tokens)
    old = old_logp(policy, algorithm, params, batch), values_of(params, batch.context_NK)
    return TurnInputs(*actions, kept_NK, *credit, *old, importance_NK, accepted_NK)


def old_logp(
    policy: TabularPolicy, algorithm: Algorithm, params: LabParams, batch: Batch
) -> jax.Array:
    """The log-probabilities that ratios are to, [N, K], where a sweep begins from the parameters.

    As in training, those of the policy before the sweep, but of tokens of another sampler without
    importance weights that sampler's.
    """
    if batch.sampler_logp_NK is not None and algorithm.importance is None:
        return batch.sampler_logp_NK
    return log_probability(policy, params.policy, batch.context_NK, batch.action_NK)


def _weigh_tokens(
    algorithm: Algorithm,
    logp_NK: jax.Array,
    sampler_logp_NK: jax.Array,
    kept_NK: jax.Array,
    turn_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """The importance weight of every token and whether it is not rejected, both [N, K]."""
    options: Any = algorithm.importance
    count, tokens = logp_NK.shape
    turn_K = np.arange(tokens) // turn_tokens
    unit_K = {
        "token": np.arange(tokens),
        "turn": turn_K,
        "action": action_numbers(algorithm, tokens // turn_tokens, turn_K),
        "trajectory": np.zeros(tokens, int),
    }[options.unit(algorithm.ratio)]
    unit_NK = np.arange(count)[:, None] * tokens + unit_K
    units = count * tokens
    weight_X, accepted_X, _ = importance_weights(
        logp_NK.reshape(-1),
        sampler_logp_NK.reshape(-1),
        jnp.where(kept_NK, unit_NK, units).reshape(-1),
        units=units,
        method=options.method,
        level=options.level,
        clip=options.clip,
        low=options.low,
    )
    return weight_X.reshape(count, tokens), accepted_X.reshape(count, tokens)


def update_steps(
    algorithm: Algorithm, tokens: int, turn_tokens: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of each planned update's actions, and which are no padding; both [S, U, L].

    A random order is a permutation of the first axis, drawn by `sweep`.

    Args:
      tokens: of a trajectory. turn_tokens: of each of its turns, a divisor.
    """
    if algorithm.order == "random":
        algorithm = dataclasses.replace(algorithm, order="reverse")
    turns = tokens // turn_tokens
    span, updates = algorithm.span(turns), plan_sweep(algorithm, turns).updates
    turns_SUL = np.full((len(updates), len(updates[0].actions), span), CONTEXT)
    for turns_UL, update in zip(turns_SUL, updates, strict=True):
        for turns_L, action in zip(turns_UL, update.actions, strict=True):
            turns_L[span - len(action) :] = action
    first_SUL = np.maximum(turns_SUL, 0) * turn_tokens
    tokens_SUL = (first_SUL[..., None] + np.arange(turn_tokens)).reshape(*turns_SUL.shape[:2], -1)
    return tokens_SUL, np.repeat(turns_SUL != CONTEXT, turn_tokens, axis=2)


def objective(
    algorithm: Algorithm,
    logp_NUL: jax.Array,
    old_logp_NUL: jax.Array,
    inputs: TurnInputs,
    present_UL: jax.Array,
    share_N: jax.Array,
    cumulative_ratio_N: jax.Array,
    value_loss_NU: jax.Array | float = 0.0,
) -> jax.Array:
    """What a step maximises: the mean of its actions' terms, minus the critic's loss; [].

    Args:
      share_N: as of `Batch`.
      value_loss_NU: times its coefficient.
    """
    mask_NUL, sampled_NUL = _masks(inputs, present_UL)
    count_NU = jnp.sum(mask_NUL, axis=2, dtype=jnp.float32)
    entry = algorithm.objective_entry
    term_NU, _ = action_objective(
        logp_NUL,
        old_logp_NUL,
        mask_NUL,
        inputs.advantage,
        cumulative_ratio_N[:, None],
        objective=entry,
        ratio=algorithm.ratio,
        importance_NL=inputs.importance,
        clip_scale_NL=inputs.clip_scale,
        **{name: vars(algorithm)[name] for name in entry.bounds},
    )
    acts_N = jnp.any(count_NU, axis=1)
    if algorithm.normalize_by == "active":
        share_N /= jnp.maximum(jnp.sum(share_N * acts_N), _LEAST)
    elif inputs.accepted is not None:  # the rejected leave the denominator
        rejected_N = jnp.any(sampled_NUL, axis=(1, 2)) & ~acts_N
        share_N /= jnp.maximum(1 - jnp.sum(share_N * rejected_N), _LEAST)
    mean = _MEANS[algorithm.loss_aggregation]
    return mean(share_N, term_NU - value_loss_NU, count_NU, present_UL)


def _masks(inputs: TurnInputs, present_UL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which tokens of a step are learned from, and which were before some were rejected."""
    sampled_NUL = inputs.kept & present_UL[None]
    if inputs.accepted is None:
        return sampled_NUL, sampled_NUL
    return sampled_NUL & inputs.accepted, sampled_NUL


def _step(
    policy: TabularPolicy,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    carry: tuple[TrainState, jax.Array],
    share_N: jax.Array,
    inputs: TurnInputs,
    present_UL: jax.Array,
) -> tuple[TrainState, jax.Array]:
    """All optimizer steps on some turns, and the updated cumulative ratios."""
    state, cumulative_ratio_N = carry
    mask_NUL, _ = _masks(inputs, present_UL)

    def logp(params: LabParams) -> jax.Array:
        return log_probability(policy, params.policy, inputs.context, inputs.action)

    old_logp = logp(state.params) if algorithm.old_policy == "turn" else inputs.old_logp

    def loss(params: LabParams) -> jax.Array:
        value_loss_NU = 0.0
        if params.value_C is not None:
            value_loss_NU = algorithm.critic.coef * _value_loss(algorithm, params, inputs, mask_NUL)
        arrays = old_logp, inputs, present_UL, share_N, cumulative_ratio_N, value_loss_NU
        return -objective(algorithm, logp(params), *arrays)

    def epoch(state: TrainState, _: None) -> Any:
        stepped, _ = apply_update(optimizer, jax.grad(loss)(state.params), state)
        # As in training, no step without a token.
        return jax.tree.map(functools.partial(jnp.where, jnp.any(mask_NUL)), stepped, state), None

    state, _ = jax.lax.scan(epoch, state, length=algorithm.inner_epochs)
    if algorithm.weighs:
        level = "geometric" if algorithm.ratio == "token" else algorithm.ratio
        ratio_NU = turn_ratio(logp(state.params), old_logp, mask_NUL, level=level)
        cumulative_ratio_N = update_weight(
            cumulative_ratio_N, ratio_N=ratio_NU[:, 0], clip=algorithm.weight_clip
        )
    return state, cumulative_ratio_N


def _value_loss(algorithm: Algorithm, params: LabParams, inputs: TurnInputs, mask_NUL: jax.Array):
    """The critic's loss, averaged over the turns of each action, [N, U]."""
    loss_NUL = clipped_value_loss(
        values_of(params, inputs.context),
        inputs.old_value,
        inputs.returns,
        clip=algorithm.critic.clip,
        mask=mask_NUL,
    )
    return jnp.sum(loss_NUL, axis=2) / jnp.maximum(jnp.sum(mask_NUL, axis=2), 1)


def _action(share_N: jax.Array, term_NU: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.sum(share_N * jnp.sum(term_NU, axis=1))


def _constant(
    share_N: jax.Array, term_NU: jax.Array, count_NU: jax.Array, present_UL: jax.Array
) -> jax.Array:
    """By the trainer's longest row of actions: all turns with order=parallel, else one action."""
    longest = jnp.maximum(present_UL.shape[1], jnp.sum(present_UL))
    return _action(share_N, term_NU * count_NU) / longest


def _token(
    share_N: jax.Array, term_NU: jax.Array, count_NU: jax.Array, present_UL: jax.Array
) -> jax.Array:
    return _action(share_N, term_NU * count_NU) / jnp.maximum(_action(share_N, count_NU), _LEAST)


# A step's mean of the terms of actions, which have `count_NU` tokens.
_MEANS = {"action": _action, "token": _token, "constant": _constant}
