"""What the ledger of an episode makes of its rewards, to the bit."""

import math

from seeupo_jax.rewards.reward_ledger import RewardLedger
from seeupo_jax.types import RewardRow, RewardTable


def test_steps_and_later_rewards_add_up_in_the_order_in_which_they_come():
    ledger = RewardLedger()
    for step in range(2):
        ledger.open_turn()
        ledger.add_step({"env": 0.1, "form": [0.2] * (step + 1)}, [0.3] * (step + 1))
    ledger.add({"late": 0.7}, [0.7])
    assert ledger.table(with_names=False) == RewardTable(
        RewardRow(math.fsum([0.3 + 0.3, 0.3 + 0.7]), (0.3 + 0.3, 0.3 + 0.7)),
        {
            "env": RewardRow(0.1 + 0.1, (0.1, 0.1)),
            "form": RewardRow(0.2 + (0.2 + 0.2), (0.2 + 0.2, 0.2)),
            "late": RewardRow(0.7, (0.0, 0.7)),
        },
    )


def test_a_reward_of_the_environment_alone_has_a_name_only_where_that_is_asked_for():
    ledger = RewardLedger()
    ledger.open_turn()
    ledger.add_step({"env": -0.0}, [-0.0])
    ledger.open_turn()  # its environment has not answered
    table = ledger.table(with_names=False)
    assert str(table.total.turns) == "(-0.0, 0.0)" and table.named == {}
    assert ledger.table(with_names=True).named == {"env": RewardRow(0.0, (0.0, 0.0))}


def test_an_episode_without_turns_has_its_reward_and_none_by_turn():
    ledger = RewardLedger()
    ledger.add({"late": 2.0}, [1.0])
    late = {"env": RewardRow(0.0), "late": RewardRow(2.0, ())}
    assert ledger.table(with_names=False) == RewardTable(RewardRow(1.0, ()), late)


def test_an_agents_own_reward_is_the_one_that_it_states_and_not_the_sum_of_its_turns():
    ledger = RewardLedger([0.0, 0.0])
    ledger.set_all(1.0, [0.7, 0.3 - 1e-9], {"form": 0.5}, [0.7, 0.8])
    assert ledger.table(with_names=True) == RewardTable(
        RewardRow(1.5, (0.7, 0.8)),
        {"env": RewardRow(1.0, (0.7, 0.3 - 1e-9)), "form": RewardRow(0.5, (0.0, 0.5))},
    )
