"""The explanation of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.schema import Config
from seeupo_jax.planning.explain.explain_parts import (
    bytes_of,
    cache_lines,
    episode_section,
    mesh_lines,
    model_lines,
    plan_run,
    program_lines,
    reward_lines,
    task_ids,
)
from seeupo_jax.planning.explain.explanation import Section
from seeupo_jax.policy_io.policy_folder import find_step


class FoundPolicy(NamedTuple):
    """The policy of an evaluation. iteration: after which it is; 0: untrained, or not known."""

    iteration: int
    sections: list[Section]


def explain_policy(
    config: Config, workdir: Path, folder: str, part: str | None, step: str | None
) -> FoundPolicy:
    """A run's checkpoint, or what it starts from, in our own engine.

    Args:
      part: of the checkpoint, params or ema; None: what the run starts from.
      step: as of `find_step`.
    """
    run, _ = plan_run(config, folder)
    files = Checkpoints(find_directory(config.checkpoint, workdir), 1)
    newest = None
    if part is not None:
        number = find_step(config, workdir, step)
        newest = files.newest({part: run.state.params}, step=number, partial=True)
    files.close()
    iteration = 0 if newest is None else newest[0]
    weights = f"untrained, as {folder} has it"
    if newest is not None:
        average = ", the average (optimizer.ema)" if part == "ema" else ""
        weights = f"of the checkpoint after iteration {iteration} in {workdir}{average}"
    sections = [
        ("policy", [weights]),
        ("model", model_lines(run, folder)),
        ("mesh", mesh_lines(run)),
        (
            "memory",
            [f"{bytes_of(run, 'parameters', 'frozen'):>12}  policy", *cache_lines(run)],
        ),
        ("programs", program_lines(run, 0)),
    ]
    return FoundPolicy(iteration, sections)


def explain_server(url: str, model: str | None) -> FoundPolicy:
    """A policy elsewhere, which is not asked for anything."""
    name = "the only model that it lists" if model is None else model
    lines = [f"{name}, at {url}, which was not contacted; nothing is loaded or compiled here"]
    return FoundPolicy(0, [("policy", lines)])


def explain_episodes(
    config: Config, split: str, k: int, path: Path, played: set[tuple[str, int]] | None
) -> list[Section]:
    """The episodes that would be played.

    Args:
      path: of the file with the episodes. played: those in it; None: it is unknown which file of
        the folder `path` that is.
    """
    every = task_ids(config, split)
    tasks = every[: config.evaluation.tasks]
    total = len(tasks) * k
    temperature = config.evaluation.temperature
    temperature = config.rollout.temperature if temperature is None else temperature
    drawn = "always the likeliest token"
    if config.rollout.top_k != 1:
        drawn = f"temperature {temperature:g}"
    where = [f"{path}: which file is known once the server has named its model"]
    if played is not None:
        there = sum((task_id, member) in played for task_id in tasks for member in range(k))
        where = [f"{there} of {total} are in {path}; {total - there} are to be played"]
    return [
        episode_section(config),
        ("rewards", reward_lines(config)),
        ("tasks", [f"{split}: the first {len(tasks)} of {len(every)}"]),
        ("episodes", [f"{len(tasks)} tasks x k={k}: {total}; {drawn}", *where]),
    ]
