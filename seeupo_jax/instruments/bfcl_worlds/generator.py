"""Tasks from seeds: conversations, withheld tools or details, splits, verification."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from seeupo_jax.envs.bfcl.simulated_apis import CALL_FAILED, MultiTurnTask, Verdict, World
from seeupo_jax.instruments.bfcl_worlds.composition import (
    GeneratedConversation,
    choose_classes,
    compose,
)
from seeupo_jax.instruments.bfcl_worlds.draft import CHANGES, PREPARATIONS, Infeasible

SPLITS = ("train", "validation", "test")
LONG = "multi_turn_long_context"
ATTEMPTS = 200  # maximum; a task takes 3 to 20


@dataclass(frozen=True)
class Options:
    """Options of task generation.

    categories: of the tasks, in rotation.
    turns: minimum and maximum of a conversation's requests.
    classes: the simulators to draw from.
    seed: of all tasks.
    """

    categories: tuple[str, ...]
    turns: tuple[int, int]
    classes: tuple[str, ...]
    seed: int


def opening_split(text: str) -> str:
    """Returns the split of a conversation, which depends on its first request only.

    So conversations of different splits never start with the same request, for any options. The
    complete request decides, also if the first message lacks a detail (`multi_turn_miss_param`).
    """
    return SPLITS[hashlib.sha256(text.encode()).digest()[0] % len(SPLITS)]


@functools.lru_cache(maxsize=1024)  # members of a group and labels use the same task
def generate(options: Options, split: str, index: int) -> MultiTurnTask:
    """Generates the task `SPLIT/INDEX`: the same for the same arguments, on every machine."""
    category = options.categories[index % len(options.categories)]
    withhold, long_context = VARIANTS[category], category == LONG
    for attempt in range(ATTEMPTS):
        name = f"{options.seed}/{split}/{index}/{attempt}"
        rng = Random(name)
        turns = rng.randint(*options.turns)
        try:
            classes = choose_classes(rng, options.classes, turns)
            conversation = compose(rng, classes, turns, long_context)
        except Infeasible:
            continue
        if opening_split(conversation.opening) != split:
            continue
        task = withhold(Random(f"{name}/withheld"), f"{split}/{index}", conversation)
        if task is not None:
            task = dataclasses.replace(task, long_context=long_context)
        if task is not None and is_solvable(task):
            return task
    raise ValueError(
        f"bfcl_worlds: no task {split}/{index} of {category} after {ATTEMPTS} attempts with"
        f" turns={options.turns} and classes={options.classes}; allow more turns or more classes."
    )


def is_solvable(task: MultiTurnTask) -> bool:
    """Whether the reference calls, parsed from their source, run and pass the official checkers."""
    world, verdict = World(task), Verdict(task)
    for turn in task.reference:
        answers = [world.call(world.read(source)) for source in turn]
        if any(answer.startswith(CALL_FAILED) for answer in answers):
            return False
        verdict.end_turn(world, answers)
    return verdict.valid


def _no_op(_: Random, task_id: str, talk: GeneratedConversation) -> MultiTurnTask:
    """Makes a task without a withheld tool or detail."""
    return _task(
        task_id,
        talk,
        [turn.ask.text for turn in talk.turns],
        [turn.sources for turn in talk.turns],
    )


def _function(rng: Random, task_id: str, talk: GeneratedConversation) -> MultiTurnTask | None:
    """Makes a task in which a tool is added after the user's request that needs it."""
    options: list[tuple[int, str]] = []
    used: set[str] = set()
    for index, turn in enumerate(talk.turns):
        new = [tool for tool in turn.tools if tool not in used]
        needed = [tool for tool in new if tool in CHANGES - PREPARATIONS] or new
        options += [(index, tool) for tool in needed[-1:]]
        used |= set(turn.tools)
    if not options:
        return None
    at, tool = rng.choice(options)
    texts: list[str | None] = [turn.ask.text for turn in talk.turns]
    sources = [turn.sources for turn in talk.turns]
    texts.insert(at + 1, None)
    sources.insert(at, ())
    return _task(task_id, talk, texts, sources, {at + 1: (tool,)})


def _parameter(rng: Random, task_id: str, talk: GeneratedConversation) -> MultiTurnTask | None:
    """Makes a task in which one request lacks a detail, which the next message gives."""
    options = [index for index, turn in enumerate(talk.turns) if turn.ask.partial]
    if not options:
        return None
    at = rng.choice(options)
    texts: list[str | None] = [turn.ask.text for turn in talk.turns]
    sources = [turn.sources for turn in talk.turns]
    texts[at : at + 1] = [talk.turns[at].ask.partial, talk.turns[at].ask.detail]
    sources.insert(at, ())
    return _task(task_id, talk, texts, sources)


def _task(
    task_id: str,
    talk: GeneratedConversation,
    texts: list[str | None],
    sources: list[tuple[str, ...]],
    held_out: dict[int, tuple[str, ...]] | None = None,
) -> MultiTurnTask:
    questions = [() if text is None else ({"role": "user", "content": text},) for text in texts]
    return MultiTurnTask(
        task_id, tuple(questions), talk.classes, talk.scenario, tuple(sources), held_out or {}
    )


# Functions that withhold a tool or detail, by official category; None: impossible.
VARIANTS: dict[str, Callable[[Random, str, GeneratedConversation], MultiTurnTask | None]] = {
    "multi_turn_base": _no_op,
    "multi_turn_miss_func": _function,
    "multi_turn_miss_param": _parameter,
    LONG: _no_op,
}
