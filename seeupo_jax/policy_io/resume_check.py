"""Checks that a resumed run is the one that began, by the notes of its checkpoints and rollouts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.resume_fields import SAMPLING, TRAINING_PARTS, refused_fields
from seeupo_jax.configuration.reward import Judge
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy_io import build
from seeupo_jax.trajectories.json_lines import plain

_LOGGER = logging.getLogger(__name__)
SUPERVISED = "sft"  # key of a checkpoint's notes that only supervised fine-tuning has
_HINTS = {
    "evaluation.split": "Name others in config.evaluation.extra_splits, or evaluate the finished"
    " run on them.",
}
# Fields of config.env that `sampling_hash` had before they could change, at their defaults.
_CALLS = ("workers", "timeout_s", "retries", "retry_wait_s")


def sampling_hash(config: Config) -> str:
    """Names the policies that a run samples with."""
    values, usual = to_dict(config), vars(Config().env)
    same = refused_fields(values, SAMPLING)
    env = values["env"] | {name: usual[name] for name in _CALLS}
    same["env"] = {name: x for name, x in env.items() if name in (*same["env"], *_CALLS)}
    drawn = config.curriculum.by != "none"
    for part, given in (
        ("rewards", config.rewards),
        ("roles", config.roles),
        ("agent", config.agent.given),
        ("tasks", config.tasks is not None),
        ("sandbox", config.tasks is not None),
        ("curriculum", drawn),
        ("judge", config.judge != Judge()),
    ):
        if not given:  # stored rollouts of versions that had none stay usable
            del same[part]
    if config.agent.given and config.agent.harness is None:  # as above
        same["agent"] = {name: x for name, x in same["agent"].items() if name != "harness"}
    # Without compute options, written as earlier versions did for remat=none.
    model = replace(config.model, remat="none", attention="auto", scan_layers=False)
    chat = str(config.chat).replace(", roles={}", "")  # as above
    choices = [same, str(model), chat, config.algorithm.dynamic_sampling]
    weights, by_turn = config.compared_weights, config.algorithm.by_turn
    if config.algorithm.dynamic_sampling and (by_turn or weights is not None):  # as above
        centred = {"centred": True} if config.algorithm.keeps_statistics else {}
        choices.append({"compared_weights": weights, "by_turn": by_turn, **centred})
    if config.algorithm.forks.kind != "none":  # as above
        choices.append({"forks": values["algorithm"]["forks"]})
    if config.algorithm.router_replay == "rollout":  # what is stored has a record of experts
        choices.append({"router_replay": "rollout"})
    return hashlib.sha256(json.dumps(plain(choices, finite=False)).encode()).hexdigest()


def check_training(notes: Mapping[str, Any]) -> None:
    """ValueError where a checkpoint's notes are of supervised fine-tuning."""
    if SUPERVISED in notes:
        raise ValueError(
            "--workdir: got the folder of supervised fine-tuning; allowed for a training: a new"
            " folder, with that run's WORKDIR/policy as config.model.path to train its policy."
        )


def check_same_run(
    config: Config, saved: Mapping[str, Any], adapters: Mapping[str, Any] | None = None
) -> None:
    """A resumed run must be the one that was stopped, but for what may change.

    Args:
      saved: the configuration that a checkpoint was made with.
      adapters: as for `check_same_policy`.

    Raises:
      ValueError: another value of a field that may not change, or as of `check_same_model`.
    """
    check_same_fields(config, saved, TRAINING_PARTS)
    check_same_model(config, saved, adapters)


def check_same_fields(config: Config, saved: Mapping[str, Any], parts: Sequence[str]) -> None:
    """ValueError where a field that may not change has another value than a checkpoint's.

    Args:
      saved: the configuration that the checkpoint was made with; a field that its version had not
        was at its default.
      parts: of the configuration, those that this kind of run reads.
    """
    wanted, had, usual = (
        _flat(refused_fields(plain(values, finite=False), parts))
        for values in (to_dict(config), saved, to_dict(Config()))
    )
    for name, value in wanted.items():
        was = had.get(name, usual[name])
        if was != value:
            raise changed_field_error(name, value, was)


