"""How overrides change what a file gives, and what becomes of paths."""

import pwd

import pytest

from seeupo_jax.configuration.loading import from_dict, load_config, to_dict


@pytest.mark.parametrize(
    "of_field, of_dict",
    [
        ("algorithm.custom_order=[1,0]", 'algorithm={"custom_order": [1,0]}'),
        ("algorithm.estimator.baseline=batch", 'algorithm={"estimator": {"baseline": "batch"}}'),
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


ROOT_HOME = pwd.getpwnam("root").pw_dir
PATHS = {
    "agent": ("name", "tasks"),
    "chat": ("template",),
    "checkpoint": ("directory",),
    "lora": ("path",),
    "model": ("path",),
    "rollout": ("grammar",),
    "sft": ("data", "held_out_data"),
    "warm_start": ("output",),
}


def of_paths(text):
    """Values that have a text in every field of a path."""
    return {group: dict.fromkeys(names, text) for group, names in PATHS.items()}


def test_a_path_that_begins_with_a_tilde_is_recorded_in_that_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/of/somebody")
    values = to_dict(load_config(of_paths("~/a~b/x:y")))
    expanded = of_paths("/of/somebody/a~b/x:y")
    assert {g: {n: values[g][n] for n in names} for g, names in PATHS.items()} == expanded
    assert load_config(of_paths("~/a~b/x:y")) == load_config(expanded)
    assert load_config({}, ["checkpoint.directory=~/x"]).checkpoint.directory == "/of/somebody/x"
    assert load_config({"model": {"path": "~root/x"}}).model.path == f"{ROOT_HOME}/x"
    assert load_config({"optimizer": {"kwargs": {"a": "~"}}}).optimizer.kwargs == {"a": "~"}


@pytest.mark.parametrize(
    "field, text",
    [
        ("checkpoint.directory", "gs://bucket/~/x//y"),
        ("model.path", "package:order_desk"),
        ("sft.data", "tfds:gs://bucket//~/x"),
        ("sft.data", "./~/x/"),
        ("rollout.grammar", "tool_calls"),
        ("agent.name", "a.module:~"),
    ],
)
def test_other_forms_of_a_path_stay_as_they_were_typed(field, text):
    group, name = field.split(".")
    assert to_dict(load_config({}, [f"{field}={text}"]))[group][name] == text
