"""The end of a run whose evaluations no longer improve (`config.evaluation.patience`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from seeupo_jax.configuration.schema import Config


class Progress(NamedTuple):
    """What the evaluations have come to on which checkpoints are selected.

    best: the largest score; None: none was measured. worse: evaluations in a row that were not
    better than all before them.
    """

    best: float | None = None
    worse: int = 0

    def after(self, score: float) -> Progress:
        """With one more evaluation; NaN, of which no episode counts, is no improvement."""
        if score == score and (self.best is None or score > self.best):
            return Progress(score, 0)
        return Progress(self.best, self.worse + 1)

    def ends(self, config: Config) -> bool:
        """Whether the run is over."""
        return 0 < (config.evaluation.patience or 0) <= self.worse


def check_patience(config: Config) -> None:
    """ValueError where patience is set and no evaluation is compared."""
    evaluation = config.evaluation
    if not evaluation.patience:
        return
    fields = {
        "config.evaluation.tasks": evaluation.tasks,
        "config.evaluation.every": evaluation.every,
        "config.checkpoint.every": config.checkpoint.every,
        "config.checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for name, value in fields.items():
        if not value:
            raise ValueError(
                f"config.evaluation.patience: got {evaluation.patience} with {name}=0; allowed: 0,"
                " or evaluations during training by which checkpoints are compared."
            )


def read_progress(notes: Mapping[str, Any]) -> Progress:
    """That of a checkpoint; none in earlier versions."""
    return Progress(*notes.get("evaluations", ()))


def why_ended(config: Config, progress: Progress, iteration: int, best: int | None) -> str:
    """A sentence for people."""
    named = "" if best is None else f"; the best checkpoint is {best}"
    known = "all before" if progress.best is None else f"{progress.best:.3g}"
    return (
        f"ended after iteration {iteration} of {config.iterations}:"
        f" {progress.worse} evaluations in a row were no better than {known}"
        f" (config.evaluation.patience={config.evaluation.patience}){named}"
    )
