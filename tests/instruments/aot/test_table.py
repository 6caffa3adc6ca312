"""The command that makes a table of reports; its rows are tested with the reports."""

import json

import pytest

from seeupo_jax.instruments.aot.table import main, row

REPORT = {
    "command": "--config=package:quickstart --topology=v5e:2x2",
    "config_file": "package:quickstart",
    "topology": "v5e:2x2",
    "programs": {},
    "hbm_bytes": 2**30,
    "fits": True,
    "iteration": None,
    "efficiency": {"compute": 0.6, "memory": 0.6},
}


def test_a_report_is_a_row_with_its_command(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    main(["table", str(tmp_path / "r.json")])
    printed = capsys.readouterr().out
    assert "| quickstart | v5e:2x2 |" in printed
    assert f"python -m seeupo_jax.aot {REPORT['command']}\n" in printed


def test_an_iteration_is_told_at_best_and_at_published_efficiency():
    made = {"step_s": 12.1, "serial_s": 21.8, "published_s": 1_031.6}
    assert row(REPORT | {"iteration": made})[-2:] == ("12 to 22", "1,032")


EARLIER = json.dumps({key: value for key, value in REPORT.items() if key != "efficiency"})


@pytest.mark.parametrize("content", [None, "", "[]", '{"programs": {}}', EARLIER])
def test_what_is_no_report_is_a_sentence(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["table", str(tmp_path / "r.json")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert f"got '{tmp_path / 'r.json'}'; allowed: a file that python -m seeupo_jax.aot" in error


@pytest.mark.parametrize("given, code", [(["--help"], 0), ([], 2), (["--json=x"], 2)])
def test_help_and_wrong_flags_are_those_of_every_command(given, code, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["table", *given])
    printed = capsys.readouterr()
    assert ended.value.code == code
    assert printed.out.startswith("usage: ") if code == 0 else printed.err.startswith("error: ")
