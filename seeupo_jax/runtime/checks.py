"""Checks of a configuration, before anything is compiled or a run is resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax

from seeupo_jax import envs
from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.agent_schema import without_places
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.reward import Judge, without_layout
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs import gate
from seeupo_jax.envs.base import Missing
from seeupo_jax.learner.optimization.optimizer import make_optimizer, try_user_optimizer
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.learner.state_layout import check_offload
from seeupo_jax.metrics.trackers import check_trackers
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.lora import with_adapters
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.branching.plans import make_plan
from seeupo_jax.rollout.branching.replay import check_replayable
from seeupo_jax.rollout.engine.grammar import TOOL_CALLS, check_tools
from seeupo_jax.rollout.tasks import share_counts
from seeupo_jax.runtime import build
from seeupo_jax.runtime.algorithm_trial import check_entries
from seeupo_jax.runtime.build_sampler import build_grammars
from seeupo_jax.runtime.episode_host import check_host, started
from seeupo_jax.runtime.training.reference_answers import check_references
from seeupo_jax.trajectories.json_lines import plain

_LOGGER = logging.getLogger(__name__)
# Of config.rollout, what changes no number but its rounding: it may change when a run resumes.
_LAYOUT = (
    "mesh concurrency slots cache_gib page_size decode_steps prefill_tokens deterministic"
    " reset_ahead_s"
).split()
SUPERVISED = "sft"  # key of a checkpoint's notes that only supervised fine-tuning has
# Of config.env, where and how environments are called, to the same end.
_PROCESSES = ("isolation", "memory_mib")
_CALLS = ("workers", "timeout_s", "retries", "retry_wait_s")


def check_config(config: Config) -> None:
    """Finds what is wrong with a configuration before anything is compiled.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    mesh = _check_fields(config)
    _check_episodes(config)
    build.check_layout(config, mesh)
    check_model(config, mesh)
    check_own_optimizer(config, mesh, build.total_steps(config))


def check_sampling(config: Config) -> None:
    """Finds what is wrong with a configuration whose policy answers, and no environment plays.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    mesh = make_mesh(config.mesh)
    build.check_layout(config, mesh)
    check_model(config, mesh)


def check_planned(config: Config) -> tuple[Config, list[str]]:
    """As `check_config`, for a run on another machine: what is missing on this one is listed.

    Returns: the configuration with a model whose sizes are known here, and what is missing.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    mesh, missing = _check_fields(config), []
    given, source = build.find_model(config)
    if given is not config:
        missing.append(f"the model's weights and tokenizer; its sizes are from {source}")
    try:
        _check_episodes(config)
    except Missing as error:
        missing.append(f"the environment's tasks: {error}")
    build.check_layout(given, mesh)
    check_model(given, mesh, tokenizer=given is config)
    check_own_optimizer(given, mesh, build.total_steps(given))
    return given, missing


def _check_fields(config: Config) -> jax.sharding.Mesh:
    """Checks that need neither tasks nor the model; the mesh."""
    mesh = check_learner(config)
    check_trackers(config.telemetry.trackers)
    make_scorer(config.rewards).close()
    make_plan(config)
    if config.algorithm.forks == "candidates":
        make_judge(config.judge, config.env.name).close()
    if max(config.profile.steps, default=0) > config.iterations:
        raise ValueError(
            f"config.profile.steps: got {config.profile.steps}; allowed: iterations from 1 to"
            f" {config.iterations}."
        )
    if config.rollout_ahead and jax.process_count() > 1:
        raise ValueError(
            f"config.rollout_ahead: got 1 with {jax.process_count()} processes; allowed: 0, since"
            " all of them must run their programs in one order."
        )
    if config.model.path is None and not config.warm_start.stages:
        raise ValueError(
            "config.model.path: got none; allowed: a model folder, or stages in config.warm_start"
            " that make a policy from nothing."
        )
    return mesh


def check_learner(config: Config) -> jax.sharding.Mesh:
    """The algorithm, the optimizer and where they are to run; the mesh."""
    check_entries(config.algorithm)
    Schedule(config.optimizer, config.iterations)
    make_optimizer(config.optimizer, total_steps=build.total_steps(config))
    mesh = make_mesh(config.mesh)
    check_offload(config.offload, mesh.local_devices[0])
    return mesh


def _check_episodes(config: Config) -> None:
    """There are the tasks, their labels and the demonstrations that the run asks for, and what
    plays the tasks can."""
    check_host(config)
    splits = ["train", config.evaluation.split, *config.evaluation.extra_splits]
    if config.evaluation.select_on is not None:
        splits.append(config.evaluation.select_on)
    tasks = find_tasks(config)
    gate.check_tasks(tasks, splits, labelled=config.evaluation.tasks)
    parts = gate.task_shares(tasks, "train")
    share_counts(parts, config.rollout.tasks)
    check_references(config, tasks)
    firsts = [part.task_ids[0] for part in parts if part.task_ids]
    if config.algorithm.forks not in ("none", "candidates"):
        with started(config.env, calls=2 * len(firsts)) as environment:
            check_replayable(environment, firsts, config.seed, config.env.name)
    if config.rollout.grammar == TOOL_CALLS and not config.agent.given:
        _check_tools(config, firsts)
    if not config.warm_start.stages:
        return
    if not gate.has_demonstrations(envs.make(config.env.name, **config.env.options)):
        raise ValueError(
            f"config.warm_start.stages: got {len(config.warm_start.stages)}; allowed: none, since"
            f" env {config.env.name} has no demonstrations() and vocabulary()."
        )


