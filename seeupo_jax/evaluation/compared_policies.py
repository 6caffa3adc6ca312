"""The figures of policies that were evaluated in one folder, on the same tasks in the same way."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.metrics.statistics import (
    aligned,
    evaluation_metrics,
    read_estimates,
)
from seeupo_jax.trajectories.episodes import read_episodes
from seeupo_jax.trajectories.json_lines import plain

_LOGGER = logging.getLogger(__name__)
# Settings that make two evaluations comparable; policies differ in how they are sampled.
_SAME = ("split", "k", "config.seed", "config.env.", "config.rewards", "config.rollout.max_turns")
_IDENTITY = ("iteration", "weights", "server", "model", "dialect", "max_tokens")


@dataclass(frozen=True)
class PolicyFigures:
    """The figures of a policy over all tasks.

    about: its identity, such as its `iteration`, or `server` and `model`; and its temperature,
      0 where the likeliest token is taken. metrics: as of `evaluation_metrics`, without kinds.
    file: of its episodes.
    """

    about: Mapping[str, Any]
    metrics: Mapping[str, float]
    file: Path

    def row(self) -> list[str]:
        """Cells of a table: policy, temperature, tasks, failed, avg@k, pass@k."""
        about = self.about
        name = f"iteration {about.get('iteration')}"
        if "weights" in about:
            name += f", {about['weights']}"
        if "server" in about:
            name = f"{about['model']} at {about['server']}"
        counts = [f"{v:g}" for key, v in self.metrics.items() if key.endswith(("tasks", "failed"))]
        estimates = [str(estimate) for estimate in read_estimates(self.metrics).values()]
        return [name, f"{about['temperature']:g}", *counts, *estimates]


def describe_policy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tells policies apart in one folder, from the settings of an evaluation."""
    greedy = settings["config.rollout.top_k"] == 1
    temperature = 0.0 if greedy else settings["config.evaluation.temperature"]
    known = {name: settings[name] for name in _IDENTITY if name in settings}
    return {**known, "temperature": temperature}


def compared_policies(
    file: Path,
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
    keys: Sequence[tuple[str, int]],
) -> list[PolicyFigures]:
    """An evaluation's policy, then that of every other file in its folder with these episodes.

    Args:
      file, settings, metrics: of the evaluation that is at hand.
      keys: task and member of each of its episodes, task by task.
    """
    total = {name: value for name, value in metrics.items() if name.count("/") == 1}
    found = [PolicyFigures(describe_policy(settings), total, file)]
    wanted = plain(settings, finite=False)
    for path in sorted(file.parent.glob(f"{settings['split']}-k{settings['k']}-*.jsonl")):
        if path == file:
            continue
        try:
            saved, played = read_episodes(path)
        except ValueError as error:
            _LOGGER.warning(f"not compared with this evaluation: {error}")
            continue
        if saved is None or _compared(saved) != _compared(wanted) or not set(keys) <= set(played):
            continue
        success = np.array([played[key].success for key in keys]).reshape(-1, settings["k"])
        metrics = evaluation_metrics("eval", success)
        found.append(PolicyFigures(describe_policy(saved), metrics, path))
    return found


def policies_table(policies: Iterable[PolicyFigures]) -> str:
    """Aligned text, a line for each policy."""
    policies = list(policies)
    names = [key.rpartition("/")[2] for key in read_estimates(policies[0].metrics)]
    head = ["policy", "temperature", "tasks", "failed", *names]
    return aligned([head, *(policy.row() for policy in policies)])


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name.startswith(_SAME)}
