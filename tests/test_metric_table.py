"""Every metric is declared once: the page, the display, the report and what is written agree."""

import re

import report_cases
from metric_names import undeclared
from places import ROOT

from seeupo_jax.learner.sweep_metrics import REDUCTIONS
from seeupo_jax.metric_table import CHARTS, DISPLAY, METRICS, STEPS


def test_every_metric_has_a_meaning_on_its_page():
    _, _, table = (ROOT / "docs" / "metrics.md").read_text().partition("|---|---|---|---|\n")
    rows = [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in table.splitlines()]
    assert [row[0] for row in rows] == [f"`{name}`" for name in METRICS]
    assert all(len(row) == 4 and row[3] for row in rows)


def test_what_is_shown_is_declared():
    charted = [name for charts in CHARTS.values() for name in charts]
    shown = [name for part in DISPLAY.values() for name in part]
    assert {*charted, *shown} <= METRICS.keys()
    assert not undeclared(report_cases.rollout(0.5, 1) | report_cases.evaluation(0.5))


def test_steps_are_reduced_in_ways_that_there_are():
    assert {metric.over for metric in STEPS} == REDUCTIONS.keys()
    assert len({metric.counted for metric in STEPS}) == len(STEPS)


def test_a_name_that_nobody_declared_is_found():
    names = ["rollout/success", "sweep/kl/turn=x", "eval/avg@", "loss", "rollout/stop_tired"]
    assert undeclared(names) == set(names)
    assert not undeclared(
        ["sweep/kl/turn=12", "eval_validation/avg@4_low/kind=a/b=c", "eval/tasks"]
    )
    assert not undeclared(["rollout/failed/cause=a\nb", "rollout/success_rate/kind=[x]"])