def _check_tools(config: Config, task_ids: Sequence[str]) -> None:
    """The tools of these tasks are such that a grammar can constrain their calls."""
    with started(config.env, calls=len(task_ids)) as environment:
        for task_id in task_ids:
            try:
                opening = gate.reset(environment, task_id, config.seed, episode_seed=0)
                _, tools = gate.check_opening(opening)
            except Exception:  # of a user's code: the run counts episodes that fail
                continue
            check_tools(tools)


def check_model(config: Config, mesh: jax.sharding.Mesh, *, tokenizer: bool = True) -> None:
    """The model has a tokenizer that can talk, the projections that adapters are for, and the
    parameters that groups of the optimizer are of."""
    arch = build.architecture(config, mesh)
    if tokenizer and config.model.path is not None:
        _check_tokenizer(config, arch.vocab_size)
    check_experts(config.algorithm, arch)
    if config.rollout.quantize != "none" and arch.moe is not None:
        raise ValueError(
            f"config.rollout.quantize: got {config.rollout.quantize!r} for a model of experts;"
            " allowed: none."
        )
    if build.adapters(config) is not None or config.optimizer.groups:
        _trained_shapes(config, arch)


def check_own_optimizer(config: Config, mesh: jax.sharding.Mesh, total_steps: int) -> None:
    """An optimizer of a user's own functions can step the parameters that train.

    Raises:
      ValueError: as of `try_user_optimizer`.
    """
    parts = (config.optimizer, *config.optimizer.groups)
    if any(":" in (part.name or "") for part in parts):
        shapes = _trained_shapes(config, build.architecture(config, mesh))
        try_user_optimizer(config.optimizer, shapes, total_steps=total_steps)


def _trained_shapes(config: Config, arch: Architecture) -> Any:
    """Shapes of the parameters that train; ValueError where adapters or groups have none."""
    lora = build.adapters(config)
    made = policy.abstract(arch) if lora is None else with_adapters(arch, lora)
    return split_trained(config.optimizer.groups, *made)[0]


def check_experts(algorithm: Algorithm, arch: Architecture) -> None:
    """The model has the experts whose choice is to be replayed.

    Raises:
      ValueError: it has none.
    """
    if algorithm.router_replay != "none" and arch.routing is None:
        raise ValueError(
            f"config.algorithm.router_replay: got {algorithm.router_replay!r} with a model that has"
            " no experts; allowed: none."
        )


def _check_tokenizer(config: Config, vocab_size: int) -> None:
    """The model's tokenizer can begin a conversation, and say what a grammar wants."""
    tokenizer = read_tokenizer(config.model.path, config.chat)
    if tokenizer is None:
        raise ValueError(
            f"config.model.path: {config.model.path} has no tokenizer; allowed: a folder with a"
            " tokenizer.json, or a SentencePiece tokenizer.model and its tokenizer_config.json."
        )
    tokenizer.begin([{"role": "user", "content": "?"}], ())
    build_grammars(config, tokenizer, vocab_size)


def made_by(config: Config) -> str:
    """Names the policies that a run samples with."""
    same, usual = _same_fields(config), vars(Config().env)
    env = {name: x for name, x in to_dict(config)["env"].items() if name not in _PROCESSES}
    same["env"] = {name: usual[name] if name in _CALLS else x for name, x in env.items()}
    drawn = config.curriculum.by != "none"
    for part, given in (
        ("rewards", config.rewards),
        ("agent", config.agent.given),
        ("curriculum", drawn),
        ("judge", config.judge != Judge()),
    ):
        if not given:  # stored rollouts of versions that had none stay usable
            del same[part]
    # Without the layout, written as earlier versions did for remat=none.
    model = replace(config.model, remat="none", attention="auto", scan_layers=False)
    choices = [same, str(model), str(config.chat), config.algorithm.dynamic_sampling]
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
            saved_value = without_layout(saved_value)
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
                *(part, path, saved_path, path),
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
    rollout = {name: v for name, v in values["rollout"].items() if name not in _LAYOUT}
    env = {name: v for name, v in values["env"].items() if name not in (*_PROCESSES, *_CALLS)}
    rewards = without_layout(values["rewards"])
    agent = without_places(values["agent"])
    same = {"seed": values["seed"], "rollout": rollout, "env": env, "rewards": rewards}
    judge = {name: values["judge"][name] for name in ("function", "options")}
    return same | {"agent": agent, "curriculum": values["curriculum"], "judge": judge}
