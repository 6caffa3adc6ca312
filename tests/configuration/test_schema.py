"""A configuration is checked whole: what it accepts is what the fields say, and no more."""

import dataclasses
import json
import re

import pytest

from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.schema import Config, Mesh

AHEAD = {"max_lag": 1, "devices": 1}  # of config.rollout
SERVED = {"engine": "openai", "servers": ("http://a:1",)}


def _refused(values):
    with pytest.raises(ValueError) as error:
        from_dict(values)
    assert "\n" not in str(error.value)
    return str(error.value)


def _nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "    config = ml_collections.ConfigDict()\n"
        "    config.iterations = 7\n"
        "    config.optimizer = ml_collections.ConfigDict({'name': 'adamw'})\n"
        "    config.optimizer.kwargs = {'b1': 0.8}\n"
        "    return config\n"
    )
    return path


def test_without_values_the_defaults_hold():
    config = from_dict({})
    assert config == Config()
    assert config.algorithm.order == "reverse" and config.algorithm.scale == "batch"
    assert config.algorithm.weight_clip == 0.2 and config.algorithm.kl_coef == 0.002


def test_given_values_replace_defaults_and_nothing_else():
    config = from_dict({"rollout": {"group_size": 4}})
    assert config.rollout.group_size == 4
    assert dataclasses.replace(config.rollout, group_size=8) == Config().rollout
    assert dataclasses.replace(config, rollout=Config().rollout) == Config()


@pytest.mark.parametrize("values", [{"rollout_ahead": 1}, {"rollout_ahead": 0}])
def test_what_replaces_a_field_that_is_gone_is_said(values):
    said = _refused(values)
    assert said.startswith("config.rollout_ahead: no such field; config.rollout.max_lag=1 with")
    with pytest.raises(ValueError, match="rollout_ahead: no such field; config.rollout.max_lag=1"):
        load_config({}, [f"{name}={value}" for name, value in values.items()])


@pytest.mark.parametrize("concurrency, at_once", [(None, 24), (5, 5), (100, 100)])
def test_all_trajectories_are_open_at_once_where_no_number_is_given(concurrency, at_once):
    given = {"rollout": {"tasks": 6, "group_size": 4, "concurrency": concurrency}}
    rollout = from_dict(given).rollout
    assert (rollout.trajectories, rollout.open_at_once) == (24, at_once)
    assert "trajectories" not in to_dict(from_dict(given))["rollout"]


