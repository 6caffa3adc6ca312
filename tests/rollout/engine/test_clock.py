"""The clock gives each dispatch the time since the one before it was over."""

import threading

import pytest

from seeupo_jax.rollout.engine import clock as module
from seeupo_jax.rollout.engine.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """A clock on devices that are done with results at the time that these are."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.jax, "block_until_ready", lambda end: now.__setitem__(0, end))
    return Clock()


def test_time_is_split_between_what_the_devices_did(clock):
    clock.prefill(10, 13)  # given at 10, over at 13
    first = clock.decode(11, 17)
    clock.prefill(12, 19)
    second = clock.decode(12, 20)
    clock.land(first)
    assert clock.seconds == {"prefill_s": 3, "decode_s": 4}
    clock.land(second)
    assert clock.seconds == {"prefill_s": 3 + 2, "decode_s": 4 + 1}


def test_idle_time_is_nobodys(clock):
    clock.land(clock.decode(5, 6))
    clock.land(clock.decode(100, 102))  # the environments took their time
    assert clock.seconds == {"prefill_s": 0, "decode_s": 3}
    assert clock.idle_s == 100 - 6
    clock.land(clock.decode(101, 104))  # given before the end of the one before
    assert clock.idle_s == 100 - 6
    clock.begin()
    assert clock.seconds == {"prefill_s": 0, "decode_s": 0} and clock.idle_s == 0


def test_an_end_is_seen_while_the_host_is_held_up(monkeypatch):
    now, done = [10.0], threading.Event()
    seen = threading.Event()

    def wait(results):
        if results == "prefilled":
            done.wait(60)

    monkeypatch.setattr(module.jax, "block_until_ready", wait)
    monkeypatch.setattr(module.time, "monotonic", lambda: (seen.set(), now[0])[1])
    clock = Clock()
    clock.prefill(10, "prefilled")
    now[0] = 13.0
    done.set()
    assert seen.wait(60)
    now[0] = 17.0  # the dispatch of the loop returned when this was over
    clock.land(clock.decode(11, "decoded"))
    assert clock.seconds == {"prefill_s": 3, "decode_s": 4}


def test_what_fails_on_the_devices_is_raised_where_it_is_waited_for(monkeypatch):
    def fail(results):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module.jax, "block_until_ready", fail)
    clock = Clock()
    ticket = clock.decode(0, None)
    with pytest.raises(RuntimeError, match="out of memory"):
        clock.land(ticket)


def test_its_thread_ends_with_a_collection_and_the_seconds_stay(clock):
    before = set(threading.enumerate())
    clock.land(clock.decode(5, 6))
    (thread,) = set(threading.enumerate()) - before
    clock.end()
    thread.join(60)
    assert not thread.is_alive() and clock.seconds["decode_s"] == 1
    clock.land(clock.decode(8, 10))  # another collection
    assert clock.seconds["decode_s"] == 1 + 2
