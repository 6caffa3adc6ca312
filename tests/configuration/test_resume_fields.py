"""Every field has a decision on what becomes of it when a run resumes, and the checks follow it."""

import dataclasses

import pytest

from seeupo_jax.configuration.field_reference import describe_fields
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.resume_fields import (
    DECISION_OF,
    DECISIONS,
    TRAINING_PARTS,
    Decision,
    without_computed,
)
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy_io.resume_check import check_same_run

NEW = "Choose a new workdir for another run."


def test_every_field_of_the_configuration_has_one_decision():
    described = dict.fromkeys(field.full_name for field in describe_fields())
    fields = [name for name in described if name.rpartition(".")[0] not in DECISION_OF]
    sections = {name.rpartition(".")[0] for name in described} & {*DECISION_OF}
    fields += sorted(sections - {*fields})
    assert sorted(DECISION_OF) == sorted(fields)
    listed = [
        name for kinds in DECISIONS.values() for names in kinds.values() for name in names.split()
    ]
    assert len(listed) == len(fields)  # none has two


def other(value):
    """Another value, which no check of values is asked for."""
    if isinstance(value, tuple):
        return [*value, {}]
    return not value if isinstance(value, bool) else f"{value} and more"


def changed(field):
    """A configuration in which one field is another, and what it was."""
    values = to_dict(Config())
    group, _, name = field.rpartition(".")
    part = values[group] if group else values
    was, part[name] = part[name], other(part[name])
    return values, was


SINGLE = [name for name in DECISION_OF if "[]" not in name and name.partition(".")[0] != "sft"]


@pytest.mark.parametrize("field", SINGLE)
def test_a_training_is_refused_with_another_value_of_a_field_exactly_where_the_table_says_so(field):
    """The saved configuration is the changed one: the check compares, it does not validate."""
    saved, _ = changed(field)
    if DECISION_OF[field] is Decision.REFUSED:
        with pytest.raises(
            ValueError, match=rf"^config\.{field}: got .*; allowed for this workdir"
        ):
            check_same_run(Config(), saved)
    else:
        check_same_run(Config(), saved)


@pytest.mark.parametrize(
    "given, sentence",
    [
        (
            {"model": {"dtype": "bfloat16"}},
            "config.model.dtype: got 'bfloat16'; allowed for this workdir, whose checkpoint has it:"
            f" 'float32'. {NEW}",
        ),
        (
            {"model": {"scan_layers": True}},
            "config.model.scan_layers: got True; allowed for this workdir, whose checkpoint has it:"
            f" False. {NEW}",
        ),
    ],
)
def test_what_makes_other_numbers_or_arrays_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ValueError) as refusal:
        check_same_run(from_dict(given), to_dict(Config()))
    assert str(refusal.value) == sentence


def test_what_an_older_version_had_not_was_at_its_default():
    saved = to_dict(Config())
    del saved["judge"], saved["rollout"]["quantize"]
    saved["rollout"]["gone"] = 3  # a field that this version has no more
    check_same_run(Config(), saved)
    with pytest.raises(ValueError, match="^config.rollout.quantize: got 'int8'"):
        check_same_run(from_dict({"rollout": {"quantize": "int8"}}), saved)


def test_only_parts_with_fields_that_may_not_change_are_compared():
    with_refused = {
        group.partition("[")[0].partition(".")[0]
        for group, kinds in DECISIONS.items()
        if Decision.REFUSED in kinds
    }
    top = {*DECISIONS[""][Decision.REFUSED].split()}
    assert {*TRAINING_PARTS} == (with_refused - {""} | top) - {"sft"}


def test_fields_that_say_where_it_is_computed_are_left_out_in_lists_too():
    reward = {"function": "m:f", "weight": 2.0, "timeout_s": 5.0}
    values = without_computed(to_dict(from_dict({"rewards": [reward]})))
    assert values["rewards"] == [{"function": "m:f", "weight": 2.0, "name": None, "options": {}}]
    assert values["mesh"] == {} and "remat" not in values["model"]
    assert values["env"].keys() == {"name", "options", "timeout_as", "max_reward"}
    assert {*values} == {field.name for field in dataclasses.fields(Config)} - {
        "log_checksum",
        "_made_of",
    }
