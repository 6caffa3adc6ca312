"""The reference policy and coefficient of the KL penalty: both may change between iterations."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.algorithms.kl_control import adapted_kl_coef
from seeupo_jax.algorithms.surrogate import MAX_K3, MAX_K3_DIFFERENCE
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.state_layout import on_device, to_pinned_host
from seeupo_jax.parallel.distributed import to_global
from seeupo_jax.types import TrainState


def reference_of(train: TrainState, ref_params: Any) -> Any:
    """The reference policy's parameters: those of the state if they move, else `ref_params`."""
    return ref_params if train.reference is None else train.reference


def wait_reference(config: Config, params: Any) -> Any:
    """The reference policy's parameters between passes: `params`, or a copy in host memory."""
    return to_pinned_host(params) if config.offload.reference else params


def with_reference(
    state: TrainState, config: Config, params: Any, replicated: jax.sharding.Sharding
) -> TrainState:
    """The state before the first step with the parts of the KL penalty that change in a run.

    Args:
      params: of the reference policy, arrays or shape structs; a state that has them donates them.
    """
    if config.algorithm.reference is not None:
        state = state._replace(reference=wait_reference(config, params))
    if config.algorithm.kl_control is not None:
        coef = np.float32(config.algorithm.kl_coef)
        struct = jax.ShapeDtypeStruct((), np.float32, sharding=replicated)
        is_struct = isinstance(state.step, jax.ShapeDtypeStruct)
        state = state._replace(kl_coef=struct if is_struct else to_global(coef, replicated))
    return state


def options_now(algorithm: Algorithm, train: TrainState) -> Algorithm:
    """The options with the state's KL coefficient."""
    if train.kl_coef is None:
        return algorithm
    return dataclasses.replace(algorithm, kl_coef=float(np.asarray(train.kl_coef)))


def sampled_kl(logp: np.ndarray, ref_logp: np.ndarray) -> float:
    """Mean of k3 = exp(d) - d - 1 with d = ref - log π, bounded as in `kl_estimate`; nats.

    Args:
      logp, ref_logp: of the sampled tokens.
    """
    difference = np.clip(
        np.float64(ref_logp) - np.float64(logp), -MAX_K3_DIFFERENCE, MAX_K3_DIFFERENCE
    )
    return float(np.minimum(np.expm1(difference) - difference, MAX_K3).mean())


def next_kl_coef(algorithm: Algorithm, train: TrainState, kl: float, trajectories: int) -> float:
    """The coefficient after an iteration of so many trajectories, sampled with this KL."""
    control = algorithm.kl_control
    return adapted_kl_coef(
        float(np.asarray(train.kl_coef)),
        kl,
        target=control.target,
        horizon=control.horizon,
        trajectories=trajectories,
    )


def ema_update(params: Any, reference: Any, *, decay: float) -> Any:
    """`decay * reference + (1 - decay) * params`, new arrays; a copy of `params` for decay 0.

    `reference` may lie in the host's memory.
    """
    if decay == 0:
        return jax.tree.map(jnp.copy, params)
    return jax.tree.map(
        lambda ref, param: decay * ref + (1 - decay) * param, on_device(reference), params
    )
