"""The options of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from seeupo_jax.algorithms.estimator_options import Options
from seeupo_jax.configuration.entry_points import entry_names, entry_point, find_entry
from seeupo_jax.configuration.fields import build_sections
from seeupo_jax.options import above, at_least, checked, choice, section, within


def _options(advantage: str) -> type[Options]:
    return find_entry("advantage", advantage).options


@dataclass(frozen=True)
class ObjectiveOptions:
    """Options of the objective of an action."""

    objective: str = entry_point("objective", "clipped")
    """What is maximised at each action or token."""
    ratio: str = choice("geometric", "product", "token")
    """Level of the ratio: exp of the mean or of the sum over an action's tokens; one per token."""
    loss_mean: str = choice("action", "token", "constant")
    """Mean over an action's tokens, then over trajectories; over all tokens; or the sum over tokens
    divided by a constant."""
    weight_clip: float | None = above(0, 0.2, most=1000)
    """Factors of M and their product stay in [1 - it, 1 + it]; none: Eq. 8, their product at
    most e^30."""
    clip_low: float | None = within(0, 1000, 0.2)
    """The ratio is clipped below 1 - it; none: not."""
    clip_high: float | None = within(0, 1000, 0.2)
    """The ratio is clipped above 1 + it; none: not."""
    clip_dual: float | None = above(1, None, most=1000)
    """With objective=clipped, bounds the loss at it times a negative M; none: no bound."""


@dataclass(frozen=True)
class LossOptions(ObjectiveOptions):
    """Options of the loss of a step, whose program depends on nothing else of an algorithm."""

    kl_coef: float = within(0, 100, 0.002)
    """Coefficient of the KL penalty to the reference policy; 0: none."""
    kl_in: str = choice("loss", "reward")
    """Whether the KL penalty is a term of the loss or taken from the reward."""
    entropy_coef: float = within(0, 100, 0.0)
    """Coefficient of the entropy bonus, a mean over an action's tokens; 0: none."""
    covariance: str = choice("none", "clip", "kl")
    """At tokens whose log-probability and advantage vary most together: no gradient (clip), or a
    penalty on their change since they were sampled (kl)."""
    covariance_kl: float = above(0, 1.0, most=1000)
    """covariance=kl: coefficient of the penalty."""
    tis_clip: float | None = above(0, None, most=1000)
    """Weigh surrogates by trainer / sampler probability, at most this; none: no weights."""
    tis_level: str = choice("sequence", "geometric")
    """With a ratio per action, the probability that tis_clip reads: the action's, or its geometric
    mean per token. With ratio=token each token has its own weight."""
    router_replay: str = choice("none", "old", "rollout")
    """Which pass chooses the experts of each token for all of a sweep's: none, each its own; old,
    the one that finds the old policy's log-probabilities; rollout, the sampler's."""

    @property
    def importance_level(self) -> str:
        """Level of the importance weights, as that of a ratio."""
        if self.ratio == "token":
            return "token"
        return {"sequence": "product", "geometric": "geometric"}[self.tis_level]


