"""Tickets start in order, and each member counts once, whichever workers die whenever."""

import random
import threading
import time
from collections import Counter

import pytest
from ticket_cases import bits, play, trajectory

from seeupo_jax.rollout.asynchronous.ticket_book import Delivery, TicketBook, TicketCounts
from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket
from seeupo_jax.rollout.collect import group_requests


def test_tickets_are_numbered_over_the_run_and_members_of_a_task_count_on():
    book = TicketBook(3, 2)
    book.admit(4, ["a", "b", "a"])  # a resumed run begins with any iteration
    book.admit(5, ["b", "b", "c"])
    assert book.lease("one", 100) == [
        Ticket(9, 4, 0, "a", (0, 1)),
        Ticket(10, 4, 1, "b", (0, 1)),
        Ticket(11, 4, 2, "a", (2, 3)),
        Ticket(12, 5, 0, "b", (0, 1)),
        Ticket(13, 5, 1, "b", (2, 3)),
        Ticket(14, 5, 2, "c", (0, 1)),
    ]
    assert book.admitted == 5 and book.lease("two", 100) == []


def test_an_iteration_has_the_trajectories_that_a_collection_of_its_requests_has():
    tasks = ["a", "b", "a"]
    book = TicketBook(3, 2)
    book.admit(2, tasks)
    tickets = book.lease("one", 100)
    for ticket in reversed(tickets):
        for finished in reversed(play(ticket)):
            assert not book.complete(2)
            book.deliver("one", [finished], {"tokens": 3, "wall_s": 0.25})
    assert book.complete(2)
    taken = book.take(2)
    assert taken.usage == {"tokens": 18, "wall_s": 1.5}
    wanted = [(r.group, r.task_id, r.member) for r in group_requests(tasks, 2, 2)]
    assert [(t.group, t.task_id, t.info["member"]) for t in taken.trajectories] == wanted


def test_a_ticket_that_does_not_fit_is_not_overtaken_but_an_idle_worker_gets_it_alone():
    book = TicketBook(3, 4)
    book.admit(1, ["a", "b", "c"])
    assert [t.number for t in book.lease("one", 7)] == [0]
    assert book.lease("one", 3) == []
    assert book.lease("idle", 0) == []
    assert [t.number for t in book.lease("idle", 3)] == [1]
    assert [t.number for t in book.lease("one", 4)] == [2]


def test_a_worker_with_an_older_policy_gets_no_tickets_beyond_its_bound():
    book = TicketBook(1, 1)
    for iteration in (1, 2, 3):
        book.admit(iteration, ["a"])
    assert [t.iteration for t in book.lease("old", 9, up_to=2)] == [1, 2]
    assert [t.iteration for t in book.lease("new", 9, up_to=3)] == [3]


def test_what_a_lost_worker_had_goes_to_the_front_and_its_late_delivery_counts():
    book = TicketBook(3, 2)
    book.admit(1, ["a", "b", "c"])
    first, second = book.lease("lost", 4)
    book.deliver("lost", play(first)[:1], {})
    assert book.lose("lost") == 3
    assert book.lease("other", 3) == [
        Ticket(0, 1, 0, "a", (1,)),
        Ticket(1, 1, 1, "b", (0, 1)),
    ]
    assert book.deliver("lost", play(second)[:1], {}) == Delivery(1, 0, 0)
    again = [*play(first), *play(second)]
    assert book.deliver("other", again, {}) == Delivery(2, 2, 0)
    counts = book.counts()
    assert (counts.waiting, counts.leased, counts.finished, counts.groups_ahead) == (2, 0, 4, 2)
    assert (counts.workers, counts.reissued, counts.doubled) == (1, 3, 2)


