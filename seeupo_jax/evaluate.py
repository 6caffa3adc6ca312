"""Evaluation: avg@k and pass@k of a policy on a split, with 95% intervals.

python -m seeupo_jax.evaluate --config=FILE.py --workdir=DIR [--untrained] [--split=test] [--k=4]
    [--greedy] [--explain] [--json=OUT] [--bfcl_results=FOLDER]
    [--server=http://HOST:PORT [--server_model=NAME] [--server_dialect=auto|vllm|sglang]
    [--server_seeded=True] [--server_timeout_s=600]]

The policy is the run's last checkpoint; with --untrained, the policy that the run starts from; with
--server, the one that the server serves, whose tokenizer must be the run's: no model is loaded or
computed here then. --explain prints which episodes would be played, and plays none.

Every episode is written to DIR/evaluation as soon as it ends (`trajectories/episodes.py`).
Rerunning the command plays the missing episodes only, and those whose environment failed. With
several processes each writes a file of its own episodes; process 0's is complete in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from seeupo_jax import envs
from seeupo_jax.checkpoint import check_could_write, check_writable
from seeupo_jax.configuration.flags import Flags, path, positive, whole
from seeupo_jax.configuration.schema import Config, Env
from seeupo_jax.display.progress import Progress
from seeupo_jax.envs.bfcl.result_files import export_results
from seeupo_jax.errors import sentence_errors
from seeupo_jax.metrics.statistics import evaluation_table
from seeupo_jax.parallel.cluster import errors_end_at_once
from seeupo_jax.planning.explain_evaluation import explain_episodes, explain_policy, explain_server
from seeupo_jax.planning.explanation import EXPLAIN, Section, print_explanation
from seeupo_jax.rollout.collection import RolloutWorker
from seeupo_jax.runtime import build
from seeupo_jax.runtime.checks import check_config
from seeupo_jax.runtime.cli import (
    add_cluster_flags,
    add_run_flags,
    join_cluster,
    prepare_xla,
    quiet_logs,
    read_config,
)
from seeupo_jax.runtime.evaluation import evaluate
from seeupo_jax.runtime.policy_sources import (
    Server,
    check_served,
    check_trained,
    own_policy,
    policy_folder,
    served_policy,
)
from seeupo_jax.trajectories.episodes import EpisodeFile, read_played


def _explain(
    config: Config, given: argparse.Namespace, server: Server | None, split: str, k: int
) -> list[Section]:
    """What this evaluation would do; a server is not asked for anything."""
    workdir = given.workdir
    if server is None:
        folder = policy_folder(config, workdir)
        found = explain_policy(config, workdir, folder, untrained=given.untrained)
        same: dict[str, Any] | None = {"iteration": found.iteration}
    else:
        jax.config.update("jax_platforms", "cpu")
        check_served(config)
        found = explain_server(server.url, server.model)
        same = None if server.model is None else {"server": server.url, "model": server.model}
    path, played = workdir / "evaluation", None
    if same is not None:
        settings = _settings(config, split, k, same)
        path = path / _file_name(settings)
        played = read_played(path, settings)
    return [*found.sections, *explain_episodes(config, split, k, path, played)]


def _settings(config: Config, split: str, k: int, same: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides how an episode goes.

    Args:
      same: of the policy; see `PolicySource`.
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


def _choices(config: Config, given: argparse.Namespace) -> tuple[Config, str, int]:
    """The configuration as the flags have it, the split, and k."""
    split = config.evaluation.split if given.split is None else given.split
    k = config.evaluation.k if given.k is None else given.k
    if given.greedy:
        rollout = dataclasses.replace(config.rollout, top_k=1)
        config = dataclasses.replace(config, rollout=rollout)
        k = 1 if given.k is None else given.k
    if given.greedy and k > 1:
        print(
            f"--greedy: the {k} episodes of a task are alike, unless its environment is random.",
            file=sys.stderr,
        )
    if given.bfcl_results is not None and config.env.name != "bfcl":
        raise ValueError(
            f"--bfcl_results: got env {config.env.name!r}; allowed: config.env.name=bfcl."
        )
    return config, split, k


def _flags() -> Flags:
    flags = Flags("evaluate", __doc__)
    add_run_flags(flags)
    add_cluster_flags(flags)
    flags.switch("explain", EXPLAIN)
    flags.switch("untrained", "evaluate the policy that the configuration starts from.")
    flags.flag("split", "the split to evaluate; default: config.evaluation.split.")
    flags.flag(
        "k", "episodes per task; default: config.evaluation.k, and 1 with --greedy.", whole(1)
    )
    flags.switch("greedy", "always take the likeliest token.")
    flags.flag(
        "bfcl_results", "also write result files for `bfcl evaluate` into this folder.", path
    )
    flags.flag("json", "also write the metrics to this file.", path)
    flags.flag("server", "evaluate the policy that this server serves.")
    flags.flag("server_model", "what the server calls it; default: the only one that it lists.")
    flags.flag(
        "server_dialect",
        "vllm, sglang, or auto (default): by the owner of the model that the server reports.",
    )
    flags.switch(
        "server_seeded",
        "give each request a seed (default); vLLM on TPU refuses seeds.",
        default=None,
    )
    flags.flag(
        "server_timeout_s",
        "of a request (default: 600); retries as in config.env.retries.",
        positive,
    )
    return flags


def _server(given: argparse.Namespace) -> Server | None:
    """The server that is named, if one is."""
    said = {
        name: value
        for name in ("model", "dialect", "seeded", "timeout_s")
        if (value := vars(given)[f"server_{name}"]) is not None
    }
    if given.server is not None and given.untrained:
        raise ValueError("--untrained: got True; allowed: without --server, which has its policy.")
    if given.server is not None:
        return Server(given.server, **said)
    if said:
        raise ValueError(
            f"--server_{next(iter(said))}: got a value; allowed: none without --server."
        )
    return None


def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with sentence_errors():
        given = _flags().read(arguments[1:])
        server = _server(given)
    quiet_logs()
    with errors_end_at_once(), sentence_errors(), contextlib.ExitStack() as opened:
        workdir = given.workdir
        config = read_config(given)
        check_could_write(workdir)
        if server is None:
            prepare_xla()
            join_cluster(config, given)
        config, split, k = _choices(config, given)
        if server is None:
            check_config(config)
            if not given.untrained:
                check_trained(config, workdir)
        if given.explain:
            return print_explanation(_explain(config, given, server, split, k))
        check_writable(workdir)
        if given.json is not None:
            check_writable(given.json.parent, "--json")
        if server is None:
            own = own_policy(config, workdir, untrained=given.untrained)
            source = opened.enter_context(own)
        else:
            source = opened.enter_context(served_policy(config, workdir, server))
        engine, tokenizer, params, iteration, about, _ = source
        settings = _settings(config, split, k, source.same)
        path = workdir / "evaluation" / _file_name(settings)
        file = opened.enter_context(EpisodeFile(path, settings))
        pool = build.build_pool(config, engine.concurrency)
        opened.enter_context(contextlib.closing(pool))
        with _progress(config) as progress:
            progress.phase(f"evaluation of {split}")
            worker = RolloutWorker(
                engine, pool, tokenizer, config.env, config.rollout, watch=progress.watch
            )
            metrics = evaluate(
                config, worker, params, split=split, k=k, iteration=iteration, file=file
            )
        if jax.process_index() == 0:
            _report(config, given, file, about, metrics)


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
    config: Config,
    given: argparse.Namespace,
    file: EpisodeFile,
    about: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    """Prints what the evaluation came to, and writes what else was asked for."""
    print(f"{evaluation_table(metrics)}\n\nEvery episode: {file.path}")
    if given.bfcl_results is not None:
        environment = envs.make(config.env.name, **config.env.options)
        played = ((e.task_id, e.member, e.messages) for e in file.played.values())
        for command in export_results(environment, played, given.bfcl_results):
            print(command)
    if given.json is not None:
        numbers = {name: None if math.isnan(value) else value for name, value in metrics.items()}
        result = about | {"episodes": str(file.path)} | numbers
        given.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
