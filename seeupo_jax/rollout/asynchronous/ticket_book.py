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
    admitted, or of other tasks than theirs.
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
    reissued, doubled, unknown: members since the book was opened: put back, since they
    would not be delivered; delivered again; delivered, of no open ticket.
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

    def has(self, finished: FinishedMember) -> bool:
        """Whether it is of a member of the group."""
        ticket = self.ticket
        same_task = finished.trajectory.task_id == ticket.task_id
        return same_task and finished.member in ticket.members

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
        for request in group_requests(tasks, self._group_size, iteration):
            members.setdefault(request.group, []).append(request.member)
        first, known = (iteration - 1) * self._tasks, {} if finished is None else finished
        with self._changed:
            self._taken = self._taken if self._admitted else iteration - 1
            for group, task_id in enumerate(tasks):
                ticket = Ticket(first + group, iteration, group, task_id, tuple(members[group]))
                done = {m: known[group, m] for m in ticket.members if (group, m) in known}
                missing = set(ticket.members) - done.keys()
                self._groups[ticket.number] = _Group(ticket, missing, finished=done)
            self._admitted = iteration
            self._changed.notify_all()

    def lease(self, worker: str, conversations: int, up_to: int | None = None) -> list[Ticket]:
        """The next tickets in the order of their numbers, with the members that wait.

        Their members are at most `conversations`; a worker that has none leased gets one ticket
        with more. No later ticket is leased before one that does not fit.

        Args:
          up_to: the last iteration that the worker may play; None: all that are admitted.
        """
        with self._changed:
            self._workers.add(worker)
            leased: list[Ticket] = []
            idle = not any(worker in group.leased.values() for group in self._groups.values())
            for group in self._groups.values():
                if not group.waiting:
                    continue
                alone = idle and not leased and conversations > 0
                fits = len(group.waiting) <= conversations or alone
                if not fits or (up_to is not None and group.ticket.iteration > up_to):
                    break
                conversations -= len(group.waiting)
                leased.append(self._lease(worker, group, group.waiting))
            return leased

    def hold(self, worker: str, tickets: Iterable[Ticket]) -> None:
        """Makes a worker's leases those that it says it plays, as after a restart of the trainer.

        Of the tickets' members those that wait are leased to it; what else it had leased is put
        back: the answer to a lease may not have reached it.
        """
        with self._changed:
            self._workers.add(worker)
            held: set[tuple[int, int]] = set()
            for ticket in tickets:
                group = self._groups.get(ticket.number)
                if group is not None and group.ticket.task_id == ticket.task_id:
                    self._lease(worker, group, group.waiting & set(ticket.members))
                    held |= {(ticket.number, member) for member in ticket.members}
            self._put_back(worker, lambda number, member: (number, member) not in held)

    def put_back(self, worker: str, members: Collection[tuple[int, int]]) -> None:
        """Puts back members that a worker has leased and will not deliver, by ticket and number."""
        with self._changed:
            self._put_back(worker, lambda number, member: (number, member) in members)

    def deliver(
        self, worker: str, finished: Sequence[FinishedMember], usage: Mapping[str, float]
    ) -> Delivery:
        """Takes finished members; one that was delivered before counts once.

        Args:
          worker: who played them; someone else may have leased them since it was lost.
          usage: the worker's counts and seconds since its last delivery, by name.
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
        """Puts back all that a worker has not delivered; returns how many members."""
        with self._changed:
            self._workers.discard(worker)
            return self._put_back(worker, lambda *_: True)

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

    def _put_back(self, worker: str, chosen: Callable[[int, int], bool]) -> int:
        """Lets other workers have what one has leased, if chosen by ticket and member."""
        lost = 0
        for number, group in self._groups.items():
            of_worker = (member for member, holder in group.leased.items() if holder == worker)
            back = {member for member in of_worker if chosen(number, member)}
            group.waiting |= back
            for member in back:
                del group.leased[member]
            lost += len(back)
        self._reissued += lost
        return lost

    def _sort(self, finished: Sequence[FinishedMember]) -> tuple[list[FinishedMember], int, int]:
        """Members that are missing, each once, and how many are doubled and unknown."""
        fresh: dict[tuple[int, int], FinishedMember] = {}
        doubled = unknown = 0
        for each in finished:
            key, group = (each.number, each.member), self._groups.get(each.number)
            if group is None:
                is_taken = each.number < self._taken * self._tasks
                doubled, unknown = doubled + is_taken, unknown + (not is_taken)
            elif not group.has(each):
                unknown += 1
            elif each.member in group.finished or key in fresh:
                doubled += 1
            else:
                fresh[key] = each
        return list(fresh.values()), doubled, unknown

    def _numbers(self, iteration: int) -> range:
        return range((iteration - 1) * self._tasks, iteration * self._tasks)

    def _is_complete(self, iteration: int) -> bool:
        groups = [self._groups.get(number) for number in self._numbers(iteration)]
        return all(group is not None and group.complete for group in groups)
