"""A policy as a folder: what training starts from, and for other software what it ends with."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.checkpoint import Checkpoints, check_writable, exclusive_output, find_directory
from seeupo_jax.checkpoint.process_sync import on_all
from seeupo_jax.configuration.schema import Config, Mesh
from seeupo_jax.durable_files import move_folder
from seeupo_jax.errors import FileError, name_file, reason
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.files.hub_snapshot import is_hub_name
from seeupo_jax.policy.files.messages import dropped_messages_notice
from seeupo_jax.policy.files.weights import resolve_path
from seeupo_jax.policy.lora import merge_adapters, save_adapters
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.resume_check import SUPERVISED, check_same_policy, score_conditions
from seeupo_jax.rollout.weights.publishing import Publication, publish_folder

_LOGGER = logging.getLogger(__name__)
# What --step and --weights are.
STEP = (
    "which checkpoint: latest, best, or its number; default: that of WORKDIR/policy, which is the"
    " last one, and after sft that of the lowest held-out loss."
)
WEIGHTS = "trained, or ema: their average; default: ema where config.optimizer.ema is set."


def write_policy(config: Config, policy: build.Policy, params: Any, folder: Path) -> None:
    """Leaves a policy in a folder, or its adapters; with several processes all call it.

    What the folder holds is replaced; where it is a link, what that points to, and the link stays.

    Raises:
      OSError: it could not be written; on all processes.
    """
    replace_folder(folder, lambda unfinished: _write_files(config, policy, params, unfinished))


def publish_policy(
    config: Config, policy: build.Policy, params: Any, folder: Path, version: int
) -> Publication:
    """As `publish` of `rollout/weights`, in the files of `write_policy`, which other engines read.

    A version of adapters has no files of their model. What is in `folder` is as of `versions`.
    """
    return publish_folder(folder, version, lambda to: _write_files(config, policy, params, to))


def _write_files(config: Config, policy: build.Policy, params: Any, folder: Path) -> None:
    model = policy.network.bind(policy.merged(params))
    if model.arch.lora is not None and not config.lora.merge:
        source = str(policy.source)
        base = source if is_hub_name(source) else resolve_path(source)
        save_adapters(model, folder, base, policy.tokenizer)
    else:
        dtype = config.model.param_dtype
        save_pretrained(merge_adapters(model), folder, policy.tokenizer, dtype=dtype)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder under another name, then renames it; all processes call it.

    A kill or a power cut at any moment leaves the old or the new folder complete: at its place, or
    between the two renames next to it, as `.before` and `.unfinished`.

    Args:
      folder: or a link to it, which stays.
      write: takes the path of the unfinished folder, which process 0 fills. It makes folders with
        `make_folder`.

    Raises:
      OSError: it could not be written; on all processes.
    """
    folder = Path(os.path.realpath(folder))
    unfinished, previous = (
        folder.with_name(folder.name + end) for end in (".unfinished", ".before")
    )

    def replace_it() -> None:
        writes = jax.process_index() == 0
        if writes:
            shutil.rmtree(unfinished, ignore_errors=True)
        write(unfinished)
        if writes:
            move_folder(folder, unfinished, previous)

    with name_file(folder):
        on_all(replace_it)


def kept_message(folder: Path) -> Callable[[FileError], str]:
    """For `file_errors`: what a command has left that writes a policy where nothing is."""

    def kept(_: FileError) -> str:
        if folder.is_dir() and any(folder.iterdir()):
            return f"{folder} holds the policy: keep it, or remove it and rerun the command"
        return f"{folder} was not written: rerun the command once it can be"

    return kept


def saved_weights(config: Config, weights: str | None) -> str:
    """Which part of a checkpoint's state holds a policy: `params` or `ema`.

    Args:
      weights: trained, or ema for their average; None: the average where the run has one.

    Raises:
      ValueError: another word, or an average that the run does not have.
    """
    averages = config.optimizer.ema is not None
    parts = {"trained": "params"} | ({"ema": "ema"} if averages else {})
    if weights is None:
        return parts["ema" if averages else "trained"]
    if weights not in parts:
        raise ValueError(
            f"--weights: got {weights!r}; allowed: {' or '.join(parts)}"
            + ("." if averages else ", since config.optimizer.ema is none.")
        )
    return parts[weights]