def test_a_configuration_cannot_be_changed():
    config = from_dict({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optimizer.learning_rate = 1.0


def test_configurations_share_no_dict():
    one, other = vars(from_dict({})), vars(from_dict({}))
    dicts = [
        (group, name)
        for group, values in one.items()
        for name, value in getattr(values, "__dict__", {}).items()
        if isinstance(value, dict)
    ]
    assert ("env", "options") in dicts and ("optimizer", "kwargs") in dicts and len(dicts) == 8
    for group, name in dicts:
        assert vars(one[group])[name] is not vars(other[group])[name], group


def test_a_configuration_survives_json():
    config = from_dict(
        {
            "algorithm": {"order": "custom", "custom_order": [2, 0, 1], "weight_clip": None},
            "rollout": {"max_turns": 3},
            "optimizer": {"kwargs": {"b1": 0.8}},
            "warm_start": {"stages": [{"steps": 3, "demonstrations": {"skill": 0.5}}]},
        }
    )
    assert config.warm_start.stages[0].steps == 3
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    "key, meant",
    [
        ("iteration", "iterations"),
        ("optimizer.learningrate", "learning_rate"),
        ("algorithm.weightclip", "weight_clip"),
        ("rollout.groupsize", "group_size"),
    ],
)
def test_a_misspelt_key_is_named_with_the_one_that_was_meant(key, meant):
    message = _refused(_nested(key, 1))
    assert message.startswith(f"config.{key}: no such field")
    assert f"did you mean {meant}?" in message


def test_a_misspelt_key_inside_a_list_is_named_with_its_place():
    message = _refused({"warm_start": {"stages": [{}, {"step": 1}]}})
    assert message.startswith("config.warm_start.stages[1].step: ")
    assert "did you mean steps?" in message


def test_a_warm_start_of_one_step_whose_learning_rate_would_be_0_is_refused():
    message = _refused({"warm_start": {"stages": [{}, {"steps": 1}]}})
    assert message == "config.warm_start.stages[1].steps: got 1; allowed: a number >= 2."


def test_a_key_like_no_other_gets_the_list_of_fields():
    message = _refused({"optimizer": {"zzz": 1}})
    assert "did you mean" not in message
    assert "name, learning_rate, schedule" in message


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("iterations", "many", "a whole number"),
        ("iterations", 1.0, "a whole number"),
        ("iterations", True, "a whole number"),
        ("iterations", None, "a whole number"),
        ("log_checksum", 1, "True or False"),
        ("optimizer.learning_rate", "1e-3x", "a finite number"),
        ("optimizer.learning_rate", False, "a finite number"),
        ("optimizer.learning_rate", float("nan"), "a finite number"),
        ("rollout.temperature", float("inf"), "a finite number"),
        ("optimizer.name", 3, "a text"),
        ("optimizer.kwargs", [1], "a dict"),
        ("optimizer", "adam", "a group of fields"),
        ("batching.buckets", "x", "a tuple"),
        ("batching.buckets", [64.5, 256], "a whole number"),
        ("telemetry.trackers", 3, "a tuple"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key, value, allowed):
    message = _refused(_nested(key, value))
    assert message.startswith(f"config.{key}") and f"allowed: {allowed}" in message
    assert repr(value) in message or repr(value[0]) in message


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("iterations", -1, "a number >= 0"),
        ("algorithm.clip_low", -0.1, "a number from 0 to 1000, or none"),
        ("algorithm.clip_high", 1e30, "a number from 0 to 1000, or none"),
        ("algorithm.clip_dual", 1.0, "a number > 1 and <= 1000, or none"),
        ("algorithm.weight_clip", 0.0, "a number > 0 and <= 1000, or none"),
        ("algorithm.importance.clip", 1e9, "a number > 0 and <= 1000."),
        ("algorithm.inner_epochs", 10**9, "a number from 1 to 1000."),
        ("algorithm.advantage_clip", -3.0, "a number > 0, or none"),
        ("algorithm.kl_coef", -1e-3, "a number from 0 to 100."),
        ("algorithm.kl_coef", 1e30, "a number from 0 to 100."),
        ("optimizer.learning_rate", 0.0, "a number > 0 and <= 100."),
        ("optimizer.learning_rate", 1e30, "a number > 0 and <= 100."),
        ("optimizer.max_grad_norm", -1.0, "a number > 0, or none"),
        ("rollout.group_size", 0, "a number >= 1"),
        ("rollout.top_p", 1.5, "a number > 0 and <= 1, or none"),
        ("rollout.top_p", 0.0, "a number > 0 and <= 1, or none"),
        ("rollout.temperature", 1e30, "a number from 0.01 to 100."),
        ("rollout.temperature", 1e-30, "a number from 0.01 to 100."),
        ("evaluation.temperature", 1e30, "a number from 0.01 to 100, or none"),
        ("env.timeout_s", 1e30, "a number > 0 and <= 1000000."),
        ("env.retries", 10**9, "a number from 0 to 20."),
        ("env.retry_wait_s", 1e30, "a number from 0 to 3600."),
        ("rollout.reset_ahead_s", 1e30, "a number from 0 to 1000000."),
        ("rollout.cache_gib", 0.0, "a number > 0, or none"),
        ("rollout.slots", 0, "a number >= 1, or none"),
        ("rollout.max_lag", 65, "a number from 0 to 64"),
        ("rollout.devices", -1, "a number >= 0"),
        ("rollout.port", 65_536, "a number from 0 to 65535, or none"),
        ("rollout.on_swap", "drop", "one of keep, prefill"),
        ("algorithm.order", "backwards", "one of reverse, forward, random, custom"),
        ("algorithm.scale", "global", "one of batch, none, group"),
        ("mesh.fsdp", 0, "-1 or a number >= 1"),
        ("checkpoint.keep", 0, "a number >= 1"),
        ("checkpoint.directory", "", "a path or gs://BUCKET/PATH, or none"),  # not the working one
        ("warm_start.output", "gs://b/x", "a path of this machine, or none"),
        ("checkpoint.directory", "gs:/x", "a path or gs://BUCKET/PATH, or none"),
        *(
            (part, url, "a path")
            for part in ("checkpoint.directory", "warm_start.output")
            for url in ("s3://b/x", "az://c/x", "hdfs:/nn/x", "file:///x", "GS://b/x")
        ),
        ("warm_start.output", "", "a path of this machine, or none"),
        ("model.path", "", "a path, or none"),
        ("lora.path", "", "a path, or none"),
    ],
)
def test_a_value_out_of_range_is_refused(key, value, allowed):
    message = _refused(_nested(key, value))
    assert message.startswith(f"config.{key}: got {value!r}; allowed: {allowed}")


