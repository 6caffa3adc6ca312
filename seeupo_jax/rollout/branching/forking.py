"""Forks: conversations that branch after turns, so that a group is a tree of trajectories.

The group's roots are played to their ends first. When all episodes of a group are over, its plan
names the branches: which episode to continue, and after how many turns. When those are over the
plan is asked again, until it names none. Only the group's own episodes decide, so trees do not
depend on the order of arrival, on other groups or on processes, and an environment is held only
while its episode is played.

A branch begins as a copy of its parent's state after the shared turns: tokens, log-probabilities,
messages and rewards are equal to the bit. Its environment is restored from the snapshot that
`fork()` returned at that point, or by replaying the actions after `reset(task, seed)`; a reply that
differs fails the branch (`replay`). The branch has its own member number, and so its own random
numbers from there on; a replayed environment repeats the random transitions of the tree's root,
whose `episode_seed` it uses. The engine finds the shared tokens' keys and values in its cache.

The budget of a group is `rollout.group_size` trajectories and, with `fork_tokens`, a number of
sampled tokens. A branch begins only if its longest possible continuation fits, so neither is ever
exceeded. Unused budget is counted and not filled up.

Every trajectory is stored whole, with its `parent` and the number of shared turns. The learner
decides which trajectory a shared turn is trained in (`trajectories/forks.py`).
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
    """The finished episodes of a group by place, and the number of open ones."""

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
        """Takes a finished episode; returns the requests that its group begins next.

        Args:
          unchosen: trajectories of candidates that were sampled with it.
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
        """Counts of finished episodes, by name."""
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
    """Closes the snapshots of its episodes, and drops their states."""
    for _, episode, _ in group.over.values():
        for state in episode.fork_states.values():
            if state.snapshot is not None:
                state.snapshot.close()
        episode.fork_states.clear()
