"""Rewards by name are summed by weight, and a function that fails costs only its episode."""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import reward_cases
from metric_names import undeclared
from remote_cases import remote, served
from reward_collections import collected
from rollout_cases import Saying

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
from seeupo_jax.errors import NameTaken
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.scorer import Scorer, make_scorer
from seeupo_jax.rollout.episode_metrics import rollout_metrics, unpaid_rewards
from seeupo_jax.rollout.resample import resample

ACTION = "5"  # what the engine says in every turn


def own(function, **fields):
    return {"function": f"reward_cases:{function}", **fields}


def test_functions_and_named_rewards_are_summed_by_weight():
    reward_cases.seen.clear()
    rewards = [
        {"name": "env", "weight": 2.0},
        own("length", weight=0.0),
        own("patient", name="turns", weight=-0.5, options={"factor": 3.0}),
        {"name": "form", "weight": 0.1},
    ]
    (trajectory,) = collected(rewards, tasks=["good"]).trajectories
    assert trajectory.rewards == {"env": 0.5, "form": 1.0, "length": len(ACTION), "turns": 6.0}
    # 2 × 0.25 + 0.1 × 0.5 a step; the functions' at the last: -0.5 × 6.
    np.testing.assert_allclose(trajectory.turn_rewards, [0.55, 0.55 - 3.0], rtol=1e-12)
    np.testing.assert_allclose(trajectory.reward, 2 * 0.55 - 3.0, rtol=1e-12)
    by_turn = {"env": (0.25, 0.25), "form": (0.5, 0.5)}
    by_turn |= {"length": (0.0, len(ACTION)), "turns": (0.0, 6.0)}
    assert trajectory.named_turn_rewards == by_turn
    assert trajectory.messages[0]["content"] == "1"  # not what the function made of its copy
    (episode,) = reward_cases.seen
    assert (episode.task_id, episode.split, episode.stop, episode.turns) == (
        *("good", "test", "done"),
        2,
    )
    assert (episode.reward, episode.rewards, episode.score) == (0.5, {"form": 1.0}, 0.2)
    assert episode.info["gold"] == 7 and episode.answer == ACTION
    assert [tool["name"] for tool in episode.tools] == ["17 18"]


def test_what_an_environment_names_counts_once_without_a_configuration():
    (trajectory,) = collected([], tasks=["good"]).trajectories
    assert trajectory.rewards == {"env": 0.5, "form": 1.0}
    assert trajectory.turn_rewards == (0.75, 0.75) and trajectory.reward == 1.5


def test_a_function_that_returns_a_number_for_each_turn_pays_them():
    rewards = [own("rising", weight=0.1), own("one", weight=2.0)]
    found = collected(rewards, make=reward_cases.Plain, tasks=["good"])
    (trajectory,) = found.trajectories
    assert trajectory.rewards == {"env": 0.5, "rising": 0.5, "one": 1.0}
    np.testing.assert_allclose(trajectory.turn_rewards, [0.25, 0.25 + 0.05 + 2], rtol=1e-12)
    by_turn = {"env": (0.25, 0.25), "rising": (0.0, 0.5), "one": (0.0, 1.0)}
    assert trajectory.named_turn_rewards == by_turn
    assert trajectory.reward == sum(trajectory.turn_rewards)


@pytest.mark.parametrize("where", ["here", "isolated"])
def test_a_step_may_change_what_earlier_ones_were_paid(where):
    make = reward_cases.Correcting
    if where == "isolated":

        def make(turns):
            return IsolatedEnvironment("reward_cases:Correcting", {"turns": turns})

    (trajectory,) = collected(
        [{"name": "form", "weight": 2.0}], make=make, tasks=["good"]
    ).trajectories
    # 0.5 for the first step, which the second takes back.
    assert trajectory.turn_rewards == (0.25, 0.25 + 2 * 0.25)
    assert trajectory.named_turn_rewards == {"env": (0.25, 0.25), "form": (0.0, 0.25)}
    assert trajectory.rewards == {"env": 0.5, "form": 0.25} and trajectory.reward == 1.0


def test_without_names_a_trajectory_is_what_it_was():
    found = collected([], make=reward_cases.Plain, tasks=["good"])
    assert found.trajectories[0].rewards == {} and found.trajectories[0].reward == 0.5
    names = rollout_metrics(found).keys()
    assert not [n for n in names if "rollout/reward/" in n or n == "time/reward_s"]


class Full(Saying):
    """Has no room for a turn."""

    def fits(self, context):
        return False


def test_an_episode_without_a_turn_is_paid_too():
    found = collected([own("one", weight=0.5)], make=reward_cases.Plain, engine=Full())
    for trajectory in found.trajectories:
        assert trajectory.stop == "max_tokens" and trajectory.turn_rewards == ()
        assert trajectory.rewards == {"env": 0.0, "one": 1.0} and trajectory.reward == 0.5