@pytest.mark.parametrize(
    "values, key, allowed",
    [
        (
            {"algorithm": {"order": "custom", "custom_order": (0, 1)}, "rollout": {"max_turns": 3}},
            "algorithm.custom_order",
            "every turn from 0 to 2 once",
        ),
        (
            {"algorithm": {"order": "custom", "custom_order": (0, 0)}, "rollout": {"max_turns": 2}},
            "algorithm.custom_order",
            "every turn from 0 to 1 once",
        ),
        ({"algorithm": {"custom_order": (0, 1)}}, "algorithm.custom_order", "unless order=custom"),
        (
            {
                "algorithm": {"order": "custom", "custom_order": (0, 1), "turns_per_update": 2},
                "rollout": {"max_turns": 2},
            },
            "algorithm.turns_per_update",
            "with order=custom; allowed: 1",
        ),
        (
            {"algorithm": {"refresh": "fused", "inner_epochs": 2}},
            "algorithm.refresh",
            "inner_epochs=1",
        ),
        (
            {"algorithm": {"refresh": "fused", "order": "forward"}},
            "algorithm.refresh",
            "order=reverse",
        ),
        (
            {"algorithm": {"advantage": "tree", "forks": {"kind": "tree"}, "order": "forward"}},
            "algorithm.order",
            "got forward with advantage=tree; allowed: reverse or parallel, unless cumulative_rat",
        ),
        (
            {"algorithm": {"advantage": "tree", "order": "random"}},
            "algorithm.order",
            "cumulative_ratio=False",
        ),
        (
            {
                "algorithm": {"advantage": "tree", "order": "custom", "custom_order": (0, 1)},
                "rollout": {"max_turns": 2},
            },
            "algorithm.order",
            "cumulative_ratio=False",
        ),
        (
            {"rollout": {"max_action_tokens": 256, "max_context": 256}},
            "rollout.max_action_tokens",
            "< max_context=256",
        ),
        ({"model": {"heads": 4, "kv_heads": 3}}, "model.kv_heads", "a divisor of heads=4"),
        (
            {"rollout": AHEAD, "algorithm": {"old_policy": "turn"}},
            "rollout.max_lag",
            "got 1 with algorithm.old_policy='turn'; allowed: 0 unless it is iteration",
        ),
        (
            {"rollout": AHEAD, "agent": {"constraints": True}},
            "agent.constraints",
            "allowed: False unless algorithm.importance is set",
        ),
        ({"rollout": AHEAD | {"top_k": 20}}, "rollout.max_lag", "rollout.top_k=20; allowed: 0 un"),
        ({"rollout": AHEAD | {"top_p": 0.9}}, "rollout.max_lag", "rollout.top_p=0.9; allowed: 0"),
        (
            {"rollout": AHEAD | {"grammar": "tool_calls"}},
            "rollout.max_lag",
            "got 1 with rollout.grammar='tool_calls'; allowed: 0 unless it is none",
        ),
        ({"rollout": AHEAD, "recipe": "rloo"}, "rollout.max_lag", "objective='logp'; allowed: 0"),
        (
            {"rollout": {"max_lag": 1}},
            "rollout.max_lag",
            "allowed: 0, unless rollout.devices, rollout.port or rollout.engine=openai is set.",
        ),
        (
            {"rollout": {"devices": 1, "port": 8476}},
            "rollout.port",
            "got 8476 with rollout.devices=1; allowed: none",
        ),
        (
            {"rollout": AHEAD | {"deterministic": True}},
            "rollout.deterministic",
            "got True with rollout.max_lag=1; allowed: False",
        ),
        (
            {"rollout": {"devices": 1}, "algorithm": {"dynamic_sampling": 2}},
            "algorithm.dynamic_sampling",
            "got 2 with rollout.devices=1; allowed: 0",
        ),
        (
            {"rollout": {"port": 0}, "recipe": "arpo"},
            "algorithm.forks.kind",
            "got entropy with rollout.port=0; allowed: none",
        ),
        (
            {"rollout": {"servers": ("http://a:1",)}},
            "rollout.servers",
            "got http://a:1 with rollout.engine=built_in; allowed: none, or rollout.engine=openai",
        ),
        (
            {"rollout": {"engine": "openai"}},
            "rollout.servers",
            "allowed: at least one address such as http://HOST:PORT",
        ),
        (
            {"rollout": SERVED | {"temperature": 0.5}},
            "rollout.temperature",
            "got 0.5 with rollout.engine=openai; allowed: 1, since",
        ),
        (
            {"rollout": SERVED | {"devices": 1}},
            "rollout.devices",
            "got 1 with rollout.engine=openai; allowed: 0",
        ),
        (
            {"rollout": SERVED | {"max_lag": 1, "port": 0}},
            "rollout.port",
            "got 0 with rollout.engine=openai; allowed: none",
        ),
        (
            {"rollout": SERVED | {"max_lag": 1, "on_swap": "prefill"}},
            "rollout.on_swap",
            "got 'prefill' with rollout.engine=openai; allowed: keep",
        ),
        (
            {
                "rollout": SERVED | {"max_lag": 1, "deterministic": False},
                "algorithm": {"dynamic_sampling": 2},
            },
            "algorithm.dynamic_sampling",
            "got 2 with rollout.engine=openai and rollout.max_lag=1; allowed: 0",
        ),
        (
            {
                "rollout": SERVED | {"max_lag": 1, "deterministic": False},
                "roles": ({"name": "judge", "path": "package:order_desk"},),
            },
            "roles[0].path",
            "got 'package:order_desk' with rollout.engine=openai and rollout.max_lag=1; allowed: a",
        ),
        (
            {
                "rollout": SERVED,
                "lora": {"rank": 2, "merge": False},
                "model": {"path": "package:order_desk"},
            },
            "lora.merge",
            "got False with rollout.engine=openai; allowed: True",
        ),
        (
            {"rollout": {"grammar": "tool_calls"}, "agent": {"tool_format": "gemma"}},
            "agent.tool_format",
            "got 'gemma' with config.rollout.grammar='tool_calls'; allowed: auto, hermes",
        ),
        ({"batching": {"buckets": (256, 64)}}, "batching.buckets", "rising lengths"),
        ({"batching": {"buckets": (64, 64, 256)}}, "batching.buckets", "rising lengths"),
        ({"batching": {"buckets": (64, 128)}}, "batching.buckets", "at least rollout.max_context"),
    ],
)
def test_values_that_cannot_go_together_are_refused(values, key, allowed):
    message = _refused(values)
    assert message.startswith(f"config.{key}: got ") and allowed in message


