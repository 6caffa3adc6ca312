"""Credit assignment: from trajectories to advantages of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.reward_shares import reward_shares
from seeupo_jax.learner.credit.sampled_tokens import Ragged
from seeupo_jax.learner.credit.turn_scores import scorer_loss, scorer_program
from seeupo_jax.trajectories.roles import rewards_by_role
from seeupo_jax.types import CONTEXT, RewardRow, RewardTable, Segment, Trajectory, learnable


def assign_credit(arrays: CreditArrays) -> tuple[dict[str, Ragged], dict[str, float]]:
    """The advantage of every token, by the algorithm's estimator; undefined at context.

    Args:
      arrays: with `old_logp` and `ref_logp`; with a critic `value`; with a scorer its scores; and
        with `algorithm.estimator.reads_entropy` `entropy`; `collision` where the estimator needs
        it.

    Returns: fields of tokens: `advantage`; with a critic `returns`, what the value is to be; and
      `clip_scale` of the token's turn, where the estimator adapts a clip range that there is. And
      each named reward's share of the gradient, by metrics' names.

    Raises:
      ValueError: a reward outside the range that the estimator is for.
    """
    algorithm = arrays.algorithm
    estimator, options = find_entry("advantage", algorithm.advantage), algorithm.estimator
    check_rewards(algorithm, arrays.trajectories)
    inputs = {name: getattr(arrays, name) for name in estimator.inputs(options, algorithm.scale)}
    scaling = {"scale": algorithm.scale, "clip": algorithm.advantage_clip}
    credited = estimator.credit(inputs, options, **scaling)
    credit = {"advantage": _OF_TOKENS[estimator.level](arrays, np.asarray(credited.advantage))}
    if credited.returns is not None:
        credit["returns"] = arrays.time.unpad(credited.returns)
    if algorithm.adapts_clip:
        credit["clip_scale"] = _from_turns(arrays, np.asarray(credited.clip_scale))
    if options.compares_siblings:  # by the rewards of turns, whichever names they are of
        return credit, {}
    return credit, reward_shares(arrays, credited.part_NQ, grouped=algorithm.grouped)


def check_rewards(algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> None:
    """Checks that rewards are in the range that the estimator is defined for.

    Raises:
      ValueError: one sentence with the trajectory's task, what was got and what is allowed.
    """
    allowed = find_entry("advantage", algorithm.advantage).reward_range
    if allowed is None:
        return
    low, high = allowed
    kept_N = learnable(trajectories, grouped=algorithm.grouped)
    for trajectory, is_learnable in zip(trajectories, kept_N, strict=True):
        for reward in rewards_by_role(trajectory).values() if is_learnable else ():
            if not low <= reward <= high:
                raise ValueError(
                    f"{trajectory.task_id}: reward: got {reward:g}; allowed with"
                    f" advantage={algorithm.advantage}: a number from {low:g} to {high:g}."
                )


def compile_credit(
    algorithm: Algorithm, shapes: Shapes, trajectories: int, names: Sequence[str] = ()
) -> None:
    """Compiles the programs of credit assignment, by crediting so many trajectories of one token.

    Args:
      names: of the rewards of trajectories.
    """
    zeros_L = np.zeros(2, np.float32)
    segment = Segment(np.zeros(2, np.int32), np.array([CONTEXT, 0], np.int32), zeros_L)
    rewards = RewardTable(RewardRow(0.0), dict.fromkeys(names, RewardRow(0.0, (0.0,))))
    one = Trajectory((segment,), rewards, 0)
    alike = [one] * trajectories
    rows = SegmentBatch.of(alike, grouped=algorithm.grouped)
    token_fields = ("old_logp", "ref_logp", "value", "scorer_logp", "progress", "entropy")
    token_fields += ("collision",)
    per_token = {name: [zeros_L] * len(rows.tokens) for name in token_fields}
    arrays = CreditArrays(algorithm, shapes, rows, alike, per_token)
    if algorithm.scorer is not None:
        scorer_loss(algorithm, arrays, rows, alike)
    assign_credit(arrays)


def credit_programs(algorithm: Algorithm) -> list[str]:
    """Names of the programs that `compile_credit` compiles."""
    names = find_entry("advantage", algorithm.advantage).programs(algorithm.scale)
    return names if algorithm.scorer is None else [scorer_program(algorithm), *names]


def _from_trajectories(arrays: CreditArrays, advantage_N: np.ndarray) -> Ragged:
    pairs = zip(arrays.rows.turn, advantage_N[arrays.rows.trajectory_S], strict=True)
    return [np.full(len(turn_L), value, np.float32) for turn_L, value in pairs]


def _from_turns(arrays: CreditArrays, advantage_NK: np.ndarray) -> Ragged:
    pairs = zip(arrays.rows.trajectory_S, arrays.sampled_turn, strict=True)
    return [advantage_NK[owner][turn_L] for owner, turn_L in pairs]


def _from_tokens(arrays: CreditArrays, advantage_NL: np.ndarray) -> Ragged:
    return arrays.time.unpad(advantage_NL)


# Level of an estimator -> from its advantages to those of every token.
_OF_TOKENS: dict[str, Callable[[CreditArrays, np.ndarray], Ragged]] = {
    "trajectory": _from_trajectories,
    "turn": _from_turns,
    "token": _from_tokens,
}
