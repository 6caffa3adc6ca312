"""Protects the work of an earlier run in the same folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.loading import from_dict, to_dict
from seeupo_jax.configuration.resume_fields import DECISION_OF, Decision
from seeupo_jax.configuration.schema import Chat, Config
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.metrics.metrics_log import METRICS_FILE, read_metrics
from seeupo_jax.metrics.run_manifest import read_run_manifest
from seeupo_jax.policy.files.folder_files import read_json_object
from seeupo_jax.policy.files.messages import resolve_chat
from seeupo_jax.policy.files.weights import PACKAGE, resolve_path
from seeupo_jax.policy_io.build import ARCHITECTURES
from seeupo_jax.policy_io.policy_folder import starting_folder
from seeupo_jax.policy_io.resume_check import changed_field_error
from seeupo_jax.trajectories.json_lines import plain

_LOGGER = logging.getLogger(__name__)
WARM_START_FILE = "warm_start.json"  # in the folder of the policy that a warm start has made
# Of config.model, how a policy is computed, not which one it is.
_COMPUTED = ("dtype", "param_dtype", "scan_layers", "remat", "attention")
_PLACES = ("model.path", "chat.template")


def check_same_sweep(config: Config, iteration: int, saved: Mapping[str, Any], folder: str) -> None:
    """A sweep that was stopped must end by the rule that it began with.

    Its order's steps are counted, and its advantages and weights were computed, for that rule.

    Args:
      iteration: of the sweep. saved: the configuration that it was stopped with.
      folder: where it is saved.

    Raises:
      ValueError: another algorithm, optimizer, balance of experts, term of teachers, or learning
        rate in this iteration, or one of a version with other fields.
    """
    now, usual = (plain(to_dict(each), finite=False) for each in (config, Config()))
    if unknown := sorted(saved["algorithm"].keys() - now["algorithm"].keys()):
        raise ValueError(
            f"{folder}: was stopped with config.algorithm.{unknown[0]}, which this version does not"
            " have; remove the folder: the run then continues from its newest checkpoint, or anew."
        )
    pairs = {
        f"{part}.{name}": (value, saved.get(part, {}).get(name, usual[part][name]))
        for part in ("algorithm", "optimizer", "experts", "teacher")
        for name, value in now[part].items()
        if DECISION_OF[f"{part}.{name}"] is Decision.APPLIES
    }
    changed = [(field, *values) for field, values in pairs.items() if values[0] != values[1]]
    if not changed:  # then iterations are all that a schedule depends on
        planned = config.iterations, saved["iterations"]
        shares = {Schedule(config.optimizer, each).share(iteration) for each in planned}
        changed = [("iterations", *planned)] if len(shares) > 1 else []
    if changed:
        field, value, was = changed[0]
        raise ValueError(
            f"config.{field}: got {value!r}; allowed: {was!r}, with which the run was stopped in"
            f" the sweep of iteration {iteration}. Let that iteration end first, or remove"
            f" {folder}: the run then continues from its newest checkpoint, or anew."
        )


def chat_note(config: Config, workdir: Path) -> dict[str, Any] | None:
    """The options of `config.chat` that a run's conversations have, for its checkpoints.

    None: the folder of the policy that it starts from is not here.
    """
    return _choose(config, workdir, config.chat)


def check_same_chat(config: Config, workdir: Path, notes: Mapping[str, Any]) -> None:
    """A resumed run must make tokens of conversations as the one that was stopped.

    Args:
      notes: of a checkpoint; without `chat_note` in earlier versions.

    Raises:
      ValueError: other options of `config.chat`, or of the model folder's where it has none.
    """
    now = chat_note(config, workdir)
    if now is None:
        return
    saved = notes.get("chat")
    if saved is None:
        given = from_dict({"chat": notes["config"].get("chat", {})}).chat
        saved = _choose(config, workdir, given) or now
    for name, value in now.items():
        was = saved.get(name, vars(Chat())[name])
        if value != was and not (name == "template" and _is_one_place(value, was)):
            raise changed_field_error(f"chat.{name}", value, was)


def _choose(config: Config, workdir: Path, chat: Chat) -> dict[str, Any] | None:
    folder = starting_folder(config, workdir)
    chosen = None if folder is None else _own_chat(folder, chat)
    return None if chosen is None else plain(asdict(chosen))


def _own_chat(folder: str, chat: Chat) -> Chat | None:
    """As `resolve_chat`; None: a folder of sizes, without a tokenizer."""
    sizes = folder.startswith(f"{PACKAGE}{ARCHITECTURES}/")
    return None if sizes else resolve_chat(resolve_path(folder), chat)


def warm_start_note(config: Config) -> dict[str, Any]:
    """Returns the fields that determine a warm start's policy, without those of how it is computed.

    Raises:
      ValueError: a model folder that cannot be read.
    """
    path, chat = config.model.path, config.chat
    return _made_of(config, chat if path is None else _own_chat(path, chat) or chat)


def _made_of(config: Config, chat: Chat) -> dict[str, Any]:
    values, path = to_dict(config), config.model.path
    sizes = {name: x for name, x in values["model"].items() if name not in _COMPUTED}
    parts = {
        "model": sizes if path is None else {"path": path},
        "env": {name: values["env"][name] for name in ("name", "options")},
        "chat": asdict(chat),
        "warm_start": {name: values["warm_start"][name] for name in ("stages", "batch_size")},
    }
    flat = {f"{part}.{name}": value for part in parts for name, value in parts[part].items()}
    return plain({"seed": config.seed} | flat, finite=False)


def check_same_warm_start(config: Config, workdir: Path) -> None:
    """A policy that a warm start has left in a workdir must be what it would make now.

    That of an earlier version, which left no note, is taken with a warning.

    Raises:
      ValueError: it was made of something else.
    """
    folder = workdir / "warm_start"
    if not config.warm_start.stages or not os.path.isdir(folder):
        return
    try:
        saved = read_json_object(folder / WARM_START_FILE)
    except ValueError:
        _LOGGER.warning(
            "%s does not say what it was made with: it is taken whatever the configuration says.",
            folder,
        )
        return
    usual = _made_of(Config(), Chat())
    for name, value in _made_of(config, config.chat).items():
        was = saved.get(name, usual[name])
        if name.startswith("chat.") and config.chat == Chat():  # then those of its folder hold
            continue
        if value != was and not (name in _PLACES and _is_one_place(value, was)):
            raise changed_field_error(name, value, was, whose="warm start was made with it")


def _is_one_place(path: str | None, other: str | None) -> bool:
    return None not in (path, other) and os.path.realpath(path) == os.path.realpath(other)


def check_no_lost_checkpoints(config: Config, workdir: Path) -> None:
    """A run that finds no checkpoint must not replace the record of one that wrote some.

    A run that was killed before its first checkpoint does begin again.

    Raises:
      ValueError: the checkpoints of the run in this folder are elsewhere, or were removed.
    """
    done = max((line["iteration"] for line in read_metrics(workdir, log=lambda _: None)), default=0)
    folder = find_directory(config.checkpoint, workdir)
    written = _written_to(config, workdir, folder) if done else None
    if written is not None:
        raise ValueError(
            f"--workdir: got {workdir}, whose {METRICS_FILE} reaches iteration {done} of a run that"
            f" wrote checkpoints to {written}; none was found in {folder}. Allowed:"
            " config.checkpoint.directory as it was, with its checkpoints, or another workdir."
        )


def _written_to(config: Config, workdir: Path, folder: str) -> str | None:
    """Where the run in a workdir wrote checkpoints; None: nothing says that it wrote any.

    Args:
      folder: where none was found.
    """
    manifest = read_run_manifest(workdir) or {}
    if (noted := manifest.get("checkpoints")) is not None:
        return noted
    # Of a version that noted nothing, or killed before it did.
    directory = manifest.get("config", {}).get("checkpoint", {}).get("directory")
    earlier = find_directory(replace(config.checkpoint, directory=directory), workdir)
    ended = any((workdir / "policy").glob("*.safetensors"))  # written after the last checkpoint
    return earlier if ended or (earlier != folder and _may_have_checkpoints(earlier)) else None


def _may_have_checkpoints(folder: str) -> bool:
    places = (folder, f"{folder}/stopped")
    try:
        return any(Checkpoints(place, 1).finished() is not None for place in places)
    except Exception:  # a bucket, or its library, that is not there: the record is kept
        return True


def resume_message(unit: str, done: int, asked: int) -> str:
    """A line that says after which checkpoint a run resumes, or that nothing is left to train.

    Args:
      unit: what is counted, in the singular.
    """
    line = f"resuming after {unit} {done}"
    return line if done < asked else f"{line} of {asked}: nothing is left to train"