def test_what_an_environment_shows_of_an_assistant_is_no_answer_of_the_policy():
    for engine, answer in ((Full(), ""), (Saying(), ACTION)):
        found = collected([own("length")], make=reward_cases.Showing, engine=engine)
        assert [t.rewards["length"] for t in found.trajectories] == [len(answer)] * 2


@pytest.mark.parametrize(
    "name, cause, reason",
    [
        ("broken", "KeyError", "reward broken: KeyError: 'no such field'"),
        ("hangs", "timeout", "reward hangs: no answer in 0.3 s"),
        ("hangs_awaiting", "timeout", "reward hangs_awaiting: no answer in 0.3 s"),
        ("blocks", "timeout", "reward blocks: no answer in 0.3 s"),
        ("own_timeout", "TimeoutError", "reward own_timeout: TimeoutError: of its own"),
        ("quits", "SystemExit", "reward quits: SystemExit: 3"),
        ("deleted", "RuntimeError", "reward deleted: RuntimeError: Array has been deleted"),
        ("deleted_later", "RuntimeError", "reward deleted_later: RuntimeError: Array has been"),
        ("infinite", "invalid", "reward infinite: got inf (float); allowed: a finite number of"),
        ("words", "invalid", "reward words: got '1.0' (str); allowed: a finite number of"),
        (
            "one_too_few",
            "invalid",
            "reward one_too_few: got a list of 1; allowed: a number, or a list",
        ),
        ("huge", "invalid", "reward huge: got 2000000.0 (float); allowed: a finite number of"),
    ],
)
def test_a_function_that_fails_costs_its_episode_and_is_counted(name, cause, reason):
    # `blocks` stops the event loop, so that the other episode's coroutine waits as well.
    tasks = ["bad"] if name == "blocks" else ["good", "bad"]
    found = collected([own(name, timeout_s=0.3)], tasks=tasks)
    *good, bad = found.trajectories
    assert all(
        (t.stop, t.rewards[name]) == ("done", 2.0 if name == "one_too_few" else 1.0) for t in good
    )
    assert bad.stop == "env_error" and bad.failed
    assert bad.info["failure"].startswith(reason)
    metrics = rollout_metrics(found)
    assert metrics[f"rollout/reward_failed/{name}={cause}"] == 1
    assert metrics["rollout/failed"] == 1 and not undeclared(metrics)


def test_an_episode_that_its_environment_failed_is_given_to_no_function():
    reward_cases.seen.clear()
    good, bad = collected([own("length")], make=reward_cases.Failing).trajectories
    assert (good.stop, bad.stop) == ("done", "env_error")
    assert [episode.task_id for episode in reward_cases.seen] == ["good"]


def finished(task_id):
    return FinishedEpisode(task_id, "train", (), (), "done", 2, 0.0, {}, 0.0, {})


def test_a_poll_gives_episodes_by_key_in_whatever_order_they_were_over():
    scorer = Scorer()
    for key in (5, 3, 4):
        scorer.submit(key, finished("good"))
    assert [key for key, _ in scorer.poll(10.0)] == [3, 4, 5]
    scorer.close()


def test_a_coroutine_beyond_its_time_is_cancelled_and_runs_no_longer():
    reward_cases.cancelled.clear()
    scorer = make_scorer(from_dict({"rewards": [own("hangs_awaiting", timeout_s=0.1)]}).rewards)
    try:
        scorer.submit(0, finished("bad"))
        ((_, scored),) = scorer.poll(1.0, timeout_s=20)
        assert scored.failure.cause == "timeout"
        assert reward_cases.cancelled.wait(20)  # and not only as the scorer is closed
    finally:
        scorer.close()


@pytest.mark.parametrize("name", ["quits_awaiting", "quits_in_a_task"])
def test_an_exit_of_a_coroutine_costs_its_episode_and_no_later_one(name):
    scorer = make_scorer(from_dict({"rewards": [own(name, timeout_s=5)]}).rewards)
    found = []
    try:
        for key, task in enumerate(["bad", "good", "good"]):
            scorer.submit(key, finished(task))
            found += scorer.poll(1.0, timeout_s=20)
    finally:
        scorer.close()
        scorer.close()  # its loop is closed
    causes = [scored.failure and scored.failure.cause for _, scored in found]
    assert causes == ["SystemExit", None, None]
    assert [scored.rewards for _, scored in found] == [{}, {name: 1.0}, {name: 1.0}]


def test_a_closed_scorer_leaves_no_thread():
    before = {*threading.enumerate()}
    scorer = make_scorer(from_dict({"rewards": [own("patient")]}).rewards)
    try:
        scorer.submit(0, finished("good"))
        assert scorer.poll(10.0, timeout_s=20)[0][1].rewards == {"patient": 2.0}
        made = {*threading.enumerate()} - before  # the pool's and the event loop's
    finally:
        scorer.close()
    for thread in made:
        thread.join(20)
    assert made and not any(thread.is_alive() for thread in made)