def test_trees_are_updated_in_any_order_where_no_ratio_weighs_later_turns():
    tree = {"advantage": "tree", "forks": {"kind": "tree"}}
    for choices in ({}, {"order": "parallel"}, {"order": "forward", "cumulative_ratio": False}):
        assert from_dict({"algorithm": tree | choices}).algorithm.reads_forks


def test_fused_refresh_needs_one_step_a_turn_in_reverse():
    for algorithm, applies in (
        ({}, True),
        ({"order": "forward"}, False),
        ({"inner_epochs": 2}, False),
        ({"minibatches_per_turn": 2}, False),
    ):
        config = from_dict({"algorithm": algorithm})
        assert fused_refresh_applies(config.algorithm) is applies


def test_whole_numbers_are_taken_where_numbers_are():
    learning_rate = from_dict({"optimizer": {"learning_rate": 1}}).optimizer.learning_rate
    assert learning_rate == 1.0 and isinstance(learning_rate, float)


def test_a_file_and_its_overrides_are_read(file):
    config = load_config(
        file,
        [
            "seed=3",
            "optimizer.learning_rate=1e-4",
            "optimizer.kwargs.b2=0.95",
            "rollout.max_turns=2",
            "algorithm.order=custom",
            "algorithm.custom_order=(1,0)",
            "log_checksum=true",
            "env.name=bfcl",
            "env.options={'split': 'base'}",
        ],
    )
    assert (config.iterations, config.seed, config.log_checksum) == (7, 3, True)
    assert config.optimizer.name == "adamw" and config.optimizer.learning_rate == 1e-4
    assert config.optimizer.kwargs == {"b1": 0.8, "b2": 0.95}
    assert config.algorithm.custom_order == (1, 0)
    assert (config.env.name, config.env.options) == ("bfcl", {"split": "base"})


