"""How a value that is typed is read, and what no field holds."""

import json

import pytest

from seeupo_jax.configuration.fields import parse
from seeupo_jax.configuration.loading import from_dict, load_config


def options(*overrides):
    return load_config({}, overrides).env.options


@pytest.mark.parametrize("typed", ['{"note": "\\ud83d\\ude00"}', '{"path": "a\\/b", "x": [1e3]}'])
def test_json_means_what_json_says(typed):
    assert options(f"env.options={typed}") == json.loads(typed)
    assert options(f"env.options.x=  [{typed}] ") == {"x": [json.loads(typed)]}


def test_what_is_no_json_is_read_as_python_has_it():
    assert parse("{'a': (1, None), 'b': \"\\x41\"}", "config.x") == {"a": (1, None), "b": "A"}
    assert parse("{'a': true}", "config.x") == {"a": True}  # between the two


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_no_json_has_is_refused_in_a_free_field(number):
    """A NaN is unequal to itself, so that no run with one could resume."""
    with pytest.raises(ValueError, match=r"^config.env.options.a\[0\]: got .*; allowed: .*finite"):
        from_dict({"env": {"options": {"a": [number]}}})
    with pytest.raises(ValueError, match=r"^config.env.options.a: got .*; allowed: .*finite"):
        load_config({}, [f"env.options={json.dumps({'a': number})}"])