def test_of_several_failures_the_first_one_of_the_configuration_is_named():
    names = ["infinite", "one", "broken", "words"]
    scorer = make_scorer(from_dict({"rewards": [own(name) for name in names]}).rewards)
    try:
        scorer.submit(0, finished("bad"))
        ((_, scored),) = scorer.poll(1.0, timeout_s=20)
    finally:
        scorer.close()
    assert (scored.failure.name, scored.failure.cause) == ("infinite", "invalid")
    assert scored.rewards == {"one": 1.0}


def test_metrics_are_means_whose_weighted_sum_is_the_reward():
    found = collected([own("length", weight=0.5), {"name": "form", "weight": 0.1}])
    metrics = rollout_metrics(found)
    named = {k.rpartition("/")[2]: v for k, v in metrics.items() if "rollout/reward/" in k}
    assert named == {"env": 0.5, "form": 1.0, "length": 1.0}
    each = {name: [t.rewards[name] for t in found.trajectories] for name in named}
    for name, rewards in each.items():
        assert metrics[f"rollout/reward_std/{name}"] == pytest.approx(np.std(rewards))
    np.testing.assert_allclose(metrics["rollout/reward_mean"], 0.5 + 0.1 + 0.5, rtol=1e-12)
    assert 0 <= metrics["time/reward_s"] <= found.wall_s and not undeclared(metrics)


def test_a_function_with_the_name_of_a_reward_of_the_environment_ends_the_run_in_a_sentence():
    wanted = r"^config\.rewards: got a function named 'form', and task 'good' pays a reward of that"
    with pytest.raises(NameTaken, match=wanted):
        collected([own("one", name="form", weight=0.0)], tasks=["good"])


def test_a_name_that_no_trajectory_has_is_reported():
    rewards = [{"name": "from", "weight": 0.1}]
    found = collected(rewards)
    assert unpaid_rewards(found, from_dict({"rewards": rewards}).rewards) == (
        "config.rewards weighs from, which no trajectory has; they have env, form."
    )
    rewards[0]["name"] = "form"
    assert unpaid_rewards(found, from_dict({"rewards": rewards}).rewards) is None


def test_a_name_that_only_rounds_that_were_left_out_have_is_none_that_no_trajectory_has():
    weighed = [{"name": "env", "weight": 1.0}]
    found, named = collected(weighed, make=reward_cases.Plain), collected(weighed)
    rewards = from_dict({"rewards": [{"name": "form", "weight": 0.1}]}).rewards
    assert unpaid_rewards(found, rewards).endswith("which no trajectory has; they have env.")
    assert unpaid_rewards(replace(found, left_out=named.trajectories), rewards) is None


def test_functions_run_beside_the_environments_as_many_at_a_time_as_is_allowed():
    reward_cases.Counting.most = 0
    rewards = [own("Counting", options={"seconds": 0.05}, concurrency=3)]
    found = collected(rewards, tasks=[str(i) for i in range(9)])
    assert reward_cases.Counting.most == 3
    assert {t.rewards["Counting"] for t in found.trajectories} == {1.0}


def test_the_sampler_goes_on_while_rewards_are_computed():
    class Going(Saying):
        def submit(self, turn):
            if turn.group == 4:  # on the slot of an episode that is over
                reward_cases.released.set()
            super().submit(turn)

    found = collected([own("waits")], make=reward_cases.Plain, tasks="abcde", engine=Going())
    assert not any(t.failed for t in found.trajectories)


def test_a_function_whose_close_fails_is_logged_and_the_others_are_closed(caplog):
    reward_cases.Closed.count = 0
    rewards = [own("Unclosable"), own("Closed")]
    make_scorer(from_dict({"rewards": rewards}).rewards).close()
    assert reward_cases.Closed.count == 1
    assert caplog.messages == [
        "reward Unclosable: its close() failed by OSError: the connection is gone."
    ]


def test_rounds_of_dynamic_sampling_add_their_waits():
    once = collected([own("length")])
    twice = resample(lambda *_: once, ["good", "bad"], iter(["good"] * 9), rounds=1)
    assert twice.reward_s == 2 * once.reward_s and replace(once, reward_s=0.0) != twice


@pytest.mark.parametrize("where", ["remote", "isolated"])
def test_named_rewards_come_from_another_process_and_machine(where, tmp_path):
    token_file = tmp_path / "token"
    with contextlib.ExitStack() as opened:
        if where == "remote":
            server = opened.enter_context(served(reward_cases.Paying, token_file))

            def make(turns):
                return remote(server.url, token_file)

        else:

            def make(turns):
                return IsolatedEnvironment("reward_cases:Paying", {"turns": turns})

        found = collected([{"name": "form", "weight": 0.5}], make=make)
    for trajectory in found.trajectories:
        assert trajectory.rewards == {"env": 0.5, "form": 1.0} and trajectory.reward == 1.0
