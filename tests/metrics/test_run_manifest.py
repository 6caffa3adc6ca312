"""run.json says how a run was begun, and keeps that when it goes on."""

import json
import platform
from importlib.metadata import version

from seeupo_jax.metrics import run_manifest
from seeupo_jax.metrics.run_manifest import (
    Launch,
    Resumption,
    flatten,
    note_checkpoints,
    read_resumptions,
    read_run_manifest,
    write_run_manifest,
)


def write(workdir, resumes=None, devices=1, **config):
    return write_run_manifest(
        workdir,
        resumes=resumes,
        launch=Launch("configs/x.py", ("python", "-m", "seeupo_jax.train")),
        config={"iterations": 3, "profile": {"steps": (1, 2)}} | config,
        devices={"platform": "cpu", "kind": "cpu", "count": devices, "processes": 1},
        model={"name": "m", "parameters": 12},
    )


def test_it_says_how_the_run_was_begun(tmp_path):
    write(tmp_path / "quick")
    record = json.loads((tmp_path / "quick" / "run.json").read_text())
    assert record["schema"] == 1 and record["name"] == "quick"
    assert record["config"] == {"iterations": 3, "profile": {"steps": [1, 2]}}
    assert record["config_file"] == "configs/x.py"
    assert record["command"] == ["python", "-m", "seeupo_jax.train"]
    assert record["resumed"] == [] and record["began"].endswith("+00:00")
    assert record["versions"]["python"] == platform.python_version()
    assert {"seeupo_jax", "jax", "jaxlib", "flax", "optax"} <= record["versions"].keys()
    assert record["devices"]["count"] == 1 and record["model"]["parameters"] == 12
    assert read_run_manifest(tmp_path / "quick") == record


def test_a_run_that_goes_on_keeps_when_it_began(tmp_path, monkeypatch):
    write(tmp_path)
    began = read_run_manifest(tmp_path)["began"]

    later = type("L", (), {"now": staticmethod(lambda _: _Stamp())})
    monkeypatch.setattr(run_manifest, "datetime", later)
    write(tmp_path, (4, False), iterations=6)
    write(tmp_path, (6, True), iterations=9)
    record = read_run_manifest(tmp_path)
    assert record["began"] == began and [each["at"] for each in record["resumed"]] == ["later"] * 2
    assert record["config"]["iterations"] == 9  # that of the last start
    write(tmp_path)
    assert read_run_manifest(tmp_path)["resumed"] == []  # begun anew


def test_a_run_that_goes_on_keeps_where_its_checkpoints_are(tmp_path):
    note_checkpoints(tmp_path, "a")  # there is no run
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    begun = read_run_manifest(tmp_path)
    assert begun["checkpoints"] is None
    for folder in ("a", "a", "b"):
        note_checkpoints(tmp_path, folder)
        assert read_run_manifest(tmp_path) == begun | {"checkpoints": folder}
    write(tmp_path, (0, False))
    assert read_run_manifest(tmp_path)["checkpoints"] == "b"
    write(tmp_path)
    assert read_run_manifest(tmp_path)["checkpoints"] is None


def test_each_resumption_names_what_changed_with_both_values(tmp_path, monkeypatch):
    write(tmp_path, env={"options": {"kinds": ["a"]}})
    manifest = read_run_manifest(tmp_path)
    manifest["versions"] |= {"jax": "0.1", "gone": "2.0"}
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    changed = {"iterations": 6, "env": {"options": {}}, "optimizer": {"learning_rate": 3e-4}}
    returned = write(tmp_path, (4, True), devices=8, **changed)
    (entry,) = read_run_manifest(tmp_path)["resumed"]
    assert entry == json.loads(json.dumps(returned._asdict()))
    assert (entry["after"], entry["in_sweep"]) == (4, True)
    assert entry["changes"] == {
        # of the learning rate the default, 3e-4, was not written: nothing changed
        "config.iterations": {"before": 3, "after": 6},
        "config.env.options.kinds": {"before": ["a"]},
        "devices.count": {"before": 1, "after": 8},
        "versions.jax": {"before": "0.1", "after": version("jax")},
        "versions.gone": {"before": "2.0"},
    }
    assert Resumption("now", 4, True, entry["changes"]).place == "in the sweep of 5"
    assert {"config.iterations: 3 -> 6", 'config.env.options.kinds: ["a"] -> -'} <= {
        *returned.lines()
    }
    write(tmp_path, (6, False), devices=8, **changed)
    assert read_run_manifest(tmp_path)["resumed"][1]["changes"] == {}
    # Undone from the last one, the changes give the settings of the first start.
    first = dict(flatten(read_run_manifest(tmp_path)["config"]))
    for name, change in entry["changes"].items():
        if name.startswith("config."):
            first.pop(name[7:], None)
            first |= {name[7:]: change["before"]} if "before" in change else {}
    assert first["iterations"] == 3 and first["env.options.kinds"] == ["a"]


def test_resumptions_of_older_versions_and_of_damaged_files_are_read(tmp_path):
    entries = ["2026-01-01", {"at": "then", "after": "x", "changes": {"a": 1}}, 7]
    found = read_resumptions({"resumed": entries})
    assert found == [Resumption("2026-01-01"), Resumption("then"), Resumption("7")]
    assert found[0].place == "at 2026-01-01" and found[0].lines() == []
    assert read_resumptions({}) == read_resumptions({"resumed": 3}) == []
    (tmp_path / "run.json").write_text(json.dumps({"resumed": ["2026-01-01"], "config": {}}))
    write(tmp_path, (2, False))
    assert [each.after for each in read_resumptions(read_run_manifest(tmp_path))] == [None, 2]


class _Stamp:
    def isoformat(self, **_):
        return "later"


def test_a_damaged_file_is_none(tmp_path):
    assert read_run_manifest(tmp_path) is None
    (tmp_path / "run.json").write_text('{"began": ')
    assert read_run_manifest(tmp_path) is None
    write(tmp_path, (0, False))
    assert len(read_run_manifest(tmp_path)["resumed"]) == 1
    (entry,) = read_run_manifest(tmp_path)["resumed"]
    assert entry["after"] == 0 and entry["changes"] is None  # what was before is not known
