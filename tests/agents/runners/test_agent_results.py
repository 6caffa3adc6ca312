"""What an agent came to is checked before it counts."""

import functools
import operator

import pytest

from seeupo_jax.agents.runners.agent_results import check_result
from seeupo_jax.envs.validation import ProtocolError


def test_turn_rewards_sum_to_the_reward_but_for_rounding():
    tenth = {"turn_rewards": [0.1] * 10}
    assert functools.reduce(operator.add, tenth["turn_rewards"]) != 1.0  # one after the other
    assert check_result({"reward": 1, **tenth}).turn_rewards == (0.1,) * 10
    for reward in (1.001, 0.999):
        with pytest.raises(ProtocolError, match="got a sum of 1; allowed: the reward"):
            check_result({"reward": reward, **tenth})


def test_turn_rewards_whose_sum_is_no_number_are_refused():
    with pytest.raises(ProtocolError, match="got a sum of inf; allowed: the reward, 1, as their"):
        check_result({"reward": 1, "turn_rewards": [1e308, 1e308]})


def test_a_reward_that_is_the_score_too_is_a_success_where_its_shares_add_up_to_1():
    total = 0.7 + 0.2 + 0.1
    assert total < 1 and check_result(total).score == 1.0 and check_result(total).reward == total
    assert [check_result(reward).score for reward in (-2.0, 0.25, 3.0)] == [0.0, 0.25, 1.0]
