"""The files that a run writes to its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.checkpoint import find_directory
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.device_memory import format_bytes


def checkpoint_lines(
    config: Config, workdir: Path, state: Any, when: str, *, evaluated: bool = True
) -> list[str]:
    """When checkpoints are saved, their size, and which of them stay.

    Args:
      state: arrays, or structs of their shapes.
      evaluated: whether evaluations compare them.
    """
    settings: Any = config.checkpoint
    leaves = jax.tree.leaves(state)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    best = f" and the best {settings.keep_best} of the others" * evaluated
    return [
        f"{when}, of at most {format_bytes(size)} each",
        f"the newest {settings.keep}{best} stay, in {find_directory(settings, workdir)}",
    ]


def file_lines(config: Config, workdir: Path, extra: Mapping[str, bool]) -> list[str]:
    """The folder's files and folders.

    Args:
      extra: those that only this command writes, and whether this run does.
    """
    names = {
        "metrics.jsonl": True,
        "run.json": True,
        **extra,
        **{f"{name}/": name in config.telemetry.trackers for name in ("tensorboard", "wandb")},
        "policy/": config.checkpoint.export,
    }
    return [f"in {workdir}: " + "; ".join(name for name, there in names.items() if there)]
