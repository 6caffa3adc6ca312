"""Experiments: settings, seeds and summaries."""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.algorithms.estimators import Estimator
from seeupo_jax.configuration.algorithm import Algorithm, ObjectiveOptions, SweepOptions
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.instruments.lab import laboratory
from seeupo_jax.instruments.lab.laboratory import (
    LabSettings,
    Result,
    compile_experiment,
    experiment,
    regrets,
)
from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem
from seeupo_jax.metrics.run_manifest import flatten
from seeupo_jax.options import names_of

RNG = np.random.default_rng(2)
PROBLEM = Problem("small", RNG.uniform(0, 1, (2, 2, 2)), RNG.uniform(0.2, 1, (2, 2, 2)))
SMALL = LabSettings(seeds=3, iterations=6, groups=2, group_size=4)


def test_the_same_seed_gives_the_same_numbers_alone_and_among_others():
    together = experiment(PROBLEM, "seeupo", SMALL)
    again = experiment(PROBLEM, "seeupo", SMALL)
    np.testing.assert_array_equal(again.value_SI, together.value_SI)
    assert np.ptp(together.value_SI[:, -1]) > 1e-3
    np.testing.assert_allclose(together.value_SI[:, 0], PROBLEM.mean.mean(), rtol=1e-5)
    arrays = [jnp.asarray(x, jnp.float32) for x in (PROBLEM.mean, PROBLEM.probability)]
    options = {"algorithm": SMALL.algorithm("seeupo"), "settings": SMALL}
    alone = jax.jit(functools.partial(regrets, **options))
    for seed in (0, 2):
        value_I = PROBLEM.optimum - alone(*arrays, jnp.array([seed]))[0]
        np.testing.assert_allclose(value_I, together.value_SI[seed], rtol=1e-4, atol=1e-6)


def test_exact_values_never_fall_with_seeupo():
    settings = LabSettings(seeds=1, iterations=150, exact=True)
    result = experiment(PROBLEM, "seeupo", settings)
    assert result.fall_SI.max() <= 1e-6
    assert result.drops == 0
    assert result.final_over_optimum[0] > 0.99


def test_the_shared_network_climbs_with_a_critic_and_another_optimizer():
    settings = LabSettings(seeds=2, iterations=30, policy="shared", optimizer="adam", lr=0.01)
    value_SI = experiment(PROBLEM, "ppo", settings).value_SI
    assert np.all(value_SI[:, -1] > value_SI[:, 0] + 0.05)


def test_results_are_summed_up():
    value_SI = np.array([[0.5, 1.0, 1.9, 2.0], [0.5, 0.4, 0.5, 1.8]])
    result = Result(2.0, value_SI)
    np.testing.assert_allclose(result.final_over_optimum, [1.0, 0.9])
    assert result.solved == 0.5
    assert result.drops == pytest.approx(1 / 6)
    assert result.fall_SI.max() == pytest.approx(0.1)
    assert result.iterations_to_solve == np.inf
    assert Result(2.0, value_SI[:1]).iterations_to_solve == 2
    # Solved after 1, 2 and 6 iterations: in the mean after 3.
    after_SI = np.arange(7) >= np.array([[1], [2], [6]])
    assert Result(2.0, 2.0 * after_SI).iterations_to_solve == 2
    rounding = Result(2.0, np.array([[1.0, 1.0 - 1e-6, 2.0]]))
    assert rounding.drops == 0


def test_clips_are_the_laboratorys_unless_the_recipe_has_its_own():
    seeupo, dapo = (LabSettings(clip=0.1).algorithm(name) for name in ("seeupo", "dapo"))
    assert (seeupo.clip_low, seeupo.clip_high) == (0.1, 0.1)
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    assert seeupo.weight_clip is None and seeupo.advantage_clip is None
    assert seeupo.kl_coef == 0 and seeupo.inner_epochs == 4
    rloo = LabSettings(clip=0.1, weight_clip=0.3).algorithm("rloo")  # which reads neither
    assert rloo.inner_epochs == 1  # it has no ratio
    assert LabSettings(weight_clip=0.3).algorithm("seeupo").weight_clip == 0.3


WITHOUT = ["istar", "spa", "opd"]  # which need a model beside the policy


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in WITHOUT])
def test_a_recipe_is_what_training_has_but_for_the_penalty_and_the_clips(recipe):
    own = {"kl_coef": 0.0}
    given = {field: own.get(field, value) for field, value in RECIPES[recipe].items()}
    actual = dict(flatten(dataclasses.asdict(LabSettings().algorithm(recipe))))
    assert dict(flatten(given)).items() <= actual.items()


