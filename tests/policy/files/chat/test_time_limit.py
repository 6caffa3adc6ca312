"""A limit on the time that somebody else's code computes for, in any thread."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from seeupo_jax.policy.files.chat.time_limit import time_limit


def endless():
    while True:
        try:
            sum(range(100))
        except Exception:  # as a library that goes on whatever was raised
            continue


def limited(code):
    with time_limit(0.1, "too slow"):
        return code()


@pytest.mark.parametrize("threads", [0, 1])
def test_what_does_not_end_is_ended_in_any_thread(threads):
    before = sys.gettrace()
    with pytest.raises(ValueError, match="^too slow$"):
        if threads:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(limited, endless).result()
        else:
            limited(endless)
    assert sys.gettrace() is before


def test_what_ends_is_as_without_a_limit_also_where_it_only_waits():
    before = sys.gettrace()
    assert limited(lambda: time.sleep(0.2) or "done") == "done"
    with pytest.raises(KeyError):
        limited(lambda: {}["missing"])
    assert sys.gettrace() is before