def test_json_is_read_where_lists_and_dicts_are_typed(file):
    typed = {"pattern": "embedding", "frozen": True, "name": None}
    config = load_config(file, [f"optimizer.groups={json.dumps([typed])}", "model.path=[a-z]"])
    assert config.model.path == "[a-z]"  # a text where it is neither
    (group,) = config.optimizer.groups
    assert (group.pattern, group.frozen, group.name) == tuple(typed.values())


@pytest.mark.parametrize("none", ["none", "None"])
def test_none_switches_a_bound_off(file, none):
    names = ("weight_clip", "clip_low", "clip_high", "advantage_clip")
    overrides = [f"algorithm.{name}={none}" for name in names]
    config = load_config(file, [*overrides, f"optimizer.max_grad_norm={none}"])
    assert [getattr(config.algorithm, name) for name in names] == [None] * 4
    assert config.optimizer.max_grad_norm is None


def test_none_is_also_the_name_of_a_choice(file):
    config = load_config(file, ["algorithm.scale=none", "model.remat=none", "chat.tools=none"])
    assert (config.algorithm.scale, config.model.remat, config.chat.tools) == ("none",) * 3


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("seed", "--config.seed: expected --config.KEY=VALUE"),
        ("optimiser.name=adam", "config.optimiser: no such field; did you mean optimizer?"),
        ("seed.deep=1", "config.seed: got {'deep': 1}"),
        ("iterations.deep=1", "config.iterations.deep: config.iterations is a value, not a group"),
        ("optimizer.learning_rate=none", "config.optimizer.learning_rate: got None"),
        (
            'optimizer.groups=[{"pattern": "*", "frozen": tru}]',
            "nor JSON (column 29: tru is no value); allowed: a tuple.",
        ),
        ("batching.buckets=[64", "nor JSON (column 1: '[' was never closed); allowed: a tuple."),
        ('judge={"a" 1}', "nor JSON (column 2: invalid syntax"),
    ],
)
def test_a_wrong_override_is_refused(file, override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_config(file, [override])


def test_a_part_of_a_group_that_is_none_is_set_in_a_file_and_in_what_was_loaded(file):
    loaded = load_config(file)
    assert loaded.rollout.mesh is None
    for source in (file, loaded, to_dict(loaded)):
        assert load_config(source, ["rollout.mesh.fsdp=2"]).rollout.mesh == Mesh(fsdp=2)


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--config: no file .*missing.py"):
        load_config(tmp_path / "missing.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"empty.py has no function get_config\(\)"):
        load_config(tmp_path / "empty.py")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="notes.txt is not a Python file"):
        load_config(tmp_path / "notes.txt")


def test_a_single_value_is_a_tuple_of_one():
    config = from_dict({"profile": {"steps": 3}, "telemetry": {"trackers": "tensorboard"}})
    assert config.profile.steps == (3,) and config.telemetry.trackers == ("tensorboard",)


EXPLICIT = {"clip_high": 0.28, "ratio": "geometric"}  # geometric: what SeeUPO has, and grpo has not


def _grpo_file(tmp_path, **algorithm):
    path = tmp_path / "grpo.py"
    values = {"recipe": "grpo", "algorithm": algorithm} if algorithm else {"recipe": "grpo"}
    path.write_text(f"def get_config():\n    return {values!r}\n")
    return path


def _ways_to_grpo(tmp_path):
    yield from_dict({"recipe": "grpo"})
    yield Config(recipe="grpo")
    yield load_config(_grpo_file(tmp_path))
    yield load_config(_grpo_file(tmp_path, ratio="geometric"), ["recipe=grpo"])
    yield dataclasses.replace(Config(recipe="grpo", seed=1), seed=0)
    yield from_dict(to_dict(Config(recipe="grpo")))


def test_every_way_to_a_recipe_gives_the_same_configuration(tmp_path):
    for config in _ways_to_grpo(tmp_path):
        assert config == from_dict({"recipe": "grpo"})
        # DeepSeekMath, arXiv:2402.03300, Eq. 3 and §4.1.2
        algorithm = config.algorithm
        assert (algorithm.ratio, algorithm.scale, algorithm.cumulative_ratio) == (
            "token",
            "group",
            False,
        )
        assert algorithm.turns_per_update is None


def test_explicit_fields_stand_above_the_recipe_on_every_way(tmp_path):
    wanted = from_dict({"recipe": "grpo", "algorithm": EXPLICIT})
    assert wanted.algorithm.clip_high == 0.28 and wanted.algorithm.ratio == "geometric"
    assert wanted.algorithm.scale == "group"
    overrides = [f"algorithm.{name}={value}" for name, value in EXPLICIT.items()]
    assert load_config(_grpo_file(tmp_path, **EXPLICIT)) == wanted
    assert load_config(_grpo_file(tmp_path), overrides) == wanted
    assert load_config(_grpo_file(tmp_path, scale="none"), ["recipe=grpo", *overrides]) == wanted
    assert from_dict(to_dict(wanted)) == wanted
    # What is changed later stays above it too.
    algorithm = dataclasses.replace(wanted.algorithm, scale="batch")
    later = dataclasses.replace(dataclasses.replace(wanted, algorithm=algorithm), seed=4)
    assert (later.algorithm.scale, later.algorithm.clip_high) == ("batch", 0.28)
    assert from_dict(to_dict(later)) == later


def test_one_recipe_under_the_name_of_another_is_refused():
    seeupo = from_dict({"algorithm": {"clip_high": 0.28}})
    for make in (
        lambda: dataclasses.replace(seeupo, recipe="grpo"),
        lambda: dataclasses.replace(Config(recipe="grpo"), recipe="seeupo"),
        lambda: Config(recipe="grpo", algorithm=Algorithm(clip_high=0.28)),
        lambda: from_dict({"recipe": "grpo", "algorithm": Algorithm(clip_high=0.28)}),
    ):
        with pytest.raises(ValueError, match=r"^config\.recipe: got '\w+' with an algorithm"):
            make()
    algorithm = dataclasses.replace(Config(recipe="grpo").algorithm, clip_high=0.28)
    changed = dataclasses.replace(seeupo, recipe="grpo", algorithm=algorithm)
    assert changed == from_dict({"recipe": "grpo", "algorithm": {"clip_high": 0.28}})


@pytest.mark.parametrize("recipe", ["no_such", [], None, {"a": 1}])
def test_an_unknown_recipe_is_refused_on_every_way(file, recipe):
    sentence = f"config.recipe: got {recipe!r}; allowed: seeupo, "
    for make in (
        lambda: from_dict({"recipe": recipe}),
        lambda: Config(recipe=recipe),
        lambda: load_config(file, [f"recipe={recipe}"]),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            make()


@pytest.mark.parametrize("name", RECIPES)
def test_a_configuration_survives_notes_and_run_json(name):
    config = from_dict(
        {
            "recipe": name,
            "env": {"options": {"files": ("a", "b"), "depth": {"1": [2]}}},
            "optimizer": {"kwargs": {"betas": (0.9, 0.95)}},
            "warm_start": {"stages": [{"steps": 3, "demonstrations": {"skill": 0.5}}]},
        }
    )
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {2: 3}}, {"a": print}, {"a": [{1, 2}]}])
def test_what_json_cannot_hold_is_refused_in_a_free_field(value):
    assert "config.env.options" in _refused({"env": {"options": value}})