def export_policy(
    config: Config,
    workdir: str | Path,
    step: str | None,
    folder: str | Path,
    weights: str | None = None,
) -> int:
    """Writes the policy of a checkpoint into a folder.

    Args:
      step: as of `find_step`.
      folder: a new one, or an empty one.
      weights: as of `saved_weights`.

    Returns: the checkpoint's step.

    Raises:
      ValueError: a folder that is there or that another process is writing, no such weights, or as
        of `check_trained`.
    """
    part = saved_weights(config, weights)
    workdir, folder = Path(workdir).absolute(), Path(folder).absolute()
    check_trained(config, workdir, step, weights)
    check_output(folder)
    with exclusive_output(folder):
        check_output(folder)  # which another one may just have written
        return _export(config, workdir, step, folder, part)


def _export(config: Config, workdir: Path, step: str | None, folder: Path, part: str) -> int:
    # Nothing is computed here, and the devices need not be those that trained.
    model = replace(config.model, attention="xla", remat="none")
    policy, example = _abstract_policy(replace(config, model=model), workdir)
    checkpoint = restore_policy(config, workdir, step, {part: example})
    if checkpoint is None:
        raise ValueError(f"--workdir: got {workdir}; allowed: one that has a checkpoint.")
    restored, state, notes = checkpoint
    write_policy(config, policy, state[part], folder)
    if step == "best":
        warn_of_selection(config, restored, notes, config.evaluation.split)
    return restored


def warn_of_selection(config: Config, step: int, notes: Mapping[str, Any], reported: str) -> None:
    """Warns where the best checkpoint was selected on the split that it is reported on.

    Args:
      step, notes: of the checkpoint.
    """
    played = SUPERVISED not in notes  # what is supervised is selected on its held-out loss
    if played and notes.get("selected_on", config.evaluation.split) == reported:
        _LOGGER.warning(
            f"checkpoint {step} was selected on the split {reported!r}: its figure there is"
            " biased upwards; report it on another split."
        )


def check_output(folder: Path) -> None:
    """ValueError where a folder for a policy holds something already, or cannot be made."""
    target = Path(os.path.realpath(folder))
    try:
        there = target.exists() or target.is_symlink()  # a link that points to itself
        taken = there and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise ValueError(
            f"--output: got {folder} ({reason(error)}); allowed: a new or empty folder."
        ) from error
    if taken:
        raise ValueError(f"--output: got {folder}, which is there; allowed: a new or empty folder.")
    check_writable(target.parent, "--output")


def check_trained(
    config: Config, workdir: Path, step: str | None, weights: str | None, otherwise: str = ""
) -> tuple[int, dict[str, Any]] | None:
    """Step and notes of the checkpoint that is meant; every process calls it.

    Args:
      step: as of `find_step`. weights: as of `saved_weights`.
      otherwise: what else may be meant than a run, for the error.

    Returns: None: what is there is damaged.

    Raises:
      ValueError: there is no checkpoint, or not the one that is meant, or `config` would make
        another policy of it than the run's.
    """
    directory = find_directory(config.checkpoint, workdir)
    files = Checkpoints(directory, 1, log=lambda _: None)  # what restores says it
    if files.latest() is None:
        lacks = "has no checkpoint"
        if config.checkpoint.directory is None and not workdir.is_dir():
            lacks = "is not there"
        raise ValueError(
            f"--workdir: got {workdir}, which {lacks}; allowed: the folder of a run{otherwise}."
        )
    number = find_step(config, workdir, step)
    found = files.newest({}, step=number, partial=True, optional=True)
    notes = {} if found is None else found[1]
    saved = notes.get("config", {})
    check_same_policy(config, saved, notes.get("adapters"))
    average = saved.get("optimizer", {}).get("ema")
    if weights is None and config.optimizer.ema is None and average is not None:
        raise ValueError(
            "config.optimizer.ema: got none; allowed for this workdir, whose policy is the average:"
            f" {average}, or --weights=trained for the parameters that it is of."
        )
    return found


