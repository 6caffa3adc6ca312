"""`appworld`: tasks in nine everyday apps, solved by writing Python code (AppWorld)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import escaped, expand_home
from seeupo_jax.envs.appworld.prompt import (
    no_code_message,
    output_message,
    system_message,
    task_message,
    truncate,
)
from seeupo_jax.envs.appworld.server import (
    InvalidReply,
    ManagedServer,
    PoolServer,
    RequestUnanswered,
    ServerError,
    ServerGone,
    python_path,
)
from seeupo_jax.envs.base import EnvironmentUnavailable, Message, StepResult, Tool, check_choice
from seeupo_jax.envs.episode_rewards import REWARDS, EpisodeReward
from seeupo_jax.envs.tool_calls import ToolCallError, parse_fenced

HOME = Path(__file__).parents[3] / "third_party" / "appworld"
# The benchmark's datasets by split. The paper trains on `train` (90 tasks) and evaluates on `dev`
# (57). The two test sets that AppWorld reserves for final results have their own names.
SPLITS = {"train": "train", "test": "dev"} | {
    name: name for name in ("dev", "test_normal", "test_challenge")
}
_SERVER_MARGIN_S = 20  # added to the code's limit: the world is saved and evaluated
_HUNG = "The code could not be interrupted; the episode is over."
_CRASHED = "The code ended its Python process; the episode is over."
_DAMAGED = "The code damaged its Python process, which cannot go on; the episode is over."
_RAISED = "Execution failed."  # how AppWorld begins the output of code that raised


@dataclass
class AppWorld:
    """The environment: the policy writes code, AppWorld runs and evaluates it.

    An action is a message with one ```python block. The observation is the block's output, and
    `complete_task` in the block ends the episode. The object holds one server exclusively from its
    first `reset` to `close`. That server runs the policy's code: see third_party/appworld.

    root: the folder that contains AppWorld's `data`; None: `home`.
    home: the folder that third_party/appworld/setup.sh has set up; None: the one in this
      repository.
    servers: the file of a pool that third_party/appworld/serve.py runs; None: the object starts its
      own server. `memory_mb` and the time limit of a request apply only to an own server.
    reward: the episode's reward, one of `REWARDS`; a step's reward is the increase. `fraction`:
      `score()`. `official`: 1 if the score is 1, else 0. `shaped`: 1 + 0.5·score if the score is 1,
      0.5·score otherwise; permanently −1 once a message repeats itself or contains a control token.
    max_calls: messages of the policy per episode; the last one ends it.
    max_output_tokens: longer output of a block is truncated, with a note. Tokens are counted
      without a tokenizer, as parts of words, digits and signs (`prompt.truncate`). The apps' output
      has 1 to 1.3 times as many of these as Qwen tokens (access tokens: 0.8); the paper shows 3000
      tokens.
    code_s: seconds after which a block is interrupted, which its output reports. A block that
      cannot be interrupted ends its server at the time limit of a request, and the episode with
      score 0; so does a block that crashes Python or changes it so that AppWorld fails.
    start_s: seconds within which a server must start, or become free.
    memory_mb: a larger server is replaced before the next episode; within an episode, a block that
      takes its memory to twice this limit gets a MemoryError.
    experiment: prefix of AppWorld's rollout names.
    """

    root: str | None = None
    home: str | None = None
    servers: str | None = None
    reward: str = "fraction"
    max_calls: int = 10
    max_output_tokens: int = 3000
    code_s: int = 30
    start_s: float = 50.0
    memory_mb: int = 2000
    experiment: str = "seeupo_jax"

    def __post_init__(self) -> None:
        check_choice("appworld reward", self.reward, REWARDS)
        for option in ("max_calls", "max_output_tokens", "code_s", "start_s", "memory_mb"):
            _check_bound(option, getattr(self, option))
        home = HOME if self.home is None else expand_home(self.home).resolve()
        root = home if self.root is None else expand_home(self.root).resolve()
        self._data = root / "data"
        self._server = self._make_server(home)
        _check_data(home, root)
        self._apps: Mapping[str, str] | None = None
        self._episode: _Episode | None = None

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the official task ids of the split's dataset (`SPLITS`), in its order."""
        check_choice("appworld split", split, SPLITS)
        file = self._data / "datasets" / f"{SPLITS[split]}.txt"
        if not file.is_file():
            raise EnvironmentUnavailable(
                f"appworld split: got {split!r}; allowed: one that {file} exists for."
            )
        return file.read_text(encoding="utf-8").split()

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode in a new world. Nothing is random: `seed` is unused.

        Raises:
          ServerError: no server could be started, or the server refused the task.
        """
        tasks = self._data / "tasks"
        if not task_id or Path(task_id).name != task_id or not (tasks / task_id).is_dir():
            raise ValueError(f"appworld task: got {task_id!r}; allowed: a name in {tasks}.")
        self._episode = None
        task = self._server.begin(
            task_id=task_id,
            experiment_name=f"{self.experiment}-{uuid.uuid4().hex}",
            timeout_seconds=self.code_s,
        )
        if self._apps is None:
            self._apps = self._server.call("app_descriptions")
        self._episode = _Episode(self, self._server, task_id)
        system = system_message(self._apps, task["supervisor"], task["datetime"])
        messages = (
            {"role": "system", "content": system},
            {"role": "user", "content": task_message(task["instruction"])},
        )
        return messages, ()

    def step(self, text: str) -> StepResult:
        """Runs a message's block and evaluates the world.

        info: `requirements_passed` out of `requirements`; `completed`: the policy completed the
        task; `calls` and `outputs_cut` so far; `bad_call`: the message has no block that could be
        run; `hung`: its block could not be interrupted; `crashed`: the block, or effects of an
        earlier one, ended the server's process; `damaged`: AppWorld could not continue in that
        process; `lost`: the error in these three cases, else None; `out_of_calls`: `max_calls`
        ended the episode.

        Raises:
          ServerError: the server died before the first block, refused, or its pool ended; the
            episode is lost.
        """
        return self._running().step(text)

    def score(self) -> float:
        """The share of the task's requirements that the world currently meets; 1 is success."""
        return self._running().score

    def close(self) -> None:
        """Ends the server, or releases it to its pool."""
        self._episode = None
        self._server.stop()

    def _make_server(self, home: Path) -> ManagedServer | PoolServer:
        request_s = self.code_s + _SERVER_MARGIN_S
        if self.servers is not None:
            pool = PoolServer(expand_home(self.servers), start_s=self.start_s, request_s=request_s)
            _check_limit(self.code_s, pool.limit_s, self.servers)
            return pool
        _check_installed(home)
        return ManagedServer(
            home,
            self._data,
            start_s=self.start_s,
            request_s=request_s,
            memory_mb=self.memory_mb,
        )

    def _running(self) -> _Episode:
        if self._episode is None:
            raise ValueError("appworld: reset() must come before step() and score().")
        return self._episode


@dataclass(frozen=True)
class _Execution:
    """A block's output; if its server is lost, the answer to the policy and the error."""

    output: str | None = None
    completed: bool = False
    lost: str | None = None
    error: str | None = None


class _Episode:
    """One conversation and the world on which it acts."""

    def __init__(self, options: AppWorld, server: ManagedServer | PoolServer, task_id: str):
        self._options, self._server, self._task_id = options, server, task_id
        self._calls = self._outputs_cut = 0
        self._executed: list[bool] = []  # of each step
        self._ran_code = False
        self._done = False
        self._reward = EpisodeReward(options.reward)
        self._evaluate()

    def step(self, text: str) -> StepResult:
        if self._done:
            raise ValueError("appworld: the episode is done; reset() must come before step().")
        self._calls += 1
        self._reward.read(text)
        code, answer = _read(text)
        ran = _Execution() if code is None else self._run(code)
        self._executed.append(ran.output is not None and not ran.output.startswith(_RAISED))
        if ran.output is not None:
            answer = output_message(self._cut(ran.output))
        elif ran.lost is not None:
            answer, self._passed = ran.lost, 0  # the world is lost with its server
        ended = ran.completed or ran.lost is not None
        out_of_calls = not ended and self._calls >= self._options.max_calls
        self._done = ended or out_of_calls
        info = {
            "requirements_passed": self._passed,
            "requirements": self._requirements,
            "completed": ran.completed,
            "calls": self._calls,
            "outputs_cut": self._outputs_cut,
            "bad_call": code is None,
            "executed": [*self._executed],
            "hung": ran.lost == _HUNG,
            "crashed": ran.lost == _CRASHED,
            "damaged": ran.lost == _DAMAGED,
            "lost": ran.error,
            "out_of_calls": out_of_calls,
        }
        observation = ({"role": "user", "content": answer},)
        return StepResult(observation, self._reward.step_reward(self.score), self._done, info)

    @property
    def score(self) -> float:
        return self._passed / self._requirements

    def _run(self, code: str) -> _Execution:
        """Runs a block and evaluates the world.

        A server that fails or ends after the first block has run is the policy's failure. Failures
        of the environment are not counted: the policy could discard bad episodes that way.
        """
        began, output = time.monotonic(), None
        try:
            output = self._call("execute", code=code)
            self._ran_code = True
            completed = self._call("task_completed")
            self._evaluate()
        except (RequestUnanswered, InvalidReply, ServerGone) as error:
            if isinstance(error, ServerGone) and not self._ran_code:
                raise ServerError(str(error)) from None
            hung = output is None and time.monotonic() - began > self._options.code_s
            lost = _DAMAGED if isinstance(error, InvalidReply) else _HUNG if hung else _CRASHED
            return _Execution(lost=lost, error=str(error))
        return _Execution(escaped(output), completed)

    def _evaluate(self) -> None:
        verdict = self._call("evaluate", suppress_errors=True)
        self._passed, self._requirements = len(verdict["passes"]), verdict["num_tests"]

    def _call(self, method: str, **body: Any) -> Any:
        return self._server.call(method, task_id=self._task_id, **body)

    def _cut(self, output: str) -> str:
        shown = truncate(output, self._options.max_output_tokens)
        self._outputs_cut += shown != output
        return shown


def _read(text: str) -> tuple[str | None, str]:
    """Returns the code of a message; or None, and the answer to the policy."""
    try:
        code = parse_fenced(text)
    except ToolCallError as error:
        return None, no_code_message(str(error))
    if code is None:
        return None, no_code_message("a message must hold a code block that opens with ```python")
    return code, ""


def _check_installed(home: Path) -> None:
    if not python_path(home).exists():
        raise EnvironmentUnavailable(
            f"appworld home: got {home}, which has no .venv; "
            "allowed: a folder set up by `sh third_party/appworld/setup.sh` of the repository, "
            "which config.env.options.home names."
        )


def _check_data(home: Path, root: Path) -> None:
    if not (root / "data" / "tasks").is_dir():
        raise EnvironmentUnavailable(
            f"appworld root: got {root}, which has no data/tasks; allowed: a folder filled by "
            f"`{home}/.venv/bin/appworld download data --root {root}` (needs the internet)."
        )


def _check_limit(code_s: float, limit_s: float | None, servers: str) -> None:
    if limit_s is not None and limit_s <= code_s:
        raise ValueError(
            f"appworld code_s: got {code_s}; allowed: less than {limit_s:g}, the --request_s of "
            f"the pool in {servers}, whose servers end after a request of that length."
        )


def _check_bound(option: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"appworld {option}: got {value!r}; allowed: a number >= 1.")
