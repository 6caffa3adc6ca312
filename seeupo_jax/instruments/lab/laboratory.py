"""Experiments: a recipe on a problem, for many seeds at once, its exact value every iteration."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.configuration.algorithm import Algorithm, ObjectiveOptions, SweepOptions
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.fields import assign, build, parse, type_of
from seeupo_jax.configuration.layers import layered
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.rules.algorithm_rules import check_choices
from seeupo_jax.configuration.schema import Optimizer, recipe_fields
from seeupo_jax.instruments.lab.advantages import (
    INPUTS,
    TurnCredit,
    expected_credit,
    sampled_credit,
)
from seeupo_jax.instruments.lab.policies import (
    POLICIES,
    TabularPolicy,
    all_probabilities,
    collision,
    entropy,
    exact_value,
    first_context,
    log_probability,
)
from seeupo_jax.instruments.lab.problems import Problem
from seeupo_jax.instruments.lab.sweep import LabParams, old_logp, sweep, values_of
from seeupo_jax.instruments.lab.trajectories import (
    Batch,
    TurnRewards,
    expected_batch,
    sampled_batch,
)
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.options import above, at_least, checked, names_of
from seeupo_jax.training.algorithm_trial import check_entries
from seeupo_jax.types import TrainState

SOLVED = 0.95  # of the optimum
_FALL = 1e-6  # of the optimum, or of a reward of 1 where that is more: less is float32's rounding

# Of the options of its algorithms, those that have no effect here, and why.
_UNREAD = {
    "estimator.gain": "a turn gains its reward",
    "estimator.gain_template": "a turn gains its reward",
    "critic.learning_rate": "the policy and its critic have one optimizer",
}


@dataclass(frozen=True)
class LabSettings:
    """Settings that all recipes of an experiment share; the defaults are the laboratory's."""

    seeds: int = at_least(1, 16)
    iterations: int = at_least(1, 150)
    groups: int = at_least(1, 16)
    group_size: int = at_least(2, 16)
    lr: float = above(0, 3.0)
    clip: float | None = at_least(0, 0.2)
    inner_epochs: int = at_least(1, 4)
    weight_clip: float | None = above(0, None)
    advantage_clip: float | None = above(0, None)
    optimizer: str = "sgd"
    policy: str = checked(
        "tables", "one of " + ", ".join(POLICIES), lambda value: value in POLICIES
    )
    exact: bool = False
    lag: int = at_least(0, 0)
    turn_tokens: int = at_least(1, 1)

    def algorithm(self, recipe: str) -> Algorithm:
        """The algorithm of a recipe in the laboratory.

        Args:
          recipe: `NAME` (or a user's `module:attribute`) or, with some choices changed,
            `NAME:field=value:field=value`. `clip` bounds the ratio of those that set no bounds of
            their own; an objective without a ratio makes one step instead of `inner_epochs`.

        Raises:
          ValueError: an unknown recipe, field or value, or one that has no meaning here.
        """
        name, *changes = re.split(r":(?=[\w.]+=)", recipe)  # a value may be a module:attribute
        preset, _, rest = name.partition(":")
        if preset in RECIPES:
            name, changes = preset, [*([rest] if rest else []), *changes]
        elif not rest:
            raise ValueError(f"--recipes: got {name!r}; allowed: {', '.join(RECIPES)}.")
        common = {
            "clip_low": self.clip,
            "clip_high": self.clip,
            "weight_clip": self.weight_clip,
            "advantage_clip": self.advantage_clip,
        }
        fixed = {"inner_epochs": self.inner_epochs, "kl_coef": 0.0}
        changed: dict[str, Any] = {}
        for text in changes:
            assign(changed, *_change(text))
        recipe_values = {**common, **recipe_fields(name)}  # some recipes do not read all of these
        values = layered({**recipe_values, **fixed}, changed)
        algorithm = build(Algorithm, values, "--recipes")
        has_ratio = find_entry("objective", algorithm.objective).has_ratio
        if not has_ratio and "inner_epochs" not in changed:
            algorithm = dataclasses.replace(algorithm, inner_epochs=1)
        check_choices(algorithm, max_turns=1, ahead=self.lag > 0, recipe=recipe_values)
        check_entries(algorithm)
        _check_needs(algorithm)
        if self.lag:
            check_stale(algorithm, f"--lag: got {self.lag}")
        if self.turn_tokens > 1 and algorithm.estimator_entry.level != "trajectory":
            raise ValueError(
                f"--turn_tokens: got {self.turn_tokens} with advantage={algorithm.advantage};"
                " allowed: 1 unless the estimator is of trajectories."
            )
        if self.exact and algorithm.advantage != "grae":
            raise ValueError(
                f"--exact: got {recipe!r}, with advantage={algorithm.advantage}; allowed: recipes"
                " with advantage=grae."
            )
        return algorithm

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optax optimizer: plain gradient ascent is `sgd`.

        Raises:
          ValueError: an unknown name, or one that needs more than a learning rate.
        """
        optimizer = Optimizer(name=self.optimizer, learning_rate=self.lr, max_grad_norm=None)
        try:
            return make_optimizer(optimizer, total_steps=1)
        except ValueError as error:
            reason = str(error).removeprefix("config.optimizer").removeprefix(".name")
            raise ValueError(f"--optimizer{reason}") from error


def _check_needs(algorithm: Algorithm) -> None:
    estimator = find_entry("advantage", algorithm.advantage)
    needs = estimator.needs
    if lacking := [name for name in needs if name not in INPUTS]:
        raise ValueError(
            f"--recipes: got advantage={algorithm.advantage}, which needs {lacking[0]}; allowed: an"
            " estimator without it, since the laboratory has neither a reference policy nor a model"
            " that scores turns, no baselines of a run, and executes every action."
        )
    if algorithm.advantage == "zero":
        raise ValueError(
            "--recipes: got advantage=zero; allowed: an estimator of rewards, since the laboratory"
            " has no teacher."
        )
    options = algorithm.estimator
    if "metric_N" in needs and not options.reads_entropy:
        raise ValueError(
            f"--recipes: got estimator.metric={options.metric}; allowed: entropy, since all"
            " trajectories of the laboratory have as many turns and tokens."
        )
    if algorithm.mask_above is not None and estimator.level == "token":
        raise ValueError(
            f"--recipes: got mask_above={algorithm.mask_above} with advantage={algorithm.advantage}"
            "; allowed: an estimator of trajectories or turns, since in the laboratory those of"
            " tokens credit masked ones too."
        )


def check_stale(algorithm: Algorithm, given: str) -> None:
    corrects = algorithm.old_policy == "iteration" and algorithm.objective_entry.has_ratio
    if algorithm.importance is None and not corrects:
        raise ValueError(
            f"{given} with objective={algorithm.objective} and old_policy={algorithm.old_policy};"
            " allowed: 0 unless importance.clip is set or there are ratios to the policy that"
            " sampled."
        )


def check_turns(problem: Problem, settings: LabSettings) -> None:
    """Whether all turns have as many tokens.

    Raises:
      ValueError: one sentence with what was got and what is allowed.
    """
    if problem.turns % settings.turn_tokens:
        raise ValueError(
            f"--turn_tokens: got {settings.turn_tokens} on {problem.name}, which has"
            f" {problem.turns} actions; allowed: a divisor of it."
        )


def check_rewards(problem: Problem, recipe: str, settings: LabSettings) -> None:
    """Whether a recipe's estimator is for the rewards of a problem.

    Raises:
      ValueError: one sentence with what was got and what is allowed.
    """
    advantage = settings.algorithm(recipe).advantage
    allowed = find_entry("advantage", advantage).reward_range
    reward, noise = problem.mean / problem.probability, problem.turns * problem.noise
    least = min(reward.min(), 0.0) if np.any(problem.probability < 1) else reward.min()
    low, high = least - noise, reward.max() + noise
    if allowed is not None and not (allowed[0] <= low and high <= allowed[1]):
        raise ValueError(
            f"--recipes: got {recipe!r} on {problem.name}, whose rewards are from {low:g} to"
            f" {high:g}; allowed with advantage={advantage}: from {allowed[0]:g} to"
            f" {allowed[1]:g}."
        )


def _change(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    read = (*names_of(ObjectiveOptions), *names_of(SweepOptions), "importance")
    unread = field in _UNREAD or (field.partition(".")[0] in {*names_of(Algorithm)} - {*read})
    if not separator or unread:
        why = f", since {_UNREAD[field]}" if field in _UNREAD else ""
        raise ValueError(
            f"--recipes: got {text!r} after a recipe's name; allowed: field=value, with one of"
            f" {', '.join(read)}, the fields that the laboratory reads{why}."
        )
    return field, parse(value, f"--recipes: {field}", type_of(Algorithm, field))


@dataclass(frozen=True)
class Result:
    """A recipe's result on a problem.

    `value_SI`: float [seeds, iterations + 1], the policy's exact value in units of reward, before
    the first iteration and after each. `optimum`: that of the best policy.
    """

    optimum: float
    value_SI: np.ndarray

    @property
    def final_over_optimum(self) -> np.ndarray:
        """[S]."""
        return self.value_SI[:, -1] / self.optimum

    @property
    def mean_over_optimum(self) -> np.ndarray:
        """The mean of the value at the start and after each iteration, over the optimum; [S]."""
        return self.value_SI.mean(axis=1) / self.optimum

    @property
    def solved(self) -> float:
        """Share of the seeds that end at 95% of the optimum or above."""
        return float(np.mean(self.final_over_optimum >= SOLVED))

    @property
    def iterations_to_solve(self) -> float:
        """Median over the seeds of the first iteration with 95% of the optimum; inf: never."""
        there_SI = self.value_SI >= SOLVED * self.optimum
        first_S = np.where(there_SI.any(axis=1), there_SI.argmax(axis=1), np.inf)
        return float(np.median(first_S))

    @property
    def fall_SI(self) -> np.ndarray:
        """How much lower each iteration ended than it began, units of reward; [S, I]."""
        return -np.diff(self.value_SI, axis=1)

    @property
    def drops(self) -> float:
        """Share of the iterations, over all seeds, in which the value fell by more than 1e-6."""
        return float(np.mean(self.fall_SI > _FALL * max(1.0, abs(self.optimum))))


def experiment(problem: Problem, recipe: str, settings: LabSettings) -> Result:
    """Runs a recipe on a problem for all seeds.

    Args:
      recipe: as for `LabSettings.algorithm`.
    """
    check_rewards(problem, recipe, settings)
    check_turns(problem, settings)
    turn_rewards = None
    if problem.turn_mean is not None:
        turn_rewards = TurnRewards(np.float32(problem.turn_mean), np.float32(problem.noise))
    run = compile_experiment(problem.mean.shape, recipe, settings, turn_rewards is not None)
    arrays = (np.asarray(x, np.float32) for x in (problem.mean, problem.probability))
    regret_SI = run(*arrays, np.arange(settings.seeds, dtype=np.int32), turn_rewards)
    return Result(problem.optimum, problem.optimum - np.asarray(regret_SI, np.float64))


def compile_experiment(
    shape: tuple[int, ...], recipe: str, settings: LabSettings, of_turns: bool = False
) -> Callable[..., jax.Array]:
    """`regrets` for all problems of a shape; the same call again compiles nothing.

    Args:
      of_turns: whether they have rewards of turns.
    """
    algorithm = settings.algorithm(recipe)
    entries = (find_entry(field, vars(algorithm)[field]) for field in ("advantage", "objective"))
    return _compile(shape, algorithm, settings, of_turns, *entries)


@functools.cache
def _compile(shape, algorithm, settings, of_turns, *_entries):  # a name's may be another by now
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    seed_S = jax.ShapeDtypeStruct((settings.seeds,), jnp.int32)
    numbers = (jax.ShapeDtypeStruct(each, jnp.float32) for each in ((len(shape), *shape), ()))
    turn_rewards = TurnRewards(*numbers) if of_turns else None
    run = functools.partial(regrets, algorithm=algorithm, settings=settings)
    return jax.jit(run).lower(array, array, seed_S, turn_rewards).compile()


def regrets(
    mean: jax.Array,
    probability: jax.Array,
    seed_S: jax.Array,
    turn_rewards: TurnRewards | None = None,
    *,
    algorithm: Algorithm,
    settings: LabSettings,
) -> jax.Array:
    """The optimum minus the policy's exact value, at the start and after each iteration.

    Not the value itself: near the optimum float32 rounds it by more than an iteration changes it.

    Returns:
      float32 [S, iterations + 1], units of reward, >= 0.
    """
    turns, actions = mean.ndim, mean.shape[0]
    policy, optimizer = POLICIES[settings.policy](turns, actions), settings.make_optimizer()

    def regret(state: TrainState) -> jax.Array:
        probability_CA = all_probabilities(policy, state.params.policy, turns, actions)
        return exact_value(probability_CA, jnp.max(mean) - mean)

    def run(seed: jax.Array) -> jax.Array:
        key_init, key_run = jax.random.split(jax.random.fold_in(jax.random.key(0), seed))
        state = initial_state(policy, optimizer, algorithm, key_init, turns, actions)
        older = None  # the policies of the last iterations, the oldest first
        if settings.lag:
            older = jax.tree.map(lambda x: jnp.stack([x] * settings.lag), state.params.policy)

        def iterate(carry: Any, number: jax.Array) -> Any:
            state, older = carry
            key = jax.random.fold_in(key_run, number)
            rewards = mean, probability, turn_rewards
            sampler = jax.tree.map(lambda x: x[0], older)
            after = iteration(policy, optimizer, algorithm, settings, rewards, state, key, sampler)
            if older is not None:
                newest = jax.tree.map(lambda x: x[None], state.params.policy)
                older = jax.tree.map(lambda *x: jnp.concatenate(x)[1:], older, newest)
            return (after, older), regret(after)

        _, regret_I = jax.lax.scan(iterate, (state, older), jnp.arange(settings.iterations))
        return jnp.concatenate([regret(state)[None], regret_I])

    return jax.vmap(run)(seed_S)


def initial_state(
    policy: TabularPolicy,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    key: jax.Array,
    turns: int,
    actions: int,
) -> TrainState:
    """The state that a run on a problem of so many turns and actions begins from."""
    has_critic = algorithm.critic.kind != "none"
    value_C = jnp.zeros(first_context(turns, actions)) if has_critic else None
    params = LabParams(policy.init(key), value_C)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), zero, zero)


def iteration(
    policy: TabularPolicy,
    optimizer: optax.GradientTransformation,
    algorithm: Algorithm,
    settings: LabSettings,
    rewards: tuple[jax.Array, jax.Array, TurnRewards | None],
    state: TrainState,
    key: jax.Array,
    sampler: Any = None,
) -> TrainState:
    """Trajectories of the policy, what they are credited with, and a sweep over their turns.

    Args:
      rewards: mean, probability and turn_rewards as for `sampled_batch`.
      sampler: parameters of the policy that samples; None: those of the state.
    """
    params, (mean, probability, turn_rewards) = state.params, rewards
    sampling = params.policy if sampler is None else sampler
    if settings.exact:
        batch = expected_batch(policy, sampling, mean)
    else:
        count = settings.groups * settings.group_size
        batch = sampled_batch(
            policy, sampling, mean, probability, key, turn_rewards, trajectories=count
        )
    if sampler is not None:
        sampler_logp_NK = log_probability(policy, sampler, batch.context_NK, batch.action_NK)
        batch = batch._replace(sampler_logp_NK=sampler_logp_NK)
    if settings.exact:
        credit = expected_credit(algorithm, batch)
    else:
        credit = _sampled_credit(policy, algorithm, settings, params, batch)
    tokens = settings.turn_tokens
    return sweep(policy, optimizer, algorithm, state, batch, credit, key, turn_tokens=tokens)


def _sampled_credit(
    policy: TabularPolicy,
    algorithm: Algorithm,
    settings: LabSettings,
    params: LabParams,
    batch: Batch,
) -> TurnCredit:
    context_NK, of_policy, needs = batch.context_NK, {}, algorithm.estimator_entry.needs
    value_NK = values_of(params, context_NK)
    if algorithm.estimator.reads_entropy:
        of_policy["entropy_NK"] = entropy(policy, params.policy, context_NK)
    if "old_logp_NL" in needs:
        of_policy["logp_NK"] = old_logp(policy, algorithm, params, batch)
    if "collision_NL" in needs:
        of_policy["collision_NK"] = collision(policy, params.policy, context_NK)
    return sampled_credit(algorithm, batch, value_NK, group_size=settings.group_size, **of_policy)
