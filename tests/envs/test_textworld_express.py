"""The games are won by their own solutions, side by side in one Java process."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seeupo_jax import envs
from seeupo_jax.envs import textworld_express

constants = pytest.importorskip("textworld_express.constants")
needed = os.environ.get("SEEUPO_REQUIRE_JAVA")  # then a machine without Java fails
pytestmark = pytest.mark.skipif(not (needed or shutil.which("java")), reason="needs Java")

SMALL = {"game": "coin", "params": "numLocations=3,includeDoors=1"}


def make(**options):
    return envs.make("textworld_express", **options)


def play(env, task_id, commands):
    """Everything that is said and given on the way, to the end of the game or of the commands."""
    said = [env.reset(task_id, seed=0)]
    for command in commands:
        said.append(env.step(f"Let me see.\n{command}"))
        if said[-1].done:
            break
    return said, env.score()


@pytest.mark.parametrize("game", constants.GAME_NAMES)
def test_the_oracle_wins_and_idleness_does_not(game):
    env = make(game=game, max_turns=100)
    for task_id in ("train/0", "train/1", "test/0"):
        commands = env.solution(task_id)
        said, score = play(env, task_id, commands)
        assert score == 1.0 and said[-1].done
        assert sum(step.reward for step in said[1:]) == pytest.approx(1.0)
        said, score = play(env, task_id, commands[: len(said) - 2])
        assert score < 1.0 and not said[-1].done
        assert play(env, task_id, ["inventory"] * 3)[1] < 1.0


def test_a_mistake_that_the_game_does_not_forgive_ends_it():
    env = make(game="simonsays")
    said, score = play(env, "train/0", [env.solution("train/0")[1]])  # Simon has not said it yet
    assert said[-1].done and said[-1].observation == () and score == 0.0


def test_episodes_side_by_side_are_what_they_are_alone():
    env = make(**SMALL)
    tasks = [f"train/{index}" for index in range(12)]
    solutions = {task: env.solution(task) for task in tasks}
    alone = {task: play(env, task, solutions[task]) for task in tasks}
    together = {}

    def run(task):
        together[task] = play(make(**SMALL), task, solutions[task])

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len({json.dumps(said[0]) for said, _ in alone.values()}) > 6  # tasks differ


def test_the_opening_says_the_task_and_the_commands():
    env = make(**SMALL)
    (system, user), tools = env.reset("train/0", seed=0)
    assert "find the coin" in system["content"] and tools == ()
    shown, commands = user["content"].split("\nCommands: ")
    assert shown.startswith("You are in the") and "look around" in commands.split(", ")
    bare = make(**SMALL, show_commands=False).reset("train/0", seed=0)[0][1]["content"]
    assert bare == shown


def test_nonsense_is_answered_and_costs_a_turn():
    env = make(**SMALL, max_turns=3)
    env.reset("train/0", seed=0)
    first = env.step("\ud7ff \x00\n" + "dance " * 10_000)
    assert "I'm not sure what you mean" in first.observation[0]["content"]
    assert (first.reward, first.done, first.info) == (0.0, False, {"commands": 1})
    assert not env.step("").done
    last = env.step("inventory")
    assert last.done and last.observation == () and env.score() == 0.0
    with pytest.raises(ValueError, match=r"reset\(\) must come before step"):
        env.step("inventory")


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"game": "chess"}, "game: got 'chess'; allowed: cookingworld, twc, coin"),
        ({"params": "numLocations=999"}, "params: got .* allowed: .* less than or equal to 11"),
        ({"params": "numLocation=3"}, "params: got .* Known properties: numLocations"),
        ({"params": "numLocations=x"}, "params: got 'numLocations=x'; allowed: NAME=NUMBER"),
        ({"params": {"numLocations": 3}}, "params: got .* allowed: NAME=NUMBER"),
        ({"params": None}, "params: got 'None'; allowed: NAME=NUMBER"),
        ({"max_turns": 0}, "max_turns: got 0; allowed: a whole number >= 1"),
        ({"max_turns": "9"}, "max_turns: got '9'; allowed: a whole number >= 1"),
    ],
)
def test_wrong_options_are_refused_before_an_episode(options, sentence):
    with pytest.raises(ValueError, match=f"textworld_express {sentence}") as error:
        make(**options)
    assert "\n" not in str(error.value)


def test_a_task_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="allowed: train/0 to 999, test/0 to 999"):
        make().reset("train/1000", seed=0)


def test_a_killed_java_process_is_replaced_at_the_next_reset():
    env = make(**SMALL)
    env.reset("train/0", seed=0)
    protocol = pytest.importorskip("py4j.protocol")
    java = textworld_express._JAVA._gateway.java_process
    java.kill()
    java.wait()
    with pytest.raises(protocol.Py4JError):
        env.step("look around")
    assert play(env, "train/0", env.solution("train/0"))[1] == 1.0


TRAINER = """
import os
from seeupo_jax import envs
from seeupo_jax.envs.textworld_express import _JAVA
envs.make("textworld_express").reset("train/0", seed=0)
print(_JAVA._gateway.java_process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_java_ends_with_a_trainer_that_is_killed():
    trainer = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True)
    assert trainer.returncode == -9
    status, until = Path(f"/proc/{int(trainer.stdout)}/stat"), time.monotonic() + 20
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < until
        time.sleep(0.02)
