"""The table, JSON and plot of experiments."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from seeupo_jax.instruments.lab import bias_report
from seeupo_jax.instruments.lab.gradient_bias import Bias, BiasResult
from seeupo_jax.instruments.lab.laboratory import Result
from seeupo_jax.instruments.lab.report import (
    draw,
    json_values,
    tables,
)
from seeupo_jax.metrics.statistics import bootstrap_interval

GOOD = Result(2.0, np.array([[1.0, 1.5, 2.0], [1.0, 2.0, 1.9]]))
BAD = Result(2.0, np.array([[1.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))


def test_one_problem_is_an_object_and_several_are_a_list_of_them():
    values = json_values({"small": {"seeupo": GOOD, "grpo": BAD}})
    assert json.loads(json.dumps(values)) == {
        "problem": "small",
        "optimum": 2.0,
        "recipes": {
            "seeupo": {
                "final_over_optimum": [1.0, 0.95],
                "mean_over_optimum": [0.75, 4.9 / 6],
                "curve_mean": [1.75, 1.95],
                "solved": 1.0,
                "drops": 0.25,
            },
            "grpo": {
                "final_over_optimum": [0.5, 0.5],
                "mean_over_optimum": [2.5 / 6, 0.5],
                "curve_mean": [0.75, 1.0],
                "solved": 0.0,
                "drops": 0.25,
            },
        },
    }
    several = json_values({"a": {"seeupo": GOOD}, "b": {"seeupo": BAD}})
    assert [each["problem"] for each in several] == ["a", "b"]


def test_the_table_has_a_line_a_recipe():
    text = io.StringIO()
    Console(width=80, file=text).print(tables({"small": {"seeupo": GOOD, "grpo": BAD}}))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["small:", "optimum", "2"] in lines
    assert ["seeupo", "0.975", "[0.950,", "1.000]", "100%", "1.5", "25.0%", "1e-01"] in lines
    assert ["grpo", "0.500", "[0.500,", "0.500]", "0%", "never", "25.0%", "5e-01"] in lines
    text = io.StringIO()
    Console(width=80, file=text).print(tables({"small": {"one": Result(2.0, GOOD.value_SI[:1])}}))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert ["one", "1.000", "100%", "2", "0.0%", "0e+00"] in lines  # of one seed no interval


def test_names_of_the_table_are_as_they_are_given():
    text = io.StringIO()
    made = tables({"w[best]:100:": {"seeupo[b]:100:": GOOD}})
    Console(width=80, file=text).print(made)
    assert "w[best]:100:: optimum 2" in text.getvalue() and "seeupo[b]:100:" in text.getvalue()


def test_the_interval_narrows_with_the_seeds():
    low, high = bootstrap_interval(np.array([0.0, 1.0] * 8))
    assert low == pytest.approx(0.25, abs=0.07) and high == pytest.approx(0.75, abs=0.07)
    assert bootstrap_interval(np.array([0.0, 1.0] * 8)) == (low, high)
    low, high = bootstrap_interval(np.array([0.0, 1.0] * 200))
    assert high - low < 0.11


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<svg"), ("a.png", b"\x89PNG")])
def test_the_plot_is_what_its_suffix_says(name, start, tmp_path):
    path = tmp_path / "new" / name
    draw({"a": {"seeupo": GOOD, "grpo": BAD}, "b": {"seeupo": GOOD, "grpo": BAD}}, path)
    assert path.read_bytes().startswith(start)


def test_the_band_reaches_from_the_worst_seed_to_the_best(tmp_path):
    """The axis of 240 pixels is of 0.5 to 1 of the optimum, and each iteration is 180 wide."""
    draw({"a": {"seeupo": GOOD}}, tmp_path / "a.svg")
    band = re.search(r'area mark" d="M([^"]*)Z"', (tmp_path / "a.svg").read_text())[1]
    worst, best = [(0, 0.5), (1, 0.75), (2, 0.95)], [(2, 1.0), (1, 1.0), (0, 0.5)]
    points = [(180 * i, (1 - share) * 480) for i, share in (*worst, *best)]
    pairs = [tuple(map(float, pair.split(","))) for pair in band.split("L")]
    np.testing.assert_allclose(pairs, points, atol=0.01)


STALE = BiasResult(
    (0, 2),
    np.array([1e-9, 0.25]),
    {
        "none": Bias(np.array([0.0, 0.5]), np.array([1.0, 1.25]), np.array([0.0, 0.0])),
        "mask per turn": Bias(np.array([0.0, 0.125]), np.array([1.0, 0.9]), np.array([0.0, 0.03])),
    },
)


def test_figures_of_stale_trajectories_are_tables_an_object_and_a_plot(tmp_path):
    results = {"w[best]": {"seeupo": STALE}}
    text = io.StringIO()
    Console(width=80, file=text).print(bias_report.tables(results))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert "w[best]: seeupo, bias of the" in text.getvalue()
    for line in (
        ["(KL", "in", "nats)", "(0)", "(0.25)"],
        ["mask", "per", "turn", "0.000", "0.125"],
    ):
        assert line in lines
    assert ["none", "1.000", "1.250"] in lines and ["mask", "per", "turn", "0.0%", "3.0%"] in lines
    (values,) = json.loads(json.dumps(bias_report.json_values(results)))
    assert (values["problem"], values["recipe"], values["lags"]) == ("w[best]", "seeupo", [0, 2])
    assert values["corrections"]["mask per turn"] == {
        "bias": [0.0, 0.125],
        "noise": [1.0, 0.9],
        "lost": [0.0, 0.03],
    }
    bias_report.draw(results, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<svg")
