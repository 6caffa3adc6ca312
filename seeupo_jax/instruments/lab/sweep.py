"""An iteration's updates in the laboratory: turn after turn, as in `learner/sweep.py`.

Every turn is an action of one token, every trajectory has all K turns, all groups are of the one
task, the old policy is the iteration's first, and there is no KL term. What follows from that:
`normalize_by` has no effect without `mask_above`. Dynamic sampling is left out: with `dapo` too,
groups of equal rewards stay in the batch, where they have advantages of 0 and count in the mean.
Recipes that update all turns together make `inner_epochs` steps an iteration; those that update
turn by turn make K times as many, each of which touches one turn. With one table per turn only the
weights connect turns: `seeupo_unweighted` and `parallel` are equal there. Of several turns a step,
spans are counted from turn K also where `mask_above` leaves no trajectory that turn.
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
from seeupo_jax.algorithms.surrogate import turn_ratio, update_weight
from seeupo_jax.algorithms.value import clipped_value_loss
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.instruments.lab.advantages import TurnCredit
from seeupo_jax.instruments.lab.policies import TabularPolicy, log_probability
from seeupo_jax.instruments.lab.trajectories import Batch
from seeupo_jax.learner.optimization.optimizer import apply_update
from seeupo_jax.learner.sweep_plan import plan_sweep
from seeupo_jax.types import CONTEXT, TrainState

_LEAST = 1e-30  # of a share: what is divided by it is 0


class LabParams(NamedTuple):
    """All parameters of a run."""

    policy: Any
    value_C: jax.Array | None  # the critic: a value for each context; None without one


class TurnInputs(NamedTuple):
    """Turns and the inputs of their updates: [N, K], or [N, U, L] of the turns of one step.

    kept: which are learned from. clip_scale: None where clip ranges are not scaled.
    """

    context: jax.Array
    action: jax.Array
    kept: jax.Array
    advantage: jax.Array
    returns: jax.Array
    clip_scale: jax.Array | None
    old_logp: jax.Array
    old_value: jax.Array


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
) -> TrainState:
    """Step after step, each weighted by the steps before it; `key` seeds the random order."""
    actions = batch.context_NK, batch.action_NK
    logp_NK = log_probability(policy, state.params.policy, *actions)
    kept_NK = jnp.ones(logp_NK.shape, bool)
    if algorithm.mask_above is not None:
        kept_NK = jnp.exp(logp_NK) <= algorithm.mask_above
    inputs = TurnInputs(
        *actions, kept_NK, *credit, logp_NK, values_of(state.params, batch.context_NK)
    )
    turns_SUL, present_SUL = map(jnp.asarray, update_steps(algorithm, batch.context_NK.shape[1]))
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


def update_steps(algorithm: Algorithm, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """The turns of each planned update's actions, and which are no padding; both [S, U, L].

    A random order is a permutation of the first axis, drawn by `sweep`.
    """
    if algorithm.order == "random":
        algorithm = dataclasses.replace(algorithm, order="reverse")
    span, updates = algorithm.span(turns), plan_sweep(algorithm, turns).updates
    turns_SUL = np.full((len(updates), len(updates[0].actions), span), CONTEXT)
    for turns_UL, update in zip(turns_SUL, updates, strict=True):
        for turns_L, action in zip(turns_UL, update.actions, strict=True):
            turns_L[span - len(action) :] = action
    return np.maximum(turns_SUL, 0), turns_SUL != CONTEXT


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
    mask_NUL = inputs.kept & present_UL[None]
    count_NU = jnp.sum(mask_NUL, axis=2, dtype=jnp.float32)
    acts_N = jnp.any(count_NU, axis=1)
    if algorithm.normalize_by == "active":
        share_N /= jnp.maximum(jnp.sum(share_N * acts_N), _LEAST)

    def logp(params: LabParams) -> jax.Array:
        return log_probability(policy, params.policy, inputs.context, inputs.action)

    objective = algorithm.objective_entry
    bounds = {name: vars(algorithm)[name] for name in objective.bounds}
    old_logp = logp(state.params) if algorithm.old_policy == "turn" else inputs.old_logp

    def loss(params: LabParams) -> jax.Array:
        term_NU, _ = action_objective(
            logp(params),
            old_logp,
            mask_NUL,
            inputs.advantage,
            cumulative_ratio_N[:, None],
            objective=objective,
            ratio=algorithm.ratio,
            clip_scale_NL=inputs.clip_scale,
            **bounds,
        )
        if params.value_C is not None:
            term_NU -= algorithm.critic.coef * _value_loss(algorithm, params, inputs, mask_NUL)
        return -_MEANS[algorithm.loss_aggregation](share_N, term_NU, count_NU, present_UL)

    def epoch(state: TrainState, _: None) -> Any:
        stepped, _ = apply_update(optimizer, jax.grad(loss)(state.params), state)
        # As in training, no step without a token.
        return jax.tree.map(functools.partial(jnp.where, jnp.any(acts_N)), stepped, state), None

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
