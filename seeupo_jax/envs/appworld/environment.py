"""`appworld`: tasks in nine apps of everyday life, done by writing Python code (AppWorld)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import escaped, expand_home
from seeupo_jax.envs.appworld.prompt import (
    cut,
    no_code_message,
    output_message,
    system_message,
    task_message,
)
from seeupo_jax.envs.appworld.server import (
    InvalidReply,
    ManagedServer,
    NoReply,
    PoolServer,
    ServerError,
    ServerGone,
    python_path,
)
from seeupo_jax.envs.base import Message, Missing, StepResult, Tool, check_choice
from seeupo_jax.envs.episode_rewards import REWARDS, EpisodeReward
from seeupo_jax.envs.tool_calls import ToolCallError, parse_fenced

HOME = Path(__file__).parents[3] / "third_party" / "appworld"
# The benchmark's datasets by split. The paper trains on `train` (90 tasks) and evaluates on `dev`
# (57); the two tests that AppWorld keeps for final results go by their own names.
SPLITS = {"train": "train", "test": "dev"} | {
    name: name for name in ("dev", "test_normal", "test_challenge")
}
_SERVER_MARGIN_S = 20  # of a request beyond its code: saving the world, evaluating it
_HUNG = "The code could not be interrupted; the episode is over."
_CRASHED = "The code ended its Python process; the episode is over."
_DAMAGED = "The code damaged its Python process, which cannot go on; the episode is over."
_RAISED = "Execution failed."  # how AppWorld begins the output of code that raised


@dataclass
class AppWorld:
    """The environment: the policy writes code, AppWorld runs it and its evaluator judges.

    An action is a message with one ```python block; the block's output is answered, and
    `complete_task` in it ends the episode. The object has a server to itself from its first `reset`
    to `close`. The code that runs there is the policy's: see third_party/appworld.

    root: the folder that holds AppWorld's `data`; None: `home`.
    home: the folder that third_party/appworld/setup.sh has set up; None: that of this repository.
    servers: the file of a pool that third_party/appworld/serve.py runs; None: the object starts its
      own server, and `memory_mb` and the limit of a request are its own too.
    reward: what an episode earns, one of `REWARDS`; each step gives what it adds. `fraction`:
      `score()`. `official`: 1 when it is 1, else 0. `shaped`: 1 + 0.5·score when it is 1, 0.5·score
      otherwise; but −1 once a message repeats itself or holds a control token, whatever follows.
    max_calls: messages of the policy in an episode; the last of them ends it.
    max_output_tokens: longer output of a block is cut, with a note. Tokens are counted without a
      tokenizer, as parts of words, digits and signs (`prompt.cut`): what the apps print
      has 1 to 1.3 times as many of them as of Qwen's tokens (access tokens: 0.8), of which the
      paper shows 3000.
    code_s: seconds after which a block is interrupted; its output says so. One that cannot be ends
      its server with the limit of a request, and the episode, which then meets no requirement; so
      does one that crashes Python, or changes it so that AppWorld fails.
    start_s: seconds in which a server must start, or become free.
    memory_mb: a server that is larger is replaced before the next episode; in an episode, a block
      that takes it to twice that gets a MemoryError.
    experiment: what AppWorld's names of rollouts begin with.
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
        """The official ids of a dataset, in its order; `SPLITS` says of which."""
        check_choice("appworld split", split, SPLITS)
        file = self._data / "datasets" / f"{SPLITS[split]}.txt"
        if not file.is_file():
            raise Missing(f"appworld split: got {split!r}; allowed: one that {file} exists for.")
        return file.read_text(encoding="utf-8").split()

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode in a new world. Nothing is random: `seed` is unused.

        Raises:
          ServerError: no server could be started, or it refused the task.
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

        info: `requirements_passed` of `requirements`, `completed` by the policy, `calls`,
        `outputs_cut` so far, `bad_call` when the message held no block that could be run, `hung`
        when its block could not be interrupted, `crashed` when it, or what an earlier one left
        behind, ended the server's process, `damaged` when AppWorld could not go on in it, `lost`:
        the error of these three, else None; `out_of_calls` when the bound ended the episode.

        Raises:
          ServerError: the server died before the first block, refused, or its pool ended; the
            episode is lost.
        """
        return self._running().step(text)

    def score(self) -> float:
        """The share of the task's requirements that the world meets now; 1 is success."""
        return self._running().score

    def close(self) -> None:
        """Ends the server, or leaves it to others."""
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
    """A block's output; or, where its server is lost, what to answer and the error."""

    output: str | None = None
    completed: bool = False
    lost: str | None = None
    error: str | None = None


class _Episode:
    """One conversation and the world that it acts on."""

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
            answer, self._passed = ran.lost, 0  # with its server the world is gone
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
        return StepResult(observation, self._reward.pay(self.score), self._done, info)

    @property
    def score(self) -> float:
        return self._passed / self._requirements

    def _run(self, code: str) -> _Execution:
        """Runs a block and evaluates the world.

        A server that fails or ends from the first block on is the policy's failure: one of the
        environment would not count, and the policy could end bad episodes so.
        """
        began, output = time.monotonic(), None
        try:
            output = self._call("execute", code=code)
            self._ran_code = True
            completed = self._call("task_completed")
            self._evaluate()
        except (NoReply, InvalidReply, ServerGone) as error:
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
        shown = cut(output, self._options.max_output_tokens)
        self._outputs_cut += shown != output
        return shown


def _read(text: str) -> tuple[str | None, str]:
    """The code of a message; or None, and what to answer."""
    try:
        code = parse_fenced(text)
    except ToolCallError as error:
        return None, no_code_message(str(error))
    if code is None:
        return None, no_code_message("a message must hold a code block that opens with ```python")
    return code, ""


def _check_installed(home: Path) -> None:
    if not python_path(home).exists():
        raise Missing(
            f"appworld home: got {home}, which has no .venv; "
            "allowed: a folder set up by `sh third_party/appworld/setup.sh` of the repository, "
            "which config.env.options.home names."
        )


def _check_data(home: Path, root: Path) -> None:
    if not (root / "data" / "tasks").is_dir():
        raise Missing(
            f"appworld root: got {root}, which has no data/tasks; allowed: a folder filled by "
            f"`{home}/.venv/bin/appworld download data --root {root}` (needs the internet)."
        )


def _check_limit(code_s: float, limit_s: float | None, servers: str) -> None:
    if limit_s is not None and limit_s <= code_s:
        raise ValueError(
            f"appworld code_s: got {code_s}; allowed: less than {limit_s:g}, the --request_s of "
            f"the pool in {servers}, whose servers end with a request that takes as long."
        )


def _check_bound(option: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"appworld {option}: got {value!r}; allowed: a number >= 1.")
