"""The bias of the policy gradient of stale trajectories, with and without importance weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.algorithms.importance_options import Importance
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.instruments.lab.advantages import expected_credit
from seeupo_jax.instruments.lab.laboratory import (
    LabSettings,
    check_rewards,
    check_stale,
    check_turns,
    initial_state,
    iteration,
)
from seeupo_jax.instruments.lab.policies import POLICIES, TabularPolicy, log_probability
from seeupo_jax.instruments.lab.problems import Problem
from seeupo_jax.instruments.lab.sweep import LabParams, objective, sweep_inputs, update_steps
from seeupo_jax.instruments.lab.trajectories import Batch, expected_batch
from seeupo_jax.options import above

_AT_ONCE = 256  # trajectories whose gradients are in memory


class Correction(NamedTuple):
    """What an update makes of what samplers recorded.

    recorded: whether it knows their log-probabilities; False: it takes all tokens for on-policy.
    """

    importance: Importance | None = None
    recorded: bool = True


@dataclasses.dataclass(frozen=True)
class BiasSettings:
    """The importance weights that are compared; truncation reads no `importance_low`."""

    importance_clip: float = above(0, 2.0, most=1000)
    importance_low: float = above(0, 0.5, most=1000)


def corrections(settings: BiasSettings) -> dict[str, Correction]:
    """What is compared, by the name that tables have for it."""
    clip, low = settings.importance_clip, settings.importance_low
    lows = {"truncate": None, "mask": low, "reject": low}
    weights = {
        f"{method} per {per}": Correction(Importance(clip, method=method, per=per, low=least))
        for method, least in lows.items()
        for per in ("token", "turn", "trajectory")
    }
    return {"none": Correction(recorded=False), "ratios to the sampler": Correction(), **weights}


class Bias(NamedTuple):
    """The gradient of stale trajectories compared with the on-policy one; each float64 [lags].

    bias: the norm of their difference over the norm of the on-policy one.
    noise: the standard deviation of a trajectory's gradient over that of an on-policy one.
    lost: the share of the tokens with an advantage that have no gradient.
    """

    bias: np.ndarray
    noise: np.ndarray
    lost: np.ndarray


@dataclasses.dataclass(frozen=True)
class BiasResult:
    """A recipe's result on a problem.

    lags: sweeps. kl: nats of a trajectory, from the policy that samples to the one that is trained,
      [lags]. by_correction: as of `corrections`.
    """

    lags: tuple[int, ...]
    kl: np.ndarray
    by_correction: dict[str, Bias]


def check_bias(
    problem: Problem,
    recipe: str,
    settings: LabSettings,
    lags: Sequence[int],
    weights: BiasSettings,
) -> None:
    """Whether `measure_bias` has a meaning.

    Raises:
      ValueError: one sentence with what was got and what is allowed.
    """
    if not all(0 <= lag < settings.iterations for lag in lags):
        got, most = ",".join(map(str, lags)), settings.iterations - 1
        raise ValueError(f"--bias: got {got}; allowed: lags from 0 to {most}, --iterations - 1.")
    if weights.importance_low >= weights.importance_clip:
        raise ValueError(
            f"--importance_low: got {weights.importance_low:g}; allowed: a number below"
            f" --importance_clip={weights.importance_clip:g}."
        )
    if settings.lag:
        raise ValueError(f"--lag: got {settings.lag} with --bias; allowed: 0, as it has its own.")
    algorithm = dataclasses.replace(settings, exact=True).algorithm(recipe)
    if algorithm.importance is not None:
        raise ValueError(
            f"--bias: got {recipe!r}, which sets importance; allowed: recipes that do not, since"
            " each method is compared."
        )
    check_stale(algorithm, f"--bias: got {recipe!r}")
    check_rewards(problem, recipe, settings)
    check_turns(problem, settings)


def measure_bias(
    problem: Problem,
    recipe: str,
    settings: LabSettings,
    lags: Sequence[int],
    weights: BiasSettings,
) -> BiasResult:
    """Compares expectations over all trajectories, along one exact on-policy run.

    The gradient is that of the objectives of all turns before the first step of a sweep, where M is
    the advantage. Every iteration from the largest lag on is measured: bias and noise are ratios of
    sums over them, `kl` and `lost` means.

    Args:
      recipe: as for `LabSettings.algorithm`, with advantage=grae and a ratio.
      settings: of the run, of which `seeds`, `groups` and `group_size` are not read.
      lags: sweeps, in [0, iterations).
      weights: of the methods that are compared.

    Raises:
      ValueError: one sentence with what was got and what is allowed.
    """
    check_bias(problem, recipe, settings, lags, weights)
    settings = dataclasses.replace(settings, exact=True)
    algorithm, mean = settings.algorithm(recipe), jnp.asarray(problem.mean, jnp.float32)
    policy = POLICIES[settings.policy](problem.turns, problem.actions)
    of_run = functools.partial(_gradients, policy, algorithm, settings.turn_tokens, mean)
    run_I = jax.jit(functools.partial(_run, policy, algorithm, settings))(mean)
    now_I = jax.tree.map(lambda x_I: x_I[max(lags) :], run_I)
    sampler_I = {
        lag: jax.tree.map(lambda x_I, lag=lag: x_I[max(lags) - lag : len(x_I) - lag], run_I)
        for lag in lags
    }
    fresh_I = jax.jit(functools.partial(of_run, Correction(recorded=False)))(now_I, now_I)
    norm, deviation = np.sum(_norms(fresh_I.mean)), np.sum(fresh_I.deviation)
    found = {}
    for name, correction in corrections(weights).items():
        stale = jax.jit(functools.partial(of_run, correction))
        by_lag = [stale(now_I, sampler_I[lag]) for lag in lags]
        apart = [np.sum(_norms(jax.tree.map(jnp.subtract, g.mean, fresh_I.mean))) for g in by_lag]
        noise = [np.sum(g.deviation) / deviation for g in by_lag]
        found[name] = Bias(
            np.array(apart) / norm, np.array(noise), np.array([np.mean(g.lost) for g in by_lag])
        )
    return BiasResult(tuple(lags), np.array([np.mean(g.kl) for g in by_lag]), found)


class _Gradients(NamedTuple):
    """Of each iteration: the expected gradient, and numbers [I] as `Bias` and `BiasResult` say.

    deviation: the standard deviation of a trajectory's gradient.
    """

    mean: Any
    deviation: jax.Array
    lost: jax.Array
    kl: jax.Array


def _run(
    policy: TabularPolicy, algorithm: Algorithm, settings: LabSettings, mean: jax.Array
) -> Any:
    """The policy's parameters as each iteration of an on-policy run begins, [I, ...]."""
    optimizer, key = settings.make_optimizer(), jax.random.key(0)
    state = initial_state(policy, optimizer, algorithm, key, mean.ndim, mean.shape[0])

    def iterate(state: Any, number: jax.Array) -> Any:
        rewards, own = (mean, jnp.ones_like(mean), None), jax.random.fold_in(key, number)
        after = iteration(policy, optimizer, algorithm, settings, rewards, state, own)
        return after, state.params.policy

    _, run_I = jax.lax.scan(iterate, state, jnp.arange(settings.iterations))
    return run_I


