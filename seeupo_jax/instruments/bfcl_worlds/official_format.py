"""Export of generated tasks to the official format: files of questions and possible answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from seeupo_jax.envs.bfcl.benchmark_files import file_name
from seeupo_jax.envs.bfcl.simulated_apis import MultiTurnTask, World
from seeupo_jax.instruments.bfcl_worlds.environment import BfclWorlds
from seeupo_jax.instruments.bfcl_worlds.generator import SPLITS, VARIANTS


def to_rows(task: MultiTurnTask, official_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rows of a task: its question and its possible answer."""
    world = World(task)
    owner = {
        tool: name
        for name, part in world.instances.items()
        for tool in dir(type(part))
        if not tool.startswith("_")
    }
    tools = [world.read(source).name for turn in task.reference for source in turn]
    question: dict[str, Any] = {
        "id": official_id,
        "question": task.questions,
        "initial_config": task.scenario,
        "path": [f"{owner[tool]}.{tool}" for tool in tools],
        "involved_classes": task.classes,
        "excluded_function": [],
    }
    if task.held_out:
        question["missed_function"] = {str(turn): names for turn, names in task.held_out.items()}
    return question, {"id": official_id, "ground_truth": task.reference}


def export_tasks(environment: BfclWorlds, folder: Path) -> Counter[str]:
    """Writes all tasks of an environment, for `bfcl` with `data=FOLDER` and for official code.

    The files are FOLDER/SPLIT/BFCL_v4_CATEGORY.json and, with the same name, in
    FOLDER/SPLIT/possible_answer/. Ids are CATEGORY_NUMBER, numbered over all splits. All files of
    an earlier export are removed first, also of splits and categories that are not written now.

    Returns:
      The number of tasks in each file of questions, by its path in the folder.
    """
    for place in (_places(folder, split, name) for split in SPLITS for name in VARIANTS):
        for file in place:
            file.unlink(missing_ok=True)
    numbers: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for split in SPLITS:
        lines: dict[str, list[tuple[str, str]]] = {}
        for task_id in environment.task_ids(split):
            category = environment.labels(task_id)["category"]
            official_id = f"{category}_{numbers[category]}"
            numbers[category] += 1
            question, answer = to_rows(environment.find_task(task_id), official_id)
            lines.setdefault(category, []).append((json.dumps(question), json.dumps(answer)))
        for category, rows in lines.items():
            place, answers = _places(folder, split, category)
            answers.parent.mkdir(parents=True, exist_ok=True)
            for file, column in ((place, 0), (answers, 1)):
                file.write_text("".join(f"{row[column]}\n" for row in rows), "utf-8")
            written[str(place.relative_to(folder))] = len(rows)
    return written


def _places(folder: Path, split: str, category: str) -> tuple[Path, Path]:
    """Returns the paths of the files of questions and of possible answers."""
    place = folder / split / file_name(category)
    return place, place.parent / "possible_answer" / place.name
