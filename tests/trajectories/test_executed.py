"""Which actions an environment could execute, by what it says itself."""

import dataclasses

import numpy as np
import pytest

from seeupo_jax.trajectories.executed import executed_turns
from seeupo_jax.types import Segment, Trajectory

TURN_L = np.array([-1, 0, 0, -1, 1, -1, 2], np.int32)
SEGMENT = Segment(np.zeros(7, np.int32), TURN_L, np.zeros(7, np.float32))
PLAIN = Trajectory((SEGMENT,), 0.0, 0)


def saying(executed, **fields):
    return dataclasses.replace(PLAIN, info={"executed": executed}, **fields)


def test_it_is_what_the_environment_says_and_true_where_it_says_nothing():
    assert list(executed_turns(PLAIN)) == [True, True, True]
    assert list(executed_turns(saying([True, False, True]))) == [True, False, True]


def test_a_step_that_hung_was_not_executed():
    hung = saying([True, True], stop="timeout", timeout_counts=True)
    assert list(executed_turns(hung)) == [True, True, False]


@pytest.mark.parametrize("said", [[True, True], [1, 1, 1], "yes"])
def test_what_is_no_list_of_a_flag_for_each_turn_is_refused(said):
    with pytest.raises(ValueError, match=r'info\["executed"\] of task .*; allowed: a list of True'):
        executed_turns(saying(said))