def test_a_delivery_of_no_open_ticket_is_counted_and_changes_nothing():
    book = TicketBook(1, 1)
    book.admit(3, ["a"])
    (ticket,) = book.lease("one", 1)
    other_task = FinishedMember(2, 0, trajectory("b", 2, 0))
    no_member = FinishedMember(2, 7, trajectory("a", 2, 7))
    ahead, before = (FinishedMember(n, 0, trajectory("a", n, 0)) for n in (3, 1))
    delivery = book.deliver("one", [other_task, no_member, ahead, before], {})
    assert delivery == Delivery(taken=0, doubled=1, unknown=3) and not book.complete(3)
    book.deliver("one", play(ticket), {})
    book.take(3)
    assert book.deliver("one", play(ticket), {}) == Delivery(doubled=1)
    assert book.counts() == TicketCounts(0, 0, 0, 0, 1, 0, 2, 3)


def test_a_member_twice_in_one_delivery_counts_once():
    recorded = []
    book = TicketBook(1, 2, record=recorded.extend)
    book.admit(1, ["a"])
    (ticket,) = book.lease("one", 2)
    assert book.deliver("one", [*play(ticket), *play(ticket)], {}) == Delivery(2, 2)
    assert [each.member for each in recorded] == [0, 1]


def test_a_resumed_run_leases_only_what_is_missing():
    book = TicketBook(2, 2)
    stored = {(0, 0): trajectory("a", 2, 0), (0, 1): trajectory("a", 2, 1)}
    stored[1, 2] = trajectory("a", 3, 2)
    book.admit(2, ["a", "a"], stored)
    (ticket,) = book.lease("one", 9)
    assert ticket == Ticket(3, 2, 1, "a", (3,))
    book.deliver("one", play(ticket), {})
    taken = book.take(2).trajectories
    wanted = [trajectory("a", 2 + m // 2, m) for m in range(4)]
    assert [bits(t.segments) for t in taken] == [bits(t.segments) for t in wanted]


def test_what_a_worker_says_it_plays_is_leased_to_it_and_what_it_does_not_know_of_is_put_back():
    book = TicketBook(3, 2)
    book.admit(1, ["a", "b", "c"])
    (unheard,) = book.lease("one", 2)  # the answer is lost
    playing = [Ticket(1, 1, 1, "b", (1,)), Ticket(2, 1, 2, "x", (0, 1)), Ticket(9, 4, 0, "a", (0,))]
    book.hold("one", playing)  # of an earlier start of the trainer; of another task; not admitted
    assert book.lease("two", 3) == [unheard, Ticket(1, 1, 1, "b", (0,))]
    assert book.lease("two", 9) == [Ticket(2, 1, 2, "c", (0, 1))]
    book.put_back("one", {(1, 1), (0, 0)})
    assert book.lease("two", 9) == [Ticket(1, 1, 1, "b", (1,))]


def test_a_member_counts_only_when_it_is_recorded():
    seen = []
    book = TicketBook(1, 1, record=lambda members: seen.append((len(members), book.complete(1))))
    book.admit(1, ["a"])
    (ticket,) = book.lease("one", 1)
    book.deliver("one", play(ticket), {})
    assert seen == [(1, False)] and book.complete(1)


def test_who_waits_for_an_iteration_wakes_with_its_last_member():
    book = TicketBook(1, 2)
    book.admit(1, ["a"])
    assert not book.wait(1, 0.01) and not book.wait(2, 0.0)
    (ticket,) = book.lease("one", 2)
    finished, woken = play(ticket), []
    waiting = threading.Thread(target=lambda: woken.append(book.wait(1, 60.0)))
    waiting.start()
    book.deliver("one", finished[:1], {})
    time.sleep(0.05)
    assert waiting.is_alive()
    book.deliver("one", finished[1:], {})
    waiting.join(10.0)
    assert woken == [True]


class World:
    """Workers that lease, deliver, repeat themselves and die at random, and a trainer that takes.

    A worker starts what it leases in order; a member's starts are all noted.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.tasks, self.group_size = self.rng.randint(1, 5), self.rng.randint(1, 4)
        self.max_lag, self.iterations = self.rng.randint(0, 3), 6
        self.drawn = {
            k: [self.rng.choice("abc") for _ in range(self.tasks)]
            for k in range(1, self.iterations + 1)
        }
        self.recorded = Counter()
        self.book = TicketBook(self.tasks, self.group_size, record=self.record)
        self.playing = {f"w{i}": [] for i in range(self.rng.randint(1, 4))}
        self.delivered, self.fresh, self.taken = [], -1, {}
        self.version = 0
        self.leased = set()

    def record(self, members):
        self.recorded.update((each.number, each.member) for each in members)

    def run(self):
        while self.version < self.iterations:
            self.admit()
            self.rng.choice([self.lease, self.lease, self.deliver, self.deliver, self.die])()
            self.repeat()
            self.train()
            counts = self.book.counts()
            opened = (self.book.admitted - self.version) * self.tasks * self.group_size
            assert counts.waiting + counts.leased + counts.finished == opened

    def admit(self):
        bound = min(self.iterations, self.version + self.max_lag + 1)
        while self.book.admitted < bound and self.rng.random() < 0.7:
            k = self.book.admitted + 1
            self.book.admit(k, self.drawn[k])

    def lease(self):
        worker = self.rng.choice([*self.playing])
        tickets = self.book.lease(worker, self.rng.randint(0, 10))
        for ticket in tickets:
            assert ticket.number < (self.version + self.max_lag + 1) * self.tasks
            if ticket.number > self.fresh:  # a group's first start: none is left out
                assert ticket.number == self.fresh + 1
                self.fresh = ticket.number
            self.playing[worker] += play(ticket)
        assert [t.number for t in tickets] == sorted(t.number for t in tickets)

    def deliver(self):
        worker = self.rng.choice([*self.playing])
        self.rng.shuffle(self.playing[worker])
        cut = self.rng.randint(0, len(self.playing[worker]))
        now, self.playing[worker] = self.playing[worker][:cut], self.playing[worker][cut:]
        self.book.deliver(worker, now, {"members": len(now)})
        self.delivered += now

    def die(self):
        worker = self.rng.choice([*self.playing])
        self.book.lose(worker)
        if self.rng.random() < 0.5:  # else it only was silent, and goes on
            self.playing[worker] = []

    def repeat(self):
        if self.delivered and self.rng.random() < 0.3:
            each = self.rng.choice(self.delivered)
            assert self.book.deliver("anyone", [each], {}) == Delivery(doubled=1)

    def train(self):
        k = self.version + 1
        if self.book.complete(k):
            self.taken[k] = self.book.take(k).trajectories
            self.version = k


@pytest.mark.parametrize("seed", range(60))
def test_whatever_workers_do_every_member_counts_once_in_order_within_the_admission(seed):
    world = World(seed)
    world.run()
    for k, tasks in world.drawn.items():
        wanted = [
            (r.group, r.task_id, r.member) for r in group_requests(tasks, world.group_size, k)
        ]
        got = [(t.group, t.task_id, t.info["member"]) for t in world.taken[k]]
        assert got == wanted
    assert set(world.recorded.values()) == {1}
    assert len(world.recorded) == world.iterations * world.tasks * world.group_size


def test_threads_share_a_book():
    """Eight workers of which some die, and a trainer: nothing is lost and nothing doubled."""
    tasks, group_size, iterations = 8, 4, 12
    recorded = Counter()
    book = TicketBook(
        tasks, group_size, record=lambda ms: recorded.update((m.number, m.member) for m in ms)
    )
    over = threading.Event()

    def work(name):
        rng = random.Random(name)
        while not over.is_set():
            for ticket in book.lease(name, 8):
                if rng.random() < 0.2:
                    book.lose(name)
                else:
                    book.deliver(name, play(ticket), {"tickets": 1})

    workers = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(8)]
    for worker in workers:
        worker.start()
    book.admit(1, ["a"] * tasks)
    for k in range(1, iterations + 1):
        if k < iterations:
            book.admit(k + 1, [f"t{i}" for i in range(tasks)])
        assert book.wait(k, 60.0)
        assert len(book.take(k).trajectories) == tasks * group_size
    over.set()
    for worker in workers:
        worker.join()
    assert set(recorded.values()) == {1} and len(recorded) == iterations * tasks * group_size
