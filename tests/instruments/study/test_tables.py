"""What is compared between the cells of a study, and what is left of it."""

import dataclasses
import math

import pytest
from scipy import stats
from study_cases import done, finished, study_of

from seeupo_jax.instruments.study import study_page
from seeupo_jax.instruments.study.cell_results import by_key
from seeupo_jax.instruments.study.stability_chart import draw_map
from seeupo_jax.instruments.study.study import grid_points
from seeupo_jax.instruments.study.study_runs import choose, history
from seeupo_jax.instruments.study.tables import (
    compare_with,
    costs,
    lines_of,
    stability_map,
    verdicts,
)


def test_a_recipe_is_compared_seed_by_seed_with_those_that_are_corrected_together(tmp_path):
    study = study_of(tmp_path, "study['seeds'] = range(4)")
    tuned = {name: grid_points(grid)[0] for name, grid in study.tuning.items()}
    cells = study.cells("final", tuned)
    after = {"seeupo": (0.9, 0.8, 0.95, 0.85), "grpo": (0.5, 0.6, 0.55, 0.4)}
    results = by_key([done(cell, after=after[cell.variant][cell.seed]) for cell in cells])
    seeupo, grpo = lines_of(cells, results)
    (found,) = compare_with(seeupo, [grpo], "final")
    wanted = stats.ttest_rel(after["seeupo"], after["grpo"])
    assert found.difference.p == pytest.approx(wanted.pvalue) == found.corrected
    assert found.difference.estimate.value == pytest.approx(0.3625)
    assert verdicts([found]) == {"ahead": ["grpo"], "behind": [], "undecided": []}
    unsure = dataclasses.replace(found, corrected=0.051)  # what decides is the usual 0.05
    assert verdicts([unsure])["undecided"] == ["grpo"]
    (back,) = compare_with(grpo, [seeupo], "final")
    assert verdicts([back])["behind"] == ["seeupo"]
    (none,) = compare_with(seeupo, [dataclasses.replace(grpo, histories=())], "steps")
    assert verdicts([none])["undecided"] == ["grpo"] and math.isnan(none.corrected)


def test_areas_are_up_to_what_both_have_got_to(tmp_path):
    study = study_of(tmp_path)
    tuned = {name: grid_points(grid)[0] for name, grid in study.tuning.items()}
    cells = study.cells("final", tuned)
    results = by_key(
        [
            done(cell, (0.2, 0.4, 0.6) if cell.variant == "seeupo" else (0.1, 0.1), tokens=100)
            for cell in cells
        ]
    )
    seeupo, grpo = lines_of(cells, results)
    (tokens,) = compare_with(seeupo, [grpo], "tokens")
    (steps,) = compare_with(seeupo, [grpo], "steps")
    # The second rollout of `grpo` is after 100 tokens and 4 steps: 0.3 and 0.1 until then.
    assert (tokens.until, steps.until) == (100, 4)
    assert tokens.difference.estimate.value == pytest.approx(0.2)
    assert seeupo.histories[0].area("steps", 8) == pytest.approx(0.4)
    *_, first, second = study_page._runs_table([seeupo, grpo]).splitlines()
    # As many tokens of both, in a table too: to 200 `seeupo` has 0.4.
    assert "area over 100 tokens" in study_page._runs_table([seeupo, grpo])
    assert "| 0.30 [0.30, 0.30] |" in first and "| 0.10 [0.10, 0.10] |" in second


@pytest.mark.parametrize(
    "success, after, collapsed",
    [
        ((0.5,) * 5 + (0.25,) * 5, 0.25, False),
        ((0.5,) * 5 + (0.24,) * 5, 0.25, True),  # less than half as often as at its best
        ((0.1, 0.5, 0.1, 0.1, 0.2) * 2, 0.2, False),  # of one lucky batch
        ((0.25, 0.25), 0.125, False),
        ((0.2, 0.2), 0.12, True),  # below the interval of its first policy
    ],
)
def test_what_a_collapsed_run_is(tmp_path, success, after, collapsed):
    cell = study_of(tmp_path).cells("tuning", {})[0]
    assert history(cell, done(cell, success, after=after)).collapsed is collapsed


def test_the_stability_map_has_every_place_and_is_drawn(tmp_path):
    study = study_of(tmp_path, "study['stability']['grid']['algorithm.inner_epochs'] = (1, 2)")
    results = finished(study.cells("tuning", {}), after=0.875)
    places = stability_map(study, results)
    assert [(p.recipe, p.x, p.y, p.runs, p.planned) for p in places[:3]] == [
        ("seeupo", "0.001", "inner_epochs=1", 1, 1),
        ("seeupo", "0.001", "inner_epochs=2", 0, 1),
        ("seeupo", "0.01", "inner_epochs=1", 1, 1),
    ]
    assert places[0].final.value == 0.875 and math.isnan(places[1].final.value)
    assert places[0].steps == 8 and len(places) == 8
    draw_map(places, tmp_path / "map.svg", x="learning_rate")
    drawn = (tmp_path / "map.svg").read_text()
    assert drawn.count(">0.88<") == sum(place.runs for place in places)


def test_costs_are_means_of_finished_cells_and_unknown_before(tmp_path):
    study = study_of(tmp_path, overrides=["iterations=2"])
    assert all(math.isnan(c.cpu_s) for c in costs(study, {}) if c.iterations)
    assert "unknown until a cell is finished" in study_page.explain_study(study, {})
    first = study.cells("tuning", {})[0]
    left = {cost.stage: cost for cost in costs(study, {first.key: done(first, cpu_s=8.0)})}
    # 4 CPU seconds and 100 tokens by iteration; one recipe's finished cell stands for both.
    assert (left["tuning"].cpu_s, left["tuning"].tokens) == (3 * 2 * 4.0, 3 * 2 * 100)
    assert left["final"].cpu_s == 4 * 2 * 4.0 and left["stability"].cpu_s == 0


def test_a_cell_costs_what_cells_with_as_many_passes_over_their_batches_do(tmp_path):
    study = study_of(tmp_path, 'study["stability"]["grid"]["algorithm.inner_epochs"] = (1, 4)')
    results = finished(study.cells("tuning", {}), cpu_s=1.0)
    points = choose(study, results)
    left = {cost.stage: cost for cost in costs(study, results)}
    assert left["stability"].cpu_s == 4 * 1.0  # none with four is finished: as the others
    four = [c for c in study.cells("stability", points) if c.config.algorithm.inner_epochs == 4]
    assert {cell.variant for cell in four} == {"seeupo", "grpo"} and len(four) == 4
    results |= finished([cell for cell in four if cell.variant == "grpo"][:1], cpu_s=3.0)
    left = {cost.stage: cost for cost in costs(study, results)}
    assert left["stability"].cpu_s == 3 * 3.0 and left["ablation"].cpu_s == 2 * 1.0
