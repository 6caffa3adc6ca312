"""What SeeUPO does not promise: with one network for all turns, each step moves other turns too.

The weight of a turn is that of the policy just after its own step; later steps of the same sweep
move it again. Steps that are safe for tables lose then, with exact gradients too.
"""

from dataclasses import replace

from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import PROBLEMS

RANDOM = PROBLEMS["random"]()
TABLES = LabSettings(seeds=4, iterations=60, exact=True)


def test_steps_that_tables_allow_lose_value_where_turns_share_parameters():
    assert experiment(RANDOM, "seeupo", TABLES).fall_SI.max() <= 1e-6
    shared = experiment(RANDOM, "seeupo", replace(TABLES, policy="shared"))
    assert shared.fall_SI.max() > 0.01
    assert shared.solved < 1
