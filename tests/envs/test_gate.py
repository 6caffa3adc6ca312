"""What a class of environments says of its tasks is a sentence where it is wrong."""

import enum
from types import SimpleNamespace

import numpy as np
import pytest

from seeupo_jax.envs import gate
from seeupo_jax.envs.base import StepResult
from seeupo_jax.rewards.scorer import REWARD_FAILURE
from seeupo_jax.rollout.branching.forking import FORK_FAILURE
from seeupo_jax.rollout.episode_metrics import AGENT_FAILURE, IGNORED, LINEAGES, REFUSED


class Mute(Exception):
    def __str__(self):
        raise KeyError


class Desk:
    """Two tasks a split, of two kinds."""

    def __init__(self, tasks=("a", "b"), kind=None):
        self._tasks, self._kind = tasks, {} if kind is None else kind

    def task_ids(self, split):
        return self._tasks() if callable(self._tasks) else self._tasks

    def labels(self, task_id):
        kind = self._kind.get(task_id, {"kind": task_id})
        return kind() if callable(kind) else kind


def fail(error):
    raise error


@pytest.mark.parametrize(
    "tasks, wanted",
    [
        ((), r"got no task; allowed: at least one\."),
        (None, r"got None; allowed: a list of texts\."),
        (lambda: (name for name in "ab"), r"got <generator .*; allowed: a list of texts\."),
        ({"a", "b"}, r"got \{.*\} \(set\); allowed: a list of texts\."),
        ({"a": 1}, r"got \{'a': 1\} \(dict\); allowed: a list of texts\."),
        ("ab", r"got 'ab' \(str\); allowed: a list of texts\."),
        ([1, 2], r"got a task 1 \(int\); allowed: a list of texts\."),
        (["a", None], r"got a task None; allowed: a list of texts\."),
        (["\udc80"], r"got a task '\\udc80' \(str\); allowed: a list of texts\."),
        (lambda: fail(OSError("no file")), r"raised OSError: no file\."),
        (lambda: fail(SystemExit(1)), r"raised SystemExit: 1\."),
        (lambda: fail(Mute()), r"raised Mute: a Mute whose text cannot be read\."),
        (lambda: fail(ValueError()), r"raised ValueError: \."),
        (lambda: fail(ValueError("only train.")), r"raised ValueError: only train\."),
        # as an environment within another has it
        (lambda: gate.task_ids(Desk(lambda: fail(KeyError(1))), "dev"), r"raised KeyError: 1\."),
    ],
)
def test_tasks_that_are_no_list_of_texts_are_refused_in_a_sentence(tasks, wanted):
    with pytest.raises(ValueError, match=rf"^Desk\.task_ids\('dev'\):? {wanted}$"):
        gate.check_tasks(Desk(tasks), ["dev"], labelled=2)


def test_tasks_are_texts_in_any_list():
    assert gate.task_ids(Desk(np.array(["x", "y"])), "train") == ["x", "y"]
    with pytest.raises(ValueError, match="^desk split: got 'dev'; allowed: train.$"):
        gate.task_ids(Desk(lambda: fail(ValueError("desk split: got 'dev'; allowed: train."))), "")


@pytest.mark.parametrize(
    "labels, wanted",
    [
        (None, r"got None; allowed: a dict of texts\."),
        (["kind"], r"got \['kind'\] \(list\); allowed: a dict of texts\."),
        ({"kind": 3}, r"got \{'kind': 3\} \(dict\); allowed: a dict of texts\."),
        ({4: "kind"}, r"got \{4: 'kind'\} \(dict\); allowed: a dict of texts\."),
        ({"turns": "3"}, r"got the label 'turns'; allowed: any name but turns, the number of .*\."),
        ({"turns=3": "x"}, r"got the label 'turns=3'; allowed: any name but turns, .*\."),
        (lambda: fail(KeyError("b")), r"raised KeyError: 'b'\."),
    ],
)
def test_labels_that_are_no_texts_or_named_turns_are_refused_at_the_start_and_reported_later(
    labels, wanted
):
    desk, logged = Desk(kind={"b": labels}), []
    gate.check_tasks(desk, ["train"], labelled=1)
    with pytest.raises(ValueError, match=rf"^Desk\.labels\('b'\):? {wanted}$"):
        gate.check_tasks(desk, ["train"], labelled=2)
    assert gate.labels_of(desk, ["a", "b"], logged.append) == {"a": {"kind": "a"}, "b": {}}
    assert len(logged) == 1 and logged[0].startswith(
        "1 of 2 tasks have no labels: Desk.labels('b')"
    )


