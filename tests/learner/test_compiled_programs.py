"""What learners have in common."""

import sys
import types

import learner_cases as cases
import pytest

from seeupo_jax.algorithms.objectives import Objective
from seeupo_jax.configuration.optimizer_schema import Optimizer, ParameterGroup
from seeupo_jax.learner.optimization.optimizer import make_optimizer

NAMES = ("turn_step", "refresh", "score")


def own_programs(**choices):
    """The programs of a learner that the tests' own learners do not share theirs with."""
    made = cases.unshared(cases.learner(**choices))
    return {name: getattr(made, name).func for name in NAMES}


@pytest.mark.parametrize(
    "choices",
    [{}, {"scale": "none"}, {"order": "forward"}, {"clip_low": 0.1}, {"weight_clip": None}],
)
def test_equal_learners_have_one_program_whatever_their_numbers_and_what_sweeps_make_on_the_host(
    choices,
):
    assert own_programs(**choices) == own_programs()


def test_learners_of_another_loss_have_programs_of_their_own_but_score_alike():
    plain, other = own_programs(), own_programs(ratio="token")
    assert [plain[name] is other[name] for name in NAMES] == [False, False, True]


def test_learners_of_a_reloaded_objective_have_programs_of_their_own(monkeypatch):
    module = types.ModuleType("reloaded_parts")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run_cell():
        module.OWN = Objective(lambda ratio, weight: (ratio, weight), ("ratio", "weight"))

    run_cell()
    first, same = (own_programs(objective="reloaded_parts:OWN") for _ in range(2))
    run_cell()
    other = own_programs(objective="reloaded_parts:OWN")
    assert first == same
    assert [first[name] is other[name] for name in NAMES] == [False, False, True]


def test_equal_configurations_have_one_optimizer_unless_it_is_a_users():
    rates = (0.1, 0.1, 0.2)
    adam, own = (
        [make_optimizer(Optimizer(name, rate), total_steps=9) for rate in rates]
        for name in ("adam", "optax:adam")
    )
    assert adam[0] is adam[1] is not adam[2]
    assert own[0] is not own[1]  # its function may be another one by now
    grouped = Optimizer("adam", groups=(ParameterGroup("kernel", name="optax:adam"),))
    made = [make_optimizer(grouped, total_steps=9) for _ in range(2)]
    assert made[0] is not made[1]
