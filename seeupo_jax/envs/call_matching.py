"""Rewards of turns from reference calls, by matching (MatchTIR, arXiv:2601.10712).

Every call of an episode, or of a part of it, is compared with every call of the task's reference
solution. A matching assigns reference calls, or shares of them, to calls, regardless of their
positions. It works for any environment whose tasks have reference calls and needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from seeupo_jax.envs.base import check_choice
from seeupo_jax.envs.tool_calls import ToolCall

REGULARIZATION = 0.1  # of the soft matching, as published
_TOLERANCE = 1e-9  # of the marginals of a transport plan


def call_similarity(call: ToolCall, reference: ToolCall) -> float:
    """Similarity of a call to a reference call.

    0 if the names differ, else [1 + J + V] / (2 + parameters of the reference): J is the Jaccard
    index of the parameters' names (1 if neither has any), V the number of the reference's
    parameters that have its value. Numbers of equal value are equal, true and 1 are not, and a
    tuple equals a list. Positional arguments count by their position.

    Returns:
      A number in [0, 1]; 1 for the same name and arguments.
    """
    if call.name != reference.name:
        return 0.0
    got, wanted = _parameters(call), _parameters(reference)
    names = got.keys() | wanted.keys()
    jaccard = len(got.keys() & wanted.keys()) / len(names) if names else 1.0
    values = sum(name in got and _equal(got[name], value) for name, value in wanted.items())
    return (1 + jaccard + values) / (2 + len(wanted))


def match_hard(similarity_PG: np.ndarray) -> np.ndarray:
    """Pairs calls and reference calls greedily, the most similar first.

    Each is in at most one pair. Ties go to the first call, then to the first reference call.

    Args:
      similarity_PG: float [P calls, G reference calls], at least 0.

    Returns:
      float64 [P], the similarity of each call's pair; 0 for a call without a pair.
    """
    reward_P = np.zeros(len(similarity_PG))
    free_P, free_G = (np.ones(size, bool) for size in similarity_PG.shape)
    for place in np.argsort(-similarity_PG, axis=None, kind="stable"):
        p, g = divmod(int(place), similarity_PG.shape[1])
        if free_P[p] and free_G[g]:
            reward_P[p] = similarity_PG[p, g]
            free_P[p] = free_G[g] = False
    return reward_P


def match_soft(similarity_PG: np.ndarray) -> np.ndarray:
    """Similarity times the entropic optimal transport plan between calls and reference calls.

    The plan has uniform marginals, the cost -similarity and the regularization 0.1. A call's share
    is 1/P, so all rewards sum to at most 1: the more calls, the less each can earn.

    Args:
      similarity_PG: float [P calls, G reference calls], in [0, 1].

    Returns:
      float64 [P]: r_p = sum over g of plan_pg similarity_pg; 0 if there is no reference call.
    """
    if not similarity_PG.size:
        return np.zeros(len(similarity_PG))
    calls, references = similarity_PG.shape
    potential_G = np.zeros(references)
    plan_PG = _plan(similarity_PG, potential_G)
    while _marginal_error(plan_PG) > _TOLERANCE:
        # A Sinkhorn iteration always reduces the error, but takes 100,000 rounds where the calls of
        # one name nearly balance their references; Newton's method takes a few.
        candidates = [potential_G - REGULARIZATION * np.log(references * plan_PG.sum(0))]
        newton_G = potential_G + _newton_step(plan_PG)
        if np.ptp(newton_G) <= 1:  # holds for the solution: similarities differ by 1 at most
            candidates.append(newton_G)
        potential_G = min(
            candidates, key=lambda each_G: _marginal_error(_plan(similarity_PG, each_G))
        )
        plan_PG = _plan(similarity_PG, potential_G)
    return (plan_PG * similarity_PG).sum(1)


def _plan(similarity_PG: np.ndarray, potential_G: np.ndarray) -> np.ndarray:
    """The plan for potentials of the reference calls; each call's marginal is exact."""
    exponent_PG = (similarity_PG + potential_G) / REGULARIZATION
    weight_PG = np.exp(exponent_PG - exponent_PG.max(1, keepdims=True))
    return weight_PG / (len(weight_PG) * weight_PG.sum(1, keepdims=True))


def _marginal_error(plan_PG: np.ndarray) -> float:
    """The L1 error of a plan's marginals over the reference calls."""
    return float(np.abs(plan_PG.sum(0) - 1 / plan_PG.shape[1]).sum())


def _newton_step(plan_PG: np.ndarray) -> np.ndarray:
    """A Newton step of the potentials; the first one is fixed, since only differences matter."""
    share_G = plan_PG.sum(0)
    slope_GG = np.diag(share_G) - len(plan_PG) * plan_PG.T @ plan_PG
    step_G = np.zeros(len(share_G))
    error_G = 1 / len(share_G) - share_G
    step_G[1:] = REGULARIZATION * np.linalg.solve(slope_GG[1:, 1:], error_G[1:])
    return step_G


# How calls are matched, by name.
MATCHINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"hard": match_hard, "soft": match_soft}


def matching_rewards(
    turns: Sequence[Sequence[ToolCall]], reference: Sequence[ToolCall], matching: str = "hard"
) -> list[float]:
    """The reward of each turn: the mean of its calls' rewards by the matching.

    Args:
      turns: the calls of each turn, in order. reference: the calls of a reference solution of all
        these turns. matching: one of `MATCHINGS`.

    Returns:
      A number in [0, 1] for each turn; 0 for a turn without calls.

    Raises:
      ValueError: the matching is unknown.
    """
    check_choice("matching", matching, MATCHINGS)
    calls = [call for turn in turns for call in turn]
    rows = [[call_similarity(call, wanted) for wanted in reference] for call in calls]
    reward_P = MATCHINGS[matching](np.array(rows, float).reshape(len(calls), len(reference)))
    ends = np.cumsum([len(turn) for turn in turns], dtype=int)
    parts = np.split(reward_P, ends[:-1]) if turns else []
    return [float(part.mean()) if part.size else 0.0 for part in parts]


class MatchingReward:
    """`matching_rewards` in steps, whose sums are correct wherever the episode is truncated.

    Args:
      reference: the calls of a reference solution, or of its first part.
      matching: one of `MATCHINGS`.
    """

    def __init__(self, reference: Sequence[ToolCall], matching: str = "hard"):
        self._matching, self._steps = matching, 0
        self.begin(reference)

    def begin(self, reference: Sequence[ToolCall]) -> None:
        """Matches the steps from the next one on with another part of the solution."""
        self._reference = reference
        self._turns: list[Sequence[ToolCall]] = []
        self._earned: list[float] = []

    def step_rewards(self, calls: Sequence[ToolCall]) -> list[float]:
        """Returns what a step with these calls adds to the reward of each step so far.

        The step's own reward is last, as in `StepResult.rewards`. An earlier step loses reward if a
        call of this step matches its reference call better.
        """
        before, self._steps = self._steps - len(self._turns), self._steps + 1
        self._turns.append(calls)
        rewards = matching_rewards(self._turns, self._reference, self._matching)
        added = [new - old for new, old in zip(rewards, [*self._earned, 0.0], strict=True)]
        self._earned = rewards
        return [0.0] * before + added


def _parameters(call: ToolCall) -> Mapping[Any, Any]:
    return dict(enumerate(call.positional)) | dict(call.arguments)


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON values; in Python True == 1 and (1,) != [1]."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
