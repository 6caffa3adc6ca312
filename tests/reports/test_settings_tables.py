"""Configurations beside each other."""

import json

from seeupo_jax.reports.run_data import load_runs
from seeupo_jax.reports.settings_tables import configuration_table


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
