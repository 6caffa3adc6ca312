"""The parts of the report, from lines of metrics that were made up."""

import json

import pytest
import report_cases

from seeupo_jax.reports.curves import curves_section
from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.reports.sections import (
    lengths_section,
    optimization_section,
    stops_section,
    time_section,
    turns_section,
)


def test_candidates_that_were_not_executed_are_a_stop_reason_of_their_own(tmp_path):
    counts = {"rollout/stop_done": 2, "rollout/stop_unchosen": 6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1} | counts) + "\n")
    section = stops_section(load_runs([tmp_path]))
    rows = section.charts[0].spec["datasets"]["rows"]
    assert {r["part"]: r["value"] for r in rows} == {"done": 0.25, "unchosen": 0.75}
    assert "unchosen: a candidate" in section.intro


@pytest.mark.parametrize(
    "section, title, metrics",
    [
        (
            curves_section,
            "Success",
            {"training rollouts": "rollout/success_rate", "test avg@4": "eval/avg@4"},
        ),
        (curves_section, "At least one of k episodes succeeds", {"test pass@4": "eval/pass@4"}),
        (curves_section, "Reward", {"reward": "rollout/reward_mean"}),
        (
            lengths_section,
            "Tokens per trajectory",
            {
                "sampled, mean": "rollout/action_tokens_mean",
                "sampled, p90": "rollout/action_tokens_p90",
                "context, mean": "rollout/context_tokens_mean",
                "context, p90": "rollout/context_tokens_p90",
            },
        ),
        (
            lengths_section,
            "Turns and segments per trajectory",
            {"turns": "rollout/turns_mean", "segments": "rollout/segments_mean"},
        ),
        *(
            (optimization_section, title, {title: name})
            for title, name in (
                ("Loss", "sweep/loss"),
                ("Gradient norm", "sweep/grad_norm"),
                ("Clip fraction, all turns", "sweep/clip_fraction"),
                ("KL to the reference, all turns", "sweep/kl"),
                ("Entropy of the policy", "rollout/entropy"),
                ("Sampler–trainer gap of log-probabilities", "logp/sampler_trainer_gap"),
                ("Zero-advantage groups", "rollout/no_signal_fraction"),
            )
        ),
        (
            time_section,
            "Tokens per second",
            {part: f"{part}/tokens_per_second" for part in ("rollout", "sweep")},
        ),
    ],
)
def test_a_line_is_of_the_metric_that_its_name_says(tmp_path, section, title, metrics):
    """By the table of docs/report.md."""
    workdir = report_cases.write_run(tmp_path)
    (chart,) = section(load_runs([workdir])).wanted[title]
    drawn = {}
    for row in chart.spec["datasets"]["rows"]:
        drawn.setdefault(row["series"], {})[row["iteration"]] = row["value"]
    assert drawn.keys() == metrics.keys()
    for series, name in metrics.items():
        assert drawn[series] == pytest.approx(report_cases.recorded(workdir, name), rel=1e-5)


@pytest.mark.parametrize(
    "title, metric",
    [
        ("Mean weight M", "sweep/weight_mean"),
        ("Largest weight |M|", "sweep/weight_max"),
        ("Clip fraction", "sweep/clip_fraction"),
        ("KL to the reference", "sweep/kl"),
    ],
)
def test_a_heat_map_is_of_the_metric_that_its_title_says(tmp_path, title, metric):
    workdir = report_cases.write_run(tmp_path)
    (chart,) = turns_section(load_runs([workdir])).wanted[title]
    drawn = {}
    for row in chart.spec["datasets"]["rows"]:  # cells reach half an iteration to either side
        drawn.setdefault(row["turn"], {})[row["from"] + 0.5] = row["value"]
    assert drawn == {
        turn: pytest.approx(report_cases.recorded(workdir, f"{metric}/turn={turn}"), rel=1e-5)
        for turn in range(1, report_cases.TURNS + 1)
    }
