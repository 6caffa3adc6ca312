"""The soft limit of open files becomes the hard one, within reason."""

import os
import resource

import pytest

from seeupo_jax.envs.transport.open_files import MOST, open_files, raise_open_files


@pytest.fixture
def hard():
    """The hard limit; the soft one is 300 until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(hard):
    allowed = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    assert raise_open_files() == allowed
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)


def test_it_is_capped_and_never_lowered(hard):
    assert raise_open_files(most=310) == 310
    assert raise_open_files(most=200) == 310
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (310, hard)


def test_pipes_are_open_files():
    before = open_files()
    ends = os.pipe()
    assert open_files() == before + 2
    for end in ends:
        os.close(end)
