"""Calls finish on their own, and one that fails or hangs is tried again or costs only itself."""

import threading
import time

import pytest

from seeupo_jax.envs import pool as pool_module
from seeupo_jax.envs.base import Killable, ServerAtCapacity, TransientError
from seeupo_jax.envs.pool import CallOutcome, EnvCall, EnvPool, Failure, ServerFull

TIMEOUT_S = 0.5
WAIT_S = 0.05
DOWN = RuntimeError("down")


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

    def make_pool(size=4, workers=2, timeout_s=TIMEOUT_S, made=Counter, **retries):
        def new():
            return made(released)

        pools.append(EnvPool(new, size, workers=workers, timeout_s=timeout_s, **retries))
        return pools[-1]

    before = set(threading.enumerate())
    yield make_pool
    released.set()
    for pool in pools:
        pool.close()
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left  # closing ends every thread, those that hung included


def drain(pool):
    """Polls until no call is open: what finished, in that order."""
    finished = []
    while pool.open:
        finished += pool.poll(None)
    return finished


def run(pool, calls):
    """What came of calls, in their order."""
    for call in calls:
        pool.submit(call)
    outcomes = {call.slot: outcome for call, outcome in drain(pool)}
    return [outcomes[call.slot] for call in calls]


def ask(pool, asked):
    """What came of calls without retries, by (slot, question)."""
    outcomes = run(pool, [EnvCall(slot, question) for slot, question in asked])
    assert not any(outcome.retries for outcome in outcomes)
    return [outcome.result for outcome in outcomes]


class Flaky:
    """Fails at its first `times` tries with `error`, or hangs; then it counts. Notes every try."""

    def __init__(self, times, error=DOWN):
        self.times, self.error = times, error
        self.environments, self.moments = [], []

    def __call__(self, env):
        self.environments.append(env)
        self.moments.append(time.monotonic())
        if len(self.moments) > self.times:
            return env.count()
        if self.error is None:
            return env.hang()
        raise self.error


def raised(error, method, lines, name=None):
    """The failure of a method that raises, so many lines below its first; name: that is called."""
    line = method.__code__.co_firstlineno + lines
    return Failure("env_error", f"{error} ({name or method.__name__}, test_pool.py:{line})")


def count(env):
    return env.count()


def hang(env):
    return env.hang()


def identify(env):
    return id(env)


def at_once(poll):
    """The result of a poll that must not wait."""
    began = time.monotonic()
    result = poll()
    assert time.monotonic() - began < 5  # what it must not wait for takes ten
    return result


def until(fact):
    deadline = time.monotonic() + 60
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert fact()


def test_calls_come_back_in_the_order_in_which_they_finish(make):
    pool, last = make(size=4, workers=1, timeout_s=30), threading.Event()
    calls = [EnvCall(slot, lambda env, slot=slot: 10 * slot) for slot in (2, 0, 3)]
    calls.append(EnvCall(1, lambda env: last.set() or 10))
    for call in calls:
        pool.submit(call)
    assert last.wait(10)
    first = pool.poll(None)
    assert len(first) >= 3  # not one a poll
    finished = first + drain(pool)
    assert all(got is call for (got, _), call in zip(finished, calls, strict=True))
    assert [outcome for _, outcome in finished] == [CallOutcome(r, 0) for r in (20, 0, 30, 10)]


def test_the_oldest_is_the_call_that_has_been_at_work_for_longest(make):
    pool = make(size=3, workers=2, timeout_s=30)
    assert pool.oldest is None
    pool.submit(EnvCall(2, hang))
    until(lambda: pool.oldest is not None)
    time.sleep(0.05)
    pool.submit(EnvCall(0, hang))
    pool.submit(EnvCall(1, hang))  # waits for a thread: it is not at work
    until(lambda: pool.open == 3)
    slot, seconds = pool.oldest
    assert slot == 2 and 0.05 <= seconds < 30
    pool._envs[0].released.set()
    assert len(drain(pool)) == 3 and pool.oldest is None


def test_what_is_given_up_at_once_comes_back_by_slot(make):
    pool, begun = make(timeout_s=0.1), threading.Semaphore(0)
    for slot in (3, 1):
        pool.submit(EnvCall(slot, lambda env: begun.release() or env.hang()))
    assert begun.acquire(timeout=30) and begun.acquire(timeout=30)
    time.sleep(0.2)
    assert [call.slot for call, _ in pool.poll()] == [1, 3]


