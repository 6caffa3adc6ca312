"""Which split the best checkpoint is selected on."""

from __future__ import annotations

from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs import Environment, gate

VALIDATION = "validation"


def selection_split(config: Config, environment: Environment) -> str | None:
    """The split whose avg@k decides which checkpoints `checkpoint.keep_best` keeps.

    `evaluation.select_on` where it is set; else `validation` where the environment has tasks of
    that name which are neither training tasks nor tasks of `evaluation.split`; else
    `evaluation.split` itself, on which the best checkpoint's figure is then too good.

    Returns: the split's name; None where `checkpoint.keep_best` is 0: nothing is chosen.
    """
    evaluation = config.evaluation
    if not config.checkpoint.keep_best:
        return None
    if evaluation.select_on is not None:
        return evaluation.select_on
    try:
        own = set(gate.task_ids(environment, VALIDATION))
    except ValueError:  # what an environment says of a split that it does not have
        return evaluation.split
    # An environment that takes any name for one of its other splits has no validation tasks.
    splits = ("train", evaluation.split)
    others = {task_id for split in splits for task_id in gate.task_ids(environment, split)}
    return VALIDATION if not own & others else evaluation.split


def selection_warning(config: Config, split: str | None) -> str | None:
    """A sentence where the best checkpoint is selected on the split that is reported, else None."""
    if split != config.evaluation.split:
        return None
    return (
        f"the best checkpoint is selected on the split {split!r} that is reported too, so its"
        f" figure there is biased upwards: env {config.env.name} has no tasks named {VALIDATION!r},"
        " and config.evaluation.select_on names no other split."
    )
