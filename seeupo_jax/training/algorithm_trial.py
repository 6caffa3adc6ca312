"""A user's estimator and objective, tried on a batch of a few numbers before anything is compiled.

First abstractly, for shapes and types and for what no compiled program can do; then compiled, for
numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.algorithms.action_objective import action_objective
from seeupo_jax.algorithms.estimators import LEVELS, Estimator
from seeupo_jax.algorithms.objectives import BOUNDS, Objective
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.user_code import describe


def check_entries(algorithm: Algorithm) -> None:
    """Whether a user's own estimator and objective do what they declare.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    for field, check in (("advantage", try_estimator), ("objective", try_objective)):
        name = vars(algorithm)[field]
        if ":" in name:  # built-in ones are tested
            check(f"config.algorithm.{field}: {name}", find_entry(field, name), algorithm)


def try_estimator(name: str, estimator: Estimator, algorithm: Algorithm) -> None:
    """Credits a batch of four trajectories, the last of which failed.

    Args:
      name: how errors begin.
      algorithm: the other options, and those of the estimator.

    Raises:
      ValueError: the function fails, or returns other shapes, types or numbers.
    """
    arrays = _tiny_batch()
    mask = arrays[LEVELS[estimator.level]]
    wanted = {"advantages": mask.shape}
    if "value_NL" in estimator.needs:
        wanted["returns"] = arrays["mask_NL"].shape
    if estimator.adapts_clip:
        wanted["clip scales"] = arrays["mask_NK"].shape
    needed = {key: arrays[key] for key in estimator.inputs(algorithm.estimator, algorithm.scale)}

    def credit(arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        scaling = {"scale": algorithm.scale, "clip": algorithm.advantage_clip}
        result = estimator.credit(arrays, algorithm.estimator, **scaling)
        result = result._replace(part_NQ=None)  # for metrics alone
        return tuple(x for x in result if x is not None)

    results = _tried(name, wanted, credit, needed)
    masks = {"advantages": mask, "returns": arrays["mask_NL"], "clip scales": arrays["mask_NK"]}
    pairs = zip(wanted, results, strict=True)
    finite = [np.isfinite(x)[masks[what]].all() for what, x in pairs]
    if not all(finite):
        what = list(wanted)[finite.index(False)]
        raise ValueError(f"{name} makes {what} of finite rewards that are not finite numbers.")


def try_objective(name: str, objective: Objective, algorithm: Algorithm) -> None:
    """The terms of three actions, and their gradient; arguments as for `try_estimator`."""
    logp_NL = jnp.log(jnp.linspace(0.1, 0.9, 12, dtype=jnp.float32)).reshape(3, 4)
    old_logp_NL = logp_NL - jnp.array([[0.1], [-0.1], [0.0]])  # within usual clip ranges
    mask_NL = jnp.arange(4)[None, :] < jnp.array([[4], [2], [1]])
    weight_NL = jnp.broadcast_to(jnp.array([[1.0], [-1.0], [0.0]]), logp_NL.shape)
    single = algorithm.ratio == "token"
    arrays = {
        "ratio": jnp.exp(logp_NL - old_logp_NL),
        "logp": logp_NL,
        "old_logp": old_logp_NL,
        "weight": weight_NL,
    }
    arrays = {key: arrays[key] if single else arrays[key][:, 0] for key in objective.needs}
    # Arguments as in a step.
    bounds = {
        key: None if (x := vars(algorithm)[key]) is None else jnp.float32(x) for key in BOUNDS
    }
    values = {key: bounds[key] for key in objective.bounds}
    absent = {key: x for key, x in values.items() if x is None}
    present = {key: x for key, x in values.items() if x is not None}
    shape = logp_NL.shape if single else logp_NL.shape[:1]
    wanted = {"terms": shape, "shares that are clipped": shape}
    call = jax.jit(lambda arrays: objective.function(**arrays, **absent))
    _tried(name, wanted, call, arrays | present)

    def total(logp_NL: jax.Array) -> jax.Array:
        term_N, _ = action_objective(
            logp_NL,
            old_logp_NL,
            mask_NL,
            advantage_NL=weight_NL,
            cumulative_ratio_N=jnp.ones(3),
            objective=objective,
            ratio=algorithm.ratio,
            **bounds,
        )
        return term_N.sum()

    gradient = jax.jit(jax.grad(total))(logp_NL)
    if not np.isfinite(gradient).all():
        raise ValueError(f"{name} has a gradient that is not finite.")
    if not np.any(gradient):
        raise ValueError(f"{name} has no gradient: its term depends on neither ratio nor logp.")


def _tried(
    name: str,
    wanted: Mapping[str, tuple[int, ...]],
    function: Callable[..., Any],
    arrays: Mapping[str, Any],
) -> tuple[np.ndarray, ...]:
    """A function's result for arrays, checked to be float32 and of the wanted shapes."""
    given = ", ".join(f"{key} {x.dtype}{list(x.shape)}" for key, x in arrays.items())
    try:
        shapes = jax.eval_shape(function, arrays)
        results = function(arrays)
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(f"{name} fails on {given}: {describe(error)}.") from error
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    got = [(getattr(x, "shape", None), str(getattr(x, "dtype", type(x)))) for x in shapes]
    if got != [(shape, "float32") for shape in wanted.values()]:
        allowed = " and ".join(f"{what} float32{list(shape)}" for what, shape in wanted.items())
        shown = ", ".join(f"{dtype}{list(shape or ())}" for shape, dtype in got)
        raise ValueError(f"{name} returned {shown} for {given}; allowed: {allowed}.")
    return tuple(np.asarray(x) for x in (results if isinstance(results, tuple) else (results,)))


def _tiny_batch() -> dict[str, jax.Array]:
    """Two groups of two trajectories with 3, 2, 1 and 3 turns of two tokens; the last failed."""
    turns_N, turns = np.array([3, 2, 1, 3]), np.arange(3)
    valid_N = np.array([True, True, True, False])
    mask_NK = (turns < turns_N[:, None]) & valid_N[:, None]
    reward_NK = np.where(mask_NK, [[0.0, 0.0, 1.0], [0.5, 0.0, 0.0], [2.0, 0, 0], [0, 0, 0]], 0)
    mask_NL = np.repeat(mask_NK, 2, axis=1)
    logp_NL = np.where(mask_NL, -np.linspace(0.1, 2.0, 6), 0)
    arrays = {
        "reward_N": reward_NK.sum(axis=1),
        "group_N": np.array([0, 0, 1, 1]),
        "valid_N": valid_N,
        "reward_NK": reward_NK,
        "reward_rest_NK": np.zeros_like(reward_NK),
        "gain_NK": np.where(mask_NK & (turns < turns_N[:, None] - 1), reward_NK, np.nan),
        "rewards_NQ": np.stack([reward_NK.sum(axis=1), turns_N * valid_N], axis=1),
        "reward_weight_Q": np.array([1.0, 0.5]),
        "rewards_NKQ": np.stack([reward_NK, 1.0 * mask_NK], axis=2),
        "turn_weight_Q": np.array([1.0, 0.5]),
        "running_mean_Q": np.array([0.4, 1.0]),
        "running_std_Q": np.array([0.7, 0.0]),
        "state_NK": np.where(turns < turns_N[:, None], turns, -1),
        "mask_NK": mask_NK,
        "implicit_NK": np.where(mask_NK, np.linspace(-0.2, 0.1, 12).reshape(4, 3), 0),
        "node_NK": np.where(mask_NK, np.array([[0, 1, 2], [0, 3, 0], [4, 0, 0], [0, 0, 0]]), -1),
        "reward_NL": np.stack([np.zeros_like(reward_NK), reward_NK], axis=2).reshape(4, 6),
        "progress_NL": np.stack([np.zeros_like(reward_NK), 0.3 * mask_NK], axis=2).reshape(4, 6),
        "executed_NL": np.stack([np.zeros_like(reward_NK), 1.0 * mask_NK], axis=2).reshape(4, 6),
        "turn_NL": np.where(mask_NL, np.repeat(turns, 2), -1),
        "mask_NL": mask_NL,
        "value_NL": np.where(mask_NL, 0.5, 0),
        "old_logp_NL": logp_NL,
        "ref_logp_NL": 1.5 * logp_NL,
        "collision_NL": np.where(mask_NL, np.exp(2 * logp_NL), 0),
        "truncated_N": np.array([True, False, False, False]),
        "baseline_N": np.array([0.5, 0.0, 0.5, 0.0]),
        "metric_N": turns_N * 1.0,
    }
    kinds = {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}
    return {name: jnp.asarray(x, kinds[x.dtype.kind]) for name, x in arrays.items()}