def test_a_slow_call_delays_no_other(make):
    pool, go_on = make(workers=2, timeout_s=30), threading.Event()
    pool.submit(EnvCall(0, lambda env: go_on.wait(10)))
    for number in range(1, 4):
        pool.submit(EnvCall(1, count))
        ((call, outcome),) = pool.poll(None)
        assert (call.slot, outcome.result, pool.open) == (1, number, 1)
    go_on.set()
    assert [(call.slot, outcome.result) for call, outcome in pool.poll(None)] == [(0, True)]


def test_submitting_and_a_poll_of_0_return_at_once(make):
    pool, go_on = make(size=3, workers=1, timeout_s=30), threading.Event()
    for slot in range(3):
        at_once(lambda slot=slot: pool.submit(EnvCall(slot, lambda env: go_on.wait(10))))
    assert at_once(pool.poll) == [] and pool.open == 3
    go_on.set()
    assert len(drain(pool)) == 3


def test_a_poll_waits_no_longer_than_its_timeout_nor_than_it_must(make):
    pool, go_on = make(timeout_s=30), threading.Event()
    pool.submit(EnvCall(0, lambda env: go_on.wait(10)))
    began = time.monotonic()
    assert pool.poll(0.2) == []
    assert 0.2 <= time.monotonic() - began < 5
    go_on.set()
    assert len(pool.poll(20)) == 1
    assert time.monotonic() - began < 5


def test_a_poll_with_nothing_open_returns_at_once(make):
    pool = make()
    for timeout_s in (None, 60.0, 0.0):
        assert at_once(lambda timeout_s=timeout_s: pool.poll(timeout_s)) == []
    ask(pool, [(0, count)])
    assert at_once(lambda: pool.poll(None)) == [] and pool.open == 0


def test_waiting_takes_no_processor_time(make):
    # What it waits for: a call at work, one without a thread, one whose retry is not yet due.
    pool = make(size=3, workers=1, timeout_s=30, retries=1, retry_wait_s=30)
    flaky, go_on = Flaky(1), threading.Event()
    pool.submit(EnvCall(0, flaky, fresh=True))
    until(lambda: flaky.moments)
    pool.submit(EnvCall(1, lambda env: go_on.wait(10)))
    pool.submit(EnvCall(2, count))
    began, cpu = time.monotonic(), time.thread_time()
    assert pool.poll(0.5) == []
    assert time.monotonic() - began >= 0.5 and time.thread_time() - cpu < 0.1
    go_on.set()


def test_a_slot_takes_one_call_until_a_poll_has_returned_it(make):
    pool, go_on = make(timeout_s=30), threading.Event()
    pool.submit(EnvCall(1, lambda env: go_on.wait(10)))
    with pytest.raises(ValueError, match="slot 1 was called before"):
        pool.submit(EnvCall(1, count))
    go_on.set()
    pool.submit(EnvCall(0, count))
    assert pool.open == 2
    time.sleep(0.05)  # finished by now, and still not returned
    with pytest.raises(ValueError, match="slot 1 was called before"):
        pool.submit(EnvCall(1, count))
    drain(pool)
    assert pool.open == 0
    assert ask(pool, [(1, count)]) == [1]  # the refused calls were never made


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_does_not_exist_is_refused(make, slot):
    with pytest.raises(ValueError, match=f"slot {slot} was called in a pool with slots 0 to 3"):
        make().submit(EnvCall(slot, count))


def test_a_drained_pool_has_ended_every_call_and_takes_new_ones(make):
    pool = make(size=4, workers=1, timeout_s=0.2, retries=1, retry_wait_s=0.01)
    hung, flaky = Flaky(1, None), Flaky(1)
    calls = [
        EnvCall(0, hung, fresh=True),
        EnvCall(1, flaky, fresh=True),
        EnvCall(2, count),
        EnvCall(3, hang),
    ]
    for call in calls:
        pool.submit(call)
    pool.drain()
    assert (len(hung.moments), len(flaky.moments), pool.open) == (2, 2, 0)
    assert at_once(lambda: pool.poll(None)) == []  # their results are dropped
    assert ask(pool, [(2, count), (3, count)]) == [2, 1]


