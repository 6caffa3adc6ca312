"""Estimators and objectives: each is found by its file, and keeps what its entry declares."""

import dataclasses
import sys

import numpy as np
import pytest
from places import ROOT

from seeupo_jax.algorithms import advantage, estimators, objectives
from seeupo_jax.algorithms.estimator_options import TurnDiscount
from seeupo_jax.algorithms.estimators import grae
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import entry_names, find_entry
from seeupo_jax.options import CHECK
from seeupo_jax.training.algorithm_trial import try_estimator, try_objective

PAGE = (ROOT / "docs" / "own_algorithm.md").read_text()
ESTIMATORS = pytest.mark.parametrize("name", entry_names("advantage"))
OBJECTIVES = pytest.mark.parametrize("name", entry_names("objective"))


def listed(names):
    return ", ".join(f"`{name}`" for name in names) if names else "none"


def estimator_row(name):
    """Its line of the page."""
    entry = find_entry("advantage", name)
    fields = {field.name: field for field in dataclasses.fields(entry.options)}
    allowed = {own: fields[own].metadata.get(CHECK, ("", "True or False"))[1] for own in fields}
    options = (f"`{own}`: {allowed[own]}" for own in entry.keywords)
    others = [f"`{own}`" for own in fields if own not in entry.keywords]
    needs = listed(entry.needs)
    for array, choice in entry.optional_inputs.items():
        needs += f"; `{array}` with `{choice}`"
    scales = "yes" if entry.scales else "no"
    return f"| `{name}` | {entry.level} | {needs} | {scales} | {'; '.join([*options, *others])} |"


def objective_row(name):
    """Its line of the page."""
    entry = find_entry("objective", name)
    epochs = "allowed" if entry.has_ratio else "refused: it has no ratio"
    ratios = "any" if len(entry.ratios) == 3 else listed(entry.ratios)
    needs, bounds = listed(entry.needs), listed(entry.bounds)
    return f"| `{name}` | {needs} | {bounds} | {ratios} | {epochs} |"


@ESTIMATORS
def test_an_estimator_is_a_row_of_the_page_and_does_what_it_declares(name):
    assert f"\n{estimator_row(name)}\n" in PAGE
    entry = find_entry("advantage", name)
    for asked in (False, True):
        options = dict.fromkeys(entry.optional_inputs.values(), asked)
        try_estimator(name, entry, Algorithm(advantage=name, estimator=options))


@OBJECTIVES
def test_an_objective_is_a_row_of_the_page_and_does_what_it_declares(name):
    assert f"\n{objective_row(name)}\n" in PAGE
    entry = find_entry("objective", name)
    for ratio in entry.ratios:
        try_objective(name, entry, Algorithm(ratio=ratio))


def test_the_page_lists_the_arrays():
    for name, meaning in estimators.ARRAYS.items():
        assert f"\n| `{name}` | {meaning} |\n" in PAGE


def test_what_users_import_is_the_estimators_own_formula():
    assert advantage.group_relative_advantage is grae.group_relative_advantage


@pytest.mark.parametrize(
    "field, folder, text",
    [
        (
            "advantage",
            estimators,
            "from seeupo_jax.algorithms.estimators import Estimator\n"
            "def rewards(reward_N):\n    return 2 * reward_N\n"
            'ESTIMATOR = Estimator(rewards, "trajectory", ("reward_N",))\n',
        ),
        (
            "objective",
            objectives,
            "from seeupo_jax.algorithms.objectives import Objective\n"
            "def plain(ratio, weight):\n    return ratio * weight, 0 * weight\n"
            'OBJECTIVE = Objective(plain, ("ratio", "weight"))\n',
        ),
    ],
)
def test_a_new_file_is_all_that_a_new_name_needs(field, folder, text, tmp_path):
    (tmp_path / "brand_new.py").write_text(text)
    # As if the file lay in the folder.
    locations = folder.__spec__.submodule_search_locations
    locations.append(str(tmp_path))
    try:
        entry_names.cache_clear()
        assert "brand_new" in entry_names(field)
        algorithm = Algorithm(**{field: "brand_new"})
        if field == "advantage":
            arrays = {"reward_N": np.ones(2), "valid_N": np.ones(2, bool)}
            entry, scaling = find_entry(field, "brand_new"), {"scale": "none", "clip": None}
            credit = entry.credit(arrays, algorithm.estimator, **scaling)
            np.testing.assert_array_equal(credit.advantage, [2, 2])
            assert not algorithm.grouped
        else:
            assert find_entry(field, "brand_new").has_ratio
    finally:
        locations.remove(str(tmp_path))
        sys.modules.pop(f"{folder.__name__}.brand_new", None)
        entry_names.cache_clear()


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: estimators.Estimator(abs, "turns", ()), "level: got 'turns'; allowed: trajectory"),
        (lambda: estimators.Estimator(abs, "turn", ("reward",)), "needs: got .*reward_N, group_N"),
        (lambda: estimators.Estimator(abs, "turn", "reward_N"), "needs: got 'reward_N'; allowed"),
        (lambda: estimators.Estimator(3, "turn", ()), "function: got 3; allowed: a function"),
        (
            lambda: estimators.Estimator(abs, "turn", (), optional_inputs={"cut_N": "cut"}),
            "optional_inputs: got .*cut_N",
        ),
        (
            lambda: estimators.Estimator(abs, "turn", (), optional_inputs={"mask_NK": "cut"}),
            "optional_inputs: got the option 'cut'; allowed: fields of Options, which are none",
        ),
        (
            lambda: estimators.Estimator(abs, "turn", (), {"discount": "discount"}),
            "options: got {.*}; allowed: a frozen dataclass that extends",
        ),
        (
            lambda: estimators.Estimator(abs, "turn", ("state_NK",), TurnDiscount),
            "options: got TurnDiscount of an estimator that needs state_NK; allowed: .* StateOptio",
        ),
        (lambda: objectives.Objective(abs, ("advantage",)), "needs: got .*ratio, logp, weight"),
        (lambda: objectives.Objective(abs, ("ratio",), ("clip",)), "bounds: got .*clip_low, clip_"),
    ],
)
def test_a_wrong_declaration_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
