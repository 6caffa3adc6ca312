"""Every field of the configuration has its type, default, bounds and one sentence."""

import dataclasses
from collections import Counter

import pytest

from seeupo_jax.configuration.field_reference import describe_fields, describe_groups
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.metrics.run_manifest import flatten

FIELDS = {field.full_name: field for field in describe_fields() if not field.selected}
SELECTED = [field for field in describe_fields() if field.selected]


def test_every_field_is_described_once_with_a_sentence():
    every = {name for name, _ in flatten(to_dict(Config()))}
    in_lists = Counter(name.partition("[].")[0] for name in FIELDS if "[]." in name)
    selected = {field.full_name for field in SELECTED}
    optional = {name for name in every if f"{name}." in " ".join(FIELDS)}
    below = {name for name in FIELDS if name.rpartition(".")[0] in optional}
    assert {name for name in FIELDS if "[]." not in name} - below == every - selected
    assert optional == {
        f"algorithm.{name}" for name in ("importance", "kl_control", "reference", "overlong")
    }
    assert in_lists == {"rewards": 6, "roles": 4, "warm_start.stages": 3, "optimizer.groups": 5}
    assert len(FIELDS) + len({*SELECTED}) == len(describe_fields())
    for name, field in [*FIELDS.items(), *((field.full_name, field) for field in SELECTED)]:
        assert field.sentence.endswith(".") and field.sentence[:1].strip(), name
        assert field.allowed and field.type, name
    assert all(describe_groups().values())
    assert {field.group for field in describe_fields()} == set(describe_groups())


def test_an_option_is_described_with_the_choices_that_have_it():
    (discount,) = (f for f in SELECTED if f.name == "discount" and "per turn" in f.sentence)
    assert discount.full_name == "algorithm.estimator.discount"
    assert discount.selected == "advantage=a2tgpo, gigpo, hgpo, matchtir, prorl"
    assert [f.selected for f in SELECTED if f.name == "lam"] == ["advantage=gae, spa"]


@pytest.mark.parametrize(
    "name, type_name, default, allowed",
    [
        ("algorithm.weight_clip", "float or none", "0.2", "a number > 0 and <= 1000, or none"),
        ("seed", "int", "0", "a number from 0 to 4294967295"),
        ("env.isolation", "str", "thread", "one of thread, process"),
        ("checkpoint.export", "bool", "True", "True or False"),
        ("telemetry.trackers", "tuple of str", "('tensorboard',)", "a tuple"),
        ("env.options", "dict", "{}", "a dict"),
        ("rollout.mesh", "dict or none", "none", "a dict, or none"),
        ("warm_start.stages[].steps", "int", "1000", "a number >= 2"),
    ],
)
def test_a_field_is_described_as_it_is_declared(name, type_name, default, allowed):
    field = FIELDS[name]
    assert (field.type, field.default, field.allowed) == (type_name, default, allowed)


@pytest.mark.parametrize("name", ["algorithm.kl_coef", "lora.rank", "seed", "checkpoint.export"])
def test_what_is_described_as_allowed_is_what_the_error_says(name):
    group, _, leaf = name.rpartition(".")
    values = {group: {leaf: -7}} if group else {leaf: -7}
    with pytest.raises(ValueError) as error:
        from_dict(values)
    assert FIELDS[name].allowed in str(error.value)


def test_private_fields_are_not_described():
    private = [field.name for field in dataclasses.fields(Config) if field.name.startswith("_")]
    assert private and not [name for name in FIELDS if "_made_of" in name]