def test_polls_of_0_give_up_what_is_late_and_queue_the_retries_that_are_due(make):
    pool = make(workers=1, timeout_s=0.2, retries=1, retry_wait_s=0.1)
    hung, flaky = Flaky(1, None), Flaky(1)
    pool.submit(EnvCall(0, hung, fresh=True))
    pool.submit(EnvCall(1, flaky, fresh=True))
    pool.submit(EnvCall(2, hang))
    finished, deadline = [], time.monotonic() + 10
    while pool.open and time.monotonic() < deadline:
        finished += at_once(pool.poll)
        time.sleep(0.01)
    assert {call.slot: outcome for call, outcome in finished} == {
        0: CallOutcome(1, 1),
        1: CallOutcome(1, 1),
        2: CallOutcome(Failure("timeout", "no answer in 0.2 s"), 0),
    }
    assert pool.abandoned == 2
    assert hung.moments[1] - hung.moments[0] >= 0.2 + 0.1
    assert flaky.moments[1] - flaky.moments[0] >= 0.1


def test_an_answer_that_is_there_when_the_pool_is_polled_is_not_late(make):
    pool, answered = make(timeout_s=0.1), threading.Barrier(3, timeout=60)

    def count_late(env):
        time.sleep(0.2)
        answered.wait()
        return env.count()

    for slot in (0, 1):
        pool.submit(EnvCall(slot, count_late))
    answered.wait()
    while pool.oldest is not None:  # until none runs
        time.sleep(0.01)
    assert [outcome.result for _, outcome in pool.poll()] == [1, 1]
    assert pool.abandoned == 0


def test_calls_run_side_by_side_up_to_the_number_of_workers(make):
    pool = make(size=4, workers=3, timeout_s=30)
    together = threading.Barrier(3, timeout=60)
    assert ask(pool, [(i, lambda env: together.wait() >= 0) for i in range(3)]) == [True] * 3
    lock, running, most = threading.Lock(), 0, 0

    def busy(env):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    ask(pool, [(i, busy) for i in range(4)])
    assert most <= 3


def test_a_slot_keeps_its_environment_between_calls(make):
    pool = make()
    assert ask(pool, [(2, count), (0, count)]) == [1, 1]
    assert ask(pool, [(0, count), (2, count), (1, count)]) == [2, 2, 1]
    assert ask(pool, []) == []


def test_an_exception_costs_one_call_and_keeps_the_environment(make):
    pool = make()
    ask(pool, [(0, count)])

    def fail(env):
        env.count()
        raise RuntimeError("no such order")

    failure, other = ask(pool, [(0, fail), (1, count)])
    assert failure == raised("RuntimeError: no such order", fail, 2)
    assert (other, pool.abandoned) == (1, 0)
    assert ask(pool, [(0, count)]) == [3]


def test_an_environment_that_exits_is_an_exception_like_any_other(make):
    pool = make(workers=1)

    def leave(env):
        raise SystemExit(2)

    results = ask(pool, [(0, leave), (1, count)])
    assert results == [raised("SystemExit: 2", leave, 1), 1]
    assert pool.abandoned == 0


def test_a_hang_costs_its_time_limit_and_its_slot_gets_a_new_environment(make):
    pool = make(workers=1)  # the only worker hangs, so the others need its substitute
    before = ask(pool, [(slot, identify) for slot in range(3)])
    ask(pool, [(slot, count) for slot in range(3)])
    began = time.monotonic()
    results = ask(pool, [(0, hang), (1, count), (2, count)])
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + 5
    assert results == [Failure("timeout", "no answer in 0.5 s"), 2, 2]
    assert pool.abandoned == 1
    after = ask(pool, [(slot, identify) for slot in range(3)])
    assert after[1:] == before[1:] and after[0] != before[0]
    assert ask(pool, [(slot, count) for slot in range(3)]) == [1, 3, 3]


def test_calls_that_wait_for_a_worker_are_not_late(make):
    # Five calls of a quarter of the limit each, one after the other, take longer than it.
    pool = make(size=5, workers=1, timeout_s=1.0)
    results = ask(pool, [(slot, lambda env: time.sleep(0.25) or env.count()) for slot in range(5)])
    assert results == [1] * 5 and pool.abandoned == 0


