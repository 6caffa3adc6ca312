"""`bfcl`: the multi-turn tasks of the Berkeley Function Calling Leaderboard (v4)."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seeupo_jax.envs.base import Demonstration, Message, StepResult, Tool
from seeupo_jax.envs.bfcl_world import Task, Verdict, World, official
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_hermes, render_hermes

CATEGORIES = ("multi_turn_base",)
SPLITS = {"train": range(100), "test": range(100, 200)}

SYSTEM = (
    "Do what the user asks with the tools. To call one, write"
    ' <tool_call>{"name": NAME, "arguments": {...}}</tool_call>; calls run in order.'
    " When the request is done, write a message without a call."
)
CLOSING = "Done."  # how the oracle ends a user's turn

# The official docs name types in Python's words; the others are JSON schema's already.
_SCHEMA_TYPES = {"dict": "object", "float": "number"}


@dataclass
class Bfcl:
    """The environment: a user asks in turns, the policy calls tools, the official checkers judge.

    A message without a call ends the user's turn. The reward is `score()`, given when the episode
    is done. The tools and messages that `reset` returns are shared: do not change them.

    category: one of `CATEGORIES`.
    max_calls: messages of the policy in an episode; the last of them ends it.
    max_calls_per_user_turn: messages with calls in one user turn; one more ends the episode.
    max_observation_chars: longer answers of a tool are cut, for the policy only; None: never.
    compact: leave out the sentence about the tool's family that the official docs put before the
      description of each tool.
    """

    category: str = "multi_turn_base"
    max_calls: int = 10
    max_calls_per_user_turn: int = 20
    max_observation_chars: int | None = None
    compact: bool = True

    def __post_init__(self) -> None:
        _check_choice("category", self.category, CATEGORIES)
        _check_bound("max_calls", self.max_calls)
        _check_bound("max_calls_per_user_turn", self.max_calls_per_user_turn)
        if self.max_observation_chars is not None:
            _check_bound("max_observation_chars", self.max_observation_chars)
        self._tasks = _load(self.category)
        self._episode: _Episode | None = None

    def task_ids(self, split: str) -> Sequence[str]:
        """The official ids; a split holds the first or the second hundred."""
        _check_choice("split", split, SPLITS)
        return [f"{self.category}_{index}" for index in SPLITS[split]]

    def reset(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """Starts an episode with the user's first question. Nothing is random: `seed` is unused."""
        if task_id not in self._tasks:
            raise ValueError(f"bfcl task: got {task_id!r}; allowed: {self.category}_NUMBER.")
        task = self._tasks[task_id]
        self._episode = _Episode(task, self)
        tools = (tool for name in task.classes for tool in _read_tools(name, self.compact))
        return ({"role": "system", "content": SYSTEM}, *task.questions[0]), tuple(tools)

    def step(self, text: str) -> StepResult:
        """Runs a message's calls, each answered by one `tool` message, or ends the user's turn.

        info: `user_turns` that ended, `user_turns_passed` before the first that failed,
        `observations_cut` so far, `bad_call` when this message's calls could not be read (none of
        them is run then), `out_of_calls` when a bound ended the episode.
        """
        return self._running().step(text)

    def score(self) -> float:
        """1 when every user turn ended and passed the official checkers, else 0."""
        return self._running().score()

    def close(self) -> None:
        self._episode = None

    def demonstrations(self, split: str, *, calls_per_message: str = "turn") -> Demonstrations:
        """The reference solutions as conversations with this environment.

        Args:
          calls_per_message: `turn`, all calls of a user turn in one message, or `one` each.
        """
        _check_choice("calls_per_message", calls_per_message, _CALLS_PER_MESSAGE)
        ids = self.task_ids(split)
        fitting = [task_id for task_id in ids if self._oracle_fits(task_id, calls_per_message)]
        return Demonstrations(self, fitting, calls_per_message, skipped=len(ids) - len(fitting))

    def vocabulary(self) -> Sequence[str]:
        """Names of tools and parameters, except plain words, which other text may hold."""
        classes = dict.fromkeys(name for task in self._tasks.values() for name in task.classes)
        tools = [tool for name in classes for tool in _read_tools(name, self.compact)]
        names = [n for tool in tools for n in (tool["name"], *tool["parameters"]["properties"])]
        return tuple(dict.fromkeys(name for name in names if "_" in name or not name.islower()))

    def oracle(self, task_id: str, calls_per_message: str = "turn") -> Iterator[tuple[str, ...]]:
        """The reference solution: for each user turn, the messages that solve and end it."""
        task = self._tasks[task_id]
        world = World(task)
        for turn in task.reference:
            calls = [world.read(source) for source in turn]
            texts = [render_hermes(call.name, **call.arguments) for call in calls]
            yield (*_CALLS_PER_MESSAGE[calls_per_message](texts), CLOSING)

    def _oracle_fits(self, task_id: str, calls_per_message: str) -> bool:
        pack = _CALLS_PER_MESSAGE[calls_per_message]
        sizes = [len(pack(turn)) for turn in self._tasks[task_id].reference]
        in_episode = sum(sizes) + len(sizes)  # a closing message ends each user turn
        return in_episode <= self.max_calls and max(sizes) <= self.max_calls_per_user_turn

    def _running(self) -> _Episode:
        if self._episode is None:
            raise ValueError("bfcl: reset() must come before step() and score().")
        return self._episode