def test_an_environment_without_labels_has_none():
    assert gate.labels(SimpleNamespace(), "a") == {}


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
    got = gate.check_step(StepResult((), np.float32(1), np.False_, info | {"loop": loop}), turn=0)
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
    with pytest.raises(
        gate.ProtocolError, match=r"step\(\) .*: got more than 250,000 values; allo"
    ):
        gate.check_step(step)


def test_large_info_is_kept_whole():
    boards = {"boards": [[[0] * 100 for _ in range(100)] for _ in range(10)]}
    assert gate.check_step(StepResult((), 0.0, True, boards)).info == boards
    screen = np.zeros((300, 300, 3), np.float32)  # 270,000 numbers
    screen[1, 2, 0] = np.nan
    got = gate.check_step(StepResult((), 0.0, True, {"screen": screen})).info["screen"]
    assert got[1].pop(2) == ["nan", 0.0, 0.0] and got[1] == [[0.0] * 3] * 299
    assert got[:1] + got[2:] == [[[0.0] * 3] * 300] * 299


@pytest.mark.parametrize(
    "name", [LINEAGES, REFUSED, IGNORED, AGENT_FAILURE, REWARD_FAILURE, FORK_FAILURE]
)
def test_what_the_trainer_adds_to_info_has_names_of_its_own(name):
    wanted = rf"^step\(\) info: got the name '{name}', which the trainer uses; allowed: another\.$"
    with pytest.raises(gate.ProtocolError, match=wanted):
        gate.check_step(StepResult((), 0.0, False, {"note": 1, name: 3}))


def test_a_sum_of_shares_is_a_score_and_more_is_none():
    assert gate.check_score(sum([0.1] * 3) + 0.7000000001) == 1.0
    assert (
        0.7 + 0.2 + 0.1 < 1 and gate.check_score(0.7 + 0.2 + 0.1) == 1.0
    )  # a success is exactly 1
    assert gate.check_score(1 - 2e-6) == 1 - 2e-6  # two millionths short: none
    assert gate.check_score(-1e-9) == 0.0 and gate.check_score(np.float32(0.25)) == 0.25
    for wrong in (1.001, -0.001, np.ones(1), "1", None, 1j):
        with pytest.raises(gate.ProtocolError, match=r"^score\(\): got .*; allowed: a number from"):
            gate.check_score(wrong)


def test_the_sum_of_an_episodes_rewards_is_bounded_as_each_of_them_is():
    for reward, earned in ((2, 2), (-3, -1), (4, -4)):
        assert gate.check_reward(reward, "step() reward", max_reward=4, earned=earned) == reward
    for reward, earned in ((3, 2), (-2, -3)):
        wanted = rf"^step\(\) reward: got {reward} after {earned}; allowed: a finite number of magn"
        with pytest.raises(gate.ProtocolError, match=wanted):
            gate.check_reward(reward, "step() reward", max_reward=4, earned=earned)


@pytest.mark.parametrize("name, one", [("states", "a"), ("executed", True)])
def test_lists_of_steps_have_one_for_each_step_so_far(name, one):
    info = {name: [one, one]}
    assert gate.check_step(StepResult((), 0.0, False, info), turn=1).info == info
    for turn in (0, 2):
        with pytest.raises(gate.ProtocolError, match=f"a list of {turn + 1} .*, one for each step"):
            gate.check_step(StepResult((), 0.0, False, info), turn=turn)


def test_an_errors_text_is_bounded_and_can_be_printed():
    assert gate.describe(KeyError("x" * 10_000)).startswith("KeyError: 'xxx")
    assert len(gate.describe(KeyError("x" * 10_000))) == 2000
    assert gate.describe(OSError("\ud800")).encode() == b"OSError: \\ud800"
    assert gate.describe(gate.ProtocolError("step(): no.")) == "step(): no."


@pytest.mark.parametrize(
    "tool", [{"name": "\ud800"}, {"name": "find", "parameters": {"enum": ["\ud800"]}}]
)
def test_half_a_character_in_a_tool_is_refused_in_a_sentence(tool):
    with pytest.raises(
        gate.ProtocolError, match=r"^reset\(\) tools: got no JSON \('utf-8' .*allowed"
    ):
        gate.check_opening(((), (tool,)))


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
    assert gate.reset(environment, "a", 3, 8) == wanted


def test_what_has_no_signature_takes_no_seed_of_the_episode():
    # Of max no signature is known to Python 3.12 and before, and none names the keyword.
    assert gate.reset(SimpleNamespace(reset=max), 3, 5, 8) == 5
