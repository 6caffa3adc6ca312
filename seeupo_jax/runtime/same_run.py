"""Whether a run that goes on is the one that began, by what its checkpoints and rollouts note."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from seeupo_jax.configuration.agent_schema import without_places
from seeupo_jax.configuration.layout_fields import CALLS, PROCESSES, ROLLOUT
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.reward import Judge, without_call_limits
from seeupo_jax.configuration.schema import Config
from seeupo_jax.runtime import build
from seeupo_jax.trajectories.json_lines import plain

_LOGGER = logging.getLogger(__name__)
SUPERVISED = "sft"  # key of a checkpoint's notes that only supervised fine-tuning has


def made_by(config: Config) -> str:
    """Names the policies that a run samples with."""
    same, usual = _same_fields(config), vars(Config().env)
    env = {name: x for name, x in to_dict(config)["env"].items() if name not in PROCESSES}
    same["env"] = {name: usual[name] if name in CALLS else x for name, x in env.items()}
    drawn = config.curriculum.by != "none"
    for part, given in (
        ("rewards", config.rewards),
        ("agent", config.agent.given),
        ("curriculum", drawn),
        ("judge", config.judge != Judge()),
    ):
        if not given:  # stored rollouts of versions that had none stay usable
            del same[part]
    # Without compute options, written as earlier versions did for remat=none.
    model = replace(config.model, remat="none", attention="auto", scan_layers=False)
    chat = str(config.chat).replace(", roles={}", "")  # as above
    choices = [same, str(model), chat, config.algorithm.dynamic_sampling]
    weights, by_turn = config.compared_weights, config.algorithm.by_turn
    if config.algorithm.dynamic_sampling and (by_turn or weights is not None):  # as above
        centred = {"centred": True} if config.algorithm.keeps_statistics else {}
        choices.append({"compared_weights": weights, "by_turn": by_turn, **centred})
    if config.algorithm.forks != "none":  # as above
        names = [name for name in vars(config.algorithm) if name.startswith("fork")]
        choices.append({name: vars(config.algorithm)[name] for name in names})
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
    """A resumed run must draw the same random numbers and tasks as the one that was stopped.

    Its metrics named `eval/` must be of one split too, since they do not name it.

    Args:
      saved: the configuration that a checkpoint was made with.
      adapters: as for `check_same_policy`.

    Raises:
      ValueError: another seed, environment, agent, rollout, curriculum or evaluation split, or
        other rewards.
    """
    wanted, defaults = (plain(_same_fields(each), finite=False) for each in (config, Config()))
    for field, value in wanted.items():
        saved_value = saved.get(field, defaults[field])  # of a version that had none
        if field == "rewards":
            saved_value = without_call_limits(saved_value)
        if isinstance(value, dict):  # the saved one's version may not have had all fields
            saved_value = {name: saved_value.get(name, defaults[field][name]) for name in value}
        if saved_value != value:
            raise ValueError(
                f"config.{field}: got {value}; allowed for this workdir, whose checkpoint"
                f" has it: {saved_value}. Choose a new workdir for another run."
            )
    split = saved.get("evaluation", {}).get("split", Config().evaluation.split)
    if config.evaluation.split != split:
        raise ValueError(
            f"config.evaluation.split: got {config.evaluation.split!r}; allowed for this workdir,"
            f" whose figures are of it: {split!r}. Name others in config.evaluation.extra_splits,"
            " or evaluate the finished run on them."
        )
    check_same_model(config, saved, adapters)


def check_same_model(
    config: Config, saved: Mapping[str, Any], adapters: Mapping[str, Any] | None = None
) -> None:
    """As `check_same_policy`; another path of what trains is a warning, where it may be another."""
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
      adapters: what `adapters_note` said of it; None: nothing, as in earlier versions.

    Raises:
      ValueError: adapters or groups of frozen parameters, with another model; adapters of another
        rank, alpha or targets.
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


def measured_with(notes: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the score of a checkpoint was measured with, by its notes; only like ones are compared.

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
    lora = build.adapters(config)
    return {} if lora is None else asdict(lora) | {"targets": sorted(lora.targets)}


def _noted_adapters(saved: Mapping[str, Any]) -> dict[str, Any]:
    """As `adapters_note`, where only the configuration is saved; {}: `lora.path` had them."""
    lora = saved.get("lora", {})
    own = lora.get("rank") and lora.get("path") is None
    return {"alpha": lora["alpha"], "targets": sorted(lora["targets"])} if own else {}


def _check_adapters(config: Config, noted: Mapping[str, Any]) -> None:
    """ValueError where both have adapters, of another rank, alpha or targets."""
    path = config.lora.path
    for name, value in adapters_note(config).items():
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


def _same_fields(config: Config) -> dict[str, Any]:
    """What decides which trajectories are sampled, but for the policy."""
    values = to_dict(config)
    rollout = {name: v for name, v in values["rollout"].items() if name not in ROLLOUT}
    env = {name: v for name, v in values["env"].items() if name not in (*PROCESSES, *CALLS)}
    rewards = without_call_limits(values["rewards"])
    agent = without_places(values["agent"])
    same = {"seed": values["seed"], "rollout": rollout, "env": env, "rewards": rewards}
    judge = {name: values["judge"][name] for name in ("function", "options")}
    return same | {"agent": agent, "curriculum": values["curriculum"], "judge": judge}
