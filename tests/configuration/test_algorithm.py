"""Which options of an algorithm go together, and which of a recipe, a file and a command hold."""

import dataclasses

import pytest
from places import ROOT

from seeupo_jax.algorithms.forks import EntropyForks, NoForks, TreeForks
from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies
from seeupo_jax.configuration.layers import given_options
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict

AHEAD = {"max_lag": 1, "devices": 1}  # of config.rollout
HEAD = "head"  # no group


@pytest.mark.parametrize(
    "field, choices",
    [
        ("critic.kind", {"advantage": "gae"}),
        ("critic.kind", {"critic": {"kind": "head"}}),
        ("critic.kind", {"advantage": "spa"}),
        ("kl_in", {"advantage": "spa", "critic": {"kind": "head"}, "kl_in": "reward"}),
        ("scale", {"advantage": "returns", "scale": "group"}),
        ("estimator.baseline", {"estimator": {"baseline": "batch"}, "scale": "group"}),
        ("kl_in", {"advantage": "hgpo", "kl_in": "reward"}),
        ("kl_in", {"advantage": "gdpo", "kl_in": "reward"}),
        ("scale", {"advantage": "dvao", "scale": "group"}),
        ("kl_in", {"advantage": "a_grae", "kl_in": "reward"}),  # rewards leave [0, 1]
        ("scale", {"advantage": "canon", "scale": "group"}),
        ("estimator.alpha", {"advantage": "a_grae", "estimator": {"alpha": 0.0}}),
        ("estimator.alpha", {"advantage": "a_grae", "estimator": {"alpha": 1.5}}),
        ("estimator.mu", {"advantage": "canon", "estimator": {"mu": -0.1}}),
        ("estimator.metric", {"advantage": "canon", "estimator": {"metric": "length"}}),
        ("estimator.step_coef", {"advantage": "gigpo", "estimator": {"step_coef": 1e30}}),
        ("estimator.power", {"advantage": "hgpo", "estimator": {"power": 1e3}}),
        ("estimator.discount", {"advantage": "gae", "estimator": {"discount": 1.01}}),
        ("estimator", {"estimator": 3}),
        ("clip_dual", {"objective": "cispo", "clip_dual": 3.0}),
        ("clip_dual", {"objective": "logp", "clip_dual": 3.0}),
        ("tau_pos", {"tau_pos": 2.0}),
        ("clip_low", {"objective": "sapo", "clip_low": 0.1}),
        ("ratio", {"objective": "gmpo", "ratio": "product"}),
        ("ratio", {"objective": "dppo_tv"}),
        ("kl_estimate", {"kl_estimate": "k3+", "kl_coef": 0.0}),
        ("kl_estimate", {"kl_estimate": "k3+", "kl_in": "reward"}),
        ("dynamic_sampling", {"advantage": "otb", "scale": "none", "dynamic_sampling": 2}),
        ("inner_epochs", {"objective": "logp", "inner_epochs": 2}),
        ("covariance.kind", {"covariance": {"kind": "clip"}}),  # ratios are of whole actions
        ("covariance.kind", {"covariance": {"kind": "kl"}, "ratio": "token", "objective": "cispo"}),
        ("covariance.kind", {"covariance": {"kind": "kl"}, "ratio": "token", "old_policy": "turn"}),
        (
            "covariance.kind",
            {"covariance": {"kind": "kl"}, "ratio": "token", "turns_per_update": None},
        ),
        ("covariance.kind", {"covariance": {"kind": "kl"}, "ratio": "token", "order": "parallel"}),
        ("covariance.low", {"covariance": {"kind": "clip", "high": 1.0}, "ratio": "token"}),
        ("overlong.length", {"advantage": "gdpo", "overlong": {"length": 5}}),
        ("overlong.length", {"advantage": "a_grae", "overlong": {"length": 5}}),
        ("overlong.length", {"overlong": {"buffer": 5}}),
        ("kl_control.target", {"kl_control": {"target": 0.1}, "kl_coef": 0.0}),
        ("reference.every", {"reference": {"every": 5}, "kl_coef": 0.0}),
        ("reference.every", {"reference": {"decay": 0.9}}),
        ("moments", {"moments": "turn", "order": "parallel"}),
        ("moments", {"moments": "turn", "turns_per_update": 2}),
        ("overlong.buffer", {"overlong": {"length": 4, "buffer": 5}}),
        ("turns_per_update", {"order": "custom", "custom_order": (0, 1), "turns_per_update": None}),
        ("refresh", {"refresh": "fused", "cumulative_ratio": False}),
        ("refresh", {"refresh": "fused", "turns_per_update": None}),
        # Of two tasks that all members of a group solve or fail, these tell the one from the other.
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "returns"}),
        (
            "dynamic_sampling",
            {"dynamic_sampling": 2, "advantage": "gae", "critic": {"kind": "head"}},
        ),
        ("dynamic_sampling", {"dynamic_sampling": 2, "estimator": {"baseline": "batch"}}),
        # What a model beside the policy, or the gain of an answer, says of turns differs too.
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "istar"}),
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "a2tgpo"}),
        # The mean over turns, or over odd halves, that scale=batch subtracts is not 0.
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "gigpo"}),
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "canon", "order": "parallel"}),
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "tree"}),
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "hgpo"}),
        ("dynamic_sampling", {"dynamic_sampling": 2, "advantage": "matchtir"}),
        (
            "dynamic_sampling",
            {"dynamic_sampling": 2, "advantage": "a2tgpo", "estimator": {"gain": "turn_reward"}},
        ),
        # Nothing reads these.
        ("overlong.length", {"overlong": {"penalty": 3.0}}),
        ("kl_control.target", {"kl_control": {"horizon": 3.0}}),
        ("importance.clip", {"importance": {"level": "geometric"}}),
        ("importance.level", {"importance": {"clip": 2.0, "level": "geometric"}, "ratio": "token"}),
        ("importance.level", {"importance": {"clip": 2, "level": "geometric", "per": "token"}}),
        ("importance.low", {"importance": {"clip": 2.0, "low": 0.5}}),
        ("importance.low", {"importance": {"clip": 2.0, "low": 2.0, "method": "mask"}}),
        ("forks.kind", {"forks": {"kind": "tree"}}),
        ("critic.coef", {"advantage": "gae", "critic": {"kind": "head", "coef": 1e30}}),
        ("critic.kind", {"critic": {"kind": "heads"}}),
        ("critic", {"critic": HEAD}),
        ("clip_low", {"objective": "logp", "clip_low": 0.1}),
        ("clip_high", {"objective": "logp", "clip_high": 0.28}),
        ("weight_clip", {"cumulative_ratio": False, "weight_clip": 0.5}),
        ("weight_clip", {"order": "parallel", "weight_clip": 0.5}),
        ("weight_clip", {"turns_per_update": None, "weight_clip": None}),
        ("advantage_clip", {"scale": "group", "advantage_clip": 1.0}),
        ("advantage_clip", {"advantage": "gigpo", "scale": "none", "advantage_clip": None}),
        ("normalize_by", {"loss_aggregation": "token", "normalize_by": "active"}),
        ("old_policy", {"objective": "logp", "cumulative_ratio": False, "old_policy": "turn"}),
        (
            "estimator.gain_template",
            {
                "advantage": "a2tgpo",
                "estimator": {"gain": "turn_reward", "gain_template": "It is {answer}."},
            },
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused_by_name(field, choices):
    values = {"algorithm": choices, "rollout": {"max_turns": 2}}
    with pytest.raises(ValueError, match=rf"^config\.algorithm\.{field}: got .*; allowed"):
        from_dict(values)


@pytest.mark.parametrize(
    "section, choices, said",
    [
        (
            "estimator",
            {"step_coef": 0.5},
            "got 0.5 with advantage=grae, which does not have it; allowed with advantage=a2tgpo or"
            " advantage=gigpo or advantage=istar.",
        ),
        (
            "estimator",
            {"bootstrap_truncated": True},
            "got True with advantage=grae, which does not have it; allowed with advantage=gae.",
        ),
        ("estimator", {"stepcoef": 0.5}, "no such field; allowed: baseline."),
        (
            "forks",
            {"factors": (2, 2)},
            "got (2, 2) with forks.kind=none, which does not have it; allowed with"
            " forks.kind=tree.",
        ),
        (
            "forks",
            {"tokens": 100},
            "got 100 with forks.kind=none, which does not have it; allowed with forks.kind=tree or"
            " forks.kind=entropy or forks.kind=candidates.",
        ),
        (
            "critic",
            {"learning_rate": 0.1},
            "got 0.1 with critic.kind=none, which does not have it; allowed with critic.kind=head"
            " or critic.kind=model.",
        ),
        (
            "covariance",
            {"coef": 4.0},
            "got 4.0 with covariance.kind=none, which does not have it; allowed with"
            " covariance.kind=kl.",
        ),
    ],
)
def test_an_option_of_what_is_not_selected_cannot_be_set(section, choices, said):
    (name,) = choices
    with pytest.raises(ValueError) as error:
        from_dict({"algorithm": {section: choices}})
    assert str(error.value) == f"config.algorithm.{section}.{name}: {said}"


def test_every_option_is_found_by_the_name_that_it_had():
    for line in (ROOT / "tests/support/flat_names.txt").read_text().splitlines():
        old, new = line.split()
        with pytest.raises(ValueError) as error:
            from_dict({"algorithm": {old: 1}})
        allowed = f"config.algorithm.{old}: no such field; it is config.algorithm.{new}."
        assert str(error.value) == allowed


@pytest.mark.parametrize(
    "recipe, choices",
    [
        ("dapo", {"advantage": "gigpo", "estimator": {"discount": 0.9}}),
        ("dapo", {"overlong": {"length": 5, "penalty": 0.5}}),
        ("a2tgpo", {"estimator": {"gain": "turn_reward"}, "dynamic_sampling": 1}),
        ("slate", {"scale": "batch", "dynamic_sampling": 1}),
        ("gdpo", {"scale": "batch", "dynamic_sampling": 1}),
        ("ppo", {"estimator": {"lam": 0.9, "bootstrap_truncated": True}, "critic": {"coef": 1.0}}),
        ("slate", {"forks": {"tokens": 1000}}),
        (
            "reinforce",
            {"cumulative_ratio": True, "turns_per_update": 1, "old_policy": "turn"},
        ),  # Eq. 8
        ("grpo", {"turns_per_update": 2, "cumulative_ratio": True, "weight_clip": 0.5}),
        ("grpo", {"scale": "batch", "advantage_clip": 1.0}),
        ("gspo", {"importance": {"clip": 2.0, "level": "geometric"}}),
        ("istar", {"estimator": {"baseline": "mean", "norm": "none"}}),
        ("gigpo", {"scale": "batch", "advantage_clip": 1.0}),
        ("grpo", {"loss_aggregation": "constant", "normalize_by": "active"}),
        ("a2tgpo", {"estimator": {"gain_template": "It is {answer}."}}),
        ("dapo", {"clip_low": None, "clip_high": 0.3}),
        # What the recipe itself sets, and what it is changed to does not read.
        ("gigpo", {"advantage": "grae"}),
        ("istar", {"advantage": "matchtir", "estimator": {"discount": 0.9}}),
        ("rloo", {"kl_coef": 0.0}),
        ("seeupo", {"kl_in": "reward", "kl_coef": 0.0}),  # as a sweep may begin
        ("rloo", {"advantage": "canon"}),
        ("arpo", {"objective": "cispo"}),
        ("ppo", {"advantage": "returns", "critic": {"kind": "none"}}),
    ],
)
def test_what_something_reads_or_the_recipe_sets_is_allowed(recipe, choices):
    config = from_dict({"recipe": recipe, "algorithm": choices})
    for name in given_options(choices):
        value, got = choices, config.algorithm
        for part in name.split("."):
            value, got = value[part], vars(got)[part]
        assert got == value, name
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    "name, value", [("alpha", 16.0), ("targets", ("q_proj",)), ("merge", True)]
)
def test_options_of_adapters_are_refused_without_adapters(name, value):
    with pytest.raises(ValueError, match=rf"^config\.lora\.{name}: got .* without adapters"):
        from_dict({"lora": {name: value}})
    for adapters in ({"rank": 4}, {"path": "some/folder"}):
        values = {"model": {"path": "some/model"}, "lora": {name: value, **adapters}}
        assert vars(from_dict(values).lora)[name] == value


