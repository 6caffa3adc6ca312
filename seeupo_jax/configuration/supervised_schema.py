"""Fields of supervised fine-tuning: of the command `sft`, and of a warm start before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.fields import is_url, path_field
from seeupo_jax.options import above, at_least, choice, within


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning on conversations, by the command sft alone."""

    data: str | None = path_field("a source")
    """A file or folder of rows, tfds:FOLDER, tfds:NAME, or demonstrations of config.env; the flag
    data of sft replaces it."""
    split: str = "train"
    """Split of tfds, of a folder with splits, or of the environment's demonstrations."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Options of the environment's demonstrations; of rows the columns prompt and completion."""
    held_out: float = within(0, 0.9, 0.05)
    """Share of the conversations whose loss is measured and not trained on; 0: of none."""
    held_out_data: str | None = path_field("a source")
    """Conversations to measure the loss on, in place of a share: as data; none: the share."""
    held_out_split: str = "test"
    """Split of held_out_data, as split is of data."""
    epochs: int = at_least(1, 1)
    """Passes over the conversations, in the fewest steps that make them; the last batch is filled
    from a further pass, or from several where it is larger than the data."""
    steps: int | None = at_least(1, None)
    """Optimizer steps in place of epochs; none: as many as the epochs have."""
    batch_size: int = at_least(1, 16)
    """Conversations per optimizer step."""
    train_on: str = choice("all", "last")
    """Assistant messages of a conversation that the loss is of."""
    too_long: str = choice("error", "skip", "cut")
    """How conversations of more than rollout.max_context tokens are handled: refused before the
    run, left out, or cut there; the last two are counted."""
    eval_every: int = at_least(0, 100)
    """Steps between two times that the held-out loss is measured; 0: only before and after."""
    patience: int | None = at_least(1, None)
    """Measurements in a row without a held-out loss lower than all before, that before the first
    step included, after which a run ends; none: it does not."""


@dataclass(frozen=True)
class WarmStartStage:
    """A stage of supervised training."""

    steps: int = at_least(2, 1000)
    """Optimizer steps, of which the first has the learning rate 0."""
    learning_rate: float = above(0, 3e-3, most=100)
    """Learning rate of the stage."""
    demonstrations: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Options of the environment's demonstrations."""


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on demonstrations, action tokens only, before the first iteration."""

    stages: tuple[WarmStartStage, ...] = ()
    """One after the other, each a dict of steps, learning_rate and demonstrations; (): none."""
    batch_size: int = at_least(1, 64)
    """Demonstrations per step."""
    output: str | None = path_field("a path of this machine", lambda v: bool(v) and not is_url(v))
    """Also write the warm policy into this folder, if it has none; none: into the workdir only."""