def test_every_worker_may_hang_at_once(make):
    pool = make(size=4, workers=2)
    results = ask(pool, [(slot, hang) for slot in range(4)])
    assert [r.stop for r in results] == ["timeout"] * 4
    assert pool.abandoned == 4
    assert ask(pool, [(slot, count) for slot in range(4)]) == [1] * 4


def test_a_call_that_ends_since_it_is_killed_is_late_and_not_tried_again(make):
    class Cut(Counter, Killable):
        cut = threading.Event()

        def hang(self):
            self.cut.wait(30)
            raise TransientError("the connection has ended")

        def kill(self):
            self.cut.set()
            time.sleep(0.1)  # its thread sees the error meanwhile

    pool = make(timeout_s=0.2, retries=2, retry_wait_s=0.001, made=Cut)
    assert run(pool, [EnvCall(0, hang)]) == [
        CallOutcome(Failure("timeout", "no answer in 0.2 s"), 0)
    ]


def test_a_late_answer_never_reaches_a_later_call(make):
    pool = make(size=1, workers=1)
    ask(pool, [(0, hang)])
    (environment,) = ask(pool, [(0, lambda env: env)])
    environment.released.set()
    for _ in range(20):
        assert ask(pool, [(0, count)])[0] != "late"


def test_a_closed_pool_has_closed_its_environments_and_takes_no_call(make):
    pool = make()
    environments = ask(pool, [(slot, lambda env: env) for slot in range(4)])
    pool.close()
    assert all(environment.closed for environment in environments)
    with pytest.raises(ValueError, match="slot 0 was called in a closed pool"):
        pool.submit(EnvCall(0, count))
    assert pool.poll(None) == []
    pool.close()


def test_closing_with_calls_open_closes_every_environment_after_its_call(make):
    pool = make(size=4, workers=1, timeout_s=30, retries=5, retry_wait_s=0.001)
    environments = ask(pool, [(slot, lambda env: env) for slot in range(4)])
    at_work, never = threading.Event(), Flaky(0)

    def fail(env):
        at_work.set()
        time.sleep(0.2)
        assert not env.closed
        env.count()
        raise TransientError("busy")

    pool.submit(EnvCall(3, count))
    pool.submit(EnvCall(0, fail))
    pool.submit(EnvCall(1, never))  # waits for the only thread
    assert at_work.wait(10)
    pool.close()
    assert all(environment.closed for environment in environments)
    assert [environment.calls for environment in environments] == [1, 0, 0, 1]  # and no retry
    assert not never.moments and (pool.open, pool.poll(None), pool.abandoned) == (0, [], 0)


def test_closing_waits_for_no_retry(make):
    pool, flaky = make(timeout_s=30, retries=1, retry_wait_s=60), Flaky(1)
    pool.submit(EnvCall(0, flaky, fresh=True))
    until(lambda: flaky.environments and flaky.environments[0].closed)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5 and len(flaky.moments) == 1


def test_closing_gives_up_a_call_that_hangs_and_closes_the_others(make):
    pool = make(workers=1, timeout_s=0.3)
    environments = ask(pool, [(slot, lambda env: env) for slot in range(4)])
    began = threading.Event()
    pool.submit(EnvCall(0, lambda env: began.set() or env.hang()))
    assert began.wait(10)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert [env.closed for env in environments] == [False, True, True, True]
    assert pool.abandoned == 1
    environments[0].released.set()
    until(lambda: environments[0].closed)


def test_closing_makes_no_environment_in_place_of_one_that_was_given_up(make):
    made = []
    pool = make(size=2, timeout_s=0.2, made=lambda released: made.append(0) or Counter(released))
    ask(pool, [(0, hang)])
    pool.close()
    assert len(made) == 2


def test_a_call_that_starts_anew_is_tried_again_on_new_environments(make):
    pool = make(retries=2, retry_wait_s=0.001)
    (before,) = ask(pool, [(1, lambda env: env)])
    flaky = Flaky(2)
    assert run(pool, [EnvCall(1, flaky, fresh=True), EnvCall(0, count)]) == [
        CallOutcome(1, 2),
        CallOutcome(1, 0),
    ]
    assert flaky.environments[0] is before and len(set(map(id, flaky.environments))) == 3
    assert [env.closed for env in flaky.environments] == [True, True, False]
    assert ask(pool, [(1, lambda env: env)]) == [flaky.environments[2]]


