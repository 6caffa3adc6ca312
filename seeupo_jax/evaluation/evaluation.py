"""An evaluation on a split, and which split the best checkpoint is selected on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from seeupo_jax.agents.agent_tasks import describe_tasks
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import Tasks
from seeupo_jax.envs.tasks import labels_by_task, list_tasks
from seeupo_jax.metrics.statistics import evaluation_metrics, evaluation_prefix
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.rollout.collect import EpisodeRequest, collect, group_requests
from seeupo_jax.rollout.episode_metrics import most_frequent_failure
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker
from seeupo_jax.trajectories.episodes import EpisodeFile, EvaluationEpisode, to_episode
from seeupo_jax.types import Trajectory

# Added to the iteration, so that an evaluation never samples with an iteration's random numbers.
_STREAM = 2**31

_LOGGER = logging.getLogger(__name__)

VALIDATION = "validation"  # the split that the best checkpoint is selected on, where there is one

Labels = Mapping[str, Mapping[str, str]]  # of tasks


def evaluate_split(
    config: Config,
    worker: RolloutWorker,
    params: Any,
    *,
    tasks: Tasks,
    split: str,
    k: int,
    iteration: int = 0,
    file: EpisodeFile | None = None,
    on_played: Callable[[Sequence[Trajectory], Labels], None] = lambda *_: None,
    on_counted: Callable[[Sequence[EvaluationEpisode], int], None] = lambda *_: None,
) -> dict[str, float]:
    """Plays the first `config.evaluation.tasks` tasks of a split k times each.

    Args:
      tasks: the run's; one catalogue, since what they are of may change meanwhile.
      file: what is in it is not played; what this process plays goes there. All processes have
        one, or none has.
      on_played: is given what all processes played, and the labels of the tasks.
      on_counted: is given the episodes that the metrics are of, also those that were in the file,
        and how many were.

    Returns: `evaluation_metrics` of success (score 1) among the episodes whose environment did not
      fail, by `eval/`; by `eval_SPLIT/` for another split than the config's.

    Raises:
      Stopped: a process was asked to.
    """
    task_ids = list_tasks(tasks, split)[: config.evaluation.tasks]
    labels = labels_by_task(tasks, task_ids, _LOGGER.warning)
    played: dict[tuple[str, int], EvaluationEpisode] = {}
    for part in gather({} if file is None else file.played, EvaluationEpisode):
        played |= part
    requests = group_requests(task_ids, k, _STREAM + iteration)
    missing = [request for request in requests if (request.task_id, request.member) not in played]

    def keep(request: EpisodeRequest, trajectory: Trajectory) -> None:
        if file is not None:
            file.add(to_episode(trajectory, labels[request.task_id]))

    options = CollectionOptions(config.seed, temperature=config.evaluation.temperature, split=split)
    collected = collect(worker, params, missing, options, on_finished=keep)
    if (failure := most_frequent_failure(collected)) is not None:
        _LOGGER.warning(failure)
    on_played(collected.trajectories, labels)
    for trajectory in collected.trajectories:
        episode = to_episode(trajectory, labels[trajectory.task_id])
        played[episode.key] = episode
    if file is not None and jax.process_index() == 0:
        for key in played.keys() - file.played.keys():
            if not played[key].failed:
                file.add(played[key])
    episodes = [played[request.task_id, request.member] for request in requests]
    on_counted(
        [episode for episode in episodes if not episode.failed], len(requests) - len(missing)
    )
    prefix = evaluation_prefix(config.evaluation.split, split)
    return _metrics(prefix, episodes, [labels[each] for each in task_ids])


def _metrics(
    prefix: str, episodes: Sequence[EvaluationEpisode], labels: Sequence[Mapping[str, str]]
) -> dict[str, float]:
    """Metrics of the episodes of some tasks, task by task, and the labels of each task."""
    success = np.array([episode.success for episode in episodes]).reshape(len(labels), -1)
    timeouts = sum(episode.stop == "timeout" for episode in episodes)
    return evaluation_metrics(prefix, success, labels) | {f"{prefix}/timeouts": timeouts}


def selection_split(config: Config, tasks: Tasks) -> str | None:
    """The split whose avg@k decides which checkpoints `checkpoint.keep_best` keeps.

    Returns: `evaluation.select_on` where it is set; else `validation` where there are such
      tasks, which no other split has; else `evaluation.split` itself, on which the best
      checkpoint's figure is then too good. None where `checkpoint.keep_best` is 0, or nothing is
      evaluated.
    """
    evaluation = config.evaluation
    if not (config.checkpoint.keep_best and evaluation.tasks):
        return None
    if evaluation.select_on is not None:
        return evaluation.select_on
    try:
        validation = set(list_tasks(tasks, VALIDATION))
    except ValueError:  # there is no such split
        return evaluation.split
    # An environment that takes any name for one of its other splits has no validation tasks.
    splits = ("train", evaluation.split)
    others = {task_id for split in splits for task_id in list_tasks(tasks, split)}
    return VALIDATION if not validation & others else evaluation.split


def is_due(config: Config, iteration: int, every: int) -> bool:
    """Whether something done `every` so many iterations, and after the last, is due."""
    return iteration == config.iterations or bool(every and iteration % every == 0)


def is_evaluated(config: Config, iteration: int) -> bool:
    """Whether the policy after an iteration of training is evaluated."""
    return config.evaluation.tasks > 0 and is_due(config, iteration, config.evaluation.every)


def scored_split(config: Config, selects_on: str | None, iteration: int) -> str | None:
    """`selects_on` where what is saved after an iteration is to be compared; else None."""
    saved = iteration > 0 and is_due(config, iteration, config.checkpoint.every)
    return selects_on if saved else None


def evaluated_splits(config: Config, selects_on: str | None, iteration: int) -> list[str]:
    """Returns the splits that are evaluated after an iteration, each once.

    These are the held-out split; before and after training the extra splits; and, if a checkpoint
    is about to be saved, the split that checkpoints are selected on. With `evaluation.tasks`=0
    there are none.
    """
    if not config.evaluation.tasks:
        return []
    splits: list[str | None] = [config.evaluation.split]
    if iteration in (0, config.iterations):
        splits += config.evaluation.extra_splits
    splits.append(scored_split(config, selects_on, iteration))
    return [split for split in dict.fromkeys(splits) if split is not None]


def selection_warning(config: Config, split: str | None) -> str | None:
    """A sentence where the best checkpoint is selected on the split that is reported, or cannot be
    selected since nothing is evaluated; else None."""
    if not config.evaluation.tasks and config.checkpoint.keep_best:
        return (
            f"config.checkpoint.keep_best={config.checkpoint.keep_best} has no effect: with"
            " config.evaluation.tasks=0 no checkpoint is evaluated."
        )
    if split != config.evaluation.split:
        return None
    return (
        f"the best checkpoint is selected on the split {split!r} that is reported too, so its"
        f" figure there is biased upwards: {describe_tasks(config)} has no tasks named"
        f" {VALIDATION!r},"
        " and config.evaluation.select_on names no other split."
    )
