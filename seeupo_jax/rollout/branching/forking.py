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

from seeupo_jax.rollout.branching.fork_plan import Branch, EpisodeSummary, ForkPlan
from seeupo_jax.rollout.episode import Episode, EpisodeRequest, Fork
from seeupo_jax.trajectories.forks import new_turns
from seeupo_jax.types import CONTEXT, Trajectory

FORK_FAILURE = "fork_failure"  # of `info`: an environment did not come to the shared state
COUNTS = ("forks", "forks_failed", "replayed_turns", "reused_tokens", "unused_trajectories")


@dataclass
class _Group:
    """A group of which some episodes are over, by place."""

    open: int
    over: dict[int, tuple[EpisodeRequest, Episode, EpisodeSummary]]
    existing: list[Branch]
    unchosen: int = 0  # candidates of turns that were not executed


class Forks:
    """The trees of a process's groups, while a collection plays them.

    Args:
      requests: the roots.
    """

    def __init__(self, plan: ForkPlan, requests: Sequence[EpisodeRequest]):
        self._plan, self._budget = plan, plan.budget
        self._counts = Counter(dict.fromkeys(COUNTS, 0))
        opened = Counter(request.group for request in requests)
        self._groups = {group: _Group(count, {}, []) for group, count in opened.items()}

    def key(self, request: EpisodeRequest) -> int:
        """The number of a group's member among all that a collection may play."""
        return request.group * self._budget.group_size + self._place(request)

    def finish(
        self,
        request: EpisodeRequest,
        episode: Episode,
        trajectory: Trajectory,
        unchosen: Sequence[Trajectory] = (),
    ) -> list[EpisodeRequest]:
        """Takes an episode that is over; what its group begins next.

        Args:
          unchosen: trajectories that were sampled with it.
        """
        group, place = self._groups[request.group], self._place(request)
        sampled = 0
        for each in (trajectory, *unchosen):
            acted = sum(int((s.turn_L != CONTEXT).sum()) for s in each.segments)
            new_tokens = sum(int((turn_L != CONTEXT).sum()) for turn_L in new_turns(each))
            self._counts["forks"] += int(each.parent is not None)
            self._counts["reused_tokens"] += acted - new_tokens
            sampled += new_tokens
        group.unchosen += len(unchosen)
        self._counts["forks_failed"] += int(FORK_FAILURE in trajectory.info)
        self._counts["replayed_turns"] += request.fork.replayed_turns if request.fork else 0
        summary = EpisodeSummary(
            trajectory.fork,
            trajectory.turns,
            sampled,
            trajectory.failed,
            tuple(sorted(episode.fork_states)),
        )
        group.over[place] = request, episode, summary
        group.open -= 1
        return [] if group.open else self._next(request.group, group)

    def usage(self) -> Mapping[str, int]:
        """Counts, by name; of what is over."""
        return dict(self._counts)

    def close(self) -> None:
        """Closes the snapshots of environments that are still held."""
        for group in self._groups.values():
            _release(group)

    def _place(self, request: EpisodeRequest) -> int:
        return request.member % self._budget.group_size

    def _next(self, number: int, group: _Group) -> list[EpisodeRequest]:
        over = [group.over[place] for place in range(len(group.over))]
        branches = self._plan.branches([played for *_, played in over], group.existing)
        if not branches:
            played = len(over) + group.unchosen
            self._counts["unused_trajectories"] += self._budget.group_size - played
            if self._budget.tokens is not None:
                spent = sum(played.tokens for *_, played in over)
                self._counts["unused_tokens"] += self._budget.tokens - spent
            _release(group)
            return []
        group.existing += branches
        group.open = len(branches)
        return [
            _branch(over[place][0], over[place][1], place, turns, len(over) + more)
            for more, (place, turns) in enumerate(branches)
        ]


def _branch(
    parent: EpisodeRequest, episode: Episode, place: int, turns: int, branch: int
) -> EpisodeRequest:
    """The request of a branch that has the place `branch` in its group."""
    member = parent.member - place + branch
    if turns == 0:
        return replace(parent, member=member, fork=None)
    origin = parent.member if parent.fork is None else parent.fork.origin
    fork = Fork(place, turns, origin, episode.fork_states[turns])
    return replace(parent, member=member, fork=fork)


def _release(group: _Group) -> None:
    """Closes what its episodes hold of environments; the episodes go with it."""
    for _, episode, _ in group.over.values():
        for state in episode.fork_states.values():
            if state.snapshot is not None:
                state.snapshot.close()
        episode.fork_states.clear()
