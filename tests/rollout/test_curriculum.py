"""Tasks are drawn by their success so far: the rates, the weights and the draw, exactly."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from metric_names import undeclared

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.schema import Curriculum
from seeupo_jax.envs.base import TaskShare
from seeupo_jax.rollout.curriculum import TaskSuccess, WeightedTasks
from seeupo_jax.rollout.task_draw import draw_tasks
from seeupo_jax.types import UNCHOSEN, Trajectory


def played(task_id, *scores, stop="done"):
    return [Trajectory.of((), s, 0, task_id, stop=stop, info={"score": s}) for s in scores]


def test_rates_forget_what_is_old_and_leave_out_failures():
    success = TaskSuccess(Curriculum(by="variance", memory=0.5))
    success.observe(1, played("a", 1.0, 0.0, 0.9, 1.0) + played("b", 1.0, stop="env_error"))
    assert success.rate("a") == 0.5 and success.rate("b") is None
    success.observe(2, played("c", 0.0))
    assert success.rate("a") == 0.5
    success.observe(3, played("a", 0.0, 0.0))
    assert success.rate("a") == (0.5 * 2) / (0.5 * 4 + 2)
    for memory, rate in ((0.0, 0.0), (1.0, 2 / 6)):
        other = TaskSuccess(Curriculum(by="variance", memory=memory))
        other.observe(1, played("a", 1.0, 0.0, 0.9, 1.0))
        other.observe(2, played("a", 0.0, 0.0))
        assert other.rate("a") == rate


def test_candidates_that_were_not_executed_say_nothing_of_their_task():
    success = TaskSuccess(Curriculum(by="variance"))
    unchosen = Trajectory.of((), 1.0, 0, "a", stop=UNCHOSEN, info={"member": 1})  # without a score
    success.observe(1, [*played("a", 1.0, 0.0), unchosen])
    assert success.state(1) == {"a": [1.0, 2.0]}


def test_weights_are_by_what_is_left_to_learn():
    success = TaskSuccess(Curriculum(by="variance", floor=0.1))
    success.observe(1, played("half", 1, 0) + played("quarter", 1, 0, 0, 0) + played("all", 1, 1))
    weights = {name: success.weight(name) for name in ("half", "quarter", "all", "new")}
    assert weights == {"half": 1, "quarter": 0.75, "all": 0.1, "new": 1}
    success = TaskSuccess(Curriculum(by="band", low=0.2, high=0.5, floor=0.01))
    success.observe(1, played("in", 1, 0) + played("above", 1, 1, 0) + played("below", 0))
    weights = {name: success.weight(name) for name in ("in", "above", "below", "new")}
    assert weights == {"in": 1, "above": 0.01, "below": 0.01, "new": 1}


def test_the_state_is_that_after_an_iteration_also_in_the_middle_of_the_next():
    options = Curriculum(by="variance")
    success = TaskSuccess(options)
    assert success.state(0) == {}
    success.observe(1, played("a", 1, 0) + played("b", 0.3, 1))
    after_first = success.state(1)
    success.observe(2, played("a", 1) + played("c", 1))
    assert success.state(1) == after_first == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    resumed = TaskSuccess(options)
    resumed.restore(1, json.loads(json.dumps(success.state(1))))
    resumed.observe(2, played("a", 1) + played("c", 1))
    assert resumed.state(2) == success.state(2) == {"a": [1.5, 2.0], "b": [1.0, 2.0], "c": [1, 1]}


def test_what_was_drawn_is_said_by_what_was_known_before():
    success = TaskSuccess(Curriculum(by="variance", floor=0.2))
    first = played("a", 1, 0) + played("b", 1, 1)
    metrics = success.metrics(first)
    assert np.isnan(metrics.pop("curriculum/success_rate"))
    assert metrics == {
        "curriculum/known_tasks": 0,
        "curriculum/new_fraction": 1.0,
        "curriculum/weight_mean": 1.0,
    }
    success.observe(1, first)
    metrics = success.metrics(played("b", 1, 1) + played("c", 1, 1))
    assert metrics == {
        "curriculum/known_tasks": 2,
        "curriculum/new_fraction": 0.5,
        "curriculum/weight_mean": 0.6,
        "curriculum/success_rate": 1.0,
    }
    assert not undeclared(metrics)


WEIGHTS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.25}


def weighted(count, seed=3, part=0):
    return WeightedTasks([*WEIGHTS], count=count, seed=(seed, part), weight=WEIGHTS.__getitem__)


def test_tasks_come_with_the_probability_of_their_weights():
    tasks, draws = weighted(2), 4000
    drawn = [tasks.of(iteration) for iteration in range(1, draws + 1)]
    assert all(len(set(own)) == 2 for own in drawn)
    first, second = (Counter(own[place] for own in drawn) for place in (0, 1))
    for name, weight in WEIGHTS.items():
        then = sum(w / 2 * weight / (2 - w) for other, w in WEIGHTS.items() if other != name)
        for counts, wanted in ((first, weight / 2), (second, then)):
            deviation = np.sqrt(wanted * (1 - wanted) / draws)
            assert abs(counts[name] / draws - wanted) < 4 * deviation


def test_a_draw_is_of_its_seed_part_and_iteration():
    assert weighted(4).of(5) == weighted(4).of(5)
    runs = {
        tuple(weighted(1, seed, part).of(n)[0] for n in range(1, 31))
        for seed, part in itertools.product((1, 2), (0, 1))
    }
    assert len(runs) == 4 and all(len(set(firsts)) > 1 for firsts in runs)
    assert weighted(2).of(7) == weighted(4).of(7)[:2]


def test_all_tasks_come_before_one_comes_again_and_replacements_are_the_others():
    assert sorted(Counter(weighted(9).of(1)).values()) == [2, 2, 2, 3]
    order = weighted(4).of(2)
    assert [*itertools.islice(weighted(3).others(2), 6)] == [order[3], *order, order[0]]


def test_environments_of_a_mixture_keep_their_groups():
    success = TaskSuccess(Curriculum(by="variance", floor=0.001))
    success.observe(1, played("a0", 1, 1) + played("a1", 0, 0) + played("a2", 0, 1))
    shares = [TaskShare("a", 2.0, ["a0", "a1", "a2"]), TaskShare("b", 1.0, ["b0", "b1"])]
    drawn = [draw_tasks(shares, count=3, seed=seed, success=success).of(1) for seed in range(50)]
    assert {tuple(task[0] for task in own) for own in drawn} == {("a", "b", "a")}
    assert sum("a2" in own for own in drawn) == 50


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"by": "p"}, "config.curriculum.by: got 'p'; allowed: one of none, variance, band"),
        ({"memory": 0.9}, "config.curriculum.memory: got 0.9 with by='none', which does not read"),
        ({"by": "variance", "low": 0.3}, "config.curriculum.low: got 0.3 with by='variance'"),
        ({"by": "band", "low": 0.9}, "config.curriculum.low: got 0.9; allowed: a number <= high"),
        (
            {"by": "variance", "floor": 0.0},
            "config.curriculum.floor: got 0.0; allowed: a number fr",
        ),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(given, sentence):
    with pytest.raises(ValueError) as error:
        from_dict({"curriculum": given})
    assert str(error.value).startswith(sentence)
    from_dict({"curriculum": {"by": "band", "low": 0.5, "high": 0.5}})
