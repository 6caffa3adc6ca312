"""Builds the learner with its optimizer, its training state and the reference policy."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax
import optax

from seeupo_jax.configuration.reward import reward_weights
from seeupo_jax.configuration.role_schema import trained_roles
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.adapter_moments import per_adapter
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.learner.optimization.turn_moments import per_turn
from seeupo_jax.learner.reference_policy import wait_reference, with_reference
from seeupo_jax.learner.state_layout import (
    abstract_state,
    make_state,
    state_layout,
    undivided_bytes,
)
from seeupo_jax.learner.step.critic import critic_optimizer, make_critic
from seeupo_jax.learner.step.turn_scorer import make_scorer, scorer_optimizer
from seeupo_jax.parallel.mesh import sharding
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.teachers import load_teachers
from seeupo_jax.types import TrainState

_LOGGER = logging.getLogger(__name__)


class BuiltLearner(NamedTuple):
    """A learner, the state before its first step, and the parameters of the reference policy.

    reference: None where the state has them.
    """

    learner: Learner
    state: TrainState
    reference: Any


def run_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer of a whole run, as long as which its schedule is.

    Raises:
      ValueError: options that it does not have.
    """
    optimizer = make_optimizer(config.optimizer, total_steps=build.total_steps(config))
    lora = build.adapters_of(config)
    if lora is None or not lora.per_turn:
        return optimizer
    return per_adapter(optimizer, lora.per_turn, int(config.model.scan_layers))


def build_learner(config: Config, policy: build.Policy, params: Any) -> BuiltLearner:
    """The learner of a run and what it begins with.

    Args:
      params: those of the policy that train; shape structs make parts of shape structs.
    """
    optimizer, steps = run_optimizer(config), build.total_steps(config)
    state = new_state(config, policy, optimizer, params)
    learner = Learner(
        network=policy.network,
        optimizer=optimizer,
        algorithm=build.sweep_algorithm(config),
        shapes=build.build_shapes(config, policy.mesh, config.rollout.trajectories),
        temperature=config.rollout.temperature,
        seed=config.seed,
        truncated=config.rollout.truncated or config.agent.constraints,
        on_policy=config.rollout.max_lag == 0,
        entropy=config.telemetry.entropy,
        critic_optimizer=critic_optimizer(config, total_steps=steps),
        scorer_optimizer=scorer_optimizer(config, total_steps=steps),
        schedule=Schedule(config.optimizer, config.iterations),
        ema=config.optimizer.ema,
        reward_weights=reward_weights(config.rewards),
        roles=trained_roles(config.roles),
        frozen=policy.frozen,
        teachers=load_teachers(config, policy, shapes=is_abstract(params)),
        teaching=config.teacher,
        balance=config.experts,
        state_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
        replicated=sharding(policy.mesh, ()),
    )
    return BuiltLearner(learner, state, place_reference(config, params))


def new_state(
    config: Config, policy: build.Policy, optimizer: optax.GradientTransformation, params: Any
) -> TrainState:
    """The state before the first step: a copy of the parameters, since the state is donated.

    Parameters that are shape structs (of `build.abstract_policy`) make a state of shape structs.
    """
    if config.algorithm.moments == "turn":
        optimizer = per_turn(optimizer, config.rollout.max_turns)
    steps, width = build.total_steps(config), policy.network.arch.width
    critic = make_critic(config.algorithm, width, critic_optimizer(config, total_steps=steps))
    scored_by = scorer_optimizer(config, total_steps=steps)
    scorer = make_scorer(config.algorithm, width, scored_by, config.rollout.temperature)
    ema = config.optimizer.ema is not None
    layout = state_layout(policy.mesh, optimizer, params, config.offload, critic, ema, scorer)
    is_struct = is_abstract(params)
    state = (abstract_state if is_struct else make_state)(optimizer, params, layout, critic, scorer)
    if not is_struct:
        warn_of_undivided(state)
    return with_reference(state, config, params, layout.step)


def is_abstract(params: Any) -> bool:
    """Whether parameters are shape structs."""
    return isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)


def warn_of_undivided(state: TrainState) -> None:
    """Warns where much of an optimizer's state is unlike the parameters, which are divided.

    adafactor's sums over rows and columns are not much: of 128 numbers or more, at most 1/64.
    """
    params = jax.tree.leaves(state.params)
    undivided, size = undivided_bytes(state), sum(x.size * x.dtype.itemsize for x in params)
    divided = not all(leaf.sharding.is_fully_replicated for leaf in params)
    if divided and undivided > max(size / 20, 2**20):
        _LOGGER.warning(
            "every device holds %.0f MiB of the optimizer's state whole, of %.0f MiB of parameters:"
            " only leaves at a parameter's path and in its shape are divided (docs/optimizers.md).",
            undivided / 2**20,
            size / 2**20,
        )


def place_reference(config: Config, params: Any) -> Any:
    """The reference policy's parameters where they wait; None: in the state, since they move."""
    return None if config.algorithm.reference is not None else wait_reference(config, params)
