"""The compiled programs of a run's sweeps, kept for all of them, and what they are compiled for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from seeupo_jax.algorithms.expert_options import NO_BALANCE, ExpertBalance
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.teacher_schema import Teacher
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.optimization.schedule import Schedule, at_share
from seeupo_jax.learner.optimization.turn_moments import of_turn
from seeupo_jax.learner.reference_policy import ema_update
from seeupo_jax.learner.state_layout import HashableShardings, average, on_device
from seeupo_jax.learner.step import turn_step
from seeupo_jax.learner.step.critic import Critic, make_critic
from seeupo_jax.learner.step.loss_config import LossConfig, Numbers
from seeupo_jax.learner.step.turn_scorer import TurnScorer, make_scorer, scorer_step
from seeupo_jax.learner.step.turn_step import TokenScores
from seeupo_jax.learner.sweep_plan import (
    Kind,
    SweepPlan,
    actions_per_update,
    plan_sweep,
    refreshes_in_steps,
    scores_old_policy,
    sweep_kinds,
)
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.parallel import distributed
from seeupo_jax.policy.architecture import Architecture, Routing
from seeupo_jax.policy.network import Network, join_params
from seeupo_jax.types import TrainState, Trajectory, TurnBatch

LearnerProgram = functools.partial[Any]  # jitted, with the parameters that no step changes


def _as_it_is(name: str, program: LearnerProgram) -> LearnerProgram:
    return program


@dataclass(frozen=True, eq=False)
class Learner:
    """The constant parts of all sweeps of a run, and their jitted programs.

    critic_optimizer, scorer_optimizer: optimizers of the value function and of the model that
      scores turns; None: the policy's.
    schedule: learning rates by iteration; None: those in the state.
    truncated: whether actions are drawn from a truncated softmax; see `SegmentBatch.of`.
    on_policy: whether every sweep's own policy sampled what it learns from. The old policy's pass
      is then left out where `scores_old_policy` says so, unless the policy has experts, whose loads
      that pass counts, or a teacher, whose log-probabilities are compared with that pass's.
    entropy: whether the first pass of a sweep also computes the entropy of every action token; it
      does so anyway where the algorithm reads it.
    ema: decay of the average of the parameters in the state; None: there is no average.
    reward_weights: weights of named rewards; any other reward weighs 1.
    roles: that rewards are compared within, as of `trained_roles`; empty: there is only one.
    frozen: parameters that no step changes: frozen groups, and with adapters all other parameters.
    teachers: whose log-probabilities enter advantages or the loss, by `teaching`.
    balance: losses of routers, and the step of selection biases, of a policy with experts.
    state_shardings: of the TrainState, and `replicated` of small arrays. Every program returns its
      donated arguments with the same shardings, so that none is compiled twice. None: one device.
    wrap_program: from the name of a program (`turn_step`, `refresh`, `score`, `value`,
      `score_in_full`, `score_teacher`, `scorer_step`, `average`, `move_reference`) and the program
      to the function that is called instead: instruments record or replace programs with it.
    """

    network: Network
    optimizer: optax.GradientTransformation
    algorithm: schema.Algorithm
    shapes: Shapes
    temperature: float
    seed: int = 0
    truncated: bool = False
    on_policy: bool = False
    entropy: bool = False
    critic_optimizer: optax.GradientTransformation | None = None
    scorer_optimizer: optax.GradientTransformation | None = None
    schedule: Schedule | None = None
    ema: float | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    frozen: Any = field(default_factory=dict)
    teachers: Sequence[TeacherModel] = ()
    teaching: Teacher = field(default_factory=Teacher)
    balance: ExpertBalance = NO_BALANCE
    state_shardings: TrainState | None = None
    replicated: jax.sharding.Sharding | None = None
    wrap_program: Callable[[str, LearnerProgram], LearnerProgram] = _as_it_is

    @functools.cached_property
    def turn_step(self) -> LearnerProgram:
        """`turn_step.turn_step` from the state on; see there."""
        shardings = self.state_shardings
        of_one = None if shardings is None else of_turn(shardings, (0,))
        config, numbers = self.loss_config.split()
        jitted = turn_step_program(
            self.network,
            self.optimizer,
            config,
            self.critic,
            HashableShardings.of(of_one),
            self.replicated,
            self.balance,
        )
        return self.wrap_program("turn_step", functools.partial(jitted, numbers, self.frozen))

    @functools.cached_property
    def refresh(self) -> LearnerProgram:
        """`turn_step.refresh` from the trained parameters on; see there."""
        config, numbers = self.loss_config.split()
        jitted = refresh_program(self.network, config, self.replicated)
        return self.wrap_program("refresh", functools.partial(jitted, numbers, self.frozen))

    @functools.cached_property
    def score(self) -> LearnerProgram:
        """`turn_step.score` from the trained parameters on, which may lie in the host's memory."""
        jitted = score_program(self.network, self.temperature, self.replicated)
        return self.wrap_program("score", functools.partial(jitted, self.frozen))

    @functools.cached_property
    def score_in_full(self) -> LearnerProgram:
        """`turn_step.score_in_full`, as `score` is `turn_step.score`."""
        jitted = score_program(
            self.network,
            self.temperature,
            self.replicated,
            full=True,
            entropy=self.finds_entropy,
            collision=self.finds_collision,
            record=self.algorithm.router_replay == "old",
        )
        return self.wrap_program("score_in_full", functools.partial(jitted, self.frozen))

    @property
    def score_old_policy(self) -> LearnerProgram:
        """The program that scores the old and the reference policy at the start of a sweep."""
        more = self.finds_entropy or self.finds_collision or self.routing is not None
        return self.score_in_full if more else self.score

    def scored(self, params: Any, batch: TurnBatch) -> TokenScores:
        """The result of `score_old_policy` for a batch, with its log-probabilities at least."""
        result = self.score_old_policy(params, batch)
        return result if isinstance(result, TokenScores) else TokenScores(result)

    @functools.cached_property
    def teacher_programs(self) -> tuple[LearnerProgram | None, ...]:
        """`turn_step.score` from the parameters of each teacher on, which may lie in the host's
        memory, or `turn_step.score_top`; None: of one that is asked."""
        programs: list[LearnerProgram | None] = []
        for teacher in self.teachers:
            if teacher.ask is not None:
                programs.append(None)
                continue
            network = self.network if teacher.network is None else teacher.network
            jitted = score_program(network, self.temperature, self.replicated)
            if self.top_k is not None:
                arch = self.network.arch
                jitted = top_program(network, self.temperature, self.top_k, arch, self.replicated)
            fixed = self.frozen if teacher.network is None else {}
            program = functools.partial(jitted, fixed)
            programs.append(self.wrap_program("score_teacher", program))
        return tuple(programs)

    @property
    def top_k(self) -> int | None:
        """Likeliest tokens of a teacher that the loss reads; None: it reads none."""
        return self.teaching.top_k if self.teachers else None

    @property
    def routing(self) -> Routing | None:
        """The layout of a record of the policy's experts; None: it has no experts."""
        return self.network.arch.routing

    @property
    def finds_entropy(self) -> bool:
        """Whether `score_old_policy` also finds the entropy of every action token."""
        return self.entropy or self.algorithm.estimator.reads_entropy

    @property
    def finds_collision(self) -> bool:
        """Whether it also finds the sum of squared probabilities at every action token."""
        return "collision_NL" in self.algorithm.estimator_entry.needs

    @functools.cached_property
    def value(self) -> LearnerProgram:
        """`turn_step.value` from the trained parameters on, with a critic or scorer; see there."""
        critic = self.scorer if self.critic is None else self.critic
        jitted = value_program(self.network, critic, self.replicated)
        return self.wrap_program("value", functools.partial(jitted, self.frozen))

    @functools.cached_property
    def scorer_step(self) -> LearnerProgram:
        """`turn_scorer.scorer_step` from the state on, which is donated; see there."""
        step = functools.partial(scorer_step, self.network, self.scorer, self.state_shardings)
        out = (self.state_shardings, self.replicated)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=out)
        return self.wrap_program("scorer_step", functools.partial(jitted, self.frozen))

    @functools.cached_property
    def average(self) -> LearnerProgram:
        """`state_layout.average` of the parameters and their average; nothing is donated."""
        out = None if self.state_shardings is None else self.state_shardings.ema
        jitted = jax.jit(functools.partial(average, decay=self.ema), out_shardings=out)
        return self.wrap_program("average", functools.partial(jitted))

    @functools.cached_property
    def move_reference(self) -> LearnerProgram:
        """`reference_policy.moved` from the parameters and the reference policy's on."""
        out = None if self.state_shardings is None else self.state_shardings.reference
        decayed = functools.partial(ema_update, decay=self.algorithm.reference.decay)
        jitted = jax.jit(decayed, out_shardings=out)
        return self.wrap_program("move_reference", functools.partial(jitted))

    @functools.cached_property
    def critic(self) -> Critic | None:
        """The value function; None: the algorithm has none."""
        optimizer = self.optimizer if self.critic_optimizer is None else self.critic_optimizer
        return make_critic(self.algorithm, self.network.arch.width, optimizer)

    @functools.cached_property
    def scorer(self) -> TurnScorer | None:
        """The model that scores turns; None: the estimator needs none."""
        optimizer = self.optimizer if self.scorer_optimizer is None else self.scorer_optimizer
        return make_scorer(self.algorithm, self.network.arch.width, optimizer, self.temperature)

    def at_iteration(self, state: TrainState, iteration: int) -> TrainState:
        """The state with the learning rates of an iteration (1, 2, ...)."""
        if self.schedule is None:
            return state
        return at_share(state, self.schedule.share(iteration), self.replicate)

    @property
    def adapters(self) -> int:
        """Adapters of turns; 1: all turns have the same."""
        return max(1, self.network.arch.turn_adapters)

    @property
    def adapters_per_update(self) -> int:
        """Adapters that the turns of an update have, at most."""
        turns, algorithm = self.shapes.turns, self.algorithm
        together = turns if algorithm.order == "parallel" else algorithm.span(turns)
        return max(1, min(self.adapters, together))

    def rows(self, trajectories: Sequence[Trajectory]) -> SegmentBatch:
        """The segments of those that it learns from."""
        return SegmentBatch.of(
            trajectories,
            grouped=self.algorithm.grouped,
            truncated=self.truncated,
            mask_truncated=self.algorithm.truncated == "mask",
            routing=self.routing,
            replays=self.algorithm.router_replay == "rollout",
            adapters=self.adapters,
        )

    def replicate(self, x_N: Any) -> jax.Array:
        """A small array, the same in all processes, on every device."""
        return distributed.to_global(np.asarray(x_N), self.replicated)

    @functools.cached_property
    def loss_config(self) -> LossConfig:
        """The options of the turn step; it is compiled for what is left of them without numbers."""
        algorithm = self.algorithm
        return LossConfig(
            algorithm.loss,
            find_entry("objective", algorithm.objective),
            self.temperature,
            # With several steps a turn, the policy before the first is scored and kept instead.
            old_is_current=algorithm.old_policy == "turn" and self.fused,
            actions=actions_per_update(algorithm, self.shapes.turns),
            finds_entropy=self.entropy and not self.scores_old_policy,
            teacher_coef=None if self.top_k is None else self.teaching.coef,
        )

    @property
    def per_token(self) -> dict[str, tuple[int, ...]]:
        """Fields of action tokens that the turn step reads, names of `TurnBatch` without axes, and
        the shape of a token's value in each."""
        names = ["old_logp", "ref_logp", "advantage"]
        if not self.scores_old_policy:
            names = ["ref_logp", "advantage"] if self.algorithm.reads_reference else ["advantage"]
        elif self.algorithm.merges:
            names.append("logp")
        if self.algorithm.importance is not None:
            names.append("importance")
        if self.algorithm.order == "parallel":
            names.append("action")
        if self.critic is not None:
            names += ["value", "returns"]
        if self.algorithm.covariance.kind == "kl":
            names.append("drift_sign")
        if self.algorithm.adapts_clip:
            names.append("clip_scale")
        fields: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        if self.top_k is not None:
            fields |= {"teacher_top": (self.top_k,), "teacher_top_logp": (self.top_k + 1,)}
        return fields

    @functools.cached_property
    def scores_old_policy(self) -> bool:
        """Whether the old policy is scored before a sweep; False: its one step does that."""
        earlier = scores_old_policy(self.algorithm, self.shapes.turns)
        counted = self.routing is not None or bool(self.teachers)
        return earlier or counted or not self.on_policy

    @property
    def fused(self) -> bool:
        """Whether a turn's step also refreshes the weights of the turn before it."""
        # Without the old policy's pass there is a single step, and no turn before it.
        return self.scores_old_policy and refreshes_in_steps(self.algorithm)

    def plan(self, turns: int, iteration: int) -> SweepPlan:
        """The passes of an iteration (1, 2, ...) over trajectories of at most so many turns."""
        return plan_sweep(
            self.algorithm, turns, seed=self.seed, iteration=iteration, **self._passes
        )

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of passes that its sweeps may take."""
        return sweep_kinds(self.algorithm, **self._passes)

    @property
    def _passes(self) -> dict[str, Any]:
        """Which passes there are beside those of the algorithm, as `plan_sweep` takes them."""
        return {
            "ema": self.ema is not None,
            "score": self.scores_old_policy,
            "teachers": len(self.teachers),
        }


# Equal learners have one program of each kind, so that what one has compiled serves the next: the
# choices of the algorithm that its sweeps make on the host do not matter to them, nor do numbers.
_shared = functools.lru_cache(maxsize=16)


@_shared
def turn_step_program(
    network: Network,
    optimizer: optax.GradientTransformation,
    config: LossConfig,
    critic: Critic | None,
    shardings: HashableShardings,
    replicated: jax.sharding.Sharding | None,
    balance: ExpertBalance,
) -> Callable[..., Any]:
    """`turn_step.turn_step` from the frozen parameters on, behind the numbers of the loss."""

    def turn(
        numbers: Numbers, frozen: Any, state: TrainState, *rest: Any
    ) -> turn_step.TurnStepResult:
        loss_config = config.with_numbers(numbers)
        options = {"critic": critic, "balance": balance}
        return turn_step.turn_step(
            network, optimizer, loss_config, shardings.tree, frozen, state, *rest, **options
        )

    out = turn_step.TurnStepResult(shardings.tree, *(replicated,) * 4)
    return jax.jit(turn, donate_argnums=(2, 5), out_shardings=out)


@_shared
def refresh_program(
    network: Network, config: LossConfig, replicated: jax.sharding.Sharding | None
) -> Callable[..., Any]:
    """`turn_step.refresh` from the frozen parameters on, behind the numbers of the loss."""

    def refresh(
        numbers: Numbers, frozen: Any, params: Any, batch: TurnBatch, cumulative_ratio_N: jax.Array
    ) -> jax.Array:
        merged, loss_config = join_params(params, frozen), config.with_numbers(numbers)
        return turn_step.refresh(network, loss_config, merged, batch, cumulative_ratio_N)

    return jax.jit(refresh, donate_argnums=4, out_shardings=replicated)


@_shared
def value_program(
    network: Network, critic: Critic | TurnScorer, replicated: jax.sharding.Sharding | None
) -> Callable[..., Any]:
    """`turn_step.value` from the frozen parameters on."""

    def value(frozen: Any, params: Any, critic_params: Any, batch: TurnBatch) -> jax.Array:
        return turn_step.value(network, critic, join_params(params, frozen), critic_params, batch)

    return jax.jit(value, out_shardings=replicated)


@_shared
def score_program(
    network: Network,
    temperature: float,
    replicated: jax.sharding.Sharding | None,
    full: bool = False,
    **statistics: bool,
) -> Callable[..., Any]:
    """One program for all learners of a network: few of the algorithm's choices matter to it.

    Args:
      full: whether it computes more than log-probabilities: the `statistics` of `score_in_full`.
    """
    run = functools.partial(turn_step.score_in_full, **statistics) if full else turn_step.score

    def score(frozen: Any, params: Any, batch: TurnBatch) -> Any:
        merged = join_params(on_device(params), frozen)
        return run(network, merged, batch, temperature=temperature)

    return jax.jit(score, out_shardings=replicated)


@_shared
def top_program(
    network: Network,
    temperature: float,
    count: int,
    among: Architecture,
    replicated: jax.sharding.Sharding | None,
) -> Callable[..., Any]:
    """`turn_step.score_top` from the frozen parameters on."""
    options = {"temperature": temperature, "count": count, "among": among}

    def score_top(frozen: Any, params: Any, batch: TurnBatch) -> turn_step.TopScores:
        merged = join_params(on_device(params), frozen)
        return turn_step.score_top(network, merged, batch, **options)

    return jax.jit(score_top, out_shardings=replicated)
