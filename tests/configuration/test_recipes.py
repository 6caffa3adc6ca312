"""Recipes: what the table says of each algorithm, and that the choices go together."""

import dataclasses
import re

import pytest

from seeupo_jax.configuration import recipes
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.rules.algorithm_rules import check_choices

NAMES = pytest.mark.parametrize("name", RECIPES)


@NAMES
def test_the_choices_of_every_recipe_go_together(name):
    for turns in (1, 2, 7):
        check_choices(Algorithm(**RECIPES[name]), max_turns=turns)


@NAMES
def test_every_recipe_overrides_all_that_seeupo_chooses(name):
    assert set(RECIPES["seeupo"]) <= set(RECIPES[name])


@NAMES
def test_every_recipe_has_a_formula_with_its_source(name):
    text = getattr(recipes, name).__doc__
    assert re.search(r"arXiv:\d{4}\.\d{5}|SeeUPO", text), text
    assert len(text.splitlines()[0]) > 20


def test_the_defaults_are_the_recipe_named_after_the_package():
    assert Algorithm(**RECIPES["seeupo"]) == Algorithm()


def test_no_two_recipes_are_the_same():
    built = {name: Algorithm(**fields) for name, fields in RECIPES.items()}
    assert len(set(built.values())) == len(built)


def differing(name, base="seeupo"):
    """Fields in which a recipe is not like another, with its values."""
    fields, others = (dataclasses.asdict(Algorithm(**RECIPES[n])) for n in (name, base))
    return {field: value for field, value in fields.items() if value != others[field]}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("seeupo_forward", {"order": "forward"}),
        ("seeupo_random", {"order": "random"}),
        ("seeupo_unweighted", {"cumulative_ratio": False}),
        ("seeupo_group_std", {"scale": "group"}),
        ("seeupo_noscale", {"scale": "none"}),
        ("parallel", {"order": "parallel", "cumulative_ratio": False}),
    ],
)
def test_an_ablation_changes_the_one_choice_that_it_is_named_after(name, expected):
    assert differing(name) == expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("grpo", {"ratio": "token", "scale": "group"}),
        (
            "dr_grpo",
            {"ratio": "token", "scale": "none", "loss_aggregation": "constant", "kl_coef": 0.0},
        ),
        ("gspo", {"ratio": "geometric", "scale": "group"}),
        ("rloo", {"estimator": {"baseline": "leave_one_out"}, "scale": "none", "kl_in": "reward"}),
        ("reinforce", {"objective": "logp", "ratio": "product"}),
        ("reinforce_plus_plus", {"advantage": "returns", "scale": "batch", "kl_in": "reward"}),
        (
            "ppo",
            {"advantage": "gae", "ratio": "token", "loss_aggregation": "token", "scale": "batch"},
        ),
        ("dapo", {"loss_aggregation": "token", "clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0}),
        (
            "cispo",
            {"objective": "cispo", "loss_aggregation": "token", "clip_low": None, "kl_coef": 0.0},
        ),
        # algorithm.gamma, gigpo.mode=mean_std_norm, gigpo.step_advantage_w, actor.kl_loss_coef,
        # actor.loss_agg_mode=token-mean, actor.clip_ratio and entropy_coeff of langfengQ/verl-agent
        (
            "gigpo",
            {
                "advantage": "gigpo",
                "estimator": {"discount": 0.95, "step_coef": 1.0, "anchor": "state"},
                "scale": "group",
                "kl_coef": 0.01,
                "entropy_coef": 0.001,
                "loss_aggregation": "token",
                "ratio": "token",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_in": "loss",
            },
        ),
        # algorithm.adv_estimator=istar_rloo; reward_model.istar_norm=batch_norm, model.beta_train
        # and optim.lr; actor.use_kl_loss, and the clips and entropy_coeff of their verl
        (
            "istar",
            {
                "advantage": "istar",
                "estimator": {
                    "baseline": "leave_one_out",
                    "norm": "batch_max",
                    "step_coef": 1.0,
                    "implicit_coef": 0.05,
                    "scorer_rate": 2.0,
                    "scorer_epochs": 1,
                    "success_above": 0.0,
                    "pair_score": "mean",
                },
                "scale": "none",
                "entropy_coef": 0.001,
                "kl_coef": 0.0,
                "ratio": "token",
                "loss_aggregation": "token",
                "clip_low": 0.2,
                "clip_high": 0.2,
            },
        ),
        # env.history_length, hgpo.length_weight_alpha
        (
            "hgpo",
            {
                "advantage": "hgpo",
                "estimator": {"history": 2, "power": 1.0, "discount": 0.95, "anchor": "state"},
            },
        ),
        # actor.use_kl_loss=False of NVlabs/GDPO, and its verl's defaults
        (
            "gdpo",
            {
                "advantage": "gdpo",
                "scale": "batch",
                "advantage_clip": None,
                "kl_coef": 0.0,
                "entropy_coef": 0.001,
                "loss_aggregation": "token",
                "ratio": "token",
                "clip_low": 0.2,
                "clip_high": 0.2,
            },
        ),
        ("dvao", {"advantage": "dvao", "scale": "none", "ratio": "token"}),
        # actor.tau_pos, actor.tau_neg and use_kl_loss of run_qwen30b_sapo.sh of volcengine/verl
        (
            "sapo",
            {
                "objective": "sapo",
                "tau_pos": 1.0,
                "tau_neg": 1.05,
                "scale": "group",
                "ratio": "token",
                "loss_aggregation": "action",
                "kl_coef": 0.0,
            },
        ),
        # cliprange and beta of qwen2.5-math-7b-gmpo.sh of callsys/GMPO
        (
            "gmpo",
            {
                "objective": "gmpo",
                "clip_low": 0.4,
                "clip_high": 0.4,
                "scale": "group",
                "ratio": "geometric",
                "loss_aggregation": "action",
                "kl_coef": 0.0,
            },
        ),
        # clip_ratio_low, norm_adv_by_std_in_grpo=False, loss_agg_mode=seq-mean-token-sum-norm and
        # use_kl_loss of run_qwen30b_dppo.sh of volcengine/verl; clip_ratio_c is 10000 there
        (
            "dppo_tv",
            {
                "objective": "dppo_tv",
                "clip_low": 0.15,
                "clip_high": 0.15,
                "clip_dual": None,
                "scale": "none",
                "ratio": "token",
                "loss_aggregation": "constant",
                "kl_coef": 0.0,
            },
        ),
        (
            "dppo_kl",
            {
                "objective": "dppo_kl",
                "clip_low": 0.05,
                "clip_high": 0.05,
                "scale": "none",
                "loss_aggregation": "constant",
            },
        ),
        # CLIP_RATIO_LOW, use_kl_loss of run_qwen3_training.sh of tajwarfahim/maxrl, loss_agg_mode
        # and entropy_coeff of its ppo_trainer.yaml
        (
            "maxrl",
            {
                "advantage": "maxrl",
                "scale": "none",
                "ratio": "token",
                "loss_aggregation": "token",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 0.0,
                "entropy_coef": 0.0,
            },
        ),
        # run_qwen2_5-7b.sh of examples/otb_trainer of volcengine/verl, and its defaults
        (
            "otb",
            {
                "advantage": "otb",
                "estimator": {"zero_tail": True},
                "scale": "none",
                "ratio": "token",
                "loss_aggregation": "token",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 0.0,
                "entropy_coef": 0.0,
            },
        ),
        # Scripts/run.sh and ppo_trainer.yaml of quchangle1/MatchTIR: loss_agg_mode=
        # seq-mean-token-mean, kl_loss_coef, entropy_coeff, clip_ratio; lam of its core_algos.py
        (
            "matchtir",
            {
                "advantage": "matchtir",
                "estimator": {"discount": 0.9},
                "scale": "group",
                "ratio": "token",
                "loss_aggregation": "action",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 0.001,
                "entropy_coef": 0.001,
                "kl_in": "loss",
            },
        ),
        # run_qwen2.5-math-7b-grpo-agrae.sh of Yu7-code/A-GRAE, alpha of its core_algos.py, and
        # entropy_coeff of its ppo_trainer.yaml
        (
            "a_grae",
            {
                "advantage": "a_grae",
                "estimator": {"alpha": 1.0},
                "scale": "group",
                "ratio": "token",
                "loss_aggregation": "token",
                "kl_coef": 0.0,
                "entropy_coef": 0.001,
            },
        ),
        # scripts/setups.sh of biuboomc/CANON: _lambda, clip_high, dr_entropy_token_budget
        (
            "canon",
            {
                "advantage": "canon",
                "estimator": {"metric": "entropy", "mu": 1.0},
                "scale": "none",
                "ratio": "token",
                "loss_aggregation": "constant",
                "clip_low": 0.2,
                "clip_high": 0.28,
                "kl_coef": 0.0,
            },
        ),
    ],
)
def test_the_backbones_are_what_their_papers_say(name, expected):
    algorithm = dataclasses.asdict(Algorithm(**RECIPES[name]))
    assert expected == {field: algorithm[field] for field in expected}
    assert algorithm["turns_per_update"] is None and algorithm["cumulative_ratio"] is False


