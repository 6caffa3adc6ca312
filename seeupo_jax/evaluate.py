"""Evaluation: avg@k and pass@k of a policy on a split, with 95% intervals.

python -m seeupo_jax.evaluate --config=FILE.py --workdir=DIR [--split=test] [--k=4] [--greedy]
    [--explain] [--json=OUT] [--bfcl_results=FOLDER]
    [--server=http://HOST:PORT [--server_model=NAME] [--server_dialect=auto|vllm|sglang]
    [--server_seeded=True] [--server_timeout_s=600]]

The policy is the run's; with a server, the one that the server holds, whose tokenizer must be the
run's. Nothing is loaded or computed here then. With --explain it prints what would be played, and
plays nothing.

Every episode is in DIR/evaluation as soon as it is over (`telemetry/episodes.py`). The same command
plays only what is not there: what it was stopped before, and what an environment's failure cost.
With several processes each keeps a file of what it plays; that of process 0 is whole in the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from seeupo_jax import build, envs
from seeupo_jax.cli import join_cluster, parse_flags, prepare_xla, read_config
from seeupo_jax.config import Config
from seeupo_jax.envs import Labelled
from seeupo_jax.envs.bfcl_export import export_results
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.errors import sentence_errors
from seeupo_jax.explain.evaluation import explain_episodes, explain_policy, explain_server
from seeupo_jax.explain.tell import EXPLAIN, Section, tell
from seeupo_jax.parallel.cluster import errors_end_at_once
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.players import (
    SERVER,
    SERVER_MODEL,
    check_own,
    check_served,
    own_policy,
    policy_folder,
    served_policy,
)
from seeupo_jax.policy.tokenizer import Tokenizer
from seeupo_jax.rollout.collect import Request, collect, group_requests
from seeupo_jax.rollout.engine import Engine
from seeupo_jax.telemetry.episodes import Episode, EpisodeFile, read_played, to_episode
from seeupo_jax.telemetry.progress import Progress
from seeupo_jax.telemetry.statistics import (
    evaluation_metrics,
    evaluation_prefix,
    evaluation_table,
)
from seeupo_jax.types import Trajectory
from seeupo_jax.watch import Watch

_SPLIT = flags.DEFINE_string("split", None, "Split to evaluate; default: config.evaluation.split.")
_K = flags.DEFINE_integer(
    "k", None, "Episodes a task; default: config.evaluation.k, and 1 with --greedy.", 1
)
_GREEDY = flags.DEFINE_bool("greedy", False, "Always take the likeliest token.")
_BFCL_RESULTS = flags.DEFINE_string(
    "bfcl_results", None, "Also write result files for `bfcl evaluate` into this folder."
)
_JSON = flags.DEFINE_string("json", None, "Also write the metrics to this file.")

# Added to the iteration, so that an evaluation never samples with an iteration's random numbers.
_STREAM = 2**31


Labels = Mapping[str, Mapping[str, str]]  # of tasks


def evaluate(
    config: Config,
    engine: Engine,
    pool: EnvPool,
    tokenizer: Tokenizer,
    params: Any,
    *,
    split: str,
    k: int,
    iteration: int = 0,
    file: EpisodeFile | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_played: Callable[[Sequence[Trajectory], Labels], None] = lambda *_: None,
    watch: Watch | None = None,
) -> dict[str, float]:
    """Plays the first `config.evaluation.tasks` tasks of a split k times each.

    Args:
      file: what is in it is not played; what this process plays goes there. All processes have
        one, or none has.
      stop: whether this process was asked to stop.
      on_played: is given what all processes played, and the labels of the tasks.
      watch: where others can see how far this process is.

    Returns: `evaluation_metrics` of success (score 1) among the episodes whose environment did not
      fail, by `eval/`; by `eval_SPLIT/` for another split than the config's.

    Raises:
      Stopped: a process was asked to.
    """
    environment = envs.make(config.env.name, **config.env.options)
    task_ids = environment.task_ids(split)[: config.evaluation.tasks]
    labelled = isinstance(environment, Labelled)
    labels = {task_id: environment.labels(task_id) if labelled else {} for task_id in task_ids}
    played: dict[tuple[str, int], Episode] = {}
    for part in gather({} if file is None else file.played):
        played |= part
    requests = group_requests(task_ids, k)
    missing = [request for request in requests if (request.task_id, request.member) not in played]

    def keep(request: Request, trajectory: Trajectory) -> None:
        if file is not None:
            file.add(to_episode(trajectory, labels[request.task_id]))

    collected = collect(
        engine,
        pool,
        tokenizer,
        params,
        missing,
        max_turns=config.rollout.max_turns,
        seed=config.seed,
        iteration=_STREAM + iteration,
        temperature=config.evaluation.temperature,
        deterministic=config.rollout.deterministic,
        on_finished=keep,
        stop=stop,
        watch=watch,
    )
    on_played(collected.trajectories, labels)
    for trajectory in collected.trajectories:
        episode = to_episode(trajectory, labels[trajectory.task_id])
        played[episode.key] = episode
    if file is not None and jax.process_index() == 0:
        for key in played.keys() - file.played.keys():
            if not played[key].failed:
                file.add(played[key])
    success = np.array([played[request.task_id, request.member].success for request in requests])
    prefix = evaluation_prefix(config.evaluation.split, split)
    return evaluation_metrics(prefix, success.reshape(-1, k), [labels[each] for each in task_ids])


def _explain(config: Config, workdir: Path, split: str, k: int) -> list[Section]:
    """What this evaluation would do; a server is not asked for anything."""
    if SERVER.value is None:
        check_own(config)
        found = explain_policy(config, workdir, policy_folder(config, workdir))
        same: dict[str, Any] | None = {"iteration": found.iteration}
    else:
        jax.config.update("jax_platforms", "cpu")
        check_served(config)
        found = explain_server(SERVER.value, SERVER_MODEL.value)
        model = SERVER_MODEL.value
        same = None if model is None else {"server": SERVER.value, "model": model}
    path, played = workdir / "evaluation", None
    if same is not None:
        settings = _settings(config, split, k, same)
        path = path / _file_name(settings)
        played = read_played(path, settings)
    return [*found.sections, *explain_episodes(config, split, k, path, played)]


def _settings(config: Config, split: str, k: int, same: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides how an episode goes.

    Args:
      same: of the policy; see `Player`.
    """
    ours = {
        "env": ("name", "options"),
        "chat": ("system", "tools", "template", "template_kwargs"),
        "rollout": ("max_turns", "max_action_tokens", "max_context", "top_k", "top_p", "grammar"),
        "evaluation": ("temperature",),
    }
    values = {
        f"config.{part}.{name}": getattr(getattr(config, part), name)
        for part, names in ours.items()
        for name in names
    }
    temperature = config.evaluation.temperature
    if temperature is None:
        values["config.evaluation.temperature"] = config.rollout.temperature
    return {"split": split, "k": k, "config.seed": config.seed, **values, **same}


