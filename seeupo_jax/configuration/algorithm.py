"""The options of an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from seeupo_jax.algorithms.covariance import ClipCovariance, KlCovariance, NoCovariance
from seeupo_jax.algorithms.critics import HeadCritic, ModelCritic, NoCritic
from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.algorithms.forks import CandidateForks, EntropyForks, NoForks, TreeForks
from seeupo_jax.algorithms.importance_options import Importance
from seeupo_jax.algorithms.kl_control import KlControl, ReferenceUpdates
from seeupo_jax.algorithms.overlong import Overlong
from seeupo_jax.configuration.entry_points import (
    entries_with,
    entry_names,
    entry_point,
    find_entry,
)
from seeupo_jax.configuration.fields import build_sections
from seeupo_jax.options import above, at_least, choice, kinds, optional, section, within


def _options(advantage: str) -> type[Options]:
    return find_entry("advantage", advantage).options


@dataclass(frozen=True)
class ObjectiveOptions:
    """Options of the objective of an action."""

    objective: str = entry_point("objective", "clipped")
    """The function that is maximised at each action or token."""
    ratio: str = choice("geometric", "product", "token")
    """Level of the ratio: exp of the mean or of the sum over an action's tokens; one per token."""
    loss_aggregation: str = choice("action", "token", "constant")
    """Mean over an action's tokens, then over trajectories; over all tokens; or the sum over tokens
    divided by a constant."""
    weight_clip: float | None = above(0, 0.2, most=1000)
    """Factors of M and their product stay in [1 - it, 1 + it]; none: Eq. 8, their product at
    most e^30."""
    clip_low: float | None = within(0, 1000, 0.2)
    """The ratio is clipped below 1 - it; with objective=gmpo the log-ratio of a token below -it,
    with dppo_tv and dppo_kl the divergence of a token above it; none: not."""
    clip_high: float | None = within(0, 1000, 0.2)
    """The ratio is clipped above 1 + it; with objective=gmpo the log-ratio of a token above it,
    with dppo_tv and dppo_kl its divergence; none: not."""
    clip_dual: float | None = above(1, None, most=1000)
    """With objective=clipped, bounds the loss at it times a negative M; with dppo_tv and dppo_kl
    the ratio itself; none: no bound."""
    tau_pos: float = above(0, 1.0, most=1000)
    """With objective=sapo, how fast the gradient falls off the ratio 1 where M is above 0."""
    tau_neg: float = above(0, 1.05, most=1000)
    """The same where M is not above 0."""


@dataclass(frozen=True)
class LossOptions(ObjectiveOptions):
    """Options of the loss of a step, whose program depends on nothing else of an algorithm."""

    kl_coef: float = within(0, 100, 0.002)
    """Coefficient of the KL penalty to the reference policy; 0: none."""
    kl_estimate: str = choice("k3", "k3+")
    """Estimate of the KL penalty in the loss: k3, or its value with the gradient of k2, which is
    not bounded."""
    kl_in: str = choice("loss", "reward")
    """Whether the KL penalty is a term of the loss or taken from the reward."""
    entropy_coef: float = within(0, 100, 0.0)
    """Coefficient of the entropy bonus, a mean over an action's tokens; 0: none."""
    covariance: NoCovariance | ClipCovariance | KlCovariance = kinds(
        NoCovariance, ClipCovariance, KlCovariance
    )
    """Limit on tokens whose log-probability and advantage vary most together: none, no gradient
    (clip), or a penalty on their change since they were sampled (kl)."""
    router_replay: str = choice("none", "old", "rollout")
    """Which pass chooses the experts of each token for all of a sweep's: none, each its own; old,
    the one that finds the old policy's log-probabilities; rollout, the sampler's."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of the order and the credit of updates."""

    order: str = choice("reverse", "forward", "random", "custom", "parallel")
    """Order of the turns' updates; parallel: all in one step, without weights."""
    turns_per_update: int | None = at_least(1, 1)
    """Consecutive turns that are one action; none: all."""
    cumulative_ratio: bool = True
    """Whether M has the ratios of turns already updated (Eq. 8); False: M stays the advantage."""
    advantage: str = entry_point("advantage", "grae")
    """Estimator of the advantage of a trajectory, a turn or a token."""
    estimator: Any = section("advantage", lambda: entry_names("advantage"), _options)
    """Options of the estimator that `advantage` names."""
    scale: str = choice("batch", "none", "group")
    """The standard deviation that advantages are divided by."""
    advantage_clip: float | None = above(0, 3.0)
    """Bound on advantages that are standardised over the batch; none: no bound."""
    old_policy: str = choice("iteration", "turn")
    """Denominator of ratios: the policy that sampled, or the one before the turn's step."""
    normalize_by: str = choice("all", "active", alias="pool_mean")
    """A step's sum is divided by all trajectories, or by those that have the turn. Another name:
    pool_mean."""
    critic: NoCritic | HeadCritic | ModelCritic = kinds(NoCritic, HeadCritic, ModelCritic)
    """The value function that gae and spa read: none, a head on the policy, or a model. The
    progress estimator of spa is of the same kind."""
    inner_epochs: int = within(1, 1000, 1)
    """Passes over each turn's trajectories."""
    mask_above: float | None = within(0, 1, None)
    """Action tokens that the policy finds likelier than this are not learned from; none: all
    are."""


