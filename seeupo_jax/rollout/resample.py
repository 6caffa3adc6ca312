"""Dynamic sampling (DAPO, arXiv:2503.14476 §3.2): new tasks for zero-advantage groups.

Where all rewards of a group are equal (of each turn, where turns are compared), so are its
advantages: zero, if they follow from its rewards alone (`Algorithm.zero_if_equal`). Such groups
give way to groups of other tasks, which are sampled in further rounds.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from seeupo_jax.rollout.collect import Collected
from seeupo_jax.trajectories.forks import forked, turn_nodes
from seeupo_jax.trajectories.rewards_by_name import named_rewards, named_turn_rewards
from seeupo_jax.trajectories.roles import rewards_by_role, role_views
from seeupo_jax.types import Trajectory, learnable, rewards_of

_ITERATIONS = 2**24  # 128 rounds of 2**24 stay below the numbers of `evaluate`


def collection_number(iteration: int, round: int) -> int:
    """The seed of a round's random numbers, instead of its iteration's number.

    Args:
      iteration: below 2**24. round: from 0, which has the iteration's own, to 127.
    """
    return iteration + round * _ITERATIONS


def groups_of(trajectories: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
    """Trajectories by group, in their order."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return groups


def has_signal(
    group: Sequence[Trajectory],
    weights: Mapping[str, float] | None = None,
    *,
    by_turn: bool = False,
    centred: bool = False,
) -> bool:
    """Whether the rewards of a group's learnable trajectories differ.

    Args:
      weights: of named rewards, each compared separately (`Config.compared_weights`); None: the
        total reward is compared.
      by_turn: compare the rewards of each turn (`Algorithm.by_turn`); in a group that forks, those
        of sibling turns.
      centred: the estimator subtracts the run's mean from each of them first
        (`Algorithm.keeps_statistics`), so a turn with reward 0 differs from a missing turn.

    Rewards are compared within a role.
    """
    roles = list(dict.fromkeys(role for t in group for role in rewards_by_role(t)))
    if len(roles) > 1 or any(t.role_rewards for t in group):
        of_role = {"weights": weights, "by_turn": by_turn, "centred": centred}
        views = groups_of(role_views(group, roles)).values()
        return any(has_signal(each, **of_role) for each in views)
    places = np.flatnonzero(learnable(group)).tolist()
    included = [group[i] for i in places]
    differ = _differ
    if by_turn:
        missing = None if centred else 0.0
        differ = functools.partial(_turns_differ, group, places, missing=missing)
    if weights is not None and (
        named := (named_turn_rewards if by_turn else named_rewards)(included)
    ):
        return any(weights.get(name, 1.0) and differ(each) for name, each in named.items())
    return differ([rewards_of(t) if by_turn else t.reward for t in included])


def _differ(values: Sequence[float | None]) -> bool:
    """Whether values differ in float32, as an estimator reads them: there 0.1 + 0.2 is 0.3."""
    return len({None if value is None else float(np.float32(value)) for value in values}) > 1


def _turns_differ(
    group: Sequence[Trajectory],
    places: Sequence[int],
    rewards: Sequence[Sequence[float]],
    *,
    missing: float | None,
) -> bool:
    """Whether rewards of turns differ.

    In a group that forks, each turn counts once and is compared with its siblings.

    Args:
      places: in the group, of the trajectories whose rewards are given.
      missing: the reward of turns after an episode's end; None: different from any reward.
    """
    if not forked(group):
        return any(map(_differ, itertools.zip_longest(*rewards, fillvalue=missing)))
    nodes = turn_nodes(group)
    turns: dict[int, tuple[int, float]] = {}  # where it begins, and its reward, by where it leads
    for place, turn_rewards in zip(places, rewards, strict=True):
        for begin, node, reward in zip(
            [-1, *nodes[place]], nodes[place], turn_rewards, strict=False
        ):
            turns.setdefault(node, (begin, float(np.float32(reward))))
    return len({*turns.values()}) > len({begin for begin, _ in turns.values()})


def resample(
    sample: Callable[[int, Sequence[str]], Collected],
    tasks: Sequence[str],
    others: Iterator[str],
    *,
    rounds: int,
    weights: Mapping[str, float] | None = None,
    by_turn: bool = False,
    centred: bool = False,
) -> Collected:
    """Samples tasks, and in up to `rounds` further rounds other tasks for zero-advantage groups.

    A round samples one task per such group; a group with a signal replaces one without and takes
    its number.

    Args:
      sample: samples a group of each task, numbered from 0, given the round's number.
      weights, by_turn, centred: as for `has_signal`.

    Returns: one group per task. The counts are those of all rounds.
    """
    signals = functools.partial(has_signal, weights=weights, by_turn=by_turn, centred=centred)
    collected = [sample(0, tasks)]
    groups = groups_of(collected[0].trajectories)
    left_out: list[Trajectory] = []
    for number in range(1, rounds + 1):
        idle = [place for place, group in groups.items() if not signals(group)]
        if not idle:
            break
        collected.append(sample(number, [*itertools.islice(others, len(idle))]))
        fresh = groups_of(collected[-1].trajectories).values()
        learnable = [group for group in fresh if signals(group)]
        for place, group in zip(idle, learnable, strict=False):
            left_out += groups[place]
            groups[place] = [replace(trajectory, group=place) for trajectory in group]
        left_out += [t for group in fresh if not signals(group) for t in group]
    return _merged(collected, groups, left_out)


def _merged(
    rounds: Sequence[Collected],
    groups: dict[int, list[Trajectory]],
    left_out: Sequence[Trajectory],
) -> Collected:
    usage: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for collected in rounds:
        usage.update(collected.usage)
        seconds.update(collected.seconds)
    return Collected(
        tuple(trajectory for group in groups.values() for trajectory in group),
        wall_s=sum(c.wall_s for c in rounds),
        environment_s=sum(c.environment_s for c in rounds),
        sampled_tokens=sum(c.sampled_tokens for c in rounds),
        context_tokens=sum(c.context_tokens for c in rounds),
        usage=usage,
        rounds=len(rounds),
        left_out=tuple(left_out),
        reset_s=sum(c.reset_s for c in rounds),
        seconds=seconds,
        reward_s=sum(c.reward_s for c in rounds),
    )
