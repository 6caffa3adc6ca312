"""Several environments in one: each task is of one of them, and training draws by weights."""

import itertools
from collections import Counter

import pytest
from metric_names import undeclared
from mixture_cases import Maze
from reward_collections import collected

from seeupo_jax import envs
from seeupo_jax.envs.base import Demonstrator, StepResult, TaskShare
from seeupo_jax.envs.mixture import Mixture, read_components
from seeupo_jax.envs.snapshot import has_fork, take_snapshot
from seeupo_jax.envs.tasks import list_task_shares, task_labels
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
from seeupo_jax.envs.validation import has_demonstrations, has_finish, reset_episode
from seeupo_jax.rollout.episode_metrics import rollout_metrics
from seeupo_jax.rollout.task_draw import TrainingTasks, draw_tasks, repeats, share_counts

DESK = {"name": "order_desk", "weight": 3.0}


def maze(**fields):
    return {"name": "mixture_cases:Maze", **fields}


def mixture(*environments):
    return envs.make("mixture", environments=list(environments))


def test_each_task_is_played_by_its_own_environment():
    env = mixture(DESK, maze())
    with pytest.raises(ValueError, match=r"mixture: reset\(\) must come before step"):
        env.step("x")
    desk_messages, desk_tools = env.reset("order_desk:train/3", seed=0)
    assert (desk_messages, desk_tools) == envs.make("order_desk").reset("train/3", seed=0)
    assert not has_finish(env) and env.score() == 0
    messages, tools = env.reset("Maze:train/a:3", seed=0)
    assert (messages[0]["content"], tools) == ("1", ({"name": "17 18"},))
    assert has_finish(env) and env.finish("max_turns") == 0.5
    assert env.step("x") == StepResult((), 3.0, True) and env.score() == 1.0
    assert task_labels(env, "order_desk:train/3").keys() == {"env", "request"}
    assert task_labels(env, "Maze:train/a:3") == {"env": "Maze", "size": "4"}
    for wrong in ("train/3", "maze:train/a:3", ""):
        with pytest.raises(
            ValueError, match="mixture task: got .*; allowed: order_desk:TASK, Maze"
        ):
            env.reset(wrong, seed=0)


def test_an_episodes_own_seed_reaches_those_that_take_one():
    env = mixture(maze(label="seeded", options={"seeded": True}), maze())
    reset_episode(env, "seeded:train/a:1", 0, 77)
    reset_episode(env, "Maze:train/a:1", 0, 78)
    assert env._made["seeded"].seeds == [77]
    env.close()
    assert all(made.closed for made in env._made.values())


def test_one_that_is_made_when_it_is_used_has_its_options():
    env = Mixture(read_components([maze(options={"size": 2})]), {})  # as a copy begins
    assert env.task_ids("train") == ["Maze:train/a:0", "Maze:train/a:1"]


def test_all_are_closed_although_one_fails_in_it():
    env = mixture(maze(label="a"), maze(label="b"), maze(label="c"))
    made = list(env._made.values())

    def fail():
        raise OSError("gone")

    made[1].close = fail
    with pytest.raises(OSError, match="gone"):
        env.close()
    assert made[0].closed and made[2].closed


def test_a_mixture_can_be_copied_where_all_of_its_environments_can():
    rolling = {"name": "isolated_cases:Rolling"}
    assert not has_fork(mixture(rolling, maze())) and not has_fork(mixture(maze()))
    assert isinstance(mixture(DESK), Demonstrator) and not isinstance(
        mixture(DESK, rolling), Demonstrator
    )
    env = mixture(rolling, rolling | {"label": "b"})
    env.reset("b:a", seed=0)
    env.step("x")
    copy = take_snapshot(env).fork()
    assert copy.step("x").observation == env.step("x").observation
    assert copy.step("x").done and copy.score() == 1 and env.score() == 2 / 3
    copy.reset("Rolling:a", seed=0)  # of another environment than it was copied with
    assert copy.step("x").observation[0]["content"] == "1" and env.step("x").done
    copy.close()
    env.close()


