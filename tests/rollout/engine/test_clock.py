"""The clock gives each dispatch the time since the one before it was over."""

import pytest

from seeupo_jax.rollout.engine import clock as module
from seeupo_jax.rollout.engine.clock import Clock


@pytest.fixture
def devices(monkeypatch):
    """A clock, and a function that sets the time at which all results are there."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.jax, "block_until_ready", lambda end: now.__setitem__(0, end))
    return Clock(), lambda at: now.__setitem__(0, at)


def test_time_is_split_between_what_the_devices_did(devices):
    clock, at = devices
    at(10)
    clock.prefill(13)  # given at 10, over at 13
    at(11)
    first = clock.decode()
    at(12)
    clock.prefill(19)
    second = clock.decode()
    clock.land(first, 17)
    assert clock.seconds == {"prefill_s": 3, "decode_s": 4}
    clock.land(second, 20)
    assert clock.seconds == {"prefill_s": 3 + 2, "decode_s": 4 + 1}


def test_idle_time_is_nobodys(devices):
    clock, at = devices
    at(5)
    clock.land(clock.decode(), 6)
    at(100)  # the environments took their time
    clock.land(clock.decode(), 102)
    assert clock.seconds == {"prefill_s": 0, "decode_s": 3}
    clock.begin()
    assert clock.seconds == {"prefill_s": 0, "decode_s": 0}
