"""Estimator, objective and recipe of docs/own_algorithm.md: shown there, and trained."""

import io

import jax
import learner_cases
import numpy as np
import pytest
import run_cases
from numpy_twin import token_logps
from places import ROOT, TINY

from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.instruments.lab.laboratory import LabSettings, experiment
from seeupo_jax.instruments.lab.problems import PROBLEMS
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.credit.advantages import credit_programs
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.train import iterate
from seeupo_jax.training.checks import check_config
from seeupo_jax.training.run import begin_run

EXAMPLES = "docs.examples"
ESTIMATOR = f"{EXAMPLES}.turn_baseline:ESTIMATOR"
OBJECTIVE = f"{EXAMPLES}.soft_gate:OBJECTIVE"
SHAPES = Shapes((32,), action=16, rows=4, trajectories=9, turns=4)  # all of a trajectory's actions
RECIPE = f"{EXAMPLES}.soft_turns:soft_turns"


@pytest.fixture(autouse=True)
def repository_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.parametrize("name", ["turn_baseline", "soft_gate", "soft_turns"])
def test_the_page_shows_the_files(name):
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    assert f"```python\n{text}```" in (ROOT / "docs" / "own_algorithm.md").read_text()
    assert len(text.splitlines()) <= 36


def test_turns_are_compared_with_the_same_turn_of_their_group():
    function = find_entry("advantage", ESTIMATOR).function
    reward_NK = np.array([[0.0, 4.0], [2.0, 0.0], [0.0, 1.0], [8.0, 8.0]], np.float32)
    mask_NK = np.array([[True, True], [True, False], [True, True], [False, False]])
    got = function(reward_NK, mask_NK, np.array([7, 7, -1, 7]), discount=0.5)
    # To go: 2, 4; 2; 0.5, 1. The last one is left out, and turn 1 of the first two is alone.
    np.testing.assert_allclose(got, [[0, 0], [0, 0], [0, 0], [0, 0]])
    reward_NK[1, 0] = 1.0
    got = function(reward_NK, mask_NK, np.array([7, 7, -1, 7]), discount=0.5)
    np.testing.assert_allclose(got, [[0.5, 0], [-0.5, 0], [0, 0], [0, 0]])


def test_the_gate_by_hand():
    function = find_entry("objective", OBJECTIVE).function
    slope = jax.vmap(jax.grad(lambda ratio, weight: function(ratio, weight)[0]))
    ratio, weight = np.array([1.0, 1.0, 3.0], np.float32), np.array([2.0, -3.0, 2.0], np.float32)
    far = 1 / (1 + np.exp(-2.0))  # sigmoid(3 - 1)
    np.testing.assert_allclose(slope(ratio, weight), [2, -3, 2 * 4 * far * (1 - far)], rtol=1e-5)
    np.testing.assert_array_equal(function(ratio, weight)[1], [0, 0, 1])


def test_a_sweep_credits_the_turns_of_ragged_trajectories():
    learner = learner_cases.learner(advantage=ESTIMATOR, scale="none", estimator={"discount": 0.5})
    trajectories = learner_cases.ragged()
    credit = learner_cases.observe(learner, trajectories).advantage
    # Group 1 is trajectories 3 (one turn, -0.7) and 5 (three turns, 0.6 with the last); 4 failed.
    # Rewards to go at turn 0 are -0.7 and 0.15; later turns of 5 are alone.
    first, second = credit[4], credit[5]  # segments: 2 has two
    for values, segment, wanted in (
        (first, trajectories[3].segments[0], {0: -0.425}),
        (second, trajectories[5].segments[0], {0: 0.425, 1: 0.0, 2: 0.0}),
    ):
        for turn, value in wanted.items():
            np.testing.assert_allclose(values[segment.turn_L == turn], value, atol=1e-6)


OF_THE_REFERENCE = """
from seeupo_jax.algorithms.estimators import Estimator

ESTIMATOR = Estimator(
    lambda ref_logp_NL, mask_NL: ref_logp_NL * mask_NL, "token", ("ref_logp_NL", "mask_NL")
)
"""


def test_an_estimator_that_reads_the_reference_policy_gets_it_without_a_penalty_too(
    tmp_path, monkeypatch
):
    (tmp_path / "of_the_reference.py").write_text(OF_THE_REFERENCE)
    monkeypatch.syspath_prepend(tmp_path)
    name = "of_the_reference:ESTIMATOR"
    learner = learner_cases.learner(advantage=name, scale="none", kl_coef=0.0, advantage_clip=None)
    reference = learner_cases.jittered(learner_cases.policy()[1], 0.02)
    trajectories = learner_cases.ragged()
    credit = learner_cases.observe(learner, trajectories, ref_params=reference).advantage
    (segment,) = trajectories[3].segments
    weights, arch = learner_cases.weights_of(reference), learner_cases.NUMPY_ARCH
    wanted_L, _ = token_logps(weights, segment.tokens_L, arch, learner.temperature)
    acted_L = segment.turn_L >= 0
    np.testing.assert_allclose(credit[4][acted_L], wanted_L[acted_L], atol=1e-4)


def test_the_gates_first_step_is_the_plain_one_and_later_ones_differ():
    choices = {
        "turns_per_update": None,
        "cumulative_ratio": False,
        "clip_low": None,
        "clip_high": None,
    }

    def swept(**more):
        made = learner_cases.learner(shapes=SHAPES, **choices, **more)
        return learner_cases.observe(made, learner_cases.ragged())

    plain, soft = swept(), swept(objective=OBJECTIVE)
    learner_cases.assert_trees_close(plain.state.params, soft.state.params, 1e-5)
    plain, soft = (swept(inner_epochs=3, **m) for m in ({}, {"objective": OBJECTIVE}))
    gaps = jax.tree.map(lambda x, y: np.abs(x - y).max(), plain.state.params, soft.state.params)
    assert max(jax.tree.leaves(gaps)) > 1e-4


def test_a_recipe_of_ones_own_is_trained_and_resumed(tmp_path, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    model = run_cases.save_policy(tmp_path / "model")
    overrides = [text.removeprefix("--config.") for text in run_cases.CHOICES]
    overrides += [f"model.path={model}", f"recipe={RECIPE}", "algorithm.inner_epochs=2"]
    lines = []
    for iterations in (1, 2):
        config = load_config(TINY, [*overrides, f"iterations={iterations}"])
        check_config(config)
        policy, params = build.load_policy(config, str(model))
        progress = ProgressDisplay(config.iterations, "plain", stream=io.StringIO())
        with progress, jax.set_mesh(policy.mesh):
            run, state = begin_run(
                config, tmp_path / "run", progress, StopRequest(), policy, params
            )
            with run:
                iterate(run, state)
        lines = run_cases.iterations(tmp_path / "run")
    assert config.algorithm.advantage == ESTIMATOR and config.algorithm.objective == OBJECTIVE
    assert credit_programs(config.algorithm) == ["turn_baseline", "standardize"]
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert line["sweep/steps"] == 2 and line["sweep/updates_skipped"] == 0
        assert np.isfinite(line["sweep/loss"]) and line["sweep/grad_norm"] > 1e-3
    assert lines[0]["state/checksum"] != lines[1]["state/checksum"]


def test_the_laboratory_takes_them_too():
    settings = LabSettings(seeds=2, iterations=2, groups=2, group_size=4)
    (name, make), *_ = PROBLEMS.items()
    for recipe in (RECIPE, f"grpo:scale=none:advantage={ESTIMATOR}"):
        result = experiment(make(), recipe, settings)
        assert np.abs(np.diff(result.value_SI)).max() > 1e-4, (name, recipe)
