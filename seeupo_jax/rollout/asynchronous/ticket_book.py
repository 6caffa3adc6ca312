"""Who plays which group: tickets are admitted, leased to workers, delivered and taken."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket
from seeupo_jax.rollout.collect import group_requests
from seeupo_jax.types import Trajectory


class Delivery(NamedTuple):
    """What became of delivered members.

    taken: counted, now. doubled: delivered before, by whomever. unknown: of tickets that are not
    admitted.
    """

    taken: int = 0
    doubled: int = 0
    unknown: int = 0


class TakenIteration(NamedTuple):
    """An iteration's trajectories in the order of group and member; `group` counts from 0.

    usage: of all workers since an iteration was last taken, summed by name.
    """

    trajectories: tuple[Trajectory, ...]
    usage: Mapping[str, float]


class TicketCounts(NamedTuple):
    """Where the members of the admitted iterations are that are not taken, and who plays them.

    waiting, leased, finished: members. groups_ahead: groups that are finished. workers: that lease.
    reissued, doubled, unknown: members since the book was opened: put back since their worker was
    lost; delivered again; delivered of no open ticket.
    """

    waiting: int
    leased: int
    finished: int
    groups_ahead: int
    workers: int
    reissued: int
    doubled: int
    unknown: int


@dataclass
class _Group:
    """An admitted ticket. Every member is in one of waiting, leased and finished.

    leased: the worker of each member. finished: its trajectory.
    """

    ticket: Ticket
    waiting: set[int]
    leased: dict[int, str] = field(default_factory=dict[int, str])
    finished: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.ticket.members)


class TicketBook:
    """The tickets of a run that are admitted and not yet taken; any thread may call any method.

    Strictly first in, first out by the tickets' numbers, whatever the speed of their workers: an
    iteration is complete when each of its members was delivered, and no group is left out.
    """

    def __init__(
        self,
        tasks: int,
        group_size: int,
        *,
        record: Callable[[Sequence[FinishedMember]], None] = lambda _: None,
    ):
        """A book without tickets.

        Args:
          tasks: groups of an iteration. group_size: members of a group.
          record: receives the members of a delivery that count, before they do; never two
            deliveries at once, and no member twice.
        """
        self._tasks, self._group_size, self._record = tasks, group_size, record
        self._changed = threading.Condition()  # guards all that follows
        self._recording = threading.Lock()  # held before `_changed`
        self._groups: dict[int, _Group] = {}  # by number, ascending
        self._admitted = self._taken = 0  # the last iterations that were
        self._workers: set[str] = set()
        self._usage: Counter[str] = Counter()
        self._reissued = self._doubled = self._unknown = 0

    @property
    def admitted(self) -> int:
        """The last iteration whose tickets may start; 0: none was admitted."""
        return self._admitted

    def admit(
        self,
        iteration: int,
        tasks: Sequence[str],
        finished: Mapping[tuple[int, int], Trajectory] | None = None,
    ) -> None:
        """Lets an iteration's tickets start; iterations are admitted in order, each once.

        Args:
          tasks: the task of each group.
          finished: trajectories that were sampled before, by group and member.
        """
        assert len(tasks) == self._tasks and (iteration == self._admitted + 1 or not self._admitted)
        members: dict[int, list[int]] = {}
        for request in group_requests(tasks, self._group_size):
            members.setdefault(request.group, []).append(request.member)
        first = (iteration - 1) * self._tasks
        with self._changed:
            self._taken = self._taken if self._admitted else iteration - 1
            for group, task_id in enumerate(tasks):
                ticket = Ticket(first + group, iteration, group, task_id, tuple(members[group]))
                opened = _Group(ticket, set(ticket.members))
                for member in ticket.members:
                    if finished is not None and (group, member) in finished:
                        opened.waiting.discard(member)
                        opened.finished[member] = finished[group, member]
                self._groups[ticket.number] = opened
            self._admitted = iteration
            self._changed.notify_all()

    def lease(self, worker: str, conversations: int) -> list[Ticket]:
        """The next tickets in the order of their numbers, with the members that wait.

        Their members are at most `conversations`; a worker that has none leased gets one ticket
        with more. No later ticket is leased before one that does not fit.
        """
        with self._changed:
            self._workers.add(worker)
            leased: list[Ticket] = []
            idle = not any(worker in group.leased.values() for group in self._groups.values())
            for group in self._groups.values():
                if not group.waiting:
                    continue
                alone = idle and not leased and conversations > 0
                if len(group.waiting) > conversations and not alone:
                    break
                conversations -= len(group.waiting)
                leased.append(self._lease(worker, group, group.waiting))
            return leased

    def claim(self, worker: str, tickets: Iterable[Ticket]) -> None:
        """Leases members that a worker plays already, as after a restart of the trainer.

        Those that do not wait, or are of no open ticket, stay as they are.
        """
        with self._changed:
            self._workers.add(worker)
            for ticket in tickets:
                group = self._groups.get(ticket.number)
                if group is not None and group.ticket.task_id == ticket.task_id:
                    self._lease(worker, group, group.waiting & set(ticket.members))

    def deliver(
        self, worker: str, finished: Sequence[FinishedMember], usage: Mapping[str, float]
    ) -> Delivery:
        """Takes finished members, whoever leased them; one that was delivered before counts once.

        Args:
          usage: the worker's counts and seconds since its last delivery, by name.

        Raises:
          ValueError: a trajectory of another task than its ticket's; nothing is taken.
        """
        with self._recording:
            with self._changed:
                fresh, doubled, unknown = self._sort(finished)
            if fresh:
                self._record(fresh)
            with self._changed:
                for each in fresh:
                    group = self._groups[each.number]
                    group.waiting.discard(each.member)
                    group.leased.pop(each.member, None)
                    group.finished[each.member] = each.trajectory
                self._usage.update(usage)
                self._doubled += doubled
                self._unknown += unknown
                self._changed.notify_all()
        return Delivery(len(fresh), doubled, unknown)

    def lose(self, worker: str) -> int:
        """Puts back what a worker has not delivered, for others; returns how many members."""
        with self._changed:
            self._workers.discard(worker)
            lost = 0
            for group in self._groups.values():
                back = {member for member, holder in group.leased.items() if holder == worker}
                group.waiting |= back
                for member in back:
                    del group.leased[member]
                lost += len(back)
            self._reissued += lost
            self._changed.notify_all()
            return lost

    def complete(self, iteration: int) -> bool:
        """Whether every member of an admitted iteration was delivered."""
        with self._changed:
            return self._is_complete(iteration)

    def wait(self, iteration: int, timeout: float | None = None) -> bool:
        """Waits until an iteration is complete, for so many seconds at most; returns whether."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_complete(iteration), timeout)

    def take(self, iteration: int) -> TakenIteration:
        """Removes an iteration that is complete; iterations are taken in order."""
        with self._changed:
            assert self._is_complete(iteration)
            trajectories: list[Trajectory] = []
            for number in self._numbers(iteration):
                group = self._groups.pop(number)
                place = group.ticket.group
                trajectories += (
                    replace(group.finished[member], group=place) for member in group.ticket.members
                )
            usage, self._usage = dict(self._usage), Counter()
            self._taken = iteration
            return TakenIteration(tuple(trajectories), usage)

    def counts(self) -> TicketCounts:
        """The numbers of members, groups and workers, now."""
        with self._changed:
            groups = self._groups.values()
            return TicketCounts(
                waiting=sum(len(group.waiting) for group in groups),
                leased=sum(len(group.leased) for group in groups),
                finished=sum(len(group.finished) for group in groups),
                groups_ahead=sum(group.complete for group in groups),
                workers=len(self._workers),
                reissued=self._reissued,
                doubled=self._doubled,
                unknown=self._unknown,
            )

    def _lease(self, worker: str, group: _Group, members: Collection[int]) -> Ticket:
        leased = tuple(member for member in group.ticket.members if member in members)
        group.waiting.difference_update(leased)
        group.leased.update(dict.fromkeys(leased, worker))
        return replace(group.ticket, members=leased)

    def _sort(self, finished: Sequence[FinishedMember]) -> tuple[list[FinishedMember], int, int]:
        """Members that are missing, each once, and how many are doubled and unknown."""
        fresh: dict[tuple[int, int], FinishedMember] = {}
        doubled = unknown = 0
        for each in finished:
            group = self._groups.get(each.number)
            if group is None or each.member not in group.ticket.members:
                is_taken = 0 <= each.number < self._taken * self._tasks
                doubled, unknown = doubled + is_taken, unknown + (not is_taken)
                continue
            if each.trajectory.task_id != group.ticket.task_id:
                raise ValueError(
                    f"a trajectory of ticket {each.number}: got task"
                    f" {each.trajectory.task_id[:80]!r}; allowed: {group.ticket.task_id!r}."
                )
            if each.member in group.finished or (each.number, each.member) in fresh:
                doubled += 1
            else:
                fresh[each.number, each.member] = each
        return list(fresh.values()), doubled, unknown

    def _numbers(self, iteration: int) -> range:
        return range((iteration - 1) * self._tasks, iteration * self._tasks)

    def _is_complete(self, iteration: int) -> bool:
        groups = [self._groups.get(number) for number in self._numbers(iteration)]
        return all(group is not None and group.complete for group in groups)
