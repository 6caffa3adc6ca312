"""Checkpoints of a supervised run: written, found again, and checked to be of the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.resume_fields import SUPERVISED_PARTS
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.missing import lacks_evaluation
from seeupo_jax.metrics.run_manifest import note_checkpoints
from seeupo_jax.policy_io.resume_check import (
    SUPERVISED,
    adapters_note,
    check_same_fields,
    check_same_model,
)
from seeupo_jax.policy_io.resuming import resume_message
from seeupo_jax.supervised.sft_components import BestLoss, SftComponents, SftState
from seeupo_jax.types import TrainState


class SftCheckpoints:
    """All of a run that outlives its process; with several processes each calls every method."""

    def __init__(self, parts: SftComponents):
        settings, self._parts = parts.config.checkpoint, parts
        self._folder = find_directory(settings, parts.workdir)
        self._checkpoints = Checkpoints(
            self._folder, settings.keep, settings.keep_best, log=parts.progress.log
        )
        self._adapters = adapters_note(parts.given)  # of a file, which may be gone later

    def restore(self, example: TrainState) -> SftState | None:
        """The run as its newest checkpoint has it; None where there is none.

        Raises:
          ValueError: it is of another run.
        """
        newest = self._checkpoints.newest({}, partial=True, optional=True)
        if newest is not None:  # of another run its arrays may be others too
            check_same_sft(self._parts.given, self._parts.data.fingerprint, newest[1])
        restored = self._checkpoints.restore(example)
        if restored is None:
            return None
        done, train, notes = restored
        steps, saved = self._parts.steps, notes["config"]
        self._parts.progress.log(resume_message("step", done, steps))
        supervised = notes[SUPERVISED]
        best = None if supervised["best"] is None else BestLoss(*supervised["best"])
        lacks = lacks_evaluation(done, steps, saved, saved["sft"]["eval_every"])
        return SftState(
            done,
            train,
            evaluated=supervised["evaluated"] and not lacks,
            saved=True,
            best=best,
            worse=supervised["worse"],
            idle=supervised["idle"],
            before=supervised.get("before"),  # earlier versions did not say
        )

    def save(self, state: SftState) -> SftState:
        """Saves a checkpoint in the background; the run with that noted."""
        best = state.best
        notes = {
            "config": to_dict(self._parts.given),
            "adapters": self._adapters,
            "random": {"seed": self._parts.config.seed, "step": state.done},
            "data_position": state.done * self._parts.config.sft.batch_size,
            SUPERVISED: {
                "data": self._parts.data.fingerprint,
                "evaluated": state.evaluated,
                "best": best,
                "worse": state.worse,
                "idle": state.idle,
                "before": state.before,
            },
        }
        score = -best.loss if best is not None and best.step == state.done else None
        with self._parts.times.timed("checkpoint"):
            self._parts.metrics.sync()  # a resumed run writes no line of these steps again
            self._checkpoints.save(state.done, state.train, notes, score)
            self._note()
        return state._replace(saved=True)

    def policy_at(self, step: int, train: TrainState) -> Any:
        """The parameters of a checkpoint that are evaluated and exported.

        Args:
          train: whose shapes and shardings they have.
        """
        part = "params" if train.ema is None else "ema"
        restored = self._checkpoints.restore({part: getattr(train, part)}, step=step, partial=True)
        assert restored is not None  # a given step is there, or `restore` raises
        return restored[1][part]

    def wait(self) -> None:
        """Returns when the last checkpoint is on the disk."""
        self._checkpoints.wait()
        self._note()

    def _note(self) -> None:
        if self._checkpoints.latest() is not None and jax.process_index() == 0:
            note_checkpoints(self._parts.workdir, self._folder)

    def close(self) -> None:
        """Finishes what is being written."""
        self._checkpoints.close()


def check_same_sft(config: Config, fingerprint: str, notes: Mapping[str, Any]) -> None:
    """A resumed run must see the same tokens in the same order as the one that was stopped.

    Raises:
      ValueError: a checkpoint of a training, or of other conversations, batches or another seed;
        or as of `check_same_model`.
    """
    if SUPERVISED not in notes:
        raise ValueError(
            "--workdir: got the folder of a training; allowed for sft: a new folder, or that of a"
            " supervised run."
        )
    check_same_fields(config, notes["config"], SUPERVISED_PARTS)
    if notes[SUPERVISED]["data"] != fingerprint:
        raise ValueError(
            "--data: got conversations, or tokens of them, other than those that the checkpoint in"
            " this workdir was trained on; allowed: the same. Choose a new workdir for another run."
        )
    check_same_model(config, notes["config"], notes.get("adapters"))
