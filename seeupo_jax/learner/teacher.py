"""The teachers of a run: models whose log-probabilities of sampled tokens enter advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.reference_policy import reference_of
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import Network
from seeupo_jax.types import CONTEXT, TrainState

# From sequences [L] to the log-probabilities [L - 1] of all their tokens but the first.
Asked = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True, eq=False)
class TeacherModel:
    """A model that teaches.

    label: `LABEL=VALUE` of the tasks that it teaches; None: those that no other one teaches.
    network, params: its own, all of them, maybe in the host's memory; None: the policy's.
    moves: whether, without a network of its own, its parameters are the policy's at the start of
      each sweep; False: the reference policy's.
    ask: instead of these, its answers.
    hint: tokens that stand before its contexts, behind `start`, the tokens that begin every text.
    """

    label: str | None
    network: Network | None = None
    params: Any = None
    moves: bool = False
    ask: Asked | None = None
    hint: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    def architecture(self, policy: Architecture) -> Architecture:
        """That of its network, given the policy's."""
        return policy if self.network is None else self.network.arch

    def parameters(self, train: TrainState, ref_params: Any) -> Any:
        """Its parameters, given the state and the reference policy's."""
        if self.network is not None:
            return self.params
        return train.params if self.moves else reference_of(train, ref_params)

    def hinted(self, rows: SegmentBatch) -> SegmentBatch:
        """The segments as it reads them, without a record of experts, since its routers choose."""
        tokens, turn, logp = [], [], []
        for tokens_L, turn_L, logp_L in zip(rows.tokens, rows.turn, rows.logp, strict=True):
            place = self.place(tokens_L)
            tokens.append(np.insert(tokens_L, place, self.hint))
            turn.append(np.insert(turn_L, place, [CONTEXT] * len(self.hint)))
            logp.append(np.insert(logp_L, place, [0.0] * len(self.hint)))
        own = {"tokens": tuple(tokens), "turn": tuple(turn), "logp": tuple(logp)}
        return replace(rows, experts=None, **own)

    def place(self, tokens_L: np.ndarray) -> int:
        """Where in a context the hint stands."""
        count = len(self.start)
        return count if tuple(tokens_L[:count].tolist()) == self.start else 0


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