def test_a_recipe_that_learns_from_a_teacher_is_refused():
    with pytest.raises(ValueError, match="--recipes: got advantage=zero; allowed: an estimator of"):
        LabSettings().algorithm("opd")


def test_a_recipes_choices_can_be_changed():
    changed = LabSettings().algorithm("seeupo:ratio=product:clip_high=none:advantage=gigpo")
    assert (changed.ratio, changed.clip_high, changed.advantage) == ("product", None, "gigpo")


# Each field that the laboratory reads, and a recipe with another value of it.
CHANGED = {
    "objective": "seeupo:objective=cispo",
    "ratio": "gspo:ratio=product",
    "loss_aggregation": "seeupo:loss_aggregation=token",
    "weight_clip": "seeupo:weight_clip=0.3",
    "clip_low": "seeupo:clip_low=0.1",
    "clip_high": "seeupo:clip_high=0.1",
    "clip_dual": "seeupo:clip_dual=3",
    "tau_pos": "sapo:tau_pos=2",
    "tau_neg": "sapo:tau_neg=2",
    "order": "seeupo:order=forward",
    "turns_per_update": "seeupo:turns_per_update=2",
    "cumulative_ratio": "seeupo:cumulative_ratio=False",
    "old_policy": "seeupo:old_policy=turn",
    "inner_epochs": "seeupo:inner_epochs=2",
    "mask_above": "seeupo:mask_above=0.9",
    "normalize_by": "grpo:normalize_by=active",
    "advantage": "seeupo:advantage=gigpo",
    "estimator.baseline": "grpo:estimator.baseline=leave_one_out",
    "scale": "seeupo:scale=none",
    "advantage_clip": "seeupo:advantage_clip=1",
    "estimator.discount": "gigpo:estimator.discount=0.5",
    "estimator.anchor": "gigpo:estimator.anchor=task",
    "estimator.step_coef": "gigpo:estimator.step_coef=0.5",
    "estimator.adaptation": "a2tgpo:estimator.adaptation=0.5",
    "estimator.std_floor": "prorl:estimator.std_floor=0.5",
    "estimator.history": "hgpo:estimator.history=0",
    "estimator.power": "hgpo:estimator.power=2",
    "estimator.lam": "ppo:estimator.lam=0.5",
    "estimator.alpha": "a_grae:estimator.alpha=0.5",
    "estimator.metric": "seeupo_noscale:advantage=canon:estimator.metric=entropy",
    "estimator.mu": "canon:estimator.mu=0.1",
    "estimator.baseline of nodes": "spo_tree:estimator.baseline=siblings",
    "critic": "seeupo_noscale:advantage=gae:critic.kind=head",
    "critic.coef": "ppo:critic.coef=1",
    "critic.clip": "ppo:critic.clip=0.5",
    "importance": "seeupo:importance.clip=2:importance.per=trajectory",
}
READ = {*names_of(ObjectiveOptions), *names_of(SweepOptions), "importance"}
UNREAD = dict.fromkeys((name for name in names_of(Algorithm) if name not in READ), "another")
UNREAD |= {"minibatches_per_turn": 2}  # the plan of a sweep counts with it
SECTIONS = {"covariance": {"kind": "clip"}, "forks": {"kind": "tree"}}


def test_every_field_that_the_laboratory_reads_can_be_changed():
    assert {name.partition(".")[0] for name in CHANGED} == READ
    for recipe in CHANGED.values():
        preset = recipe.partition(":")[0]
        before, after = (LabSettings().algorithm(text) for text in (preset, recipe))
        assert after != before, recipe


@pytest.mark.parametrize("field", UNREAD)
def test_every_other_field_is_refused_in_one_sentence(field):
    with pytest.raises(ValueError) as error:
        LabSettings().algorithm(f"seeupo:{field}={UNREAD[field]}")
    said = str(error.value)
    assert said.startswith(f"--recipes: got '{field}=") and said.endswith("the laboratory reads.")
    assert said.count(". ") == 0


