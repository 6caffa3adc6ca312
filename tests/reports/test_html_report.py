"""The page of a run: what its sections hold, and what it says where something is missing."""

import json
import math
import os
import re
import time

import altair as alt
import numpy as np
import pytest
import report_cases
from report_cases import report_of

from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.reports import settings_tables
from seeupo_jax.reports.curves import curves_section, first_and_last, kinds_section
from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.reports.sections import (
    lengths_section,
    parts_section,
    stops_section,
    supervised_section,
    time_section,
    turns_section,
)
from seeupo_jax.reports.settings_tables import (
    configuration_table,
    failures_section,
    unrecorded,
    versions_table,
)
from seeupo_jax.reports.trajectory_pages import write_pages
from seeupo_jax.trajectories.reader import TrajectoryFile, pack_shard, write_shard


@pytest.fixture
def runs(tmp_path):
    first = report_cases.write_run(tmp_path / "first")
    second = report_cases.write_run(
        tmp_path / "second", iterations=8, planned=12, gain=0.5, learning_rate=1e-3
    )
    return load_runs([first, second])


def values(chart):
    return chart.spec["datasets"]["rows"]


def titles(section):
    return [chart.title for chart in section.charts]


def cells(table):
    return [list(row.cells) for row in table.rows]


def test_a_runs_success_is_in_one_chart_and_several_runs_lie_over_each_other(runs):
    assert titles(curves_section(runs[:1]))[0] == "Success"
    assert {r["series"] for r in values(curves_section(runs[:1]).charts[0])} == {
        "training rollouts",
        "test avg@4",
    }
    both = curves_section(runs)
    assert titles(both)[:2] == ["Success: training rollouts", "Success: test avg@4"]
    assert all({r["series"] for r in values(c)} == {"first", "second"} for c in both.charts)


def domains(chart, channel):
    """The domains of an axis or of the colours, in any layer of a chart over iterations."""
    found = []
    for layer in chart.spec.get("layer", [chart.spec]):
        encoding = layer.get("encoding", {})
        if encoding.get("x", {}).get("title") == "iteration" and channel in encoding:
            found.append(tuple(encoding[channel].get("scale", {}).get("domain", ())))
    return {domain for domain in found if domain}


def test_all_charts_of_a_page_have_the_same_iterations(runs):
    for shown, span in ((runs[:1], (-0.5, 12.5)), (runs, (-0.5, 12.5)), (runs[1:], (-0.5, 8.5))):
        charts = [
            chart
            for make in (
                curves_section,
                turns_section,
                lengths_section,
                stops_section,
                time_section,
            )
            for chart in make(shown).charts
        ]
        found = [domain for chart in charts for domain in domains(chart, "x")]
        assert len(found) > 10 and set(found) == {span}


def test_charts_of_several_runs_are_on_one_scale(runs):
    def scales(section, channel, title):
        return [domains(chart, channel) for chart in section.charts if title in chart.title]

    for section, channel, title in (
        (time_section(runs), "y", "Time per iteration"),
        (lengths_section(runs), "y", "Tokens per trajectory"),
        (turns_section(runs), "color", "Mean weight M"),
    ):
        first, *others = scales(section, channel, title)
        assert len(first) == 1 and others and all(other == first for other in others)


def test_rewards_by_name_have_a_chart_where_there_are_any(tmp_path):
    lines = [{"iteration": i, "rollout/reward/env": 0.5, "rollout/reward/short": i} for i in (1, 2)]
    lines[1] |= {"sweep/reward_share/env": 0.25, "sweep/reward_share/short": 0.75}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    wanted = curves_section(load_runs([tmp_path])).wanted
    (shares,) = wanted["Share of the gradient by reward"]
    assert [(r["series"], r["value"]) for r in values(shares)] == [("env", 0.25), ("short", 0.75)]
    (chart,) = wanted["Rewards by name"]
    assert [(r["series"], r["value"]) for r in values(chart)] == [
        *(("env", 0.5), ("env", 0.5)),
        *(("short", 1), ("short", 2)),
    ]
    report_cases.write_run(tmp_path / "other", iterations=2)
    others = curves_section(load_runs([tmp_path / "other"])).wanted
    assert not {"Rewards by name", "Share of the gradient by reward"} & others.keys()


