"""The files of a run's teachers, which a resumed run must find unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.cli.file_digests import model_digests
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy_io.teachers import field_of


def teachers_note(config: Config) -> dict[str, dict[str, str | None]]:
    """Digests of each teacher's files, by the label of its tasks, for checkpoints and `run.json`;
    of a server, and of what the run itself has, the name alone."""
    return {
        "" if label is None else label: model_digests(path)
        if path in config.teacher.models
        else {path: None}
        for label, path in config.teacher.places.items()
    }


def check_same_teachers(config: Config, saved: Mapping[str, Any] | None) -> None:
    """The teachers of a resumed run must be those that it began with, wherever they lie.

    Args:
      saved: the `teachers_note` of a checkpoint; None: of a version without teachers.

    Raises:
      ValueError: one is new, is gone, or has other files.
    """
    now, before = teachers_note(config), {} if saved is None else saved
    for label in {**before, **now}:
        if now.get(label) != before.get(label):
            tasks = label or None
            raise ValueError(
                f"{field_of(config.teacher, tasks)}: got {config.teacher.places.get(tasks)};"
                " allowed for this workdir: the teacher that its run began with, with the same"
                " files. Choose a new workdir for another run."
            )