def test_what_fails_at_every_try_is_a_failure_and_its_slot_gets_a_new_environment(make):
    pool = make(retries=2, retry_wait_s=0.001)
    flaky = Flaky(3)
    assert run(pool, [EnvCall(0, flaky, fresh=True)]) == [
        CallOutcome(raised("RuntimeError: down", Flaky.__call__, 7), 2)
    ]
    (after,) = ask(pool, [(0, lambda env: env)])
    assert after not in flaky.environments and not after.closed


def test_only_a_transient_error_repeats_a_call_that_goes_on_and_on_the_same_environment(make):
    pool = make(retries=2, retry_wait_s=0.001)
    before = ask(pool, [(slot, lambda env: env) for slot in range(2)])
    transient, lasting = Flaky(2, TransientError("busy")), Flaky(1)
    assert run(pool, [EnvCall(0, transient), EnvCall(1, lasting)]) == [
        CallOutcome(1, 2),
        CallOutcome(raised("RuntimeError: down", Flaky.__call__, 7), 0),
    ]
    assert transient.environments == [before[0]] * 3 and len(lasting.moments) == 1
    assert not before[0].closed


FULL = ServerAtCapacity("http://x: all 2 sessions are open")


def test_a_call_waits_for_a_servers_room_on_its_environment_and_uses_no_retry(make, monkeypatch):
    monkeypatch.setattr(pool_module, "_ROOM_WAIT_S", 0.01)
    pool, fresh, later = make(retries=1, timeout_s=30), Flaky(9, FULL), Flaky(4, FULL)
    assert run(pool, [EnvCall(0, fresh, fresh=True), EnvCall(1, later)]) == [CallOutcome(1, 0)] * 2
    for flaky in (fresh, later):
        assert len(set(flaky.environments)) == 1 and not flaky.environments[0].closed


def test_a_wait_that_is_long_is_said_once_and_one_that_is_too_long_ends_the_run(
    make, monkeypatch, caplog
):
    monkeypatch.setattr(pool_module, "_ROOM_WAIT_S", 0.05)
    pool, other = make(size=3, retries=1, retry_wait_s=0.001, timeout_s=0.5), Flaky(0)
    for call in (
        EnvCall(0, Flaky(99, FULL), fresh=True),
        EnvCall(1, Flaky(99, FULL)),
        EnvCall(2, other),
    ):
        pool.submit(call)
    with pytest.raises(ServerFull) as error:
        drain(pool)
    assert len(other.moments) == 1  # others are answered meanwhile
    assert str(error.value) == (
        "http://x: all 2 sessions are open, and this process has up to 3 environments (those of"
        " config.rollout.concurrency); waited for 0.5 s (config.env.timeout_s); allowed: a server"
        " whose --max-sessions suffices for all trainers."
    )
    (record,) = caplog.records
    assert "--max-sessions" in record.getMessage() and "all 2 sessions" in record.getMessage()
    assert pool.open == 2  # no call is lost: the run ends before
    pool.drain()  # waits for no room
    assert pool.open == 0 and run(pool, [EnvCall(0, count)])[0].result == 1


def test_no_retries_are_allowed(make):
    for call in (EnvCall(0, Flaky(1), fresh=True), EnvCall(1, Flaky(1, TransientError("busy")))):
        (outcome,) = run(make(retries=0), [call])
        assert outcome.result.stop == "env_error" and outcome.retries == 0


@pytest.mark.parametrize("error", [TransientError("busy"), DOWN])
def test_reading_the_answer_is_never_repeated_nor_what_was_answered(make, error):
    pool = make(retries=2, retry_wait_s=0.001)

    def read(env, answer):
        assert answer == 1
        raise error

    (outcome,) = run(pool, [EnvCall(0, count, read, fresh=True)])
    assert (outcome.result.stop, outcome.retries) == ("env_error", 0)
    assert ask(pool, [(0, count)]) == [2]
    assert run(pool, [EnvCall(0, count, lambda env, answer: (env.calls, -answer))])[0].result == (
        3,
        -3,
    )


