"""Checks of a configuration, before anything is compiled or a run is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax import envs
from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.answer_form import resolve_form
from seeupo_jax.cli.command_line import check_places, check_shared_places, join_cluster, prepare_xla
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.base import EnvironmentUnavailable, Tool
from seeupo_jax.envs.tasks import check_tasks, list_task_shares
from seeupo_jax.envs.validation import has_demonstrations
from seeupo_jax.evaluation.episode_host import check_host, open_environment, try_resets
from seeupo_jax.evaluation.frozen_roles import check_frozen_roles
from seeupo_jax.learner.optimization.optimizer import try_optimizer
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.learner.state_layout import check_offload
from seeupo_jax.metrics.trackers import check_trackers
from seeupo_jax.parallel.mesh import make_mesh, training_mesh
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import base_model_folder, read_tokenizer, resolve_path
from seeupo_jax.policy.lora import adapters_of_some_parts, with_adapters
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_grammars
from seeupo_jax.policy_io.teachers import check_teachers
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.branching.plans import make_plan
from seeupo_jax.rollout.branching.replay import check_replayable
from seeupo_jax.rollout.engine.grammar import TOOL_CALLS, check_tools
from seeupo_jax.rollout.task_draw import share_counts
from seeupo_jax.training.algorithm_trial import check_entries
from seeupo_jax.training.build_learner import run_optimizer
from seeupo_jax.training.early_stopping import check_patience
from seeupo_jax.training.exact_value import ExactValue, check_exact
from seeupo_jax.training.reference_answers import check_references


def prepare_run(config: Config, workdir: Path, check: Callable[[Config], object]) -> None:
    """Prepares a run that Python code starts: XLA, folders, checks; joins its processes.

    Args:
      check: `check_config`, or the check of another kind of run.

    Raises:
      ValueError: a configuration or a folder that cannot be used.
    """
    prepare_xla(small=build.is_small_policy(config))
    check_places(config, workdir, make=False)
    join_cluster(config)
    check(config)
    check_places(config, workdir)
    check_shared_places(config, workdir)


def check_config(config: Config, splits: Sequence[str] | None = None) -> None:
    """Finds what is wrong with a configuration before anything is compiled.

    Args:
      splits: whose first task is begun, to try them; None: the splits of training.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    trains = splits is None
    mesh = training_mesh(config) if trains else make_mesh(config.mesh)
    _check_fields(config, mesh)
    _check_episodes(config, splits)
    build.check_layout(config, mesh)
    check_model(config, mesh)
    if trains:  # nothing else asks a teacher, or has devices of its own that sample
        build.check_trainable(config)
        build.check_samplers_layout(config, mesh)
        check_teachers(config, mesh, None if config.model.path is None else _tokenizer(config))
    build.check_one_conversation(config)
    check_frozen_roles(config, mesh)
    check_optimizer(config, mesh, build.total_steps(config))
    check_first_tasks(config, _played_splits(config) if splits is None else splits)
    if trains and config.evaluation.exact and config.model.path is not None:
        ExactValue(config, _tokenizer(config))  # lists all episodes


def _played_splits(config: Config) -> list[str]:
    evaluation = config.evaluation
    return ["train", evaluation.split] if evaluation.tasks else ["train"]


def check_first_tasks(config: Config, splits: Sequence[str], *, tokenized: bool = True) -> None:
    """Begins the first task of each split, of each part of it; agents begin theirs by themselves,
    and may send messages of any role.

    Args:
      tokenized: whether the policy's tokenizer begins the conversations, too.

    Raises:
      ValueError: one does not begin, the model's chat template does not write its messages, or none
        has the tools that a grammar is to constrain.
    """
    if config.agent.given:
        return check_every_role(config)
    with contextlib.closing(find_tasks(config)) as tasks:
        parts = [part for split in splits for part in list_task_shares(tasks, split)]
    firsts = dict.fromkeys(part.task_ids[0] for part in parts)
    path = config.model.path
    tokenizer = None
    if tokenized and path is not None:
        tokenizer = read_tokenizer(path, config.chat)
    tools = try_resets(config, list(firsts), tokenizer)
    if config.rollout.grammar == TOOL_CALLS:
        _check_tools(config, tools)


