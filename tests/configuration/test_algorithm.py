"""Which choices of an algorithm go together, and what a recipe is worth beside a file's own."""

import pytest

from seeupo_jax.configuration.algorithm import Algorithm, fused_refresh_applies
from seeupo_jax.configuration.loading import from_dict, load_config


@pytest.mark.parametrize(
    "field, choices",
    [
        ("critic", {"advantage": "gae"}),
        ("critic", {"critic": "head"}),
        ("scorer_rate", {"scorer_rate": 2.0}),
        ("scorer_epochs", {"scorer_epochs": 2}),
        ("critic", {"advantage": "spa"}),
        ("kl_in", {"advantage": "spa", "critic": "head", "kl_in": "reward"}),
        ("scale", {"advantage": "returns", "scale": "group"}),
        ("baseline", {"advantage": "gigpo", "baseline": "leave_one_out"}),
        ("baseline", {"baseline": "batch", "scale": "group"}),
        ("kl_in", {"advantage": "hgpo", "kl_in": "reward"}),
        ("kl_in", {"advantage": "gdpo", "kl_in": "reward"}),
        ("scale", {"advantage": "dvao", "scale": "group"}),
        ("baseline", {"advantage": "gdpo", "baseline": "leave_one_out"}),
        ("kl_in", {"advantage": "a_grae", "kl_in": "reward"}),  # rewards leave [0, 1]
        ("scale", {"advantage": "canon", "scale": "group"}),
        ("anchor", {"advantage": "matchtir", "anchor": "task"}),
        ("anchor", {"anchor": "turn"}),
        ("bootstrap_truncated", {"bootstrap_truncated": True}),
        ("a_grae_alpha", {"a_grae_alpha": 0.0}),
        ("a_grae_alpha", {"a_grae_alpha": 1.5}),
        ("canon_mu", {"canon_mu": -0.1}),
        ("canon_metric", {"canon_metric": "length"}),
        ("clip_dual", {"objective": "cispo", "clip_dual": 3.0}),
        ("clip_dual", {"objective": "logp", "clip_dual": 3.0}),
        ("inner_epochs", {"objective": "logp", "inner_epochs": 2}),
        ("covariance", {"covariance": "clip"}),  # ratios are of whole actions
        ("covariance", {"covariance": "kl", "ratio": "token", "objective": "cispo"}),
        ("covariance", {"covariance": "kl", "ratio": "token", "old_policy": "turn"}),
        ("covariance", {"covariance": "kl", "ratio": "token", "turns_per_update": None}),
        ("covariance", {"covariance": "kl", "ratio": "token", "order": "parallel"}),
        ("covariance_low", {"covariance": "clip", "ratio": "token", "covariance_high": 1.0}),
        ("overlong_length", {"advantage": "gdpo", "overlong_length": 5}),
        ("overlong_length", {"advantage": "a_grae", "overlong_length": 5}),
        ("overlong_buffer", {"overlong_buffer": 5}),
        ("kl_target", {"kl_target": 0.1, "kl_coef": 0.0}),
        ("ref_every", {"ref_every": 5, "kl_coef": 0.0}),
        ("ref_decay", {"ref_decay": 0.9}),
        ("moments", {"moments": "turn", "order": "parallel"}),
        ("moments", {"moments": "turn", "turns_per_update": 2}),
        ("overlong_buffer", {"overlong_length": 4, "overlong_buffer": 5}),
        ("turns_per_update", {"order": "custom", "custom_order": (0, 1), "turns_per_update": None}),
        ("refresh", {"refresh": "fused", "weight": "off"}),
        ("refresh", {"refresh": "fused", "turns_per_update": None}),
    ],
)
def test_choices_that_do_not_go_together_are_refused_by_name(field, choices):
    values = {"algorithm": choices, "rollout": {"max_turns": 2}}
    with pytest.raises(ValueError, match=rf"^config\.algorithm\.{field}: got .*; allowed"):
        from_dict(values)


def test_a_penalty_on_changes_needs_a_step_before_it_or_a_sampler_behind():
    choices = {"covariance": "kl", "inner_epochs": 2}
    assert from_dict({"recipe": "grpo", "algorithm": choices}).algorithm.covariance == "kl"
    one = {"recipe": "grpo", "algorithm": choices | {"inner_epochs": 1}}
    assert from_dict(one | {"rollout_ahead": 1}).algorithm.covariance == "kl"


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
        values = {"recipe": name, "rollout_ahead": 1, "rollout": {"top_p": 1.0}}
        assert from_dict(values | {"algorithm": {"inner_epochs": 2}}).rollout_ahead == 1


@pytest.mark.parametrize(
    "choices, weighs, fused",
    [
        ({}, True, True),
        ({"order": "forward"}, True, False),
        ({"inner_epochs": 2}, True, False),
        ({"weight": "off"}, False, False),
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
