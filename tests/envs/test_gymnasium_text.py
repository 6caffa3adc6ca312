"""Gymnasium's own environments, and one with texts, play as environments of ours."""

import math

import numpy as np
import pytest

from seeupo_jax import envs

gymnasium = pytest.importorskip("gymnasium")

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


class Parrot(gymnasium.Env):
    """Shows a word drawn from the seed; repeating it in lower case ends the episode."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(chr(97 + letter) for letter in self.np_random.integers(26, size=5))
        return self.word.upper(), {}

    def step(self, action):
        return (
            f"YouSaid{action.title()}",
            3.0 * (action == self.word),
            action == self.word,
            False,
            {},
        )


class Dial(gymnasium.Env):
    """Shows the number of the last action, of which the first is 1."""

    observation_space = gymnasium.spaces.Text(1)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        return "0", {}

    def step(self, action):
        return str(action), 0.0, False, False, {}


gymnasium.register("Parrot-v0", entry_point=Parrot)
gymnasium.register("Dial-v0", entry_point=Dial)


def lake(**options):
    return envs.make("gymnasium_text", **(LAKE | options))


def test_frozen_lake_is_crossed_by_names_of_actions():
    env = lake(instruction="Reach G.")
    messages, tools = env.reset("train/0", seed=0)
    assert [m["role"] for m in messages] == ["system", "user"] and tools == ()
    assert "FFFH" in messages[1]["content"] and env.score() == 0.0
    for move in ("down", "down", "right", "right", "down"):
        step = env.step(f"I go {move}.\n{move}")
        assert (step.reward, step.done) == (0.0, False)
    assert "(Down)" in step.observation[0]["content"]
    step = env.step("right")
    assert (step.reward, step.done, env.score()) == (1.0, True, 1.0)
    with pytest.raises(ValueError, match=r"reset\(\) must come before step"):
        env.step("right")
    env.close()


def test_falling_in_ends_the_episode_without_a_reward():
    env = lake()
    env.reset("train/0", seed=0)
    env.step("down")
    step = env.step("right")
    assert (step.reward, step.done, env.score()) == (0.0, True, 0.0)


def test_an_unknown_action_is_answered_and_changes_nothing():
    env = lake()
    env.reset("train/0", seed=0)
    reported = env.step("jump").observation[0]["content"]
    assert reported == "No action 'jump'. Actions: left, down, right, up."
    for move in ("down", "down", "right", "right", "down", "right"):
        step = env.step(move)
    assert env.score() == 1.0 and step.done


def test_names_count_from_the_first_action_of_the_space():
    env = envs.make("gymnasium_text", id="Dial-v0", actions=["low", "high"])
    env.reset("train/0", seed=0)
    assert [env.step(text).observation[0]["content"] for text in ("low", "high")] == ["1", "2"]


def test_a_time_limit_ends_the_episode():
    env = lake(kwargs=LAKE["kwargs"] | {"max_episode_steps": 2})
    env.reset("train/0", seed=0)
    assert [env.step("up").done, env.step("up").done] == [False, True]


def test_texts_are_played_as_they_are_and_the_task_is_the_seed():
    env = envs.make("gymnasium_text", id="Parrot-v0", train_tasks=3, test_tasks=2, full_reward=4.0)
    assert env.task_ids("test") == ["test/0", "test/1"]
    words = [env.reset(task, seed=9)[0][0]["content"] for task in ("train/2", "test/0", "train/2")]
    parrot = Parrot()
    assert words[:2] == [parrot.reset(seed=2)[0], parrot.reset(seed=2**30)[0]]
    assert words[2] == words[0]
    assert "Text(" in env.step("too long").observation[0]["content"]
    assert env.step("nope").observation[0]["content"] == "YouSaidNope"
    step = env.step(words[0].lower())
    assert (step.reward, step.done, env.score()) == (3.0, True, 0.75)


@pytest.mark.parametrize(
    "options, wanted",
    [
        (LAKE | {"kwargs": {}}, "FrozenLake-v1 shows Discrete.16.; allowed: a Text space, or"),
        (LAKE | {"actions": ["left"]}, "a name for each action of a Discrete space"),
        (LAKE | {"actions": ["left"] * 4}, "a name for each action of a Discrete space"),
        (LAKE | {"actions": [*LAKE["actions"], "up"]}, "a name for each action of a Discrete"),
        (
            LAKE | {"actions": "ldru"},
            "actions: got 'ldru' for Discrete.4.; allowed: a list with a name",
        ),
        ({"id": "Parrot-v0", "actions": ["a"]}, "none for a Text space"),
        ({"id": "Nothing-v0"}, "gymnasium_text id: got 'Nothing-v0'"),
        (LAKE | {"full_reward": -13}, "gymnasium_text full_reward: got -13; allowed: a number > 0"),
        (LAKE | {"full_reward": math.nan}, "full_reward: got nan; allowed: a number > 0"),
        (LAKE | {"train_tasks": -5}, "train_tasks: got -5; allowed: a whole number >= 1"),
        (
            LAKE | {"test_seed": 999},
            "test_seed: got 999; allowed: a whole number >= train_tasks, 1",
        ),
        (LAKE | {"test_tasks": 0}, "test_tasks: got 0; allowed: a whole number >= 1"),
    ],
)
def test_what_cannot_be_played_is_refused(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        envs.make("gymnasium_text", **options)


SLIPPERY = {**LAKE, "kwargs": {"render_mode": "ansi", "is_slippery": True}}
STEPS = ("up",) * 12  # slips to both sides along the first row, which has no hole


def slid(env, task="train/0", **own):
    """What is seen from the first message on, when the same actions slip."""
    messages, _ = env.reset(task, 7, **own)
    return [messages[0]["content"]] + [env.step(text).observation[0]["content"] for text in STEPS]


def test_the_same_actions_slip_differently_in_each_episode_of_a_task():
    env = lake(**SLIPPERY)
    seen = [slid(env, episode_seed=own) for own in range(8)]
    assert len({one[0] for one in seen}) == 1
    assert len({tuple(one) for one in seen}) == 8
    assert slid(env, episode_seed=3) == slid(lake(**SLIPPERY), episode_seed=3) == seen[3]


def test_an_episode_slips_as_gymnasium_does_with_a_generator_of_its_seed():
    world = gymnasium.make("FrozenLake-v1", **SLIPPERY["kwargs"])
    world.reset(seed=0)
    world.unwrapped.np_random = np.random.Generator(np.random.PCG64(3))
    up = SLIPPERY["actions"].index("up")
    wanted = [world.step(up) and world.render() for _ in STEPS]
    assert slid(lake(**SLIPPERY), episode_seed=3)[1:] == wanted


def test_without_a_seed_of_the_episode_the_task_decides_everything():
    env = lake(**SLIPPERY)
    assert slid(env) == slid(env) and slid(env) != slid(env, "train/1")
    env.reset("train/1", 7, episode_seed=3)
    assert slid(env) == slid(lake(**SLIPPERY))
    words = envs.make("gymnasium_text", id="Parrot-v0")
    reported = {words.reset("train/2", 7, episode_seed=own)[0][0]["content"] for own in range(4)}
    assert reported == {words.reset("train/2", 7)[0][0]["content"]}
