"""The teachers of a run: models whose log-probabilities of sampled tokens enter advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seeupo_jax.learner.reference_policy import reference_of
from seeupo_jax.policy.network import Network
from seeupo_jax.types import TrainState


@dataclass(frozen=True, eq=False)
class TeacherModel:
    """A model that teaches.

    label: `LABEL=VALUE` of the tasks that it teaches; None: those that no other one teaches.
    network, params: its own, all of them, maybe in the host's memory; None: those of the reference
      policy.
    ask: instead of these, what gives the log-probabilities [L - 1] of every token but the first of
      sequences [L].
    """

    label: str | None
    network: Network | None = None
    params: Any = None
    ask: Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None = None

    def parameters(self, train: TrainState, ref_params: Any) -> Any:
        """Its parameters, given the state and the reference policy's."""
        return reference_of(train, ref_params) if self.network is None else self.params


def taught_by(
    teachers: Sequence[TeacherModel], labels: Sequence[Mapping[str, str]] | None, trajectories: int
) -> list[int | None]:
    """The index of the teacher of each trajectory; None: it has none.

    Args:
      labels: of each trajectory's task; None: none has any.
    """
    numbers = {teacher.label: number for number, teacher in enumerate(teachers)}
    found: list[int | None] = []
    for own in [{}] * trajectories if labels is None else labels:
        named = (numbers.get(f"{name}={value}") for name, value in own.items())
        found.append(next((each for each in named if each is not None), numbers.get(None)))
    return found
