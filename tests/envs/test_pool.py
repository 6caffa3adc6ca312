"""The pool answers in order, and a call that fails or hangs costs only itself."""

import threading
import time

import pytest

from seeupo_jax.envs.pool import EnvPool, Failure

TIMEOUT_S = 0.5


class Counter:
    """An environment that counts its calls; `released` lets hung calls end with the test."""

    def __init__(self, released):
        self.released = released
        self.calls = 0
        self.closed = False

    def count(self):
        self.calls += 1
        return self.calls

    def hang(self):
        self.released.wait(30)
        return "late"

    def close(self):
        self.closed = True


@pytest.fixture
def make():
    """Makes pools; closes them and ends their hung calls after the test."""
    released, pools = threading.Event(), []

    def make_pool(size=4, workers=2, timeout_s=TIMEOUT_S):
        pools.append(EnvPool(lambda: Counter(released), size, workers=workers, timeout_s=timeout_s))
        return pools[-1]

    before = set(threading.enumerate())
    yield make_pool
    released.set()
    for pool in pools:
        pool.close()
    deadline = time.monotonic() + 10
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left  # closing ends every thread, those that hung included


def count(env):
    return env.count()


def hang(env):
    return env.hang()


def identify(env):
    return id(env)


def test_results_are_in_the_order_of_the_calls_whatever_finishes_first(make):
    pool = make(size=4, workers=4, timeout_s=30)
    turns = [threading.Event() for _ in range(5)]
    turns[4].set()

    def last_first(index):
        def call(env):
            turns[index + 1].wait(10)
            turns[index].set()
            return index

        return call

    assert pool.call([(i, last_first(i)) for i in range(4)]) == [0, 1, 2, 3]


def test_calls_run_side_by_side_up_to_the_number_of_workers(make):
    pool = make(size=4, workers=3, timeout_s=30)
    together = threading.Barrier(3, timeout=10)
    assert pool.call([(i, lambda env: together.wait() >= 0) for i in range(3)]) == [True] * 3
    lock, running, most = threading.Lock(), 0, 0

    def busy(env):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    pool.call([(i, busy) for i in range(4)])
    assert most <= 3


def test_a_slot_keeps_its_environment_between_calls(make):
    pool = make()
    assert pool.call([(2, count), (0, count)]) == [1, 1]
    assert pool.call([(0, count), (2, count), (1, count)]) == [2, 2, 1]
    assert pool.call([]) == []


def test_an_exception_costs_one_call_and_keeps_the_environment(make):
    pool = make()
    pool.call([(0, count)])

    def fail(env):
        env.count()
        raise RuntimeError("no such order")

    failure, other = pool.call([(0, fail), (1, count)])
    assert failure == Failure("env_error", "RuntimeError: no such order")
    assert (other, pool.abandoned) == (1, 0)
    assert pool.call([(0, count)]) == [3]


def test_an_environment_that_exits_is_an_exception_like_any_other(make):
    pool = make(workers=1)

    def leave(env):
        raise SystemExit(2)

    results = pool.call([(0, leave), (1, count)])
    assert results == [Failure("env_error", "SystemExit: 2"), 1]
    assert pool.abandoned == 0


def test_a_hang_costs_its_time_limit_and_its_slot_gets_a_new_environment(make):
    pool = make(workers=1)  # the only worker hangs, so the others need its substitute
    before = pool.call([(slot, identify) for slot in range(3)])
    pool.call([(slot, count) for slot in range(3)])
    began = time.monotonic()
    results = pool.call([(0, hang), (1, count), (2, count)])
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 5
    assert results == [Failure("timeout", "no answer in 0.5 s"), 2, 2]
    assert pool.abandoned == 1
    after = pool.call([(slot, identify) for slot in range(3)])
    assert after[1:] == before[1:] and after[0] != before[0]
    assert pool.call([(slot, count) for slot in range(3)]) == [1, 3, 3]


def test_calls_that_wait_for_a_worker_are_not_late(make):
    # Five calls of a quarter of the limit each, one after the other, take longer than it.
    pool = make(size=5, workers=1, timeout_s=1.0)
    results = pool.call([(slot, lambda env: time.sleep(0.25) or env.count()) for slot in range(5)])
    assert results == [1] * 5 and pool.abandoned == 0


def test_every_worker_may_hang_at_once(make):
    pool = make(size=4, workers=2)
    results = pool.call([(slot, hang) for slot in range(4)])
    assert [r.stop for r in results] == ["timeout"] * 4
    assert pool.abandoned == 4
    assert pool.call([(slot, count) for slot in range(4)]) == [1] * 4


def test_a_late_answer_never_reaches_a_later_call(make):
    pool = make(size=1, workers=1)
    pool.call([(0, hang)])
    (environment,) = pool.call([(0, lambda env: env)])
    environment.released.set()
    for _ in range(20):
        assert pool.call([(0, count)])[0] != "late"


def test_a_closed_pool_has_closed_its_environments_and_takes_no_call(make):
    pool = make()
    environments = pool.call([(slot, lambda env: env) for slot in range(4)])
    pool.close()
    assert all(environment.closed for environment in environments)
    with pytest.raises(IndexError):
        pool.call([(0, count)])
    pool.close()