def find_step(config: Config, workdir: Path, step: str | None) -> int | None:
    """Which checkpoint `--step` means; every process calls it.

    Args:
      step: latest, best, or a number; None: that of WORKDIR/policy, as the run writes it.

    Returns: None: the newest that is whole.

    Raises:
      ValueError: another word, or a best one where none has a score.
    """
    directory = find_directory(config.checkpoint, workdir)
    # What restores says what is passed over.
    checkpoints = Checkpoints(directory, 1, measured=score_conditions, log=lambda _: None)
    if step is None:
        return _exported_step(checkpoints)
    if step == "latest":
        return None
    if step.isdecimal():
        return int(step)
    if step != "best":
        raise ValueError(f"--step: got {step!r}; allowed: latest, best, or a number.")
    best = checkpoints.best()
    if best is None:
        raise ValueError("--step: got 'best'; allowed: latest or a number, since none has a score.")
    return best


def restore_policy(
    config: Config, workdir: Path, step: str | None, example: Any
) -> tuple[int, Any, dict[str, Any]] | None:
    """As `Checkpoints.restore`, of the leaves that `example` has; every process calls it.

    Where no step was asked for and that of WORKDIR/policy is damaged, the newest takes its place.

    Args:
      step: as of `find_step`.
    """
    checkpoints = Checkpoints(find_directory(config.checkpoint, workdir), 1)
    number = find_step(config, workdir, step)
    optional = step is None and number is not None
    restored = checkpoints.restore(example, step=number, partial=True, optional=optional)
    if restored is None and optional:
        return checkpoints.restore(example, partial=True)
    return restored


def _exported_step(checkpoints: Checkpoints) -> int | None:
    """After sft that of the lowest held-out loss, if it was kept; None: the newest."""
    step, notes = checkpoints.newest({}, partial=True, optional=True) or (None, {})
    best = notes.get(SUPERVISED, {}).get("best")
    if best is None or best[0] == step or not notes["config"]["checkpoint"]["keep_best"]:
        return None
    try:
        newest = checkpoints.newest({}, step=best[0], partial=True, optional=True)
    except ValueError:  # a life that kept fewer checkpoints removed it
        return None
    return None if newest is None else newest[0]


def _abstract_policy(config: Config, workdir: Path) -> tuple[build.Policy, Any]:
    """A policy, and what its trained parameters are like; weights are read if some are frozen."""
    path = starting_folder(config, workdir)
    if path is None:
        raise ValueError(f"--workdir: got {workdir}; allowed: one whose warm start is over.")
    config = replace(config, model=replace(config.model, path=path))
    count = jax.device_count()
    for parts in (n for n in range(count, 0, -1) if count % n == 0):
        layout = Mesh(fsdp=parts)
        try:
            policy, example = build.abstract_policy(config, make_mesh(layout))
            break
        except ValueError:  # parameters cannot be cut into so many parts
            if parts == 1:
                raise
    if policy.frozen:
        return build.load_policy(replace(config, mesh=layout), path)
    return policy, example


def log_policy(
    config: Config, workdir: Path, policy: build.Policy, log: Callable[[str], None]
) -> None:
    """Says how the policy of a run computes attention, and what its template does not read."""
    platform = policy.mesh.devices.flat[0].platform
    log(
        f"attention: {policy.network.arch.attention}"
        f" (model.attention={config.model.attention} on {platform})"
    )
    path = starting_folder(config, workdir)
    notice = None if path is None else dropped_messages_notice(resolve_path(path), config.chat)
    if notice is not None:
        log(notice)


def starting_folder(config: Config, workdir: Path) -> str | None:
    """Where the policy that training starts from lies; None while it has still to be made."""
    warm = workdir / "warm_start"
    if config.warm_start.stages:
        return str(warm) if os.path.isdir(warm) else None  # False: closed to this user
    return config.model.path
