"""`textworld_express`: household text games made from seeds, in one Java process per trainer."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Message, StepResult, Tool, check_choice
from seeupo_jax.envs.seeded_tasks import SeedTasks, check_count, last_line, opening_messages

# As in TextWorldExpress's own folds.
_SEEDS = {"train": range(1000), "test": range(20_000, 21_000)}
GAMES = "cookingworld twc coin mapreader arithmetic sorting simonsays peckingorder".split()
# Without a limit Java uses up to a quarter of the machine's memory before it frees finished games.
# Half of this limit was enough for 128 games at once.
_HEAP = "-Xmx1g"
INSTRUCTION = (
    "You play a text game. {task} Write one command on the last line of each message; commands that"
    " work now are listed."
)


class _Java:
    """The Java process of all games; it ends with this process and is restarted if it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gateway: Any = None

    def game(self) -> Any:
        """Makes a game object, which belongs to one episode at a time."""
        java_gateway, jar, folder = _imports()
        with self._lock:
            self._forget_the_dead()
            if self._gateway is None:
                port, process = java_gateway.launch_gateway(
                    classpath=jar,
                    cwd=folder,
                    javaopts=[_HEAP],
                    die_on_exit=True,
                    return_proc=True,
                )
                parameters = java_gateway.GatewayParameters(auto_field=True, port=port)
                self._gateway = java_gateway.JavaGateway(
                    gateway_parameters=parameters, java_process=process
                )
            return self._gateway.jvm.textworldexpress.runtime.PythonInterface()

    def _forget_the_dead(self) -> None:
        if self._gateway is None or self._gateway.java_process.poll() is None:
            return
        # Otherwise py4j would report every object that Python frees to the dead process.
        self._gateway._gateway_client.is_connected = False
        self._gateway.java_process.stdin.close()
        self._gateway = None


_JAVA = _Java()


@dataclass
class TextWorldExpress:
    """A game of TextWorldExpress; a step's reward is the change of the game's score.

    Args:
      game: cookingworld, twc, coin, mapreader, arithmetic, sorting, simonsays or peckingorder.
      params: the game's parameters, such as numLocations=4,includeDoors=1; a game is generated to
        check them.
      max_turns: commands per episode.
      show_commands: list the currently valid commands below every observation.
    """

    game: str = "coin"
    params: str = ""
    max_turns: int = 50
    show_commands: bool = True

    def __post_init__(self) -> None:
        _imports()
        check_choice("textworld_express game", self.game, GAMES)
        check_count("textworld_express max_turns", self.max_turns)
        if self.params != "":
            _check_params(self.game, str(self.params))
        self._tasks = SeedTasks("textworld_express", _SEEDS)
        self._world: Any = None
        self._turns, self._score, self._done = 0, 0.0, True

    def task_ids(self, split: str) -> Sequence[str]:
        return self._tasks.ids(split)

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts the task's game; `seed` is unused."""
        shown = self._begin(task_id, gold=False)
        instruction = INSTRUCTION.format(task=self._world.getTaskDescription())
        return opening_messages(instruction, shown), ()

    def step(self, text: str) -> StepResult:
        if self._done:
            raise ValueError("textworld_express: reset() must come before step().")
        self._turns += 1
        state = json.loads(self._world.stepJSON(last_line(text)))
        reward, self._score = state["score"] - self._score, state["score"]
        ended = state["tasksuccess"] or state["taskfailure"]
        self._done = ended or self._turns >= self.max_turns
        shown = () if self._done else ({"role": "user", "content": self._shown(state)},)
        return StepResult(shown, reward, self._done, {"commands": self._turns})

    def score(self) -> float:
        if self._world is None:
            raise ValueError("textworld_express: reset() must come before score().")
        return min(max(self._score, 0.0), 1.0)

    def close(self) -> None:
        self._world, self._done = None, True

    def solution(self, task_id: str) -> Sequence[str]:
        """Returns commands that win a task, as found by the game's own agent."""
        self._begin(task_id, gold=True)
        self._done = True
        return list(self._world.getGoldActionSequence())

    def _begin(self, task_id: str, *, gold: bool) -> str:
        number = self._tasks.seed(task_id)
        split = task_id.partition("/")[0]
        self._world = _JAVA.game()
        self._world.load(self.game, self.params)
        state = json.loads(self._world.generateNewGameJSON(number, split, gold))
        self._turns, self._score, self._done = 0, state["score"], False
        return self._shown(state)

    def _shown(self, state: dict[str, Any]) -> str:
        if not self.show_commands:
            return state["observation"].strip()
        commands = ", ".join(sorted(state["validActions"]))
        return f"{state['observation'].strip()}\nCommands: {commands}"


@functools.cache  # every slot of a pool has the same params
def _check_params(game: str, params: str) -> None:
    """Raises ValueError if no game can be generated with these params."""
    world = _JAVA.game()
    wrong = world.load(game, params)  # also empty for unparsable params: "numLocations=x"
    state = json.loads(world.generateNewGameJSON(_SEEDS["train"][0], "train", False))
    if wrong or state["observation"].startswith("ERROR"):
        raise ValueError(
            f"textworld_express params: got {params!r}; allowed: NAME=NUMBER, separated by commas."
            f" {wrong}".rstrip()
        )


def _imports() -> tuple[Any, str, str]:
    """Returns py4j's gateway module, and the jar and folder of TextWorldExpress."""
    try:
        from py4j import java_gateway
        from textworld_express.constants import BASEPATH, JAR_PATH
    except ImportError:
        raise ValueError(
            "env textworld_express needs its package: pip install 'seeupo_jax[textworld]'."
        ) from None
    if shutil.which("java") is None:
        raise ValueError("env textworld_express needs Java: no `java` on the PATH.")
    return java_gateway, JAR_PATH, BASEPATH