def test_a2tgpo_is_all_turns_in_one_step_with_the_published_numbers():
    assert differing("a2tgpo", "parallel") == {
        "advantage": "a2tgpo",
        "scale": "group",
        "estimator": {
            "discount": 1.0,
            "step_coef": 0.3,
            "adaptation": 0.3,
            "gain": "reference",
            "gain_template": "{answer}",
        },
        "loss_aggregation": "token",
        "clip_low": 3e-3,
        "clip_high": 4e-3,
        "kl_coef": 0.0,
    }
    assert Algorithm(**RECIPES["a2tgpo"]).ratio == "geometric"


def test_prorl_is_all_turns_in_one_step_with_its_authors_numbers():
    assert differing("prorl", "parallel") == {
        "advantage": "prorl",
        # prorl_gamma and mo_min_std of hongruhou89/ProRL
        "estimator": {"discount": 1.0, "std_floor": 0.1},
        "objective": "logp",
        "scale": "none",
        "kl_coef": 0.01,
    }


def test_hgpo_is_gigpo_with_another_credit():
    assert differing("hgpo", "gigpo").keys() == {"advantage", "estimator"}


def test_only_ppo_and_spa_have_a_value_function():
    assert [n for n, fields in RECIPES.items() if fields["critic"]["kind"] != "none"] == [
        "ppo",
        "spa",
    ]


def test_spa_is_ppo_with_another_credit():
    assert differing("spa", "ppo").keys() == {"advantage", "estimator"}


def test_the_recipes_of_trainers_with_verls_old_default_have_its_entropy_bonus():
    # `entropy_coeff: 0.001` of ppo_trainer.yaml, or of the script; it is 0 in the others' (canon:
    # scripts/setups.sh; arpo: ppo_trainer.yaml of ARPO/scripts) and in SeeUPO's.
    found = {name: fields.get("entropy_coef", 0.0) for name, fields in RECIPES.items()}
    own = ["a_grae", "gdpo", "gigpo", "hgpo", "istar", "matchtir"]
    assert {name: coef for name, coef in found.items() if coef} == dict.fromkeys(own, 0.001)


def test_only_dapo_samples_again():
    assert [n for n, fields in RECIPES.items() if fields["dynamic_sampling"]] == ["dapo"]