def test_parts_that_only_some_runs_have_are_charted_by_the_table(tmp_path):
    report_cases.write_run(tmp_path / "plain", iterations=2)
    (plain,) = load_runs([tmp_path / "plain"])
    assert parts_section([plain]) is None
    lines = [
        {"iteration": i, "rollout/reward_mean/env=desk": 0.5, "rollout/reward_mean/env=maze": i}
        | {"sweep/expert_load_entropy": 1 / i, "rollout/forks": 3 * i}
        for i in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (made,) = load_runs([tmp_path])
    section = parts_section([made, plain])
    assert section.key == "parts" and not section.absent
    rows = {
        title: {
            (r["series"], r["iteration"]): r["value"] for chart in charts for r in values(chart)
        }
        for title, charts in parts_section([made]).wanted.items()
    }
    load, forks = "Evenness of the experts' load", "Branches of conversations"
    assert rows == {
        "Reward by environment": {
            ("desk", 1): 0.5,
            ("desk", 2): 0.5,
            ("maze", 1): 1,
            ("maze", 2): 2,
        },
        load: {(load, 1): 1, (load, 2): 0.5},
        forks: {(forks, 1): 3, (forks, 2): 6},
    }


def test_exact_values_are_charted_from_before_training_on(tmp_path):
    lines = [{"iteration": i, "exact/value": 0.25 + i / 4, "exact/outside": 0.0} for i in (0, 1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts = parts_section(load_runs([tmp_path])).wanted
    value = "Exact value: expected reward of the policy"
    assert [*charts] == [value, "Episodes that end with a text that is no action, exact"]
    assert [(r["iteration"], r["value"]) for chart in charts[value] for r in values(chart)] == [
        (0, 0.25),
        (1, 0.5),
        (2, 0.75),
    ]


def test_intervals_of_rollouts_are_as_wide_as_those_of_as_many_coins_as_tasks(runs):
    (row,) = (
        r
        for r in values(curves_section(runs[:1]).charts[0])
        if r["series"] == "training rollouts" and r["iteration"] == 12
    )
    # Wilson's interval by its definition: |p - q| = z sqrt(q (1 - q) / n) at both ends q.
    for bound in (row["low"], row["high"]):
        distance = 1.959964 * np.sqrt(bound * (1 - bound) / 16)
        assert abs(row["value"] - bound) == pytest.approx(distance, abs=1e-5)


def test_intervals_of_rollouts_are_of_the_groups_that_were_played(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        counts = {"rollout/trajectories/turns=1": 200, "rollout/trajectories/turns=2": 392}
        for i in (1, 2):  # 74 groups of 8; in the second they are not recorded
            found = {"rollout/success_rate": 0.5, "rollout/rounds": 5}
            writer.write(i, found | (counts if i == 1 else {}))
        for i, trajectories in ((3, 96), (4, 3)):  # the other environments failed
            found = {"rollout/success_rate": 0.5, "rollout/rounds": 1}
            writer.write(i, found | {"rollout/trajectories/turns=1": trajectories})
    report_cases.write_about(tmp_path / "run", rollout={"tasks": 64, "group_size": 8})
    chart = curves_section(load_runs([tmp_path / "run"])).charts[0]
    lows = {r["iteration"]: r["low"] for r in values(chart)}
    for iteration, groups in ((1, 74), (2, 64), (3, 12), (4, 1)):
        low = lows[iteration]
        assert 0.5 - low == pytest.approx(1.959964 * np.sqrt(low * (1 - low) / groups), abs=1e-5)


def test_evaluations_have_the_intervals_that_were_recorded(runs):
    rows = [r for r in values(curves_section(runs[:1]).charts[0]) if r["series"] == "test avg@4"]
    assert [r["iteration"] for r in rows] == [0, 5, 10, 12]
    assert rows[0]["low"] == pytest.approx(0.32) and rows[0]["high"] == pytest.approx(0.48)


def test_iterations_without_a_success_rate_are_missing_in_its_chart(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i in range(1, 51):
            rate = math.nan if 10 <= i <= 40 else i / 100
            writer.write(i, {"rollout/success_rate": rate, "rollout/reward_mean": rate})
        writer.write(50, {"eval/avg@4": math.nan})
    (run,) = load_runs([tmp_path])
    for chart in curves_section([run]).charts[:2]:
        missing = {r["iteration"] for r in values(chart) if r["value"] is None}
        assert missing == set(range(10, 41)) and len(values(chart)) == 50
    measure, ends = first_and_last(run)
    assert measure == "rollouts" and [e.value for e in ends] == [0.01, 0.5]


def test_an_evaluation_without_an_estimate_is_missing_in_its_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i, value in ((0, 0.2), (5, math.nan), (10, 0.6)):
            bounds = {"eval/avg@4_low": value - 0.1, "eval/avg@4_high": value + 0.1}
            writer.write(i, {"eval/avg@4": value, **bounds})
    (run,) = load_runs([tmp_path])
    rows = values(curves_section([run]).charts[0])
    assert [r["value"] for r in rows] == [0.2, None, 0.6]
    assert [r.get("low") for r in rows] == [pytest.approx(0.1), None, pytest.approx(0.5)]
    assert [e.value for e in first_and_last(run)[1]] == [0.2, 0.6]


def test_success_by_turns_is_pooled_over_the_first_and_the_last_iterations(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i in range(1, 11):
            rate, count = (0.5, 30) if i % 2 else (0.1, 10)
            turns = {"rollout/success_rate/turns=2": rate, "rollout/trajectories/turns=2": count}
            writer.write(i, {"rollout/success_rate": 0.5, **turns})
    section = kinds_section(load_runs([tmp_path]))
    pooled = {r["series"]: r["value"] for r in values(section.charts[0])}
    mean = (0.5 * 30 + 0.1 * 10) / 40
    assert pooled == {
        "iterations 1 to 2": pytest.approx(mean),
        "iterations 9 to 10": pytest.approx(mean),
    }


def test_kinds_of_tasks_are_shown_before_and_after_with_intervals(runs):
    section = kinds_section(runs[:1])
    (chart,) = (c for c in section.charts if c.title == "test avg@4 by request")
    rows = {(r["series"], r["kind"]): r for r in values(chart)}
    assert rows["iteration 0", "cancel"]["value"] == pytest.approx(0.45)
    assert rows["iteration 12", "refund"]["high"] == pytest.approx(0.88)
    assert "Rollouts by request" in titles(section)


def test_a_kind_whose_episodes_all_failed_is_left_out(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i in (0, 12):
            found = report_cases.evaluation(i / 12)
            writer.write(i, found | {"eval/avg@4/request=late": math.nan})
    report_cases.write_about(tmp_path)
    (chart,) = kinds_section(load_runs([tmp_path])).charts
    assert {row["kind"] for row in values(chart)} == {"cancel", "address", "refund"}


def test_several_runs_are_compared_by_kind_at_their_ends(runs):
    charts = {chart.title: values(chart) for chart in kinds_section(runs).charts}
    for title, kind in (("Success by number of turns", "3"), ("Rollouts by request", "cancel")):
        found = {r["series"]: r["value"] for r in charts[title] if r["kind"] == kind}
        assert set(found) == {"first", "second"} and found["first"] > found["second"]
    (before, after) = sorted(
        r["value"] for r in charts["test avg@4 by request"] if r["kind"] == "refund"
    )
    assert (before, after) == (pytest.approx(0.3 + 0.25 * 5 / 12), pytest.approx(0.8))


def test_turns_have_a_map_each(runs):
    section = turns_section(runs)
    assert len(section.charts) == 8 and not section.absent
    weights = values(section.charts[2])
    assert {row["turn"] for row in weights} == set(range(1, report_cases.TURNS + 1))


def test_the_speed_is_the_median_of_the_last_iterations(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        # The median of the last ten is 500; of all it would be 100.
        for i, speed in enumerate([10.0] * 5 + [100.0] * 5 + [900.0] * 5, 1):
            writer.write(
                i, {"rollout/tokens_per_second": speed, "sweep/tokens_per_second": speed / 10}
            )
    text = report_of(tmp_path).read_text()
    assert '<dd>500</dd><dd class="quiet">rollout; 50 sweep</dd>' in re.sub(r"\s*\n\s*", "", text)


def tiles(workdir):
    """The page's text without line breaks, where each tile is its label, value and detail."""
    return re.sub(r"\s*\n\s*", "", report_of(workdir).read_text())


def test_the_tiles_are_success_at_first_and_now_and_the_time_of_an_iteration(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i, value in ((0, 0.25), (2, 0.75)):
            bounds = {"eval/avg@4_low": value - 0.125, "eval/avg@4_high": value + 0.125}
            writer.write(i, {"eval/avg@4": value, **bounds, "time/rollout_s": 4.0 if i else 0.0})
    text = tiles(tmp_path)
    assert '<dd>0.25 → 0.75</dd><dd class="quiet">[0.12, 0.38] → [0.62, 0.88]</dd>' in text
    assert '<dd>4s</dd><dd class="quiet">2.0 s per iteration</dd>' in text


def test_the_lowest_held_out_loss_is_shown_beside_the_last(tmp_path):
    losses = [{"eval/loss": 0.125}, {"sft/loss": 0.5}, {"eval/loss": 0.25}, {"eval/loss": 0.375}]
    with MetricsWriter(tmp_path) as writer:
        for i, loss in enumerate(losses):
            writer.write(i, loss)
    # The first is of the policy before, which is not one of those that are kept.
    assert '<dd>0.1250 → 0.3750</dd><dd class="quiet">lowest 0.2500</dd>' in tiles(tmp_path)
    (chart,) = supervised_section(load_runs([tmp_path])).wanted["Loss of assistant tokens"]
    points = [(row["series"], row["iteration"], row["value"]) for row in values(chart)]
    assert points == [
        ("steps", 1, 0.5),
        *(("held-out loss", i, loss) for i, loss in ((0, 0.125), (2, 0.25), (3, 0.375))),
    ]


@pytest.mark.parametrize("selected_on", [0.0, 1.0])
def test_a_figure_that_the_best_checkpoint_was_chosen_by_is_marked(tmp_path, selected_on):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"eval/avg@4": 0.5, "eval/selected_on": selected_on})
    text = report_of(tmp_path).read_text()
    assert ("the best checkpoint is selected on test too" in text) == bool(selected_on)


def test_stop_reasons_are_shares(runs):
    rows = values(stops_section(runs[:1]).charts[0])
    first = [r["value"] for r in rows if r["from"] == 0.5]
    assert sum(first) == pytest.approx(1.0) and len(first) == 3


def test_the_time_table_adds_up(runs):
    section = time_section(runs[:1])
    last = section.tables[0].rows[-1].cells
    assert last[0] == "all" and runs[0].seconds > 20
    shares = [float(re.search(r"\((\d+)%\)", row[1])[1]) for row in cells(section.tables[0])[:-1]]
    assert sum(shares) == pytest.approx(100, abs=len(shares) / 2)


def test_percentages_of_the_time_are_of_each_run_alone(tmp_path):
    for name, rollout in (("a", 3.0), ("b", 1.0)):
        with MetricsWriter(tmp_path / name) as writer:
            writer.write(1, {"time/rollout_s": rollout, "time/sweep_s": 1.0})
    (table,) = time_section(load_runs([tmp_path / "a", tmp_path / "b"])).tables
    assert cells(table) == [
        ["rollout: rest", "3s (75%)", "1s (50%)"],
        ["sweep", "1s (25%)", "1s (50%)"],
        ["all", "4s", "2s"],
    ]


def test_what_an_old_run_did_not_record_is_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"rollout/success_rate": 0.5, "time/rollout_s": 2.0})
    runs = load_runs([tmp_path])
    absent = ["Tokens per trajectory", "Turns and segments per trajectory"]
    assert lengths_section(runs).absent == absent
    assert turns_section(runs).charts == []
    page = report_of(tmp_path).read_text()
    assert "Not recorded: Mean weight M; Largest weight |M|; Clip fraction;" in page
    assert "Without run.json" in page


def test_fields_that_differ_are_marked(runs):
    table = configuration_table(runs)
    assert table.header == ["field", "first", "second"]
    marked = [list(row.cells) for row in table.rows if row.marked]
    assert marked == [["optimizer.learning_rate", "0.0002", "0.001"]]
    assert not any(row.marked for row in configuration_table(runs[:1]).rows)


def test_a_run_without_a_record_is_named_and_differs_in_nothing(runs, tmp_path):
    old = load_runs([report_cases.write_run(tmp_path / "old", about=False)])
    table = configuration_table([runs[0], *old])
    assert table.header == ["field", "first"] and not any(row.marked for row in table.rows)
    assert unrecorded([runs[0], *old]).endswith("are not known: old.")
    assert unrecorded(runs) == ""


def test_versions_hold_software_devices_and_the_command(runs):
    found = {row[0]: row[1] for row in cells(versions_table(runs[:1]))}
    assert found["versions.jax"] == "0.10.2" and found["devices.platform"] == "cpu"
    assert found["command"].startswith("python -m seeupo_jax.train --config=")
    assert found["model.parameters"] == "123456"


def test_failures_are_counted_by_cause_and_the_rest_without(runs):
    rows = cells(failures_section(runs[:1]).tables[0])
    assert rows == [
        ["(cause not recorded)", "rollouts", "12", "1 to 12"],
        ["TimeoutError: the desk did not answer", "rollouts", "12", "1 to 12"],
    ]


def _record(member, failure, *, split="test", iteration=5):
    failed = failure is not None
    return {
        **{"schema": 1, "split": split, "iteration": iteration, "group": 0, "member": member},
        **{"task_id": "t", "seed": 0, "labels": {}, "stop": "env_error" if failed else "done"},
        **{"failed": failed, "failure": failure, "reward": 0.0, "score": 0.0, "turns": 1},
        **{"success": None if failed else False, "turn_rewards": [], "policy_version": 5},
        **{"advantage": None, "weights": [], "info": {}, "messages": [], "segments": []},
    }


def test_failures_of_evaluations_come_from_their_trajectories(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(5, {"eval/failed": 2, "eval_train/failed": 1})
        writer.write(10, {"eval/failed": 0})
    records = [_record(0, None), _record(1, "OSError: \ud83d gone")]
    write_shard(tmp_path, TrajectoryFile(5, "test", True), pack_shard(records))
    rollouts = [_record(0, "of a rollout", split="train")]
    write_shard(tmp_path, TrajectoryFile(5, "train", False), pack_shard(rollouts))
    rows = cells(failures_section(load_runs([tmp_path])).tables[0])
    assert rows == [
        ["(cause not recorded)", "evaluation on test", "1", "5 to 5"],
        ["OSError: \ud83d gone", "evaluation on test", "1", "5 to 5"],
        ["(cause not recorded)", "evaluation on train", "1", "5 to 5"],
    ]
    assert r"OSError: \ud83d gone" in report_of(tmp_path).read_text()  # half of a character


def test_failures_in_a_shard_that_the_run_has_just_removed_have_no_cause(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write(5, {"eval/failed": 2})
    monkeypatch.setattr(
        settings_tables, "find_shards", lambda workdir: [TrajectoryFile(5, "test", True)]
    )
    rows = cells(failures_section(load_runs([tmp_path])).tables[0])
    assert rows == [["(cause not recorded)", "evaluation on test", "2", "5 to 5"]]


def test_a_run_without_failures_says_so(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"rollout/failed": 0})
    assert failures_section(load_runs([tmp_path])).intro == "No environment failed."


def test_success_at_first_and_now_is_of_evaluations_where_there_are_any(runs, tmp_path):
    measure, ends = first_and_last(runs[0])
    assert measure == "test avg@4" and [e.value for e in ends] == pytest.approx([0.4, 0.9])
    with MetricsWriter(tmp_path / "no") as writer:
        writer.write(1, {"rollout/success_rate": 0.25})
    measure, ends = first_and_last(load_runs([tmp_path / "no"])[0])
    assert measure == "rollouts" and [e.value for e in ends] == [0.25]
    assert first_and_last(load_runs([tmp_path])[0])[1] == []


def test_the_page_is_one_file_that_names_no_other(runs):
    page = report_of(runs[0].workdir, compare=[runs[1].workdir])
    assert page == runs[0].workdir / "report.html"
    text = page.read_text()
    scripts = re.findall(r"<script[^>]*>", text)
    assert scripts == ['<script type="application/json" id="specs">', "<script>", "<script>"]
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "default-src &#39;none&#39;" in text and len(text) < 2 * 2**20
    assert sorted(p.name for p in page.parent.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "run.json",
    ]


def test_the_charts_of_a_page_are_those_of_its_sections(runs):
    text = report_of(runs[0].workdir).read_text()
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', text, re.DOTALL)[1])
    assert set(re.findall(r'data-chart="([^"]+)"', text)) == set(specs) and len(specs) > 15
    for spec in specs.values():  # which were not checked as they were made
        alt.Chart.from_dict(spec, validate=True)


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path):
    text = report_of(tmp_path).read_text()
    assert "Nothing has been recorded yet" in text and "data-chart" not in text


def test_a_damaged_line_of_metrics_costs_the_page_that_line_and_is_told(tmp_path, caplog):
    lines = ['{"iteration": 1, "rollout/success_rate": 0.25}', "\0garbage"]
    lines += ['{"iteration": 2, "rollout/success_rate": 0.75}', ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert "0.75" in report_of(tmp_path).read_text()
    assert "1 of 3 lines are damaged, the first of them line 2; they are left out" in caplog.text


def test_a_page_has_a_link_to_trajectories_once_their_page_is_written(runs, tmp_path):
    workdir = runs[0].workdir
    write_shard(workdir, TrajectoryFile(1, "train", False), pack_shard([]))
    assert "index.html" not in report_of(workdir).read_text()
    write_pages(workdir)
    assert 'href="trajectories/index.html"' in report_of(workdir).read_text()
    (tmp_path / "pages").mkdir()
    file = report_of(workdir, output=tmp_path / "pages" / "r.html")
    assert 'href="../first/trajectories/index.html"' in file.read_text()


def test_a_run_that_stands_still_is_told_from_one_that_runs(tmp_path):
    workdir = report_cases.write_run(tmp_path / "a", iterations=5, planned=12)
    assert "<dd>running</dd>" in report_of(workdir).read_text()
    os.utime(workdir / "metrics.jsonl", (1_000_000, 1_000_000))
    assert "<dd>stopped or waiting</dd>" in report_of(workdir).read_text()


@pytest.mark.parametrize("age, state", [(200, "running"), (500, "stopped or waiting")])
def test_a_run_may_be_silent_for_a_minute_and_three_of_its_iterations(tmp_path, age, state):
    with MetricsWriter(tmp_path) as writer:
        for i in (1, 2):
            writer.write(i, {"time/rollout_s": 100.0})
    then = time.time() - age  # of 60 + 3 * 100 seconds
    os.utime(tmp_path / "metrics.jsonl", (then, then))
    assert f"<dd>{state}</dd>" in report_of(tmp_path).read_text()


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--output: got .*\(Not a directory\)"):
        report_of(tmp_path, output=tmp_path / "file" / "new" / "r.html")


def test_a_link_stays_and_its_target_becomes_the_page_in_a_folder_that_is_made(tmp_path):
    link, target = tmp_path / "report.html", tmp_path / "new" / "site" / "run.html"
    link.symlink_to(target)
    for _ in range(2):  # a target that is missing, and one that is there
        assert report_of(tmp_path) == link and link.is_symlink()
        assert target.read_text().startswith("<!doctype html>")
    assert os.listdir(target.parent) == ["run.html"] and len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("segments, warned", [(4.0, True), (1.0, False)])
def test_turns_that_are_segments_of_their_own_are_a_warning_in_the_head(tmp_path, segments, warned):
    with MetricsWriter(tmp_path) as writer:
        values = {"rollout/turns_mean": 4.0, "rollout/segments_mean": segments}
        writer.write(1, {"rollout/success_rate": 0.5} | values)
    page = report_of(tmp_path).read_text()
    assert ("4.0 segments per trajectory at 4.0 turns: the chat template" in page) is warned