def test_a_hang_is_tried_again_where_the_call_starts_anew_and_nowhere_else(make):
    pool = make(workers=1, timeout_s=0.3, retries=1, retry_wait_s=0.001)
    again, once = Flaky(1, None), Flaky(1, None)
    outcomes = run(pool, [EnvCall(0, again, fresh=True), EnvCall(1, once), EnvCall(2, count)])
    assert outcomes == [
        CallOutcome(1, 1),
        CallOutcome(Failure("timeout", "no answer in 0.3 s"), 0),
        CallOutcome(1, 0),
    ]
    assert (len(again.moments), len(once.moments), pool.abandoned) == (2, 1, 2)
    assert again.environments[0] is not again.environments[1]


def test_a_late_answer_to_the_first_try_is_nobodys_and_its_environment_is_closed(make):
    pool = make(size=1, workers=1, retries=1, retry_wait_s=0.001)
    first = []

    def late(env):
        first.append(env)
        if len(first) == 1:
            return env.hang()
        first[0].released.set()  # the first try ends while the second is at work
        deadline = time.monotonic() + 60
        while not first[0].closed and time.monotonic() < deadline:
            time.sleep(0.005)
        return "in time"

    outcome = run(pool, [EnvCall(0, late, fresh=True)])
    assert outcome == [CallOutcome("in time", 1)]
    assert ask(pool, [(0, lambda env: env)]) == [first[1]] and first[0].closed


def test_the_wait_before_a_retry_doubles(make):
    flaky = Flaky(3)
    run(make(retries=3, retry_wait_s=WAIT_S), [EnvCall(0, flaky, fresh=True)])
    waits = [
        after - before for before, after in zip(flaky.moments, flaky.moments[1:], strict=False)
    ]
    for wait, wanted in zip(waits, (WAIT_S, 2 * WAIT_S, 4 * WAIT_S), strict=True):
        assert wanted <= wait < wanted + 2


def test_the_wait_before_a_retry_is_no_part_of_the_time_limit(make):
    pool = make(timeout_s=0.2, retries=1, retry_wait_s=0.4)
    assert run(pool, [EnvCall(0, Flaky(1), fresh=True)]) == [CallOutcome(1, 1)]
    assert pool.abandoned == 0


def test_a_thread_serves_others_while_a_call_waits_for_its_retry(make):
    pool = make(workers=1, retries=1, retry_wait_s=0.3)
    flaky, others = Flaky(1), [Flaky(0) for _ in range(3)]
    run(pool, [EnvCall(0, flaky, fresh=True), *(EnvCall(i + 1, o) for i, o in enumerate(others))])
    failed, again = flaky.moments
    assert all(failed < other.moments[0] < again for other in others)


def test_many_that_fail_at_once_wait_side_by_side(make):
    pool = make(size=40, workers=2, timeout_s=30, retries=1, retry_wait_s=0.2)
    began = time.monotonic()
    outcomes = run(pool, [EnvCall(slot, Flaky(slot % 4), fresh=True) for slot in range(40)])
    assert time.monotonic() - began < 20 * 0.2
    for slot, outcome in enumerate(outcomes):
        assert outcome.retries == min(slot % 4, 1)
        assert (outcome.result == 1) == (slot % 4 < 2)


def test_an_environment_that_cannot_be_made_again_costs_its_own_call(make):
    broken = threading.Event()

    def made(released):
        if broken.is_set():
            raise OSError("no port left")
        return Counter(released)

    pool = make(retries=1, retry_wait_s=0.001, made=made)
    broken.set()
    outcomes = run(pool, [EnvCall(0, Flaky(1), fresh=True), EnvCall(1, count)])
    assert outcomes == [
        CallOutcome(raised("OSError: no port left", made, 2, "new"), 1),
        CallOutcome(1, 0),
    ]
    broken.clear()
    assert ask(pool, [(0, count), (1, count)]) == [1, 2]


def test_a_closed_pool_leaves_no_thread_but_those_that_hang():
    before = set(threading.enumerate())
    gate = threading.Event()
    pool = EnvPool(lambda: Counter(gate), 3, workers=3, timeout_s=0.2)
    pool.submit(EnvCall(0, Counter.hang))
    while not pool.poll(None):
        pass
    pool.close()
    (hung,) = set(threading.enumerate()) - before
    gate.set()
    hung.join(10)
    assert not hung.is_alive()
