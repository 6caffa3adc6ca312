"""run.json says how a run was begun, and keeps that when it goes on."""

import json
import platform

from seeupo_jax.metrics import run_manifest
from seeupo_jax.metrics.run_manifest import (
    Launch,
    note_checkpoints,
    read_run_manifest,
    write_run_manifest,
)


def write(workdir, resumed, **config):
    write_run_manifest(
        workdir,
        resumed=resumed,
        launch=Launch("configs/x.py", ("python", "-m", "seeupo_jax.train")),
        config={"iterations": 3, "profile": {"steps": (1, 2)}} | config,
        devices={"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1},
        model={"name": "m", "parameters": 12},
    )


def test_it_says_how_the_run_was_begun(tmp_path):
    write(tmp_path / "quick", False)
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
    write(tmp_path, False)
    began = read_run_manifest(tmp_path)["began"]

    later = type("L", (), {"now": staticmethod(lambda _: _Stamp())})
    monkeypatch.setattr(run_manifest, "datetime", later)
    write(tmp_path, True, seed=1)
    write(tmp_path, True, seed=2)
    record = read_run_manifest(tmp_path)
    assert record["began"] == began and record["resumed"] == ["later", "later"]
    assert record["config"]["seed"] == 2  # that of the last life
    write(tmp_path, False)
    assert read_run_manifest(tmp_path)["resumed"] == []  # begun anew


def test_a_run_that_goes_on_keeps_where_its_checkpoints_are(tmp_path):
    note_checkpoints(tmp_path, "a")  # there is no run
    assert not list(tmp_path.iterdir())
    write(tmp_path, False)
    begun = read_run_manifest(tmp_path)
    assert begun["checkpoints"] is None
    for folder in ("a", "a", "b"):
        note_checkpoints(tmp_path, folder)
        assert read_run_manifest(tmp_path) == begun | {"checkpoints": folder}
    write(tmp_path, True)
    assert read_run_manifest(tmp_path)["checkpoints"] == "b"
    write(tmp_path, False)
    assert read_run_manifest(tmp_path)["checkpoints"] is None


class _Stamp:
    def isoformat(self, **_):
        return "later"


def test_a_damaged_file_is_none(tmp_path):
    assert read_run_manifest(tmp_path) is None
    (tmp_path / "run.json").write_text('{"began": ')
    assert read_run_manifest(tmp_path) is None
    write(tmp_path, True)
    assert len(read_run_manifest(tmp_path)["resumed"]) == 1