class Demonstrations(Sequence[Demonstration]):
    """Oracle conversations, played when they are asked for.

    skipped: tasks left out because the environment's bounds would end them too early.
    """

    def __init__(self, env: Bfcl, task_ids: Sequence[str], calls_per_message: str, skipped: int):
        self._env, self._ids, self._calls_per_message = env, task_ids, calls_per_message
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Demonstration:
        env = replace(self._env)  # a twin: threads may ask at once, and an episode may be running
        messages, tools = env.reset(self._ids[index], seed=0)
        for turn in env.oracle(self._ids[index], self._calls_per_message):
            for action in turn:
                reply = env.step(action).observation
                messages += ({"role": "assistant", "content": action}, *reply)
        return Demonstration(messages, tools)


class _Episode:
    """One conversation: the world, the verdict so far, and what is left of the bounds."""

    def __init__(self, task: Task, options: Bfcl):
        self._task, self._options = task, options
        self._world, self._verdict = World(task), Verdict(task)
        self._responses: list[str] = []  # of this user turn's calls
        self._user_turns = self._calls = self._calls_in_user_turn = self._observations_cut = 0
        self._done = False

    def step(self, text: str) -> StepResult:
        if self._done:
            raise ValueError("bfcl: the episode is done; reset() must come before step().")
        self._calls += 1
        self._calls_in_user_turn += 1
        try:
            calls, bad_call = parse_hermes(text), False
        except ToolCallError as error:
            observation, bad_call = (self._answer(json.dumps({"error": str(error)})),), True
        else:
            observation = self._run(calls) if calls else self._end_user_turn()
        ended = self._user_turns == len(self._task.questions)
        self._done = ended or self._out_of_calls()
        info = {
            "user_turns": self._user_turns,
            "user_turns_passed": self._verdict.turns_passed,
            "observations_cut": self._observations_cut,
            "bad_call": bad_call,
            "out_of_calls": self._done and not ended,
        }
        # The score stays 0 until the last user turn ends, so it is given once.
        return StepResult(observation, self.score(), self._done, info)

    def score(self) -> float:
        return float(self._verdict.valid)

    def _run(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        responses = [self._world.call(call) for call in calls]
        self._responses += responses
        return tuple(self._answer(response) for response in responses)

    def _end_user_turn(self) -> tuple[Message, ...]:
        self._verdict.end_turn(self._world, self._responses)
        self._responses = []
        self._calls_in_user_turn = 0
        self._user_turns += 1
        later = self._task.questions[self._user_turns :]
        return later[0] if later else ()

    def _out_of_calls(self) -> bool:
        options = self._options
        in_user_turn = self._calls_in_user_turn > options.max_calls_per_user_turn
        return in_user_turn or self._calls >= options.max_calls

    def _answer(self, text: str) -> Message:
        # Escaped JSON can hold half a character, which no tokenizer takes.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        limit = self._options.max_observation_chars
        if limit is not None and len(text) > limit:
            self._observations_cut += 1
            text = f"{text[:limit]}... [{len(text) - limit} more characters]"
        return {"role": "tool", "content": text}


# How the oracle packs the calls of a user turn into messages.
_CALLS_PER_MESSAGE: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "turn": lambda calls: ["\n".join(calls)] if calls else [],
    "one": lambda calls: calls,
}


def _check_choice(option: str, value: str, allowed: Sequence[str] | dict[str, Any]) -> None:
    if value not in allowed:
        raise ValueError(f"bfcl {option}: got {value!r}; allowed: {', '.join(allowed)}.")


def _check_bound(option: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"bfcl {option}: got {value!r}; allowed: an integer >= 1.")


@functools.cache
def _load(category: str) -> dict[str, Task]:
    """The tasks of a category by id."""
    name = f"BFCL_v4_{category}.json"
    answers = {row["id"]: row["ground_truth"] for row in _read_lines(f"possible_answer/{name}")}
    return {
        row["id"]: Task(
            task_id=row["id"],
            questions=tuple(tuple(messages) for messages in row["question"]),
            classes=tuple(row["involved_classes"]),
            scenario=row["initial_config"],
            reference=tuple(tuple(turn) for turn in answers[row["id"]]),
        )
        for row in _read_lines(name)
    }


@functools.cache
def _read_tools(class_name: str, compact: bool) -> tuple[Tool, ...]:
    """The official docs of a simulator's tools as JSON schema; what they return is left out."""
    config = official("bfcl_eval.constants.executable_backend_config")
    file = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    tools = []
    for row in _read_lines(f"multi_turn_func_doc/{file}"):
        text = row["description"]
        if compact:
            text = text.rpartition("Tool description: ")[2]
        parameters = _to_schema(row["parameters"])
        tools.append({"name": row["name"], "description": text, "parameters": parameters})
    return tuple(tools)


def _to_schema(doc: dict[str, Any]) -> dict[str, Any]:
    """A parameter's official description as JSON schema, its parts included."""
    schema = {**doc, "type": _SCHEMA_TYPES.get(doc["type"], doc["type"])}
    if "properties" in doc:
        schema["properties"] = {key: _to_schema(part) for key, part in doc["properties"].items()}
    if "items" in doc:
        schema["items"] = _to_schema(doc["items"])
    return schema


def _read_lines(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file in the official package's data folder."""
    text = (importlib.resources.files(official("bfcl_eval")) / "data" / path).read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]
