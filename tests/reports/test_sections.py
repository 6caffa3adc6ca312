"""The parts of the report, from lines of metrics that were made up."""

import json

from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.reports.sections import stops_section


def test_candidates_that_were_not_executed_are_a_stop_reason_of_their_own(tmp_path):
    counts = {"rollout/stop_done": 2, "rollout/stop_unchosen": 6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1} | counts) + "\n")
    section = stops_section(load_runs([tmp_path]))
    rows = section.charts[0].spec["datasets"]["rows"]
    assert {r["part"]: r["value"] for r in rows} == {"done": 0.25, "unchosen": 0.75}
    assert "unchosen: a candidate" in section.intro
