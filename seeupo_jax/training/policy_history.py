"""Which policies a run has had, to tell whether trajectories were sampled by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from seeupo_jax.rollout.asynchronous.work import versions_of
from seeupo_jax.types import Trajectory


class Verdict(Enum):
    """Whether what some policies have sampled may be trained on; the value ends a sentence."""

    USABLE = "are used"
    COMING = "are kept for a policy that is still to come"
    OTHER = (
        "were sampled by other parameters than this run has had, as after a change of the learning"
        " rate, the recipe or the optimizer"
    )
    STALE = "were sampled by a policy of more sweeps before than rollout.max_lag allows"


class PolicyHistory:
    """The fingerprints of a run's policies by version, those that samples may still be of.

    Args:
      max_lag: of `config.rollout`.
    """

    def __init__(self, max_lag: int):
        self._max_lag = max_lag
        self._fingerprints: dict[int, str] = {}

    def add(self, version: int, fingerprint: str) -> None:
        """Notes the newest policy."""
        kept = {v: f for v, f in self._fingerprints.items() if version - self._max_lag <= v}
        self._fingerprints = kept | {version: fingerprint}

    def judge(self, sampled_by: Mapping[int, str], iteration: int) -> Verdict:
        """Whether an iteration may be trained on what policies have sampled.

        Args:
          sampled_by: their fingerprints by version, at least one.
        """
        if max(sampled_by) > max(self._fingerprints):
            return Verdict.COMING
        if min(sampled_by) < iteration - 1 - self._max_lag:
            return Verdict.STALE
        same = (self._fingerprints.get(v) == f for v, f in sampled_by.items())
        return Verdict.USABLE if all(same) else Verdict.OTHER

    def sampled(self, trajectories: Iterable[Trajectory]) -> dict[int, str]:
        """The fingerprints, by version, of the policies that sampled trajectories or began to.

        That of a version which this run has not had is empty.
        """
        versions = sorted({v for t in trajectories for v in _versions(t)})
        return {version: self._fingerprints.get(version, "") for version in versions}

    def state(self) -> dict[str, str]:
        """What a checkpoint has to note, for `restore`."""
        return {str(version): text for version, text in self._fingerprints.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._fingerprints = {int(version): text for version, text in state.items()}


def _versions(trajectory: Trajectory) -> set[int]:
    began = trajectory.policy_version
    return versions_of(trajectory) | (set() if began is None else {began})


def join_origins(sampled_by: Mapping[int, str], iteration: int) -> str:
    """Fingerprints by version as one text: one of them where only the newest policy sampled."""
    if [*sampled_by] == [iteration - 1]:
        return sampled_by[iteration - 1]
    return " ".join(f"{version}={text}" for version, text in sorted(sampled_by.items()))


def split_origins(text: str, iteration: int) -> dict[int, str]:
    """The fingerprints by version of such a text."""
    if "=" not in text:
        return {iteration - 1: text}
    pairs = (each.partition("=") for each in text.split(" "))
    return {int(version): fingerprint for version, _, fingerprint in pairs}