def test_a_recipe_of_the_command_line_drops_what_nothing_reads_of_the_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def get_config():\n    return {'recipe': 'hgpo', 'algorithm': {'estimator': {'history':"
        " 4}}}\n"
    )
    assert load_config(file).algorithm.estimator.history == 4
    config = load_config(file, ["recipe=grpo"])
    assert config.algorithm == from_dict({"recipe": "grpo"}).algorithm
    with pytest.raises(ValueError, match=r"algorithm\.estimator\.history: got 5 with advantage"):
        load_config(file, ["recipe=grpo", "algorithm.estimator.history=5"])


def test_another_estimator_than_the_recipes_has_its_own_defaults():
    config = from_dict({"recipe": "gigpo", "algorithm": {"advantage": "hgpo"}})
    assert config.algorithm.estimator == Algorithm(advantage="hgpo").estimator
    same = from_dict({"recipe": "gigpo", "algorithm": {"estimator": {"anchor": "turn"}}})
    assert (same.algorithm.estimator.anchor, same.algorithm.estimator.discount) == ("turn", 0.95)
    with pytest.raises(ValueError, match="estimator: got Baseline with advantage=gigpo"):
        dataclasses.replace(Algorithm(), advantage="gigpo")


def test_options_of_a_file_stay_where_the_command_line_names_the_same_recipe(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def get_config():\n    return {'recipe': 'gigpo', 'algorithm': {'estimator': {'anchor':"
        " 'turn', 'discount': 0.5}}}\n"
    )
    options = load_config(file, ["recipe=gigpo"]).algorithm.estimator
    assert (options.anchor, options.discount) == ("state", 0.95)  # which the recipe sets
    config = load_config(file, ["recipe=seeupo", "algorithm.estimator.baseline=batch"])
    assert config.algorithm.estimator.over_batch


def test_a_group_that_another_kind_is_selected_for_has_its_own_defaults(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def get_config():\n    return {'recipe': 'spo_tree', 'algorithm': {'forks': {'every': 2},"
        " 'overlong': {'length': 9}}}\n"
    )
    assert load_config(file).algorithm.forks == TreeForks(every=2)
    config = load_config(file, ["recipe=grpo"])
    assert config.algorithm.forks == NoForks() and config.algorithm.overlong.length == 9
    with pytest.raises(ValueError, match="every: got 2 with forks.kind=entropy, which does not"):
        load_config(file, ["algorithm.forks.kind=entropy"])  # the file's would be lost
    values = {"recipe": "spo_tree", "algorithm": {"forks": {"kind": "entropy"}}}
    assert from_dict(values).algorithm.forks == EntropyForks()
    assert load_config(file, ["algorithm.overlong=none"]).algorithm.overlong is None


@pytest.mark.parametrize("name", ["normalize_by", "pool_mean"])
def test_a_field_has_one_value_by_either_of_its_names(name):
    file = {"recipe": "grpo", "algorithm": {"normalize_by": "active"}}
    assert load_config(file, [f"algorithm.{name}=all"]).algorithm.normalize_by == "all"
    file["algorithm"] = {"pool_mean": "active"}
    assert load_config(file, [f"algorithm.{name}=all"]).algorithm.normalize_by == "all"
    assert load_config(file).algorithm.normalize_by == "active"
    with pytest.raises(ValueError, match="pool_mean: got it and normalize_by; allowed: one of"):
        from_dict({"algorithm": {"pool_mean": "all", "normalize_by": "all"}})


def test_a_penalty_on_changes_needs_a_step_before_it_or_a_sampler_behind():
    choices = {"covariance": {"kind": "kl"}, "inner_epochs": 2}
    assert from_dict({"recipe": "grpo", "algorithm": choices}).algorithm.covariance.kind == "kl"
    one = {"recipe": "grpo", "algorithm": choices | {"inner_epochs": 1}}
    assert from_dict(one | {"rollout": AHEAD}).algorithm.covariance.kind == "kl"
    with pytest.raises(ValueError, match=r"config\.algorithm\.covariance"):
        weighed = one["algorithm"] | {"importance": {"clip": 2.0}}
        from_dict(one | {"algorithm": weighed, "rollout": AHEAD})


def test_rewards_weigh_at_least_0_where_their_deviations_are_added_up():
    rewards = [{"name": "env", "weight": 0.0}, {"name": "late", "weight": -0.5}]
    said = (
        r"^config\.rewards\[1\]\.weight: got -0.5 of late with advantage=dvao; allowed: .* >= 0\.$"
    )
    with pytest.raises(ValueError, match=said):
        from_dict({"recipe": "dvao", "rewards": rewards})
    assert from_dict({"recipe": "gdpo", "rewards": rewards}).compared_weights == {
        "env": 0.0,
        "late": -0.5,
    }
    assert from_dict({"rewards": rewards}).compared_weights is None


def test_what_has_ratios_may_be_sampled_ahead_and_stepped_on_twice():
    for name in ("seeupo", "grpo", "gspo", "ppo", "cispo", "dapo"):
        values = {"recipe": name, "rollout": {**AHEAD, "top_p": 1.0}}
        twice = {"inner_epochs": 2, "dynamic_sampling": 0}
        assert from_dict(values | {"algorithm": twice}).rollout.max_lag == 1


@pytest.mark.parametrize(
    "values",
    [
        {"recipe": "rloo"},
        {"recipe": "reinforce"},
        {"algorithm": {"old_policy": "turn"}},
        {"rollout": {"top_p": 0.9, "top_k": 20}},
        {"rollout": {"grammar": "tool_calls", "quantize": "int8"}},
        {"agent": {"constraints": True}},
    ],
    ids=str,
)
def test_importance_weights_allow_whatever_is_sampled_ahead(values):
    importance = {"clip": 2.0, "method": "mask", "per": "trajectory"}
    weighed = values.get("algorithm", {}) | {"importance": importance}
    values = values | {"rollout": values.get("rollout", {}) | AHEAD}
    config = from_dict(values | {"algorithm": weighed})
    assert config.rollout.max_lag == 1 and config.algorithm.importance.per == "trajectory"
    with pytest.raises(ValueError, match="config.rollout.max_lag|config.agent.constraints"):
        from_dict(values)


@pytest.mark.parametrize(
    "choices, weighs, fused",
    [
        ({}, True, True),
        ({"order": "forward"}, True, False),
        ({"inner_epochs": 2}, True, False),
        ({"cumulative_ratio": False}, False, False),
        ({"order": "parallel"}, False, False),
        ({"turns_per_update": None}, False, False),
        ({"turns_per_update": 2}, True, True),
    ],
)
def test_only_turns_updated_one_after_the_other_weigh(choices, weighs, fused):
    algorithm = Algorithm(**choices)
    assert algorithm.weighs is weighs
    assert fused_refresh_applies(algorithm) is fused


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "def get_config():\n"
        "    return {'recipe': 'grpo', 'algorithm': {'scale': 'none', 'clip_low': 0.1}}\n"
    )
    return path


def test_a_files_own_choices_stand_above_the_recipe_that_it_names(file):
    algorithm = load_config(file).algorithm
    assert (algorithm.ratio, algorithm.turns_per_update) == ("token", None)
    assert (algorithm.scale, algorithm.clip_low) == ("none", 0.1)


def test_a_recipe_of_the_command_line_stands_above_the_file_and_below_a_field(file):
    algorithm = load_config(file, ["recipe=seeupo"]).algorithm
    assert (algorithm.ratio, algorithm.scale, algorithm.clip_low) == ("geometric", "batch", 0.1)
    overrides = ["algorithm.order=forward", "recipe=seeupo", "algorithm.scale=group"]
    algorithm = load_config(file, overrides).algorithm
    assert (algorithm.order, algorithm.scale) == ("forward", "group")
