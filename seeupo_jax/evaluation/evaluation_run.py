"""An evaluation of a policy, from its settings to its figures; every episode is kept in a file."""

# Types of jax's own functions are partly unknown.
# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.server_dialects import CHAT
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.resume_fields import without_computed
from seeupo_jax.configuration.schema import Config, Env
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.evaluation.compared_policies import PolicyFigures, compared_policies
from seeupo_jax.evaluation.episode_host import build_host
from seeupo_jax.evaluation.evaluation import evaluate_split
from seeupo_jax.evaluation.frozen_roles import with_frozen_roles
from seeupo_jax.evaluation.policy_sources import PolicySource
from seeupo_jax.metrics.statistics import Estimate, evaluation_table, read_estimates
from seeupo_jax.policy_io.resuming import chat_note
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.engine.role_engine import RoleEngine
from seeupo_jax.rollout.player import RolloutWorker
from seeupo_jax.tasks.task_folders import digest_of, find_folder
from seeupo_jax.trajectories.episodes import (
    EpisodeFile,
    EvaluationEpisode,
    process_file,
    process_files,
)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation; its text is a table, a line for each kind of tasks.

    split, k: what was played, and how often each task.
    avg_at_k, pass_at_k: over all tasks, with 95% intervals.
    metrics: all figures by name, those of each kind of tasks too, as `--json` has them.
    policy: which one: its `iteration`, or `server` and `model`.
    episodes: those that count, on process 0 of all processes. file: where they are kept.
    resumed: how many of them were in the file before, and were not played.
    usage: the engine's counts of what was played now, such as tokens that a server reports.
    policies: this one, then others that were evaluated in this folder on the same tasks.
    """

    split: str
    k: int
    avg_at_k: Estimate
    pass_at_k: Estimate
    metrics: Mapping[str, float]
    policy: Mapping[str, Any]
    episodes: Sequence[EvaluationEpisode]
    file: Path
    resumed: int
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    policies: Sequence[PolicyFigures] = ()

    def __str__(self) -> str:
        return evaluation_table(self.metrics)


def evaluate_policy(
    config: Config, workdir: Path, source: PolicySource, *, split: str, k: int
) -> EvaluationResult:
    """Plays the episodes of a split that are not in WORKDIR/evaluation yet."""
    # A server of chat completions applies its own template, and no model folder is needed here.
    chat = None if source.same.get("dialect") == CHAT else chat_note(config, workdir)
    settings = evaluation_settings(config, split, k, source.same, chat)
    episodes: list[EvaluationEpisode] = []
    resumed = 0

    def count(counted: Sequence[EvaluationEpisode], before: int) -> None:
        nonlocal resumed
        episodes.extend(counted)
        resumed = before

    with contextlib.ExitStack() as opened:
        first, number = workdir / "evaluation" / episodes_name(settings), jax.process_index()
        path = process_file(first, number)
        others = () if number else process_files(first, jax.process_count())
        file = opened.enter_context(EpisodeFile(path, settings, others))
        rewards = opened.enter_context(contextlib.closing(make_scorer(config.rewards)))
        shown = jax.process_index() == 0  # on stderr; stdout has the result
        progress = opened.enter_context(
            ProgressDisplay(0, config.telemetry.display, stream=sys.stderr, shown=shown)
        )
        tasks = opened.enter_context(contextlib.closing(find_tasks(config)))
        host = build_host(config, source.engine, tasks, source.tokenizer, progress.log)
        opened.enter_context(contextlib.closing(host))
        progress.phase(f"evaluation of {split}")
        engine = with_frozen_roles(config, source.engine, source.tokenizer)
        if isinstance(engine, RoleEngine):
            opened.enter_context(contextlib.closing(engine))
        worker = RolloutWorker(
            engine,
            host,
            source.tokenizer,
            config.env,
            config.rollout,
            rewards,
            roles=config.roles,
            watch=progress.watch,
        )
        metrics = evaluate_split(
            config,
            worker,
            source.params,
            tasks=tasks,
            split=split,
            k=k,
            iteration=source.iteration,
            file=file,
            on_counted=count,
        )
    estimates = {name.rpartition("/")[2]: e for name, e in read_estimates(metrics).items()}
    return EvaluationResult(
        split=split,
        k=k,
        avg_at_k=estimates[f"avg@{k}"],
        pass_at_k=estimates[f"pass@{k}"],
        metrics=metrics,
        policy=source.about,
        episodes=tuple(episodes),
        file=path,
        resumed=resumed,
        usage=dict(source.engine.usage()),
        policies=() if number else compared_policies(path, settings, metrics, _keys(episodes, k)),
    )


def _keys(episodes: Sequence[EvaluationEpisode], k: int) -> list[tuple[str, int]]:
    """Task and member of all episodes of the tasks that were played."""
    tasks = dict.fromkeys(episode.task_id for episode in episodes)
    return [(task_id, member) for task_id in tasks for member in range(k)]


def evaluation_settings(
    config: Config,
    split: str,
    k: int,
    same: Mapping[str, Any],
    chat: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that decides how an episode goes.

    Args:
      same: of the policy; see `PolicySource`.
      chat: of `chat_note`: the options of `config.chat`, or of the model folder's `chat.json`.
    """
    fields = {
        "env": ("name", "options"),
        "chat": ("system", "tools", "template", "template_kwargs"),
        "rollout": ("max_turns", "max_action_tokens", "max_context", "top_k", "top_p", "grammar"),
        "evaluation": ("temperature",),
    }
    values = {
        f"config.{part}.{name}": getattr(getattr(config, part), name)
        for part, names in fields.items()
        for name in names
    }
    temperature = config.evaluation.temperature
    if temperature is None:
        values["config.evaluation.temperature"] = config.rollout.temperature
    # What decides which episodes count; files of versions that had none of these have the defaults.
    for name in ("timeout_as", "max_reward"):
        if vars(config.env)[name] != vars(Env())[name]:
            values[f"config.env.{name}"] = vars(config.env)[name]
    if config.chat.roles:
        values["config.chat.roles"] = config.chat.roles
    if config.rollout.quantize != "none" and "server" not in same:  # which samples by itself
        values["config.rollout.quantize"] = config.rollout.quantize
    decisive = without_computed(to_dict(config))
    if config.rewards:
        values["config.rewards"] = decisive["rewards"]
    if config.roles:
        values["config.roles"] = decisive["roles"]
    if config.agent.given:
        left_out = ("harness",) if config.agent.harness is None else ()  # as above
        agent = decisive["agent"].items()
        values["config.agent"] = {name: x for name, x in agent if name not in left_out}
    if config.tasks is not None:
        values |= {"config.tasks": config.tasks, "config.sandbox": decisive["sandbox"]}
        values["digest of config.tasks"] = digest_of(find_folder(config.tasks))
    if chat is not None:
        values |= {
            f"chat.{name}": value for name, value in chat.items() if name != "roles" or value
        }
    return {"split": split, "k": k, "config.seed": config.seed, **values, **same}


def episodes_name(settings: dict[str, Any]) -> str:
    """Process 0's, such as `test-k4-temperature0.9-iteration60.jsonl`."""
    limits = {name: settings[f"config.rollout.{name}"] for name in ("top_k", "top_p")}
    parts = [settings["split"], f"k{settings['k']}"]
    if limits["top_k"] == 1:
        parts.append("greedy")
    else:
        parts.append(f"temperature{settings['config.evaluation.temperature']}")
        parts += [f"{name}{limit}" for name, limit in limits.items() if limit is not None]
    if "server" in settings:
        parts += [settings["server"].partition("://")[2], settings["model"]]
    else:
        parts.append(f"iteration{settings['iteration']}")
    if "config.rollout.quantize" in settings:
        parts.append(settings["config.rollout.quantize"])
    if "weights" in settings:
        parts.append(settings["weights"])
    return re.sub(r"[^\w.-]+", "_", "-".join(parts))[:200] + ".jsonl"
