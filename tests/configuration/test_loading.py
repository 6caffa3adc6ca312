"""How overrides change what a file gives."""

import pytest

from seeupo_jax.configuration.loading import from_dict, load_config


@pytest.mark.parametrize(
    "of_field, of_dict",
    [
        ("algorithm.custom_order=[1,0]", 'algorithm={"custom_order": [1,0]}'),
        ("algorithm.a_grae_alpha=0.5", 'algorithm={"a_grae_alpha": 0.5}'),
    ],
)
def test_a_field_that_nothing_reads_is_told_however_it_is_given_beside_a_recipe(of_field, of_dict):
    told = []
    for override in (of_field, of_dict):
        with pytest.raises(ValueError, match="^config.algorithm.") as error:
            load_config({}, ["recipe=grpo", override])
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_recipe_drops_what_the_file_gave_for_another_and_no_override():
    source = {"algorithm": {"order": "custom", "custom_order": (1, 0)}}
    assert load_config(source, ["recipe=grpo"]) == from_dict({"recipe": "grpo"})
    given = ["recipe=grpo", 'algorithm={"clip_high": 0.25}', "algorithm.clip_low=0.5"]
    wanted = {"recipe": "grpo", "algorithm": {"clip_high": 0.25, "clip_low": 0.5}}
    assert load_config(source, given) == from_dict(wanted)


@pytest.mark.parametrize(
    "overrides, tasks",
    [
        (["rollout.tasks=1", 'rollout={"tasks": 2}', "rollout.tasks=3"], 3),
        (["rollout.tasks=3", "rollout.tasks=1", 'rollout={"tasks": 2}'], 2),
        (['rollout={"tasks": 2}', "rollout.group_size=4", 'rollout={"tasks": 1}'], 1),
    ],
)
def test_of_two_overrides_the_last_counts(overrides, tasks):
    rollout = load_config({"rollout": {"tasks": 9, "group_size": 9}}, overrides).rollout
    assert (rollout.tasks, rollout.group_size) == (tasks, 8)
