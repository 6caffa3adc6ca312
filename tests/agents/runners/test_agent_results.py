"""What an agent came to is checked before it counts."""

import pytest

from seeupo_jax.agents.runners.agent_results import check_result
from seeupo_jax.envs.gate import ProtocolError


def test_turn_rewards_whose_sum_is_no_number_are_refused():
    with pytest.raises(ProtocolError, match="got a sum of inf; allowed: the reward, 1, as their"):
        check_result({"reward": 1, "turn_rewards": [1e308, 1e308]})
