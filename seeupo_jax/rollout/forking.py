"""Forks: conversations that branch at the ends of turns, so that a group is a tree of trajectories.

Whole episodes first. The group's roots are played to their ends, as ever. When all of a group's
episodes are over its plan says which of them others are to continue, and after how many turns; when
those are over it is asked again, until it asks for no more. Nothing but the group's own episodes
decides, so trees do not depend on the order of arrival, on other groups, or on processes; and an
environment is held only while its episode plays.

A branch begins as a copy of the episode that it leaves, as that was after the shared turns: its
tokens, log-probabilities, messages and rewards are the same to the bit. Its environment comes to
that state by the snapshot that `fork()` gave then, or by replaying the actions after
`reset(task, seed)`: a reply that differs fails the branch (`replay`). Its member, and so its random
numbers, are its own from there on; the random transitions of a replayed environment are those of
the tree's root, whose `episode_seed` it has. The shared tokens' keys and values are in the engine's
cache, which finds them by the tokens.

The budget is `rollout.group_size` trajectories and, with `fork_tokens`, so many sampled tokens a
group: a branch begins only if the turns that it may have at the most still fit, so that neither is
ever exceeded. What the plan does not use is counted, not filled up.

Every trajectory is stored whole, with its `parent` and how many turns they share; which one is
trained on a shared turn, the learner decides (`trajectories/forks.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from seeupo_jax.configuration.schema import Config
from seeupo_jax.rollout.episode import Episode, Fork, Request
from seeupo_jax.trajectories.forks import new_turns
from seeupo_jax.types import CONTEXT, Trajectory

FORK_FAILURE = "fork_failure"  # of `info`: an environment did not come to the shared state
COUNTS = ("forks", "forks_failed", "replayed_turns", "reused_tokens", "unused_trajectories")


class Played(NamedTuple):
    """An episode that is over.

    shared: turns that it has from another one. turns: all of its. tokens: that were sampled in it.
    """

    shared: int
    turns: int
    tokens: int
    failed: bool


class Branch(NamedTuple):
    """An episode to begin: it continues that of a place in the group after so many turns."""

    place: int
    turns: int


class ForkPlan(Protocol):
    """Which trees a collection's groups become."""

    @property
    def group_size(self) -> int:
        """Trajectories of a group at most."""
        ...

    @property
    def roots(self) -> int:
        """Trajectories that begin with the task."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens that a group may sample; None: no bound."""
        ...

    def keeps(self, turns: int) -> bool:
        """Whether others may continue an episode after so many turns."""
        ...

    def branches(self, played: Sequence[Played], begun: Sequence[Branch]) -> list[Branch]:
        """What a group whose episodes are all over begins next; none: it is complete.

        Args:
          played: by place. begun: those of them that are branches, by what they continued.
        """
        ...


