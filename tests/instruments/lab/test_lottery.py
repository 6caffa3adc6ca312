"""SeeUPO is for rewards that are rare and large: dividing by a group's deviation loses them.

In a group without a win every ticket lost, and divided by its own small deviation such a group says
so as loudly as another one says the contrary. Scaled by the whole batch, the win keeps its size.
"""

import pytest

from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import PROBLEMS

LOTTERY = PROBLEMS["lottery"]()
SETTINGS = LabSettings(seeds=8, iterations=60)


def test_scaled_by_the_batch_every_seed_ends_at_the_optimum():
    assert experiment(LOTTERY, "seeupo", SETTINGS).final_over_optimum.min() >= 0.95


@pytest.mark.parametrize("recipe", ["seeupo_group_std", "grpo", "gspo"])
def test_divided_by_the_groups_deviation_every_seed_ends_with_the_safe_half(recipe):
    final_S = experiment(LOTTERY, recipe, SETTINGS).final_over_optimum
    assert final_S.min() > 0.45 and final_S.max() < 0.55