def _gradients(
    policy: TabularPolicy,
    algorithm: Algorithm,
    turn_tokens: int,
    mean: jax.Array,
    correction: Correction,
    now_I: Any,
    sampler_I: Any,
) -> _Gradients:
    """The gradients at policies `now_I` of the trajectories that policies `sampler_I` sample."""
    algorithm = dataclasses.replace(algorithm, importance=correction.importance)

    def of_iteration(pair: tuple[Any, Any]) -> _Gradients:
        now, sampler = pair
        batch = expected_batch(policy, sampler, mean)
        actions = batch.context_NK, batch.action_NK
        logp_NK, sampler_logp_NK = (log_probability(policy, p, *actions) for p in pair)
        kl = jnp.sum(batch.share_N[:, None] * (sampler_logp_NK - logp_NK))
        if correction.recorded:
            batch = batch._replace(sampler_logp_NK=sampler_logp_NK)
        slope_NK, lost = _slopes(policy, algorithm, turn_tokens, now, batch)

        def gradient(slope_XK: jax.Array, context_XK: jax.Array, action_XK: jax.Array) -> Any:
            def weighed(params: Any) -> jax.Array:
                return jnp.sum(slope_XK * log_probability(policy, params, context_XK, action_XK))

            return jax.grad(weighed)(now)

        def squared_norm(trajectory: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return optax.tree.norm(gradient(*trajectory), squared=True)

        whole = gradient(slope_NK, *actions)
        squared_N = jax.lax.map(squared_norm, (slope_NK, *actions), batch_size=_AT_ONCE)
        sampled_N = batch.share_N > 0
        second = jnp.sum(jnp.where(sampled_N, squared_N / batch.share_N, 0.0))
        variance = second - optax.tree.norm(whole, squared=True)
        return _Gradients(whole, jnp.sqrt(jnp.maximum(variance, 0.0)), lost, kl)

    return jax.lax.map(of_iteration, (now_I, sampler_I))


def _slopes(
    policy: TabularPolicy, algorithm: Algorithm, turn_tokens: int, params: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """The objectives' derivative by each token's log-probability, [N, K], and `Bias.lost`."""
    credit, all_params = expected_credit(algorithm, batch), LabParams(params, None)
    inputs = sweep_inputs(policy, algorithm, all_params, batch, credit, turn_tokens)
    steps_SUL = update_steps(algorithm, batch.context_NK.shape[1], turn_tokens)

    def total(logp_NK: jax.Array) -> jax.Array:
        terms = []
        for tokens_UL, present_UL in zip(*steps_SUL, strict=True):
            parts = jax.tree.map(lambda x_NK, own=tokens_UL: x_NK[:, own], inputs)
            ones_N = jnp.ones(batch.share_N.shape)
            logps = logp_NK[:, tokens_UL], parts.old_logp
            terms.append(objective(algorithm, *logps, parts, present_UL, batch.share_N, ones_N))
        return sum(terms, jnp.zeros(()))

    slope_NK = jax.grad(total)(log_probability(policy, params, inputs.context, inputs.action))
    credited_NK = batch.share_N[:, None] * (inputs.kept & (inputs.advantage != 0))
    return slope_NK, jnp.sum(credited_NK * (slope_NK == 0)) / jnp.sum(credited_NK)


def _norms(gradient_I: Any) -> np.ndarray:
    """The norm of each iteration's gradient, float64 [I]."""
    squares = [np.square(np.asarray(x_I, np.float64)) for x_I in jax.tree.leaves(gradient_I)]
    return np.sqrt(sum(x_I.reshape(len(x_I), -1).sum(axis=1) for x_I in squares))
