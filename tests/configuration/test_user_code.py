"""What a user's `FILE.py:attribute` stands for."""

import sys

import pytest

from seeupo_jax.configuration.user_code import import_attribute


def found(name):
    return import_attribute(name, "config.field", "value", lambda value: value is not None)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file with a module of its own beside it, in another folder than the working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "lies_beside.py").write_text("VALUE = 5\n")
    file = tmp_path / "own_file.py"
    file.write_text("from lies_beside import VALUE\nMADE, OTHER = object(), VALUE\n")
    yield file
    for name in ("lies_beside", str(file)):
        sys.modules.pop(name, None)


def test_a_file_runs_once_in_a_process(file):
    assert found(f"{file}:MADE") is found(f"{file}:MADE")


def test_a_file_finds_modules_beside_it_and_they_do_not_hide_others(file):
    before = [*sys.path]
    assert found(f"{file}:OTHER") == 5
    assert sys.path[: len(before)] == before and sys.path[-1] == str(file.parent)
