"""Configurations beside each other, and what failed."""

import gzip
import json

import pytest
from report_cases import write_about
from telemetry_cases import record, write_shard

from seeupo_jax.reports.blocks import Point
from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.reports.sections import overlay
from seeupo_jax.reports.settings_tables import (
    changes_table,
    configuration_table,
    failures_section,
    versions_table,
)


def test_values_that_differ_are_marked_and_told_apart_where_their_texts_agree(tmp_path):
    options = {
        "a": {"level": 1, "kinds": ["x", "y"], "same": "1", "given": "-", "rate": 0.5},
        "b": {"level": "1", "kinds": "x y", "same": "1", "rate": 0.25},
    }
    for name, values in options.items():
        (tmp_path / name).mkdir()
        record = {"config": {"env": {"options": values}}}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    table = configuration_table(load_runs([tmp_path / "a", tmp_path / "b"]))
    rows = {
        row.cells[0].removeprefix("env.options."): (row.cells[1:], row.marked) for row in table.rows
    }
    assert rows == {
        "given": (['"-"', "-"], True),
        "kinds": (['["x", "y"]', '"x y"'], True),
        "level": (["1", '"1"'], True),
        "rate": (["0.5", "0.25"], True),
        "same": (["1", "1"], False),
    }


RESUMED = [
    "2026-01-01T00:00:00+00:00",  # as earlier versions wrote it
    {"at": "monday", "after": 3, "in_sweep": False, "changes": {}},
    {
        "at": "tuesday",
        "after": 5,
        "in_sweep": True,
        "changes": {"config.seed": {"before": 0, "after": 1}, "versions.x": {"before": "2"}},
    },
]


def test_the_report_shows_what_changed_when_a_run_resumed_and_where(tmp_path):
    write_about(tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    assert changes_table(load_runs([tmp_path])) is None
    (tmp_path / "run.json").write_text(json.dumps(about | {"resumed": RESUMED}))
    lines = [{"iteration": i, "sweep/loss": 0.1} for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = load_runs([tmp_path])
    assert [row.cells for row in changes_table([run]).rows] == [
        ["at 2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00", "not recorded"],
        ["after 3", "monday", "nothing"],
        ["in the sweep of 6", "tuesday", "config.seed: 0 -> 1"],
        ["in the sweep of 6", "tuesday", "versions.x: 2 -> -"],
    ]
    versions = {row.cells[0]: row.cells[1] for row in versions_table([run]).rows}
    assert versions["resumed"] == "2026-01-01T00:00:00+00:00 monday tuesday"
    measures = {"loss": lambda run: [Point(i, v) for i, v in run.series("sweep/loss")]}
    (chart,) = overlay("Loss", [run], measures, y="")
    text = "in the sweep of 6: config.seed: 0 -> 1; versions.x: 2 -> -"
    assert [{"iteration": 5.5, "change": text}] in chart.spec["datasets"].values() or any(
        layer.get("data") == {"values": [{"iteration": 5.5, "change": text}]}
        for layer in chart.spec["layer"]
    )


@pytest.mark.parametrize(
    "damage",
    [gzip.compress(b'{"schema": 2}\n'), b"no gzip", None],
    ids=["schema", "bytes", "folder"],
)
def test_failures_of_an_evaluation_whose_shard_cannot_be_read_have_no_cause(tmp_path, damage):
    lines = [{"iteration": i, "eval/avg@4": 0.5, "eval/failed": 1} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = {"split": "test", "failed": True, "failure": "TimeoutError"}
    write_shard(tmp_path, [record(2, **made)])
    broken = write_shard(tmp_path, [record(1, **made)])
    if damage is None:
        broken.unlink()
        broken.mkdir()
    else:
        broken.write_bytes(damage)
    (table,) = failures_section(load_runs([tmp_path])).tables
    assert [list(row.cells) for row in table.rows] == [
        ["(cause not recorded)", "evaluation on test", "1", "1 to 1"],
        ["TimeoutError", "evaluation on test", "1", "2 to 2"],
    ]