@dataclass(frozen=True)
class TreePlan:
    """Levels of nodes, `every` turns apart, whose children are so many (SPO's trees).

    factors: children of the root, and of the nodes of each level. A node's first child is the
      episode that made it, which goes on; the others branch off. An episode that is over before a
      level has no node there.
    turn_tokens, max_turns: of a turn and an episode, at most.
    """

    factors: tuple[int, ...]
    every: int
    group_size: int
    turn_tokens: int
    max_turns: int
    tokens: int | None = None

    @property
    def roots(self) -> int:
        return self.factors[0]

    def keeps(self, turns: int) -> bool:
        return turns % self.every == 0 and turns // self.every < len(self.factors)

    def branches(self, played: Sequence[Played], begun: Sequence[Branch]) -> list[Branch]:
        made = Counter(begun)
        for level, factor in enumerate(self.factors[1:], start=1):
            turns = level * self.every
            nodes = [
                Branch(place, turns)
                for place, one in enumerate(played)
                if one.shared < turns < one.turns and not one.failed
            ]
            # A second child for every node before a third for any.
            wanted = [node for child in range(1, factor) for node in nodes if made[node] < child]
            if begin := wanted[: self._room(played, turns)]:
                return begin
        return []

    def _room(self, played: Sequence[Played], turns: int) -> int:
        """How many branches after so many turns the budget certainly holds."""
        room = self.group_size - len(played)
        if self.tokens is None:
            return room
        left = self.tokens - sum(one.tokens for one in played)
        return min(room, max(0, left) // self.most_tokens(turns))

    def most_tokens(self, turns: int) -> int:
        """What an episode may sample after so many turns, at the most."""
        return (self.max_turns - turns) * self.turn_tokens


def scaled_factors(factors: Sequence[int], group_size: int) -> tuple[int, ...]:
    """A tree's factors for so many leaves at most: the largest ones shrink, the deepest first.

    What that leaves over goes to the root, whose factor becomes as large as the group allows.
    """
    scaled = list(factors)
    while _product(scaled) > group_size:
        largest = max(scaled)
        last = len(scaled) - 1 - scaled[::-1].index(largest)
        scaled[last] -= 1
    return (group_size // _product(scaled[1:]), *scaled[1:])


def _product(factors: Sequence[int]) -> int:
    total = 1
    for factor in factors:
        total *= factor
    return total


def make_plan(config: Config) -> ForkPlan | None:
    """The plan of `config.algorithm.forks`; None: nothing branches.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.forks == "none":
        return None
    if config.agent.given:
        raise ValueError(
            f"config.algorithm.forks: got {algorithm.forks!r} with config.agent; allowed: none,"
            " since an agent's own loop cannot be brought to where it was after a turn."
        )
    plan = TreePlan(
        scaled_factors(algorithm.fork_factors, rollout.group_size),
        algorithm.fork_every,
        rollout.group_size,
        rollout.max_action_tokens,
        rollout.max_turns,
        algorithm.fork_tokens,
    )
    needed = plan.roots * plan.most_tokens(0)
    if plan.tokens is not None and plan.tokens < needed:
        raise ValueError(
            f"config.algorithm.fork_tokens: got {plan.tokens}; allowed: at least {needed}, what"
            f" {plan.roots} episodes of {plan.max_turns} turns of {plan.turn_tokens} tokens may"
            " sample."
        )
    return plan


def root_requests(requests: Sequence[Request], plan: ForkPlan | None) -> list[Request]:
    """Of the requests of whole groups those that a collection begins with."""
    if plan is None:
        return list(requests)
    return [each for each in requests if each.member % plan.group_size < plan.roots]


@dataclass
class _Group:
    """A group of which some episodes are over, by place."""

    open: int
    over: dict[int, tuple[Request, Episode, Played]]
    begun: list[Branch]


class Forks:
    """The trees of a process's groups, while a collection plays them.

    Args:
      requests: the roots.
    """

    def __init__(self, plan: ForkPlan, requests: Sequence[Request]):
        self._plan, self._counts = plan, Counter(dict.fromkeys(COUNTS, 0))
        opened = Counter(request.group for request in requests)
        self._groups = {group: _Group(count, {}, []) for group, count in opened.items()}

    def key(self, request: Request) -> int:
        """The number of a group's member among all that a collection may play."""
        return request.group * self._plan.group_size + self._place(request)

    def finish(self, request: Request, episode: Episode, trajectory: Trajectory) -> list[Request]:
        """Takes an episode that is over; what its group begins next."""
        group, place = self._groups[request.group], self._place(request)
        acted = sum(int((s.turn_L != CONTEXT).sum()) for s in trajectory.segments)
        sampled = sum(int((turn_L != CONTEXT).sum()) for turn_L in new_turns(trajectory))
        self._counts["forks"] += int(request.fork is not None)
        self._counts["forks_failed"] += int(FORK_FAILURE in trajectory.info)
        self._counts["replayed_turns"] += request.fork.replayed_turns if request.fork else 0
        self._counts["reused_tokens"] += acted - sampled
        played = Played(trajectory.fork, trajectory.turns, sampled, trajectory.failed)
        group.over[place] = request, episode, played
        group.open -= 1
        return [] if group.open else self._next(request.group, group)

    def usage(self) -> Mapping[str, int]:
        """Counts, by name; of what is over."""
        return dict(self._counts)

    def close(self) -> None:
        """Closes the snapshots of environments that are still held."""
        for group in self._groups.values():
            _release(group)

    def _place(self, request: Request) -> int:
        return request.member % self._plan.group_size

    def _next(self, number: int, group: _Group) -> list[Request]:
        over = [group.over[place] for place in range(len(group.over))]
        branches = self._plan.branches([played for *_, played in over], group.begun)
        if not branches:
            self._counts["unused_trajectories"] += self._plan.group_size - len(over)
            if self._plan.tokens is not None:
                spent = sum(played.tokens for *_, played in over)
                self._counts["unused_tokens"] += self._plan.tokens - spent
            _release(group)
            return []
        group.begun += branches
        group.open = len(branches)
        return [
            _branch(over[place][0], over[place][1], place, turns, len(over) + more)
            for more, (place, turns) in enumerate(branches)
        ]


def _branch(parent: Request, episode: Episode, place: int, turns: int, own: int) -> Request:
    """The request of a branch that has the place `own` in its group."""
    origin = parent.member if parent.fork is None else parent.fork.origin
    first = parent.member - place
    return replace(parent, member=first + own, fork=Fork(place, turns, origin, episode.ends[turns]))


def _release(group: _Group) -> None:
    """Closes what its episodes hold of environments; the episodes go with it."""
    for _, episode, _ in group.over.values():
        for end in episode.ends.values():
            if end.snapshot is not None:
                end.snapshot.close()
        episode.ends.clear()
