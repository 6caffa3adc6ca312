"""SeeUPO is for large steps: an early turn is judged by what the later turns have just become.

The chain's first action is worth 1/8 under the policy that sampled, and nearly 1 once the later
turns are updated. Reverse order with the weights of Eq. 8 uses that in the same iteration. Any
other schedule uses the 1/8, moves to the safe 0.5 in one step and never samples the chain again.
"""

from dataclasses import replace

import pytest

from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import PROBLEMS

DECEPTIVE = PROBLEMS["deceptive"]()
LARGE_STEPS = LabSettings(seeds=16, iterations=12, lr=50.0, clip=10.0)


def test_reverse_order_with_weights_reaches_the_optimum_on_every_seed():
    result = experiment(DECEPTIVE, "seeupo", LARGE_STEPS)
    assert result.final_over_optimum.min() >= 0.99
    assert result.iterations_to_solve == 1


@pytest.mark.parametrize("recipe", ["seeupo_forward", "seeupo_unweighted", "parallel"])
def test_any_other_schedule_ends_at_the_safe_action_on_every_seed(recipe):
    assert experiment(DECEPTIVE, recipe, LARGE_STEPS).final_over_optimum.max() <= 0.51


def test_weights_that_are_clipped_as_in_training_do_not_see_the_chain_either():
    exact = replace(LARGE_STEPS, seeds=1, exact=True)
    assert experiment(DECEPTIVE, "seeupo", exact).solved == 1
    clipped = experiment(DECEPTIVE, "seeupo:weight_clip=0.2", exact)
    assert clipped.final_over_optimum.max() <= 0.51
