"""Options of how an estimator's inputs are made, and those that several estimators share."""

from __future__ import annotations

from dataclasses import dataclass

from seeupo_jax.options import Group, Setting, above, checked, choice, refused, within


@dataclass(frozen=True)
class Options(Group):
    """Options of an estimator, as `config.algorithm.estimator`; each one's own extend this class.

    A field is a keyword of the estimator's function, unless it belongs to one of its inputs.
    """

    @property
    def over_batch(self) -> bool:
        """Whether rewards are compared with those of the batch instead of the group."""
        return False

    @property
    def compares_siblings(self) -> bool:
        """Whether a turn is compared with those that begin at the same node."""
        return False

    @property
    def scores_answers(self) -> bool:
        """Whether the tasks' reference answers are scored at every turn."""
        return False

    @property
    def reads_entropy(self) -> bool:
        """Whether advantages depend on the entropy of sampled tokens."""
        return False


@dataclass(frozen=True)
class TurnDiscount(Options):
    """The discount of rewards to go."""

    discount: float = within(0, 1, 1.0)
    """Discount per turn."""


@dataclass(frozen=True)
class TokenDiscount(Options):
    """The discount of rewards to go."""

    discount: float = within(0, 1, 1.0)
    """Discount per token."""


@dataclass(frozen=True)
class Baseline(Options):
    """The baseline of rewards."""

    baseline: str = choice("mean", "leave_one_out", "batch")
    """The mean that is subtracted from a reward: of its group, the group's others or the batch."""

    @property
    def over_batch(self) -> bool:
        return self.baseline == "batch"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.over_batch and setting.algorithm.scale == "group":
            raise refused(
                "estimator.baseline",
                "'batch' with scale=group",
                "mean or leave_one_out with scale=group of"
                f" advantage={setting.algorithm.advantage}",
            )


@dataclass(frozen=True)
class StateOptions(Options):
    """Options of `state_NK`."""

    anchor: str = choice("state", "turn", "task")
    """A turn is compared with those of its task from the same state, with the same index, or with
    all."""


@dataclass(frozen=True)
class GainOptions(Options):
    """Options of `gain_NK`."""

    gain: str = choice("reference", "turn_reward")
    """The gain of a turn: in the probability of the task's reference answer, or its reward."""
    gain_template: str = checked(
        "{answer}", "a text with {answer} once", lambda text: text.count("{answer}") == 1
    )
    """gain=reference: closing message of the assistant that contains the reference answer, at
    {answer}."""

    @property
    def scores_answers(self) -> bool:
        return self.gain == "reference"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.gain_template != GainOptions.gain_template and not self.scores_answers:
            raise refused(
                "estimator.gain_template",
                f"{self.gain_template!r} with gain={self.gain}, which does not read it",
                f"{GainOptions.gain_template}, unless gain=reference",
            )


@dataclass(frozen=True)
class BaselineOptions(Options):
    """Options of `baseline_N`."""

    decay: float = within(0, 1, 0.95)
    """Weight of the rewards before in a role's baseline, each time that one is added."""


@dataclass(frozen=True)
class MetricOptions(Options):
    """Options of `metric_N`."""

    metric: str = choice("turns", "tokens", "entropy")
    """The quantity of a trajectory: turns, sampled tokens, or their mean entropy."""

    @property
    def reads_entropy(self) -> bool:
        return self.metric == "entropy"


@dataclass(frozen=True)
class ScorerOptions(Options):
    """Options of the model that scores turns, of `progress_NL` and of `implicit_NK`."""

    scorer_rate: float = above(0, 1.0, most=1000)
    """Learning rate of the model that scores turns, as a multiple of the policy's."""
    scorer_epochs: int = within(1, 1000, 1)
    """Optimizer steps of that model in an iteration."""


@dataclass(frozen=True)
class ImplicitOptions(ScorerOptions):
    """Options of `implicit_NK`."""

    implicit_coef: float = above(0, 0.05, most=1000)
    """A turn's implicit reward is this times log(scorer / old policy) of its tokens."""
    success_above: float = within(-1e6, 1e6, 0.0)
    """Trajectories of a larger reward succeeded; each is paired with its group's others."""
    pair_score: str = choice("mean", "sum")
    """The score of a trajectory in a pair: the mean or the sum of its implicit rewards."""


# Input of an estimator -> the options of how it is made.
INPUT_OPTIONS: dict[str, type[Options]] = {
    "state_NK": StateOptions,
    "gain_NK": GainOptions,
    "metric_N": MetricOptions,
    "baseline_N": BaselineOptions,
    "implicit_NK": ImplicitOptions,
    "progress_NL": ScorerOptions,
}
