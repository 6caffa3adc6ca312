"""What a user's `FILE.py:attribute` stands for."""

import os
import sys

import pytest

from seeupo_jax.configuration.config_file import read_values
from seeupo_jax.configuration.user_code import import_attribute, listed


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


def test_a_file_may_lie_in_a_home_folder(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert found(f"~/{file.name}:MADE") is found(f"{file}:MADE")


def test_a_file_finds_modules_beside_it_and_they_do_not_hide_others(file):
    before = [*sys.path]
    assert found(f"{file}:OTHER") == 5
    assert sys.path[: len(before)] == before and sys.path[-1] == str(file.parent)


def test_a_file_that_changed_within_a_second_is_read_as_it_is(tmp_path, monkeypatch):
    """Python's cache knows a source by its size and the whole second of its change."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, read = tmp_path / "own_file.py", []
    for rate in ("1e-4", "2e-4"):
        file.write_text(f"VALUE = {rate}\ndef get_config(): return {{'seed': int(VALUE * 1e4)}}\n")
        os.utime(file, (1_000_000_000, 1_000_000_000))
        read.append((found(f"{file}:VALUE"), read_values(file)["seed"]))
        del sys.modules[str(file)]  # as in another process
    assert read == [(1e-4, 1), (2e-4, 2)]


def test_a_list_of_nothing_says_so_and_why():
    assert listed(["a", "b"], "it has no field") == "a, b"
    assert listed((), "it has no field") == "none, since it has no field"