def test_the_first_tasks_hold_each_environment_in_proportion_to_its_weight():
    env = mixture(maze(label="a", weight=3, options={"size": 100}), maze(label="b"))
    ids = env.task_ids("test")
    assert len(set(ids)) == 104 and ids[:2] == ["a:test/a:0", "a:test/a:1"]
    for first in (4, 8, 12, 16):
        assert Counter(task[0] for task in ids[:first]) == {"a": first * 3 // 4, "b": first // 4}
    assert {task[0] for task in ids[16:]} == {"a"}
    with pytest.raises(ValueError, match="no such split"):
        env.task_ids("validation")


@pytest.mark.parametrize(
    "given, sentence",
    [
        ([], r"env.options.environments: got \[\]; allowed: a list of dicts"),
        (["order_desk"], r"environments\[0\]: got 'order_desk'; allowed: a dict with name, and"),
        ([{"name": "bfcl", "wieght": 1}], r"environments\[0\]: got .*; allowed: a dict with name"),
        ([DESK, DESK], r"environments\[1\].label: got 'order_desk', the label of an earlier one"),
        ([DESK | {"weight": 0}], r"environments\[0\].weight: got 0; allowed: a number > 0"),
        ([DESK | {"weight": "1"}], r"environments\[0\].weight: got '1'; allowed: a number > 0"),
        (
            [DESK | {"label": "a:b"}],
            r"environments\[0\].label: got 'a:b'; allowed: 1 to 64 letters",
        ),
        ([DESK | {"options": 3}], r"environments\[0\].options: got 3; allowed: a dict"),
        ([{"name": "desk"}], "env.name: got 'desk'; allowed: order_desk"),
    ],
)
def test_a_wrong_list_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        envs.make("mixture", environments=given)


def test_demonstrations_are_interleaved_where_all_have_them():
    shown = {"name": "mixture_cases:Shown"}
    assert not isinstance(mixture(shown, maze()), Demonstrator)
    env = mixture(shown | {"label": "four"}, shown | {"label": "two", "options": {"size": 2}})
    assert isinstance(env, Demonstrator)
    texts = [each.messages[0]["content"] for each in env.demonstrations("train")]
    assert sorted(texts) == ["2 0", "2 1", "4 0", "4 1", "4 2", "4 3"]
    assert {text[0] for text in texts[:3]} == {text[0] for text in texts[3:]} == {"2", "4"}
    # By their numbers: at (i + 1/2) / n of n.
    assert texts == ["4 0", "2 0", "4 1", "4 2", "2 1", "4 3"]
    assert len(env.demonstrations("train", four={"first": 3})) == 3
    assert env.vocabulary() == ("north", "size 4", "size 2")
    with pytest.raises(ValueError, match="got options {} for 'six'; allowed: four, two"):
        env.demonstrations("train", six={})
    with pytest.raises(ValueError, match="got options 5 for 'two'; allowed: .* a dict of options"):
        env.demonstrations("train", two=5)


def test_what_a_wrapper_passes_on_are_its_demonstrations():
    wrapper = {"name": "mixture_cases:Wrapper", "options": {"name": "mixture_cases:Shown"}}
    env = mixture(wrapper, wrapper | {"label": "two"})
    assert has_demonstrations(env) and not has_demonstrations(mixture(maze(), wrapper))
    assert len(env.demonstrations("train")) == 8
    assert list(env.vocabulary()) == ["north", "size 4"]


def test_an_environment_with_parts_of_its_own_shares_its_weight_among_them():
    inner = {"environments": [maze(label="a", weight=9), maze(label="b")]}
    env = mixture({"name": "mixture", "label": "tools", "options": inner, "weight": 2}, maze())
    shares = list_task_shares(env, "train")
    assert [(share.name, share.weight) for share in shares] == [
        ("tools:a", 2 * 0.9),
        ("tools:b", 2 * 0.1),
        ("Maze", 1),
    ]
    assert shares[1].task_ids[0] == "tools:b:train/a:0"
    assert share_counts(shares, 30) == [18, 2, 10]
    env.reset("tools:b:train/a:3", seed=0)
    assert env.step("x").reward == 3.0


SHARES = [
    TaskShare("a", 3.0, [f"a{number}" for number in range(10)]),
    TaskShare("b", 1.0, [f"b{number}" for number in range(3)]),
]


def test_every_iteration_has_so_many_groups_of_each():
    tasks = draw_tasks(SHARES, count=8, seed=1)
    played = [tasks.of(iteration) for iteration in range(1, 11)]
    for own in played:
        assert Counter(task[0] for task in own) == {"a": 6, "b": 2} and len(set(own)) == 8
    of_a = [task for own in played for task in own if task[0] == "a"]
    for epoch in range(6):
        assert sorted(of_a[10 * epoch : 10 * epoch + 10]) == sorted(SHARES[0].task_ids)
    assert [task[0] for task in played[0]] == [*"aabaaaba"]  # so that no process has all of one
    assert draw_tasks(SHARES, count=8, seed=1).of(7) == played[6]
    assert draw_tasks(SHARES, count=8, seed=2).of(1) != played[0]
    others = [*itertools.islice(tasks.others(3), 4)]
    assert [task[0] for task in others] == [*"aaba"] and not set(others) & set(played[2])


def test_one_part_is_drawn_as_without_parts():
    plain = TrainingTasks(SHARES[0].task_ids, count=4, seed=9)
    drawn = draw_tasks(SHARES[:1], count=4, seed=9)
    assert [drawn.of(i) for i in range(1, 9)] == [plain.of(i) for i in range(1, 9)]


@pytest.mark.parametrize(
    "weights, count, counts", [((1, 1), 5, [3, 2]), ((2, 1), 4, [3, 1]), ((5, 4, 1), 10, [5, 4, 1])]
)
def test_counts_are_the_nearest_to_the_weights(weights, count, counts):
    shares = [TaskShare(str(weight), weight, ["x"]) for weight in weights]
    assert share_counts(shares, count) == counts


def test_an_environment_without_a_group_is_refused_and_too_few_tasks_are_said():
    with pytest.raises(
        ValueError, match="rollout.tasks: got 1, of which none is of b with the wei"
    ):
        share_counts(SHARES, 1)
    assert repeats(SHARES, 8) == []
    assert repeats(SHARES, 13) == []
    _, note = repeats(SHARES, 16)
    assert note.startswith("an iteration has 4 groups of b, and there are 3 training tasks of it")


def test_an_environments_own_parts_are_checked():
    class Parted(Maze):
        def task_shares(self, split):
            return self.shares

    env = Parted(2)
    env.shares = [TaskShare("a", 1.0, ["train/a:0"])]
    with pytest.raises(ValueError, match="got other tasks than task_ids"):
        list_task_shares(env, "train")
    env.shares = [TaskShare("a", 0.0, env.task_ids("train"))]
    with pytest.raises(ValueError, match="got 'a' with 2 tasks and weight 0.0; allowed: at least"):
        list_task_shares(env, "train")
    env.shares = [TaskShare("a", float("inf"), env.task_ids("train"))]
    with pytest.raises(ValueError, match="with 2 tasks and weight inf; allowed: at least"):
        list_task_shares(env, "train")
    env.shares = [TaskShare("a", "2", env.task_ids("train"))]
    with pytest.raises(ValueError, match="with 2 tasks and weight '2'; allowed: at least"):
        list_task_shares(env, "train")
    for wrong in (None, [("a", 1.0, env.task_ids("train"))]):
        env.shares = wrong
        with pytest.raises(ValueError, match="got .*; allowed: a list of TaskShare"):
            list_task_shares(env, "train")


@pytest.mark.parametrize("where", ["here", "isolated"])
def test_a_collection_has_groups_of_each_and_metrics_of_each(where):
    options = {"environments": [maze(label="a"), maze(label="b", weight=1, options={"size": 2})]}
    made = envs.make("mixture", **options)

    def make(_):
        return envs.make("mixture", **options)

    if where == "isolated":

        def make(_):
            return IsolatedEnvironment("mixture", options)

    tasks = ["a:train/a:3", "b:train/a:1", "a:train/a:2"]
    found = collected([], make=make, tasks=tasks)
    assert [t.reward for t in found.trajectories] == [3.0, 1.0, 2.0]
    labels = {task: task_labels(made, task) for task in tasks}
    metrics = rollout_metrics(found, labels)
    assert metrics["rollout/reward_mean/env=a"] == 2.5
    assert metrics["rollout/reward_mean/env=b"] == 1.0
    assert metrics["rollout/trajectories/env=a"] == 2
    assert metrics["rollout/success_rate/env=b"] == 1 and not undeclared(metrics)