def _file_name(settings: dict[str, Any]) -> str:
    """Such as `test-k4-temperature0.9-iteration60.jsonl`."""
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
    if (number := jax.process_index()) > 0:
        parts.append(f"process{number}")
    return re.sub(r"[^\w.-]+", "_", "-".join(parts))[:200] + ".jsonl"


def _choices(config: Config) -> tuple[Config, str, int]:
    """The configuration as the flags have it, the split, and k."""
    split = config.evaluation.split if _SPLIT.value is None else _SPLIT.value
    k = config.evaluation.k if _K.value is None else _K.value
    if _GREEDY.value:
        rollout = dataclasses.replace(config.rollout, top_k=1)
        config = dataclasses.replace(config, rollout=rollout)
        k = 1 if _K.value is None else _K.value
    if _GREEDY.value and k > 1:
        print(
            f"--greedy: the {k} episodes of a task are alike, unless its environment is random.",
            file=sys.stderr,
        )
    if _BFCL_RESULTS.value is not None and config.env.name != "bfcl":
        raise ValueError(
            f"--bfcl_results: got env {config.env.name!r}; allowed: config.env.name=bfcl."
        )
    return config, split, k


def main(_: Sequence[str]) -> None:
    with errors_end_at_once(), sentence_errors(), contextlib.ExitStack() as opened:
        config, workdir = read_config(make=not EXPLAIN.value)
        if SERVER.value is None:
            prepare_xla()
            join_cluster(config)
        config, split, k = _choices(config)
        if EXPLAIN.value:
            return tell(_explain(config, workdir, split, k))
        policy = own_policy if SERVER.value is None else served_policy
        player = opened.enter_context(policy(config, workdir))
        engine, tokenizer, params, iteration, about, _ = player
        settings = _settings(config, split, k, player.same)
        path = workdir / "evaluation" / _file_name(settings)
        file = opened.enter_context(EpisodeFile(path, settings))
        pool = build.build_pool(config, engine.concurrency)
        opened.enter_context(contextlib.closing(pool))
        with _progress(config) as progress:
            progress.phase(f"evaluation of {split}")
            metrics = evaluate(
                config,
                engine,
                pool,
                tokenizer,
                params,
                split=split,
                k=k,
                iteration=iteration,
                file=file,
                watch=progress.watch,
            )
        if jax.process_index() == 0:
            _report(config, file, about, metrics)


@contextlib.contextmanager
def _progress(config: Config) -> Iterator[Progress]:
    """Shown on the standard error by process 0: the standard output has the result."""
    shows = jax.process_index() == 0
    with (
        open(os.devnull, "w") as nowhere,
        Progress(0, config.telemetry.display, stream=sys.stderr if shows else nowhere) as progress,
    ):
        yield progress


def _report(
    config: Config, file: EpisodeFile, about: dict[str, Any], metrics: dict[str, float]
) -> None:
    """Prints what the evaluation came to, and writes what else was asked for."""
    print(f"{evaluation_table(metrics)}\n\nEvery episode: {file.path}")
    if _BFCL_RESULTS.value is not None:
        environment = envs.make(config.env.name, **config.env.options)
        played = ((e.task_id, e.member, e.messages) for e in file.played.values())
        for command in export_results(environment, played, Path(_BFCL_RESULTS.value)):
            print(command)
    if _JSON.value is not None:
        numbers = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        result = about | {"episodes": str(file.path)} | numbers
        Path(_JSON.value).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    app.run(main, argv=parse_flags(sys.argv))
