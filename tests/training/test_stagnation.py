"""A run that learns nothing says so, and does not end as a success."""

import pytest
import run_cases as cases

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.errors import NotLearning
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.training.stagnation import Stagnation, check_groups, check_reward_values
from seeupo_jax.types import UNCHOSEN, Trajectory

LEARNS = {
    "sweep/turns": 3,
    "sweep/steps": 3,
    "sweep/updates_skipped": 0,
    "sweep/updates": 3,
    "sweep/weight_max": 1.5,
}
IDLE = {
    "every advantage was 0": {"sweep/weight_max": 0.0},
    "all 3 optimizer steps were skipped": {"sweep/updates_skipped": 3, "sweep/updates": 0},
    "the gradient was 0 in all 3 optimizer steps": {"sweep/updates": 0},
    "no turn was sampled": {"sweep/turns": 0},
    "every episode was cut": {"sweep/turns": 0, "sweep/masked_trajectories": 4},
    "every sampled token was likelier": {"sweep/turns": 0, "sweep/masked_fraction": 1.0},
    "every sampled token was forced": {"sweep/turns": 0, "sweep/forced_fraction": 1.0},
}


def episodes(*scores):
    """A group with an episode of each score; None, or the reason: its environment failed."""
    return Collected(
        tuple(
            Trajectory.of((), 0.0, 0, stop="env_error", info={"failure": score or "down"})
            if score is None or isinstance(score, str)
            else Trajectory.of((), score, 0, info={"score": score})
            for score in scores
        ),
        1.0,
        0.0,
        1,
        1,
    )


@pytest.mark.parametrize("reason", IDLE)
def test_iterations_without_an_update_are_warned_of_and_end_the_run(reason):
    warnings = []
    stagnation = Stagnation(3, warn=warnings.append)
    for iteration in (1, 2):
        stagnation.check(iteration, episodes(0.0, 0.5), LEARNS | IDLE[reason])
    assert [reason in warning for warning in warnings] == [True, True]
    assert "in a row: 2; config.stop_after_idle=3 ends the run at 3." in warnings[1]
    with pytest.raises(NotLearning, match=f"3 learned nothing from its rewards: {reason}"):
        stagnation.check(3, episodes(0.0, 0.5), LEARNS | IDLE[reason])
    assert len(warnings) == 2


def test_success_that_stays_0_is_warned_of_after_ten_iterations_and_at_the_end():
    warnings, lines = [], []
    stagnation = Stagnation(3, warn=warnings.append, lines=lambda: lines)
    for iteration in range(1, 13):
        reward = 0.1 * (iteration % 3)
        lines.append({"rollout/success_rate": 0.0, "rollout/reward_mean": reward})
        stagnation.check(iteration, episodes(0.0, 0.5), LEARNS)
        assert len(warnings) == (iteration >= 10)
    stagnation.check_outcome()
    for warning, count in zip(warnings, (10, 12), strict=True):
        assert f"warning: rollout/success_rate was 0 in all {count} iterations" in warning
        assert "mean reward was between 0 and 0.2" in warning and "docs/debugging.md" in warning


def test_the_end_of_a_run_that_learns_nothing_names_the_page():
    with pytest.raises(NotLearning, match=r"any number pass\. docs/debugging\.md has what"):
        Stagnation(1, warn=pytest.fail).check(1, episodes(0.0), LEARNS | {"sweep/updates": 0})


def test_an_update_ends_the_count():
    stagnation = Stagnation(2, warn=lambda _: None)
    for metrics in (IDLE["no turn was sampled"], {}, IDLE["no turn was sampled"]):
        stagnation.check(1, episodes(0.0, 0.5), LEARNS | metrics)
    assert stagnation.idle == 1


def test_a_policy_that_always_succeeds_may_learn_nothing():
    stagnation = Stagnation(1, warn=pytest.fail)
    stagnation.check(1, episodes(1.0, None, 1.0), LEARNS | {"sweep/weight_max": 0.0})
    with pytest.raises(NotLearning):
        stagnation.check(2, episodes(1.0, 0.9), LEARNS | {"sweep/weight_max": 0.0})


def test_candidates_that_were_not_executed_are_no_failures():
    executed = Trajectory.of((), 1.0, 0, info={"score": 1.0})
    candidate = Trajectory.of((), 0.4, 0, stop=UNCHOSEN)
    played = Collected((executed, candidate), 1.0, 0.0, 1, 1)
    stagnation = Stagnation(1, warn=pytest.fail)
    stagnation.check(1, played, LEARNS | {"sweep/weight_max": 0.0})


def test_none_lets_any_number_pass_with_a_warning_each():
    warnings = []
    stagnation = Stagnation(None, warn=warnings.append)
    for iteration in range(20):
        stagnation.check(iteration, episodes(0.0), LEARNS | {"sweep/updates": 0})
    assert len(warnings) == 20


def test_an_iteration_of_failed_environments_is_refused():
    with pytest.raises(NotLearning, match=r"of them so: f\(\): got 2; allowed: 1\.$"):
        check_groups(1, episodes("f(): got 2; allowed: 1."))
    check_groups(1, episodes(0.0, None, 1.0))
    with pytest.raises(NotLearning, match="iteration 2 has nothing to learn from.*: down"):
        check_groups(2, episodes(None, None, 1.0))


def test_a_run_whose_environments_all_fail_ends_with_1_and_the_reason(tmp_path):
    model = cases.save_policy(tmp_path / "model")
    choices = ("--config.env.name=run_environment:Lost", "--config.env.retries=0")
    (process,) = cases.start(
        model, tmp_path / "run", *choices, "--config.evaluation.tasks=1", "--config.evaluation.k=1"
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    (sentence,) = (line for line in errors.splitlines() if line.startswith("error: "))
    assert "iteration 1 has nothing to learn from" in sentence
    assert "no server listens" in sentence
    assert "Traceback" not in errors


def test_a_reward_that_the_estimator_is_not_for_ends_the_run_in_one_sentence():
    bounded = Algorithm(advantage="a_grae")
    check_reward_values(4, episodes(0.0, 1.0, None), bounded)
    check_reward_values(4, episodes(0.0, 1.5), Algorithm())
    with pytest.raises(NotLearning, match=r"^iteration 4: .*reward: got 1.5; allowed with advan"):
        check_reward_values(4, episodes(0.0, 1.5), bounded)
