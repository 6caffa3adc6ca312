"""A trainer in the process of its sampler, for tests of what samples for it."""

import contextlib
import itertools
from collections import Counter

from rollout_cases import Saying

from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import PublishedPolicy
from seeupo_jax.rollout.engine.protocol import Action


class Trainer:
    """A `WorkSource` whose run trains nothing: it takes each iteration once it is complete.

    params: of each version, an iterator; they are published one after the other.
    ahead: iterations that are admitted before their policy is there.
    taken: trajectories of each iteration. delivered: number and member of each, as they came.
    """

    def __init__(self, tasks_by_iteration, group_size, params=None, ahead=0):
        self._tasks, self._group_size = list(tasks_by_iteration), group_size
        self._params, self._ahead = params or itertools.repeat(None), ahead
        self.taken, self.delivered, self.usage = [], [], Counter()
        self.closed, self.on_delivery = False, lambda trainer: None
        self.go_back()

    def go_back(self):
        """Begins again with the first iteration, as a trainer that finds no checkpoint."""
        self.book = TicketBook(len(self._tasks[0]), self._group_size)
        self._version = -1
        self._publish()

    @property
    def version(self):
        return self._version

    def lease(self, conversations):
        return self.book.lease("worker", conversations)

    def deliver(self, finished, usage):
        self.delivered += [(each.number, each.member) for each in finished]
        self.usage.update(usage)
        self.book.deliver("worker", finished, usage)
        self.on_delivery(self)
        while self._version < len(self._tasks) and self.book.complete(self._version + 1):
            self.taken.append(self.book.take(self._version + 1).trajectories)
            self._publish()

    def newer_policy(self, than):
        return None if than == self._version else PublishedPolicy(self._version, self._policy)

    def _publish(self):
        self._version += 1
        self.closed = self._version == len(self._tasks)
        if not self.closed:
            self._policy = next(self._params)
        last = min(len(self._tasks), self._version + self._ahead + 1)
        for iteration in range(self.book.admitted + 1, last + 1):
            self.book.admit(iteration, self._tasks[iteration - 1])


class Versioned(Saying):
    """Says the same in every turn, as the version that was in use then."""

    def begin(self, params, *, seed, temperature=None, version=-1):
        super().begin(params)
        self.version, self.begun = version, getattr(self, "begun", 0) + 1

    def swap(self, params, version):
        self.version = version

    def step(self, unfinished, stop=False):
        if stop:
            raise Stopped
        return super().step(unfinished)

    def said(self, turn):
        return Action(turn.key, [5, 3], [-1.0, -2.0], version_L=[self.version] * 2)

    @contextlib.contextmanager
    def one_policy(self):
        yield
