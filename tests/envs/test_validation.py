"""What an environment returns in an episode is validated before it is used."""

import enum
from types import SimpleNamespace

import numpy as np
import pytest

from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.validation import (
    ProtocolError,
    check_reset,
    check_reward,
    check_score,
    check_step,
    describe,
    reset_episode,
)
from seeupo_jax.rewards.scorer import REWARD_FAILURE
from seeupo_jax.rollout.branching.forking import FORK_FAILURE
from seeupo_jax.rollout.episode_metrics import AGENT_FAILURE, IGNORED, LINEAGES, REFUSED


class Mute(Exception):
    def __str__(self):
        raise KeyError


def test_info_becomes_what_json_holds():
    class Colour(enum.Enum):
        RED = 1

    loop = []
    loop.append(loop)
    info = {
        "count": np.int64(3), "share": np.float32(0.5), "won": np.True_, "path": np.arange(2),
        5: (1, None), "who": Colour.RED, "mute": Mute(), "large": 10**5000, "loss": float("inf"),
        "half": "\ud800", "at": 1 + 2j,
    }  # fmt: skip
    got = check_step(StepResult((), np.float32(1), np.False_, info | {"loop": loop}), turn=0)
    held = dict(got.info)
    assert str(held.pop("loop")).count("[") >= 32
    assert held == {
        "count": 3, "share": 0.5, "won": True, "path": [0, 1], "5": [1, None],
        "who": "Colour.RED", "mute": "a Mute whose text cannot be read",
        "large": "a int whose text cannot be read", "loss": "inf", "half": "\\ud800",
        "at": "(1+2j)",
    }  # fmt: skip
    assert (got.reward, type(got.reward), got.done, type(got.done)) == (1.0, float, False, bool)


ROOMS = [{"name": f"room {i}"} for i in range(4)]
for i, room in enumerate(ROOMS):
    room["left"], room["right"] = ROOMS[i - 1], ROOMS[(i + 1) % 4]  # 2 ** 32 paths of 32 rooms
TWICE = []
for _ in range(60):
    TWICE = [TWICE, TWICE]  # no circle; its text alone has 2 ** 60 brackets


@pytest.mark.parametrize(
    "step",
    [
        StepResult((), 0.0, True, {"rooms": ROOMS}),
        StepResult(({"role": "user", "content": "", "twice": TWICE},), 0.0, True),
    ],
)
def test_parts_that_hold_each_other_are_refused_in_a_sentence_and_in_time(step):
    with pytest.raises(ProtocolError, match=r"step\(\) .*: got more than 250,000 values; allo"):
        check_step(step)


def test_large_info_is_kept_whole():
    boards = {"boards": [[[0] * 100 for _ in range(100)] for _ in range(10)]}
    assert check_step(StepResult((), 0.0, True, boards)).info == boards
    screen = np.zeros((300, 300, 3), np.float32)  # 270,000 numbers
    screen[1, 2, 0] = np.nan
    got = check_step(StepResult((), 0.0, True, {"screen": screen})).info["screen"]
    assert got[1].pop(2) == ["nan", 0.0, 0.0] and got[1] == [[0.0] * 3] * 299
    assert got[:1] + got[2:] == [[[0.0] * 3] * 300] * 299


@pytest.mark.parametrize(
    "name", [LINEAGES, REFUSED, IGNORED, AGENT_FAILURE, REWARD_FAILURE, FORK_FAILURE]
)
def test_what_the_trainer_adds_to_info_has_names_of_its_own(name):
    wanted = rf"^step\(\) info: got the name '{name}', which the trainer uses; allowed: another\.$"
    with pytest.raises(ProtocolError, match=wanted):
        check_step(StepResult((), 0.0, False, {"note": 1, name: 3}))


def test_a_sum_of_shares_is_a_score_and_more_is_none():
    assert check_score(sum([0.1] * 3) + 0.7000000001) == 1.0
    assert 0.7 + 0.2 + 0.1 < 1 and check_score(0.7 + 0.2 + 0.1) == 1.0  # a success is exactly 1
    assert check_score(1 - 2e-6) == 1 - 2e-6  # two millionths short: none
    assert check_score(-1e-9) == 0.0 and check_score(np.float32(0.25)) == 0.25
    for wrong in (1.001, -0.001, np.ones(1), "1", None, 1j):
        with pytest.raises(ProtocolError, match=r"^score\(\): got .*; allowed: a number from"):
            check_score(wrong)


def test_the_sum_of_an_episodes_rewards_is_bounded_as_each_of_them_is():
    for reward, earned in ((2, 2), (-3, -1), (4, -4)):
        assert check_reward(reward, "step() reward", max_reward=4, earned=earned) == reward
    for reward, earned in ((3, 2), (-2, -3)):
        wanted = rf"^step\(\) reward: got {reward} after {earned}; allowed: a finite number of magn"
        with pytest.raises(ProtocolError, match=wanted):
            check_reward(reward, "step() reward", max_reward=4, earned=earned)


@pytest.mark.parametrize("name, one", [("states", "a"), ("executed", True)])
def test_lists_of_steps_have_one_for_each_step_so_far(name, one):
    info = {name: [one, one]}
    assert check_step(StepResult((), 0.0, False, info), turn=1).info == info
    for turn in (0, 2):
        with pytest.raises(ProtocolError, match=f"a list of {turn + 1} .*, one for each step"):
            check_step(StepResult((), 0.0, False, info), turn=turn)


def test_an_errors_text_is_bounded_and_can_be_printed():
    assert describe(KeyError("x" * 10_000)).startswith("KeyError: 'xxx")
    assert len(describe(KeyError("x" * 10_000))) == 2000
    assert describe(OSError("\ud800")).encode() == b"OSError: \\ud800"
    assert describe(ProtocolError("step(): no.")) == "step(): no."


@pytest.mark.parametrize(
    "tool", [{"name": "\ud800"}, {"name": "find", "parameters": {"enum": ["\ud800"]}}]
)
def test_half_a_character_in_a_tool_is_refused_in_a_sentence(tool):
    with pytest.raises(ProtocolError, match=r"^reset\(\) tools: got no JSON \('utf-8' .*allowed"):
        check_reset(((), (tool,)))


class Opens:
    """Remembers what `reset` was called with."""

    def named(self, task_id, seed, episode_seed=None):
        return task_id, seed, episode_seed

    def keyword(self, task_id, seed, *, episode_seed):
        return task_id, seed, episode_seed

    def plain(self, task_id, seed):
        return task_id, seed

    def anything(self, *arguments, **named):
        return arguments + tuple(named)

    def positional(self, task_id, seed, episode_seed=None, /):
        return task_id, seed, episode_seed


@pytest.mark.parametrize(
    "kind, wanted",
    [
        ("named", ("a", 3, 8)),
        ("keyword", ("a", 3, 8)),
        ("plain", ("a", 3)),
        ("anything", ("a", 3)),
        ("positional", ("a", 3, None)),
    ],
)
def test_an_episodes_own_seed_goes_to_who_names_it(kind, wanted):
    environment = SimpleNamespace(reset=getattr(Opens(), kind))
    assert reset_episode(environment, "a", 3, 8) == wanted


def test_what_has_no_signature_takes_no_seed_of_the_episode():
    # Of max no signature is known to Python 3.12 and before, and none names the keyword.
    assert reset_episode(SimpleNamespace(reset=max), 3, 5, 8) == 5
