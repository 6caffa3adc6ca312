"""Evaluations that a checkpoint's run has still to make before it resumes or ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.evaluation import evaluated_splits
from seeupo_jax.policy_io.resume_check import score_conditions


def lacks_evaluation(done: int, asked: int, saved: Mapping[str, Any], every: int) -> bool:
    """Whether a run now ends with a checkpoint that was saved as one on its way, unevaluated.

    Args:
      done: of the checkpoint. asked: iterations of the run now.
      saved: the configuration that the checkpoint was made with.
      every: iterations between its evaluations; 0: only before and after.
    """
    return done == asked < saved["iterations"] and not (every and done % every == 0)


def remaining_splits(
    config: Config,
    selects_on: str | None,
    done: int,
    notes: Mapping[str, Any],
    score: float | None,
) -> list[str]:
    """The splits that a checkpoint's policy is evaluated on before the run resumes from it.

    Where the run now ends with it, what an end is evaluated on and it was not, on its way.

    Args:
      selects_on: the split that checkpoints are selected on now; None: none is selected.
      done, notes, score: of the checkpoint.
    """
    saved, wanted = notes["config"], evaluated_splits(config, selects_on, done)
    every = saved["evaluation"]["every"] if saved["evaluation"]["tasks"] else 0
    # Older versions saved after they evaluated, and did not say so.
    if not notes.get("evaluated", True) or lacks_evaluation(done, config.iterations, saved, every):
        return wanted
    if not done == config.iterations < saved["iterations"]:
        return []
    stands = score is not None and score_conditions(notes) == _measured_now(config, selects_on)
    had, scored = {config.evaluation.split}, {selects_on}
    had = had | scored if stands else had - scored  # what is compared needs a score
    return [split for split in wanted if split not in had]


def _measured_now(config: Config, selects_on: str | None) -> dict[str, Any] | None:
    return score_conditions({"config": to_dict(config), "selected_on": selects_on})


def selection_notice(
    config: Config, selects_on: str | None, notes: Mapping[str, Any]
) -> str | None:
    """A line where scores of checkpoints are measured otherwise than those so far, else None.

    Args:
      selects_on: the split of the scores from now on; None: there are none.
      notes: of the newest checkpoint.
    """
    now, was = _measured_now(config, selects_on), score_conditions(notes)
    if None in (now["split"], was["split"]) or now == was:
        return None
    changed = [name for name in now if now[name] != was[name]]
    before, after = (", ".join(f"{n} {each[n]!r}" for n in changed) for each in (was, now))
    return (
        f"checkpoints are selected by evaluations with {after} from now on, and were with {before}:"
        " scores before and after this are not compared"
    )
