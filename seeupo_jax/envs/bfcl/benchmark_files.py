"""The official data of BFCL's multi-turn tasks: questions, reference calls, tool descriptions."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import describe
from seeupo_jax.envs.base import Message
from seeupo_jax.envs.bfcl.simulated_apis import MultiTurnTask, World, official
from seeupo_jax.envs.validation import ProtocolError, check_reset

CATEGORIES = (
    "multi_turn_base",
    "multi_turn_miss_func",
    "multi_turn_miss_param",
    "multi_turn_long_context",
)
SPLITS = ("train", "test")
TASKS = 200  # per category, numbered from 0
SPLIT_SEED = 0

# The official doc of a tool: its name, description, parameters and response, with Python's types.
Doc = dict[str, Any]


def split_ids(category: str, split: str) -> list[str]:
    """Returns the official ids of half a category, in the order of their numbers.

    `multi_turn_base` is split by number, as in the paper's code: 0 to 99 train. The other three
    share one split, by hashes of seed and number, independent of any random generator: tasks with
    the same number are variants of each other. They are also variants of the base task, so
    training on one category and testing on another leaks.
    """
    numbers = list(range(TASKS))
    if category != "multi_turn_base":
        numbers.sort(key=lambda number: hashlib.sha256(f"{SPLIT_SEED} {number}".encode()).digest())
    halves = {"train": numbers[: TASKS // 2], "test": numbers[TASKS // 2 :]}
    return [f"{category}_{number}" for number in sorted(halves[split])]


def load_tasks(category: str, folder: Path | None = None) -> dict[str, MultiTurnTask]:
    """Loads the tasks of a category by id: the official tasks, or a folder's in their format.

    Raises:
      ValueError: the folder's files do not exist or do not have this format.
    """
    if folder is None:
        return _cached_tasks(category, None)
    name = file_name(category)
    stamps = map(_stamp, (folder / name, folder / "possible_answer" / name))
    return _cached_tasks(category, folder, folder.absolute(), *stamps)


def _stamp(file: Path) -> tuple[int, int] | None:
    """A file's modification time and size; None: unknown, reading it will report the error."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=64)  # every slot of a pool loads them
def _cached_tasks(category: str, folder: Path | None, *_stamps: Any) -> dict[str, MultiTurnTask]:
    if folder is None:
        return _read_tasks(category, importlib.resources.files(official("bfcl_eval")) / "data")
    try:
        tasks = _read_tasks(category, folder)
        for task in tasks.values():
            _check_task(task)
        return tasks
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"bfcl data: got {str(folder)!r}, whose {file_name(category)} or its possible_answer"
            f" cannot be read: {type(error).__name__}: {error}."
        ) from None


def file_name(category: str) -> str:
    """The file name of a category's questions, and of its calls in `possible_answer`."""
    return f"BFCL_v4_{category}.json"


def _read_tasks(category: str, root: Traversable) -> dict[str, MultiTurnTask]:
    name = file_name(category)
    answers = _by_id(_read_lines(root, "possible_answer", name))
    return {
        task_id: MultiTurnTask(
            task_id=task_id,
            questions=tuple(tuple(messages) for messages in row["question"]),
            classes=tuple(row["involved_classes"]),
            scenario=row["initial_config"],
            reference=tuple(tuple(turn) for turn in answers[task_id]["ground_truth"]),
            held_out={int(k): tuple(names) for k, names in row.get("missed_function", {}).items()},
            long_context=category == "multi_turn_long_context",
        )
        for task_id, row in _by_id(_read_lines(root, name)).items()
    }


def _by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    rows_by_id: dict[str, dict[str, Any]] = {}
    for row in rows:
        if rows_by_id.setdefault(row["id"], row) is not row:
            raise ValueError(f"{row['id']} is there twice")
    return rows_by_id


def _check_task(task: MultiTurnTask) -> None:
    """Raises ValueError if a task could not be played to its end."""
    simulators = official("bfcl_eval.constants.executable_backend_config").CLASS_FILE_PATH_MAPPING
    if unknown := [name for name in task.classes if name not in simulators]:
        raise ValueError(f"{task.task_id} has no simulator {unknown[0]}; there are {[*simulators]}")
    if len(task.questions) != len(task.reference):
        turns = f"{len(task.questions)} user turns and calls for {len(task.reference)}"
        raise ValueError(f"{task.task_id} has {turns}")
    if not task.questions:
        raise ValueError(f"{task.task_id} has no user turn")
    for messages in task.questions:
        _check_question(task.task_id, messages)
    try:
        world = World(task)
    except Exception as error:  # of a simulator
        what = f"an initial_config that no simulator takes: {describe(error)}"
        raise ValueError(f"{task.task_id} has {what}") from None
    try:
        for source in (source for turn in task.reference for source in turn):
            world.read(source)
        for turn in task.held_out:
            added_docs(task, turn)
    except KeyError as error:
        raise ValueError(f"{task.task_id} has no tool {error}") from None


def _check_question(task_id: str, messages: Sequence[Message]) -> None:
    try:
        check_reset((messages, ()))
    except ProtocolError as error:
        wrong = str(error).removeprefix("reset() messages: ")
        raise ValueError(f"{task_id} has an invalid question: {wrong}") from None


@functools.cache
def read_docs(class_name: str) -> tuple[Doc, ...]:
    """The official docs of a simulator's tools; read-only, since episodes share them."""
    config = official("bfcl_eval.constants.executable_backend_config")
    file = config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    root = importlib.resources.files(official("bfcl_eval")) / "data"
    return tuple(_read_lines(root, "multi_turn_func_doc", file))


def listed_docs(task: MultiTurnTask) -> list[Doc]:
    """Docs of the tools that are listed at the start of an episode."""
    held_out = {name for names in task.held_out.values() for name in names}
    return [doc for name in task.classes for doc in read_docs(name) if doc["name"] not in held_out]


def added_docs(task: MultiTurnTask, turn: int) -> list[Doc]:
    """Docs of the tools that a user turn adds."""
    docs = {doc["name"]: doc for name in task.classes for doc in read_docs(name)}
    return [docs[name] for name in task.held_out.get(turn, ())]


def _read_lines(root: Traversable, *path: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    text = root.joinpath(*path).read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]
