"""Tasks of an environment: their ids, weights, labels and reference answers, checked.

Functions here call the environment's class outside an episode. A fault of the class raises
`ValueError`: one sentence with the method, what was got and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from seeupo_jax.configuration.user_code import encodes, text_of
from seeupo_jax.envs.base import TURNS, HasTaskShares, Labelled, Referenced, Tasks, TaskShare
from seeupo_jax.envs.validation import as_number, describe, refusal


def list_tasks(environment: Tasks, split: str) -> list[str]:
    """Returns the task ids of a split.

    Raises:
      ValueError: there is no such split, it has no tasks, or `task_ids` returns no list of texts.
    """
    where = f"{type(environment).__name__}.task_ids({split!r})"
    returned = _ask(where, lambda: environment.task_ids(split))
    listed = hasattr(returned, "__len__") and hasattr(returned, "__getitem__")
    if not listed or isinstance(returned, str | bytes | Mapping):
        raise ValueError(str(refusal(where, returned, "a list of texts")))
    tasks = _ask(where, lambda: list(returned))
    if not tasks:
        raise ValueError(f"{where}: got no task; allowed: at least one.")
    texts = [task for task in tasks if isinstance(task, str)]
    if len(texts) < len(tasks) or not encodes("".join(texts)):
        wrong = next(task for task in tasks if not isinstance(task, str) or not encodes(task))
        raise ValueError(str(refusal(where, wrong, "a list of texts", "a task ")))
    return [str(task) for task in tasks]


def list_task_shares(environment: Tasks, split: str) -> list[TaskShare]:
    """Returns the weighted parts of a split's tasks; a single part if the class defines none.

    Raises:
      ValueError: as `list_tasks`, or the parts do not hold exactly the split's tasks.
    """
    every = list_tasks(environment, split)
    if not callable(getattr(environment, "task_shares", None)):
        return [TaskShare("", 1.0, every)]
    where = f"{type(environment).__name__}.task_shares({split!r})"
    returned = _ask(where, lambda: cast(HasTaskShares, environment).task_shares(split))
    shares = isinstance(returned, list | tuple) and all(isinstance(s, TaskShare) for s in returned)
    if not shares:
        raise ValueError(str(refusal(where, returned, "a list of TaskShare")))
    if sorted(task for share in returned for task in share.task_ids) != sorted(every):
        raise ValueError(f"{where}: got other tasks than task_ids({split!r}); allowed: the same.")
    for share in returned:
        weight = as_number(share.weight)
        if not share.task_ids or weight is None or not 0 < weight < math.inf:
            got = f"{share.name!r} with {len(share.task_ids)} tasks and weight {share.weight!r}"
            raise ValueError(f"{where}: got {got}; allowed: at least one task, a weight > 0.")
    return list(returned)


def task_labels(environment: Tasks, task_id: str) -> dict[str, str]:
    """Returns a task's labels; empty if the environment has none.

    Raises:
      ValueError: `labels` raises, does not return a dict of texts, or uses the name under which
        metrics count turns.
    """
    if not callable(getattr(environment, "labels", None)):
        return {}
    where = f"{type(environment).__name__}.labels({task_id!r})"
    returned = _ask(where, lambda: cast(Labelled, environment).labels(task_id))
    if not isinstance(returned, Mapping):
        raise ValueError(str(refusal(where, returned, "a dict of texts")))
    for label, value in returned.items():
        if not all(isinstance(text, str) and encodes(text) for text in (label, value)):
            raise ValueError(str(refusal(where, dict(returned), "a dict of texts")))
        if label.partition("=")[0] == TURNS:
            allowed = f"any name but {TURNS}, the number of turns that metrics count"
            raise ValueError(f"{where}: got the label {label!r}; allowed: {allowed}.")
    return dict(returned)


def task_reference(environment: Tasks, task_id: str) -> str | None:
    """Returns a task's reference answer; None if the task or the environment has none.

    Raises:
      ValueError: `reference` raises, or returns neither None nor a text that is not empty.
    """
    if not callable(getattr(environment, "reference", None)):
        return None
    where = f"{type(environment).__name__}.reference({task_id!r})"
    returned = _ask(where, lambda: cast(Referenced, environment).reference(task_id))
    if returned is not None and not (isinstance(returned, str) and returned and encodes(returned)):
        raise ValueError(str(refusal(where, returned, "a text that is not empty, or None")))
    return returned


def labels_by_task(
    environment: Tasks, tasks: Collection[str], warn: Callable[[str], None]
) -> dict[str, dict[str, str]]:
    """Returns the labels of several tasks.

    A task whose labels are invalid gets none; `warn` then receives one sentence with their number.
    """
    by_task, wrong = {}, []
    for task_id in tasks:
        try:
            by_task[task_id] = task_labels(environment, task_id)
        except ValueError as error:
            by_task[task_id] = {}
            wrong.append(str(error))
    if wrong:
        warn(f"{len(wrong)} of {len(tasks)} tasks have no labels: {wrong[0]}")
    return by_task


def check_tasks(environment: Tasks, splits: Sequence[str], *, labelled: int) -> None:
    """Checks that all splits have tasks, and the labels of the first `labelled` of each split.

    Raises:
      ValueError: as `list_tasks` and `task_labels`.
    """
    for split in dict.fromkeys(splits):
        for task_id in list_tasks(environment, split)[:labelled]:
            task_labels(environment, task_id)


def _ask(where: str, question: Callable[[], Any]) -> Any:
    """Returns what the class returns.

    Its error becomes a ValueError that names the call; a ValueError that already says what is
    allowed, or names the call, keeps its text.
    """
    try:
        return question()
    except (Exception, SystemExit) as error:
        text, call = text_of(error), where[where.index(".") : where.index("(") + 1]
        complete = isinstance(error, ValueError) and ("; allowed: " in text or call in text)
        sentence = text if complete else f"{where} raised {describe(error).rstrip('.')}."
        raise ValueError(sentence) from error
