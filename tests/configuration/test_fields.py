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


@pytest.mark.parametrize(
    "typed, wanted",
    [
        ("a,b", ("a", "b")),
        ("(a,b)", ("a", "b")),
        (r"layers\.\d{1,2}\.(q|v),b", (r"layers\.\d{1,2}\.(q|v)", "b")),
        ("[a, b]", ("a", "b")),
        (" a, b ", ("a", "b")),
        ("(a,)", ("a",)),
        ("('a', \"b\")", ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        ("()", ()),
        ("2023", ("2023",)),
        ("2023,0x10", ("2023", "0x10")),
        ("(2023, 1_0)", ("2023", "1_0")),
        ("(a),(b)", ("(a)", "(b)")),
    ],
)
def test_a_tuple_of_texts_is_typed_as_the_documentation_says(typed, wanted):
    assert load_config({}, [f"evaluation.extra_splits={typed}"]).evaluation.extra_splits == wanted


@pytest.mark.parametrize("typed", ["20261128", "1_0", "1e3", "007", "true", "1,2", "-3j"])
def test_a_text_is_what_was_typed(typed):
    fields = ("checkpoint.directory", "evaluation.split", "warm_start.output")
    config = load_config({}, [f"{field}={typed}" for field in fields])
    assert config.checkpoint.directory == config.evaluation.split == typed
    assert config.warm_start.output == typed


def test_only_numbers_are_kept_as_they_were_typed():
    config = load_config({}, ["seed=1_0", "rollout.mesh.fsdp=2", "evaluation.split='a b'"])
    assert (config.seed, config.rollout.mesh.fsdp, config.evaluation.split) == (10, 2, "a b")
    assert load_config({}, ["checkpoint.directory=none"]).checkpoint.directory is None
    assert options("env.options.size=007", "env.options.x=10") == {"size": "007", "x": 10}
    for override in ("evaluation.split=[1]", 'checkpoint={"directory": 5}', "recipe=[1]"):
        with pytest.raises(ValueError, match="^config.*: got .*; allowed: "):
            load_config({}, [override])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_no_json_has_is_refused_in_a_free_field(number):
    """A NaN is unequal to itself, so that no run with one could resume."""
    with pytest.raises(ValueError, match=r"^config.env.options.a\[0\]: got .*; allowed: .*finite"):
        from_dict({"env": {"options": {"a": [number]}}})
    with pytest.raises(ValueError, match=r"^config.env.options.a: got .*; allowed: .*finite"):
        load_config({}, [f"env.options={json.dumps({'a': number})}"])