@pytest.mark.parametrize("recipe", ["seeupo", "a2tgpo"])
def test_no_other_field_changes_what_is_computed(recipe):
    algorithm = SMALL.algorithm(recipe)
    other = dataclasses.replace(algorithm, **UNREAD | SECTIONS)
    array = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    arguments = (array, array, jax.ShapeDtypeStruct((1,), jnp.int32))
    traced, changed = (
        jax.make_jaxpr(functools.partial(regrets, algorithm=each, settings=SMALL))(*arguments)
        for each in (algorithm, other)
    )
    assert str(changed) == str(traced)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("sepo", "--recipes: got 'sepo'; allowed: seeupo, "),
        ("seeupo:ratio=x", "--recipes.ratio: got 'x'; allowed: one of geometric"),
        ("seeupo:ration=token", "--recipes.ration: no such field; did you mean ratio"),
        ("seeupo:kl_coef=0.1", "got 'kl_coef=0.1' after a recipe's name"),
        ("seeupo:token", "got 'token' after a recipe's name; allowed: field=value"),
        ("seeupo:critic.kind=head", "critic.kind: got 'head' with advantage=grae"),
        (
            "istar",
            "which needs implicit_NK; allowed: an estimator without it, since the laboratory",
        ),
        ("a2tgpo:estimator.gain=turn_reward", "=turn_reward' after a recipe's name"),
        (
            "canon:estimator.metric=tokens",
            "--recipes: got estimator.metric=tokens; allowed: entropy,",
        ),
        ("ppo:mask_above=0.9", "--recipes: got mask_above=0.9 with advantage=gae; allowed: an est"),
    ],
)
def test_what_is_no_recipe_is_told(recipe, said):
    with pytest.raises(ValueError) as error:
        LabSettings().algorithm(recipe)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "settings", "said"),
    [
        ("rloo", {"lag": 2}, "--lag: got 2 with objective=logp and old_policy=iteration; allowed"),
        ("seeupo:old_policy=turn", {"lag": 2}, "--lag: got 2 with objective=clipped and old_pol"),
        ("gigpo", {"turn_tokens": 2}, "--turn_tokens: got 2 with advantage=gigpo; allowed: 1 un"),
    ],
)
def test_stale_trajectories_and_turns_of_tokens_need_a_recipe_for_them(recipe, settings, said):
    with pytest.raises(ValueError) as error:
        LabSettings(**settings).algorithm(recipe)
    assert said in str(error.value)
    weighed = f"{recipe}:importance.clip=2"
    if "lag" in settings:
        assert LabSettings(**settings).algorithm(weighed).importance.clip == 2


def test_a_lag_as_long_as_the_run_samples_all_trajectories_from_the_first_policy():
    recipe = "seeupo_noscale:importance.clip=1000:importance.per=trajectory"
    long, longer = (
        experiment(PROBLEM, recipe, dataclasses.replace(SMALL, lag=lag)).value_SI for lag in (6, 9)
    )
    np.testing.assert_allclose(long, longer, rtol=1e-6)
    fresh = experiment(PROBLEM, recipe, SMALL).value_SI
    np.testing.assert_array_equal(fresh[:, :2], long[:, :2])  # all versions of the first are one
    assert np.abs(fresh[:, 2:] - long[:, 2:]).min() > 1e-5


def test_expectations_are_of_group_relative_advantages_alone():
    with pytest.raises(ValueError, match="--exact: got 'ppo', with advantage=gae"):
        LabSettings(exact=True).algorithm("ppo")


@pytest.mark.parametrize(
    ("name", "said"), [("sgdd", "--optimizer: got 'sgdd'"), ("lbfgs", "--optimizer: lbfgs")]
)
def test_what_is_no_optimizer_is_told(name, said):
    with pytest.raises(ValueError) as error:
        LabSettings(optimizer=name).make_optimizer()
    assert str(error.value).startswith(said)


def test_an_estimator_is_not_run_on_rewards_that_it_is_not_for():
    with pytest.raises(ValueError) as caught:
        experiment(PROBLEMS["lottery"](), "a_grae", SMALL)
    assert str(caught.value) == (
        "--recipes: got 'a_grae' on lottery, whose rewards are from 0 to 8; allowed with"
        " advantage=a_grae: from 0 to 1."
    )
    value_SI = experiment(PROBLEMS["random"](), "a_grae", SMALL).value_SI
    assert np.all(value_SI[:, -1] > value_SI[:, 0])


def test_a_reloaded_estimator_is_compiled_anew(monkeypatch):
    module = types.ModuleType("reloaded_estimator")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(laboratory, "regrets", lambda mean, *_, **__: mean)

    def run_cell():
        module.OWN = Estimator(lambda reward_N: reward_N, "trajectory", ("reward_N",))

    def compiled():
        return compile_experiment((2,), "grpo:scale=none:advantage=reloaded_estimator:OWN", SMALL)

    run_cell()
    first, same = compiled(), compiled()
    run_cell()
    assert first is same is not compiled()
