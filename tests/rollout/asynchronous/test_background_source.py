"""A source behind a slow connection holds nothing up, loses nothing, and says its errors."""

import threading
import time

import pytest

from seeupo_jax.rollout.asynchronous.background_source import BackgroundSource
from seeupo_jax.rollout.asynchronous.work import FinishedMember, PublishedPolicy, Ticket


class Slow:
    """Each call waits until the connection is there."""

    def __init__(self, tickets=0):
        self.there, self.asked, self.delivered = threading.Event(), [], []
        self.left, self.policies = list(range(tickets)), [PublishedPolicy(0, "zero")]
        self.threads, self.over, self.closings, self.error = set(), False, 0, None

    def _wait(self):
        self.threads.add(threading.current_thread().name)
        assert self.there.wait(30)
        if self.error is not None:
            raise self.error

    def lease(self, conversations):
        self._wait()
        self.asked.append(conversations)
        numbers, self.left = self.left[:conversations], self.left[conversations:]
        return [Ticket(number, 1, number, "task", (0,)) for number in numbers]

    def deliver(self, finished, usage):
        self._wait()
        self.delivered.append(([each.number for each in finished], dict(usage)))

    def newer_policy(self, than):
        self._wait()
        newer = [p for p in self.policies if than is None or p.version > than]
        return newer[-1] if newer else None

    @property
    def closed(self):
        self._wait()
        return self.over

    def close(self):
        self.closings += 1


def until(holds, limit_s=20):
    """The first true value of a function."""
    end = time.monotonic() + limit_s
    while not (value := holds()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


@pytest.fixture
def open_source():
    opened = []

    def make(slow):
        opened.append((slow, BackgroundSource(slow)))
        return opened[-1][1]

    yield make
    for slow, source in opened:
        slow.error = None
        slow.there.set()
        source.close()


def test_no_call_waits_for_the_connection(open_source):
    slow = Slow(tickets=3)
    source, began = open_source(slow), time.monotonic()
    assert source.lease(2) == [] and source.newer_policy(None) is None and not source.closed
    source.deliver([FinishedMember(7, 0, None)], {"tokens": 3})
    source.deliver([FinishedMember(8, 0, None)], {"tokens": 4})
    assert time.monotonic() - began < 10.0  # the connection takes 30
    slow.there.set()
    assert until(lambda: source.newer_policy(None)) == PublishedPolicy(0, "zero")
    until(lambda: sum(len(numbers) for numbers, _ in slow.delivered) == 2)
    assert [n for numbers, _ in slow.delivered for n in numbers] == [7, 8]
    assert sum(usage["tokens"] for _, usage in slow.delivered) == 7
    assert slow.threads == {"work"}


def test_no_more_tickets_are_leased_than_there_is_room_for(open_source):
    slow = Slow(tickets=5)
    source = open_source(slow)
    slow.there.set()
    taken = []
    for room in (2, 2, 1):
        wanted = len(taken) + room
        while len(taken) < wanted:  # the room shrinks as tickets come
            taken += source.lease(wanted - len(taken))
            time.sleep(0.01)
    assert [ticket.number for ticket in taken] == [0, 1, 2, 3, 4]
    assert max(slow.asked) <= 2
    time.sleep(0.5)
    assert source.lease(0) == []


def test_a_policy_is_handed_out_once_and_the_next_one_is_read_when_it_was(open_source):
    """No more than one lies in memory beside that of the engine."""
    slow = Slow()
    source = open_source(slow)
    slow.there.set()
    until(lambda: source._policy)
    slow.policies.append(PublishedPolicy(1, "one"))
    slow.policies.append(PublishedPolicy(2, "two"))
    time.sleep(0.6)
    assert source.newer_policy(None).version == 0 and source.newer_policy(0) is None
    assert until(lambda: source.newer_policy(0)).version == 2


def test_an_error_is_raised_where_the_source_is_used(open_source):
    slow = Slow()
    source = open_source(slow)
    slow.error = ValueError("it refuses this worker")
    slow.there.set()
    until(lambda: source._error)
    for call in (
        lambda: source.lease(1),
        lambda: source.deliver([], {}),
        lambda: source.newer_policy(None),
        lambda: source.closed,
    ):
        with pytest.raises(ValueError, match="refuses this worker"):
            call()


def test_closing_hands_over_what_is_finished(open_source):
    slow = Slow()
    slow.there.set()
    source = open_source(slow)
    until(lambda: source.newer_policy(None))
    source.deliver([FinishedMember(1, 0, None)], {})
    source.close()
    assert slow.delivered == [([1], {})]
    assert slow.closings == 1


def test_closing_does_not_wait_for_a_trainer_that_is_away(open_source):
    slow = Slow()
    source, began = open_source(slow), time.monotonic()
    source.deliver([FinishedMember(1, 0, None)], {})
    source.close()
    assert time.monotonic() - began < 20.0 and slow.closings == 1


def test_the_end_of_the_run_is_seen(open_source):
    slow = Slow()
    source = open_source(slow)
    slow.over = True
    slow.there.set()
    until(lambda: source.closed)
