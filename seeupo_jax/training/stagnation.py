"""Whether a run still learns: a sentence where it does not, and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.errors import NotLearning
from seeupo_jax.learner.credit.advantages import check_rewards
from seeupo_jax.metrics.flat_outcomes import WHERE_TO_LOOK, flat_outcome
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import most_frequent_failure
from seeupo_jax.types import learnable

FLAT = 10  # iterations after which a success or a reward that never moved is warned of


def check_groups(iteration: int, collected: Collected, *, grouped: bool = True) -> None:
    """NotLearning where no trajectory of an iteration counts; `grouped`: as for `learnable`."""
    if not learnable(collected.trajectories, grouped=grouped).any():
        why = ", since rewards are compared within groups only" if grouped else ""
        raise NotLearning(
            f"iteration {iteration} has nothing to learn from{why}:"
            f" {str(most_frequent_failure(collected)).rstrip('.')}."
        )


def check_reward_values(iteration: int, collected: Collected, algorithm: Algorithm) -> None:
    """NotLearning where a reward is not one that the algorithm's estimator is for."""
    try:
        check_rewards(algorithm, collected.trajectories)
    except ValueError as error:
        raise NotLearning(f"iteration {iteration}: {error}") from error


class Stagnation:
    """Counts iterations in a row whose rewards moved no parameter, and watches success.

    An iteration in which every episode succeeded is not counted: it left nothing to learn. Of
    success that is 0 in every iteration, or a reward that never moves, a sentence says so after
    `FLAT` iterations and at the end of the run.

    Args:
      limit: so many end the run; None: any number may pass.
      warn: takes a sentence for each of them.
      lines: gives the metrics of all iterations so far, those of earlier processes too.

    Attributes:
      idle: such iterations in a row so far.
    """

    def __init__(
        self,
        limit: int | None,
        *,
        warn: Callable[[str], None],
        lines: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ):
        self._limit, self._warn, self._lines, self.idle = limit, warn, lines, 0

    def check(self, iteration: int, collected: Collected, metrics: Mapping[str, float]) -> None:
        """Takes an iteration that is over, with the metrics of its sweep.

        Raises:
          NotLearning: the limit is reached.
        """
        if iteration == FLAT:
            self.check_outcome()
        reason = idle_reason(metrics)
        if reason is None:
            self.idle = 0
            return
        scores = [t.info.get("score", 0.0) for t in collected.trajectories if t.played]
        if all(score >= 1 for score in scores):
            return
        self.idle += 1
        sentence = (
            f"iteration {iteration} learned nothing from its rewards: {reason}. Such iterations in"
            f" a row: {self.idle}; config.stop_after_idle="
        )
        if self._limit is None:
            return self._warn(f"{sentence}none lets any number pass.")
        sentence += f"{self._limit} ends the run at {self._limit}"
        if self.idle < self._limit:
            return self._warn(f"{sentence}.")
        raise NotLearning(f"{sentence}; none lets any number pass. {WHERE_TO_LOOK}.")

    def check_outcome(self) -> None:
        """Warns of success that was 0, or a reward that was the same, in every iteration."""
        flat = flat_outcome(self._lines())
        if flat is not None:
            self._warn(f"warning: {flat}")


def idle_reason(metrics: Mapping[str, float]) -> str | None:
    """Why no reward moved a parameter in a sweep; None where one did."""
    if not metrics["sweep/turns"]:
        return _why_no_step(metrics)
    steps, skipped = int(metrics["sweep/steps"]), int(metrics["sweep/updates_skipped"])
    if steps == skipped:
        return f"all {steps} optimizer steps were skipped, since their gradients were not finite"
    if not metrics["sweep/weight_max"] > 0:
        return "every advantage was 0, as where all rewards of a group are equal"
    if not metrics["sweep/updates"]:
        return f"the gradient was 0 in all {steps - skipped} optimizer steps"
    return None


def _why_no_step(metrics: Mapping[str, float]) -> str:
    if metrics.get("sweep/masked_trajectories"):
        return "every episode was cut, of which algorithm.truncated=mask makes no update"
    if metrics.get("sweep/masked_fraction") == 1:
        return "every sampled token was likelier than algorithm.mask_above"
    if metrics.get("sweep/importance_rejected") == 1:
        return "every sampled token was rejected by algorithm.importance"
    if metrics.get("sweep/forced_fraction") == 1:
        return "every sampled token was forced: its log-probability is 0"
    return "no turn was sampled"
