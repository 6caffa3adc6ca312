"""What the page of a study says of runs that end well and of runs that collapse."""

import dataclasses
import re

import pytest
from study_cases import done, finished, study_of

from seeupo_jax.instruments.study import study_page
from seeupo_jax.instruments.study.cell_results import by_key
from seeupo_jax.instruments.study.study_runs import choose


def rows(page, heading):
    """The cells of the first table below a heading, its head first, as a page shows them."""
    below = page.split(f"\n## {heading}\n")[1]
    table = re.search(r"(?:\|[^\n]*\n)+", below)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_stability_map_names_its_axes_and_counts_what_collapsed(tmp_path):
    study = study_of(
        tmp_path,
        """\
        rates = {'optimizer.learning_rate': (1e-3, 1e-2)}
        grpo = rates | {'algorithm.minibatches_per_turn': (2,)}
        grid = rates | {'algorithm.kl_coef': (0.1,)}
        study['stability'] = {'seeds': (7, 8), 'grid': grid, 'grids': {'grpo': grpo}}
        """,
    )
    results = finished(study.cells("tuning", {}))
    for cell in study.cells("stability", choose(study, results)):
        # Below 0.125, the lower bound of the first policy's interval, it collapsed.
        fell = cell.variant == "seeupo" and (cell.config.seed == 7 or "0.01" in cell.name)
        results |= by_key([done(cell, after=0.1 if fell else 0.5)])
    page = study_page.write_page(study, results, tmp_path / "results").read_text()
    assert "against learning_rate and kl_coef or minibatches_per_turn, all else as tuned" in page
    head, _, *places = rows(page, "Stability map")
    assert head[1:4] == ["learning_rate", "kl_coef or minibatches_per_turn", "steps per iteration"]
    assert [[*place[:3], place[-1]] for place in places] == [
        ["seeupo", "0.001", "kl_coef=0.1", "1 of 2"],
        ["seeupo", "0.01", "kl_coef=0.1", "2 of 2"],
        ["grpo", "0.001", "minibatches_per_turn=2", "0 of 2"],
        ["grpo", "0.01", "minibatches_per_turn=2", "0 of 2"],
    ]


def test_final_runs_are_drawn_against_tokens_and_steps_and_collapsed_ones_counted(tmp_path):
    study = study_of(tmp_path)
    results = finished(study.cells("tuning", {}))
    for cell in study.cells("final", choose(study, results)):
        fell = cell.variant == "grpo" and cell.config.seed == 1
        results |= by_key([done(cell, after=0.1 if fell else 0.5)])
    folder = tmp_path / "results"
    page = study_page.write_page(study, results, folder).read_text()
    head, _, seeupo, grpo = rows(page, "Fresh seeds")
    assert (head[-1], seeupo[-1], grpo[-1]) == ("collapsed", "0 of 2", "1 of 2")
    for axis, words in (("tokens", "sampled tokens"), ("steps", "optimizer steps")):
        assert f"![Success against {words}](results/success_{axis}.svg)" in page
        assert f">{words}</text>" in (folder / f"success_{axis}.svg").read_text()


@pytest.mark.parametrize(
    "p, text", [(0.0009, "< 0.001"), (0.001, "0.001"), (0.009, "0.009"), (float("nan"), "-")]
)
def test_p_is_written_to_a_thousandth(p, text):
    assert study_page._p(p) == text


def test_exact_values_are_counted_over_runs_and_iterations(tmp_path):
    study = study_of(tmp_path)
    results = finished(study.cells("tuning", {}))
    for cell in study.cells("final", choose(study, results)):
        ended = done(cell)
        # Seed 0 falls once, by 0.3; a fall by 5e-6 is rounding.
        values = (1.0, 0.7, 1.95) if cell.config.seed == 0 else (0.5, 0.5 - 5e-6, 1.0)
        exact = [
            {"iteration": i, "exact/value": v, "exact/optimum": 2.0, "exact/outside": i / 100}
            for i, v in enumerate(values)
        ]
        records = [*ended.records, *(exact if cell.variant == "grpo" else [])]
        results |= by_key([dataclasses.replace(ended, records=records)])
    page = study_page.write_page(study, results, tmp_path / "results").read_text()
    head, _, grpo = rows(page, "Exact values")
    assert len(head) == len(grpo) and grpo[:2] == ["final", "grpo"] and grpo[3] == "2"
    # Of 1.95 / 2 and 1 / 2: mean 0.7375; one of four iterations fell.
    assert grpo[4].startswith("0.74 [")
    assert grpo[5:] == ["50%", "never", "25.0%", "3e-01", "0.020"]
    assert "![Exact values](results/exact.svg)" in page
    # A run that ended early keeps its value: now one of three iterations that are left, of four.
    cell = next(c for c in study.cells("final", choose(study, results)) if c.variant == "grpo")
    short = [line for line in results[cell.key].records if line.get("exact/value") != 1.95]
    results |= by_key([dataclasses.replace(results[cell.key], records=short)])
    page = study_page.write_page(study, results, tmp_path / "results").read_text()
    assert rows(page, "Exact values")[2][7:9] == ["25.0%", "3e-01"]
    assert ">grpo<" in (tmp_path / "results" / "exact.svg").read_text()