@dataclass(frozen=True)
class Algorithm(LossOptions, SweepOptions):
    """Options of an update; defaults as SeeUPO's authors run it, but old_policy (theirs: turn)."""

    custom_order: tuple[int, ...] = ()
    """For order=custom: turns, first to be updated first."""
    minibatches_per_turn: int = at_least(1, 1)
    """Optimizer steps per pass, each on a part of the trajectories."""
    refresh: str = choice("auto", "fused", "separate")
    """Whether the next turn's ratio is computed in the step's program or in one of its own."""
    dynamic_sampling: int = within(0, 127, 0)
    """Rounds of new tasks that may replace zero-advantage groups; 0 where groups of equal rewards
    are none, as with scale=batch and most estimators of turns."""
    moments: str = choice("shared", "turn")
    """The optimizer's state: one for all turns, or one for each turn's steps (an ablation)."""
    importance: Importance | None = optional()
    """Importance weights: the probability of tokens under the policy before the sweep divided by
    the sampler's; none: no weights."""
    kl_control: KlControl | None = optional()
    """Adaptation of kl_coef to a target; none: kl_coef stays."""
    reference: ReferenceUpdates | None = optional()
    """Updates of the reference policy by the policy; none: it stays."""
    truncated: str = choice("keep", "mask")
    """Episodes that max_turns or the context's end cut; mask: they count in the statistics of their
    group, but in no update."""
    overlong: Overlong | None = optional()
    """Penalty on the reward of overlong episodes; none: no penalty."""
    forks: NoForks | TreeForks | EntropyForks | CandidateForks = kinds(
        NoForks, TreeForks, EntropyForks, CandidateForks
    )
    """Branches of conversations at the ends of turns: none; fixed numbers (tree); where the policy
    is less certain than in the first turn (entropy); or several candidate actions, from which a
    judge's scores select one (candidates)."""

    def __post_init__(self) -> None:
        build_sections(self, "config.algorithm")

    @property
    def loss(self) -> LossOptions:
        """The loss options alone, on which the turn step's program depends."""
        names = (field.name for field in fields(LossOptions))
        return LossOptions(**{name: vars(self)[name] for name in names})

    def span(self, max_turns: int) -> int:
        """The maximum number of turns of one action."""
        return max_turns if self.turns_per_update is None else self.turns_per_update

    @property
    def estimator_entry(self) -> Any:
        """The entry that `advantage` names."""
        return find_entry("advantage", self.advantage)

    @property
    def objective_entry(self) -> Any:
        """The entry that `objective` names."""
        return find_entry("objective", self.objective)

    def entries(self, field: str, fits: Callable[[Any], bool]) -> list[str]:
        """`field=NAME` of each entry of `advantage` or `objective` that fits, or of its own alone
        if that does."""
        own = vars(self)[field]
        return [f"{field}={own}"] if fits(find_entry(field, own)) else entries_with(field, fits)

    @property
    def reads_reference(self) -> bool:
        """Whether a sweep scores actions by the reference policy."""
        return bool(self.kl_coef) or "ref_logp_NL" in self.estimator_entry.needs

    @property
    def grouped(self) -> bool:
        """Whether advantages are relative to the group."""
        return "group_N" in self.estimator_entry.needs and not self.estimator.over_batch

    @property
    def scorer(self) -> str | None:
        """Kind of the model that is trained to score turns; None: the estimator needs none."""
        needs = self.estimator_entry.needs
        if "implicit_NK" in needs:
            return "policy"
        critic = "head" if self.critic.kind == "none" else self.critic.kind
        return critic if "progress_NL" in needs else None

    @property
    def scorer_steps(self) -> int:
        """Optimizer steps of that model in an iteration; 0 without one."""
        return 0 if self.scorer is None else self.estimator.scorer_epochs

    @property
    def of_group_alone(self) -> bool:
        """Whether advantages depend on a group's rewards only, but for penalties and the scale."""
        own = "collision_NL" not in self.estimator_entry.needs
        return self.grouped and own and self.scorer is None and not self.estimator.scores_answers

    @property
    def zero_if_equal(self) -> bool:
        """Whether a group of equal rewards has advantages of 0, but for penalties.

        With scale=batch most estimators of turns subtract a mean over all turns, which is not 0
        where episodes have different numbers of them.
        """
        entry = self.estimator_entry
        keeps_zero = self.scale != "batch" or entry.keeps_zero or self.estimator.compares_siblings
        return self.of_group_alone and keeps_zero

    @property
    def adapts_clip(self) -> bool:
        """Whether the estimator scales a clip range that the objective reads."""
        bounds = ("clip_low", "clip_high")
        read = self.objective_entry.bounds
        bounded = any(name in read and vars(self)[name] is not None for name in bounds)
        return bounded and self.estimator_entry.adapts_clip

    @property
    def by_name(self) -> bool:
        """Whether each named reward is read by itself, instead of their weighted sum."""
        needs = self.estimator_entry.needs
        return bool({"rewards_NQ", "rewards_NKQ"} & {*needs})

    @property
    def by_turn(self) -> bool:
        """Whether it compares rewards of turns: trajectories of equal total may differ."""
        needs = self.estimator_entry.needs
        reads = bool({"reward_NK", "gain_NK", "rewards_NKQ"} & {*needs})
        return reads and (self.estimator.compares_siblings or not self.reads_forks)

    @property
    def keeps_statistics(self) -> bool:
        """Whether it reads statistics of the run's rewards so far."""
        return "running_mean_Q" in self.estimator_entry.needs

    @property
    def keeps_baselines(self) -> bool:
        """Whether it reads moving averages of the run's rewards by role."""
        return "baseline_N" in self.estimator_entry.needs

    @property
    def reads_forks(self) -> bool:
        """Whether advantages are computed on the tree of branching trajectories."""
        return "node_NK" in self.estimator_entry.needs

    @property
    def merges(self) -> bool:
        """Whether an action may have several turns, which may lie in several segments."""
        return self.turns_per_update != 1

    @property
    def weighs(self) -> bool:
        """Whether a turn's update weighs those of later steps."""
        several = self.order != "parallel" and self.turns_per_update is not None
        return several and self.cumulative_ratio


def fused_refresh_applies(algorithm: Algorithm) -> bool:
    """Whether turn t's step can refresh turn t+1's weight too (one step per turn, reverse)."""
    single = algorithm.inner_epochs == 1 and algorithm.minibatches_per_turn == 1
    return algorithm.order == "reverse" and algorithm.weighs and single