def check_sampling(config: Config) -> None:
    """Finds what is wrong with a configuration whose policy answers, and no environment plays.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    mesh = make_mesh(config.mesh)
    build.check_layout(config, mesh)
    check_model(config, mesh)
    check_every_role(config)


def check_planned(config: Config) -> tuple[Config, list[str]]:
    """As `check_config`, for a run on another machine: what is missing on this one is listed.

    Returns: the configuration with a model whose sizes are known here, and what is missing.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    mesh, missing = training_mesh(config), []
    _check_fields(config, mesh)
    given, source = build.find_model(config)
    if given is not config:
        missing.append(f"the model's weights and tokenizer; its sizes are from {source}")
    try:
        _check_episodes(config)
    except EnvironmentUnavailable as error:
        missing.append(f"the environment's tasks: {error}")
    build.check_layout(given, mesh)
    build.check_samplers_layout(given, mesh)
    check_model(given, mesh, tokenizer=given is config)
    known = given is config and config.model.path is not None
    check_teachers(given, mesh, _tokenizer(given) if known else None)
    check_optimizer(given, mesh, build.total_steps(given))
    if not missing:  # else what an episode needs may be missing, too
        check_first_tasks(config, _played_splits(config))
    return given, missing


def _check_fields(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Checks that need neither tasks nor the model."""
    check_learner(config, mesh)
    check_trackers(config.telemetry.trackers)
    make_scorer(config.rewards).close()
    make_plan(config)
    check_patience(config)
    if config.algorithm.forks.kind == "candidates":
        make_judge(config.judge, config.env.name).close()
    if max(config.profile.steps, default=0) > config.iterations:
        raise ValueError(
            f"config.profile.steps: got {config.profile.steps}; allowed: iterations from 1 to"
            f" {config.iterations}."
        )
    if config.model.path is None and not config.warm_start.stages:
        raise ValueError(
            "config.model.path: got none; allowed: a model folder, or stages in config.warm_start"
            " that make a policy from nothing."
        )


def check_learner(config: Config, mesh: jax.sharding.Mesh) -> None:
    """The algorithm, the optimizer and the mesh that they are to run on."""
    check_entries(config.algorithm)
    Schedule(config.optimizer, config.iterations)
    run_optimizer(config)
    check_offload(config.offload, mesh.local_devices[0])


def _check_episodes(config: Config, splits: Sequence[str] | None = None) -> None:
    """There are the tasks, their labels and the demonstrations that the run asks for, and what
    plays the tasks can. `splits` as of `check_config`."""
    check_host(config)
    evaluation, tasks = config.evaluation, find_tasks(config)
    if splits is not None:  # an evaluation's
        return check_tasks(tasks, splits, labelled=max(1, evaluation.tasks))
    splits = _played_splits(config)
    if evaluation.tasks:
        more = (*evaluation.extra_splits, evaluation.select_on)
        splits += [split for split in more if split is not None]
    check_tasks(tasks, splits, labelled=max(1, evaluation.tasks))
    parts = list_task_shares(tasks, "train")
    share_counts(parts, config.rollout.tasks)
    check_references(config, tasks)
    check_exact(config)
    firsts = [part.task_ids[0] for part in parts if part.task_ids]
    if config.algorithm.forks.kind not in ("none", "candidates"):
        with open_environment(config.env, calls=2 * len(firsts)) as environment:
            check_replayable(environment, firsts, config.seed, config.env.name)
    if not config.warm_start.stages:
        return
    if not has_demonstrations(envs.make(config.env.name, **config.env.options)):
        raise ValueError(
            f"config.warm_start.stages: got {len(config.warm_start.stages)}; allowed: none, since"
            f" env {config.env.name} has no demonstrations() and vocabulary()."
        )


def check_every_role(config: Config) -> None:
    """ValueError: there is a role whose messages the model's chat template does not write, or it
    writes calls in no known format."""
    if config.model.path is None:
        return  # a tokenizer that is made here writes all
    tokenizer = _tokenizer(config)
    for sentence in tokenizer.unwritten.values():
        raise ValueError(sentence)
    resolve_form(config.agent, tokenizer)


def _check_tools(config: Config, tools: Sequence[tuple[Tool, ...]]) -> None:
    """The tasks list tools, and such that a grammar can constrain their calls."""
    for listed in tools:
        check_tools(listed)
    if not any(tools):
        raise ValueError(
            f"config.rollout.grammar: got {TOOL_CALLS!r}; allowed: none or a file, since the tasks"
            f" of env {config.env.name} list no tools whose calls it could constrain."
        )


def check_model(config: Config, mesh: jax.sharding.Mesh, *, tokenizer: bool = True) -> None:
    """The model has a tokenizer that can talk, the projections that adapters are for, and the
    parameters that groups of the optimizer are of."""
    arch = build.architecture_of(config, mesh)
    if tokenizer and config.model.path is not None:
        _check_tokenizer(config, arch.vocab_size)
    check_experts(config, arch)
    if arch.recurrent and config.algorithm.refresh == "fused":
        raise ValueError(
            "config.algorithm.refresh: got 'fused' for a model with recurrent layers; allowed: auto"
            " or separate, since such layers cannot continue a step's own pass."
        )
    if config.rollout.quantize != "none" and arch.moe is not None:
        raise ValueError(
            f"config.rollout.quantize: got {config.rollout.quantize!r} for a model of experts;"
            " allowed: none."
        )
    if build.adapters_of(config) is not None and not config.lora.merge:
        _check_no_adapters(config.model.path)
    lora = build.adapters_of(config)
    if lora is not None or config.optimizer.groups:
        shapes = _trained_shapes(config, arch)
        adapted = dataclasses.replace(arch, lora=lora)
        some = None if lora is None else adapters_of_some_parts(adapted, shapes)
        if some is not None and not config.lora.merge:
            raise ValueError(
                f"config.lora.merge: got False with adapters {some}; allowed: True, or names of all"
                " their parts, or of none, as config.lora.targets."
            )


def _check_no_adapters(path: str | None) -> None:
    """ValueError: adapters that would belong to a model which is adapters itself."""
    if path is not None and base_model_folder(resolve_path(path)) != resolve_path(path):
        raise ValueError(
            f"config.model.path: got {path!r}, which has adapters, with config.lora; allowed: the"
            " folder of their model with config.lora.path, which trains them further, or"
            " config.lora.merge=True. To evaluate or serve the folder, leave config.lora out."
        )


def check_optimizer(config: Config, mesh: jax.sharding.Mesh, total_steps: int) -> None:
    """The optimizer can have a state of the parameters that train, and a user's own step them.

    Raises:
      ValueError: as of `try_optimizer`.
    """
    # Each of the adapters per turn has a state of its own.
    shapes = _trained_shapes(config, build.architecture_of(config, mesh), per_turn=False)
    try_optimizer(config.optimizer, shapes, total_steps=total_steps)


def _trained_shapes(config: Config, arch: Architecture, *, per_turn: bool = True) -> Any:
    """Shapes of the parameters that train; ValueError where adapters or groups have none.

    Args:
      per_turn: False: of adapters per turn those of one.
    """
    lora = build.adapters_of(config)
    if lora is not None and not per_turn:
        lora = dataclasses.replace(lora, per_turn=0)
    made = policy.abstract_network(arch) if lora is None else with_adapters(arch, lora)
    return split_trained(config.optimizer.groups, *made)[0]


def check_experts(config: Config, arch: Architecture) -> None:
    """The model has the experts that the configuration is about, and they can be trained so.

    Raises:
      ValueError: it has none, or no selection biases that train.
    """
    replay, balance = config.algorithm.router_replay, config.experts
    if arch.routing is None:
        if replay != "none":
            raise ValueError(
                f"config.algorithm.router_replay: got {replay!r} with a model that has no experts;"
                " allowed: none."
            )
        for name, value in vars(balance).items():
            if value:
                raise ValueError(
                    f"config.experts.{name}: got {value} with a model that has no experts;"
                    " allowed: 0."
                )
    if not balance.bias_rate:
        return
    field = f"config.experts.bias_rate: got {balance.bias_rate} with"
    if not arch.moe.selection_bias:
        raise ValueError(
            f"{field} a model whose files hold no selection bias of its experts; allowed: 0, or"
            " a model of a family that has one, such as dots1."
        )
    trained = jax.tree.leaves_with_path(_trained_shapes(config, arch))
    if not any(path[-1].key == SELECTION_BIAS for path, _ in trained):
        raise ValueError(
            f"{field} selection biases that config.lora or config.optimizer.groups freezes;"
            " allowed: 0, or biases that train."
        )


def _check_tokenizer(config: Config, vocab_size: int) -> None:
    """The model's tokenizer can begin a conversation, and say what a grammar wants."""
    tokenizer = _tokenizer(config)
    tokenizer.begin([{"role": "user", "content": "?"}], ())
    build_grammars(config, tokenizer, vocab_size)


def _tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the model folder that the configuration names."""
    tokenizer = read_tokenizer(str(config.model.path), config.chat)
    if tokenizer is None:
        raise ValueError(
            f"config.model.path: {config.model.path} has no tokenizer; allowed: a folder with a"
            " tokenizer.json, or a SentencePiece tokenizer.model and its tokenizer_config.json."
        )
    return tokenizer