@dataclass(frozen=True)
class SweepOptions:
    """Options of the order and the credit of updates."""

    order: str = choice("reverse", "forward", "random", "custom", "parallel")
    """Order of the turns' updates; parallel: all in one step, without weights."""
    turns_per_update: int | None = at_least(1, 1)
    """Consecutive turns that are one action; none: all."""
    weight: str = choice("on", "off")
    """Whether M carries the ratios of turns already updated (Eq. 8); off: M stays the advantage."""
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
    pool_mean: str = choice("all", "active")
    """A step's sum is divided by all trajectories, or by those that have the turn."""
    critic: str = choice("none", "head", "model")
    """The value function, which advantage=gae and spa read: a head on the policy, or a model. The
    progress estimator of spa is of the same kind."""
    value_coef: float = above(0, 0.5, most=1000)
    """Coefficient of the value function's loss."""
    value_clip: float | None = above(0, 0.2)
    """Change of a value per update, as in PPO; none: not clipped."""
    critic_learning_rate: float | None = above(0, None, most=100)
    """Learning rate of the value function; none: the policy's."""
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
    kl_target: float | None = above(0, None, most=10)
    """KL to the reference policy, nats per token, that kl_coef is adapted to between iterations;
    none: kl_coef stays."""
    kl_horizon: float = above(0, 10000.0)
    """kl_target: trajectories over which kl_coef changes by at most a fifth."""
    ref_every: int | None = at_least(1, None)
    """Iterations after each of which the reference policy moves to the policy; none: it stays."""
    ref_decay: float = within(0, 1, 0.0)
    """ref_every: what the reference policy keeps of itself, as a moving average; 0: nothing."""
    truncated: str = choice("keep", "mask")
    """Episodes that max_turns or the context's end cut; mask: in the statistics of their group, and
    in no update."""
    overlong_length: int | None = at_least(1, None)
    """Sampled tokens of an episode from which on the whole overlong_penalty is taken from its
    reward; none: nothing is."""
    overlong_buffer: int | None = at_least(1, None)
    """Tokens below overlong_length over which the penalty grows; none: a fifth of it."""
    overlong_penalty: float = above(0, 1.0, most=1e6)
    """The largest penalty."""
    covariance_share: float = above(0, 2e-4, most=1)
    """Share of a step's action tokens that covariance limits, rounded down, but at least one."""
    covariance_low: float = within(-1e6, 1e6, 1.0)
    """covariance=clip: tokens whose covariance is above it."""
    covariance_high: float = within(-1e6, 1e6, 5.0)
    """covariance=clip: and below it."""
    forks: str = choice("none", "tree", "entropy", "candidates")
    """Whether conversations branch at the ends of turns; tree: by fork_factors; entropy: where the
    policy is less certain than in the first turn; candidates: one of several goes on, by a
    judge."""
    fork_factors: tuple[int, ...] = checked(
        (6, 6, 6),
        "at least one number, each from 1 to 1000",
        lambda value: len(value) > 0 and all(1 <= factor <= 1000 for factor in value),
    )
    """forks=tree: children of the root and of each level's nodes, at most; scaled to
    rollout.group_size."""
    fork_every: int = at_least(1, 1)
    """forks=tree: turns from one level of nodes to the next."""
    fork_tokens: int | None = at_least(1, None)
    """Tokens that a group may sample at most: branches for which it leaves no room are not begun;
    none: no bound."""
    fork_roots: int | None = at_least(1, None)
    """forks=entropy: episodes that a group begins with; none: half of rollout.group_size."""
    fork_probability: float = within(0, 1, 0.5)
    """forks=entropy: probability of a branch after a turn that is as certain as the first one."""
    fork_entropy_coef: float = within(0, 1000, 0.2)
    """forks=entropy: how much that rises with a turn's entropy over the first turn's."""
    fork_entropy_tokens: int = within(1, 10_000, 20)
    """forks=entropy: first tokens of a turn whose entropies, in units of log V, are added up."""
    fork_candidates: int = within(2, 1000, 5)
    """forks=candidates: actions sampled for a turn, at most; scaled to rollout.group_size."""
    fork_temperature: float = above(0, 0.7, most=1000)
    """forks=candidates: of the softmax over their advantages that draws the one that goes on."""

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
    def grouped(self) -> bool:
        """Whether advantages are relative to the group."""
        estimator = find_entry("advantage", self.advantage)
        return "group_N" in estimator.needs and not self.estimator.over_batch

    @property
    def scorer(self) -> str | None:
        """Kind of the model that is trained to score turns; None: the estimator needs none."""
        needs = find_entry("advantage", self.advantage).needs
        if "implicit_NK" in needs:
            return "policy"
        critic = "head" if self.critic == "none" else self.critic
        return critic if "progress_NL" in needs else None

    @property
    def scorer_steps(self) -> int:
        """Optimizer steps of that model in an iteration; 0 without one."""
        return 0 if self.scorer is None else self.estimator.scorer_epochs

    @property
    def of_group_alone(self) -> bool:
        """Whether advantages are of a group's rewards alone, but for penalties and the scale."""
        return self.grouped and self.scorer is None and not self.estimator.scores_answers

    @property
    def zero_if_equal(self) -> bool:
        """Whether a group of equal rewards has advantages of 0, but for penalties.

        With scale=batch most estimators of turns subtract a mean over all turns, which is not 0
        where episodes have different numbers of them.
        """
        entry = find_entry("advantage", self.advantage)
        keeps_zero = self.scale != "batch" or entry.keeps_zero or self.estimator.compares_siblings
        return self.of_group_alone and keeps_zero

    @property
    def adapts_clip(self) -> bool:
        """Whether the estimator scales a clip range that the objective reads."""
        bounds = ("clip_low", "clip_high")
        read = find_entry("objective", self.objective).bounds
        bounded = any(name in read and vars(self)[name] is not None for name in bounds)
        return bounded and find_entry("advantage", self.advantage).adapts_clip

    @property
    def by_name(self) -> bool:
        """Whether each named reward is read by itself, instead of their weighted sum."""
        needs = find_entry("advantage", self.advantage).needs
        return bool({"rewards_NQ", "rewards_NKQ"} & {*needs})

    @property
    def by_turn(self) -> bool:
        """Whether it compares what turns were paid: of equal sums, advantages may differ."""
        needs = find_entry("advantage", self.advantage).needs
        reads = bool({"reward_NK", "gain_NK", "rewards_NKQ"} & {*needs})
        return reads and (self.estimator.compares_siblings or not self.reads_forks)

    @property
    def keeps_statistics(self) -> bool:
        """Whether it reads statistics of the run's rewards so far."""
        return "running_mean_Q" in find_entry("advantage", self.advantage).needs

    @property
    def reads_forks(self) -> bool:
        """Whether advantages are of the tree that trajectories make."""
        return "node_NK" in find_entry("advantage", self.advantage).needs

    @property
    def merges(self) -> bool:
        """Whether an action may have several turns, which may lie in several segments."""
        return self.turns_per_update != 1

    @property
    def weighs(self) -> bool:
        """Whether a turn's update weighs those of later steps."""
        several = self.order != "parallel" and self.turns_per_update is not None
        return several and self.weight == "on"


def fused_refresh_applies(algorithm: Algorithm) -> bool:
    """Whether turn t's step can refresh turn t+1's weight too (one step per turn, reverse)."""
    single = algorithm.inner_epochs == 1 and algorithm.minibatches_per_turn == 1
    return algorithm.order == "reverse" and algorithm.weighs and single