def changed_field_error(
    field: str, got: Any, was: Any, whose: str = "checkpoint has it"
) -> ValueError:
    """The refusal of a field of the configuration that a workdir's run has otherwise."""
    return ValueError(
        f"config.{field}: got {got!r}; allowed for this workdir, whose {whose}: {was!r}."
        f" {_HINTS.get(field, 'Choose a new workdir for another run.')}"
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of parts of the configuration by their full names; options stay one value."""
    flat: dict[str, Any] = {}
    for part, value in values.items():
        of_part = isinstance(value, Mapping)
        flat |= {f"{part}.{name}": x for name, x in value.items()} if of_part else {part: value}
    return flat


def check_same_model(
    config: Config, saved: Mapping[str, Any], adapters: Mapping[str, Any] | None = None
) -> None:
    """As `check_same_policy`; a new path of parameters that train, if allowed, is a warning."""
    try:
        check_same_policy(config, saved, adapters)
    except ValueError as error:
        raise ValueError(f"{error} Choose a new workdir for another run.") from error
    for part in ("model", "lora"):
        path, saved_path = vars(config)[part].path, _other_path(config, saved, part)
        if saved_path != path:
            _LOGGER.warning(
                "config.%s.path: got %s; this workdir's checkpoint began with %s: its parameters"
                " are restored, and a reference policy is that of %s.",
                part,
                path,
                saved_path,
                path,
            )


def check_same_policy(
    config: Config, saved: Mapping[str, Any], adapters: Mapping[str, Any] | None = None
) -> None:
    """A checkpoint must be of the parameters that do not train, which it lacks.

    Args:
      saved: the configuration that the checkpoint was made with.
      adapters: the checkpoint's `adapters_note`; None: it has none, as in earlier versions.

    Raises:
      ValueError: adapters or groups of frozen parameters, with another model; adapters of another
        rank, scale or targets.
    """
    _check_adapters(config, _noted_adapters(saved) if adapters is None else adapters)
    lora, path = config.lora, config.model.path
    saved_path = _other_path(config, saved, "model")
    partly = lora.rank or lora.path is not None or any(g.frozen for g in config.optimizer.groups)
    if partly and saved_path != path:
        raise ValueError(
            f"config.model.path: got {path}; allowed for this workdir, whose checkpoint has only"
            f" the parameters that train: {saved_path}, or what that links to; for a folder that"
            " was moved, a link at its old place."
        )


def score_conditions(notes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how a checkpoint's score was measured, by its notes; only like ones are compared.

    None: on the held-out conversations of supervised fine-tuning, which no run may change.
    """
    if SUPERVISED in notes:
        return None
    usual, saved = Config(), notes.get("config", {})
    evaluation = vars(usual.evaluation) | saved.get("evaluation", {})
    values = {name: evaluation[name] for name in ("tasks", "k", "temperature")}
    if values["temperature"] is None:
        values["temperature"] = (vars(usual.rollout) | saved.get("rollout", {}))["temperature"]
    return {"split": notes.get("selected_on", evaluation["split"]), **values}


def adapters_note(config: Config) -> dict[str, Any]:
    """The adapters that a run has, also those of `lora.path`, for its checkpoints; {}: none."""
    lora = build.adapters_of(config)
    if lora is None:
        return {}
    layers = None if lora.layers is None else sorted(lora.layers)
    note = asdict(lora) | {"targets": sorted(lora.targets), "layers": layers}
    if not lora.per_turn:  # as earlier versions wrote it
        del note["per_turn"]
    return note


def _noted_adapters(saved: Mapping[str, Any]) -> dict[str, Any]:
    """As `adapters_note`, where only the configuration is saved; {}: `lora.path` had them."""
    lora = saved.get("lora", {})
    if not lora.get("rank") or lora.get("path") is not None:
        return {}
    noted = {"alpha": lora["alpha"], "rslora": lora.get("rslora", False)}
    return noted | {"targets": sorted(lora["targets"])}


def _check_adapters(config: Config, noted: Mapping[str, Any]) -> None:
    """ValueError where both have adapters, of another rank, scale or targets."""
    path = config.lora.path
    ours = adapters_note(config)
    if ours and noted:
        noted, ours = ({"per_turn": 0, **note} for note in (noted, ours))
    for name, value in ours.items():
        if (saved := noted.get(name, value)) != value:
            got = f"{name}: got {value}" if path is None else f"path: got {path} of {name} {value}"
            raise ValueError(
                f"config.lora.{got}; allowed for this workdir, whose checkpoint has adapters of it:"
                f" {saved}."
            )


def _other_path(config: Config, saved: Mapping[str, Any], part: str) -> str | None:
    """The saved path of the model or of adapters; that of `config` where both are one place."""
    path = vars(config)[part].path
    saved_path = saved.get(part, {}).get("path", path)
    same = os.path.realpath(str(saved_path)) == os.path.realpath(str(path))
    return path if same else saved_path
