"""Evaluation: avg@k and pass@k of a policy on a split, with 95% intervals.

python -m seeupo_jax.evaluate --config=FILE.py --workdir=DIR [--split=test] [--k=4] [--json=OUT]
    [--server=http://HOST:PORT [--server_model=NAME] [--server_dialect=auto|vllm|sglang]
    [--server_seeded=True] [--server_timeout_s=600]]

The policy is the run's; with a server, the one that the server holds, whose tokenizer must be the
run's. Nothing is loaded or computed here then.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from seeupo_jax import build, envs
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.cli import parse_flags, read_config
from seeupo_jax.config import Config
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.errors import sentence_errors
from seeupo_jax.policy.tokenizer import Tokenizer
from seeupo_jax.policy.weights import read_tokenizer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine import Engine
from seeupo_jax.rollout.openai_server import OpenAIServer
from seeupo_jax.telemetry.statistics import evaluation_metrics

_SPLIT = flags.DEFINE_string("split", None, "Split to evaluate; default: config.evaluation.split.")
_K = flags.DEFINE_integer("k", None, "Episodes a task; default: config.evaluation.k.")
_JSON = flags.DEFINE_string("json", None, "Also write the metrics to this file.")
_SERVER = flags.DEFINE_string("server", None, "Play with the policy that this server holds.")
_SERVER_MODEL = flags.DEFINE_string(
    "server_model", None, "What the server calls it; default: the only model that it lists."
)
_SERVER_DIALECT = flags.DEFINE_string(
    "server_dialect", "auto", "vllm, sglang, or auto: by who the server says owns the model."
)
_SERVER_SEEDED = flags.DEFINE_bool(
    "server_seeded", True, "Give each request a seed; vLLM on TPU refuses seeds."
)
_SERVER_TIMEOUT_S = flags.DEFINE_float(
    "server_timeout_s", 600.0, "Of a request; tried again as config.env.retries says."
)
_OF_SERVER = (_SERVER_MODEL, _SERVER_DIALECT, _SERVER_SEEDED, _SERVER_TIMEOUT_S)

# Added to the iteration, so that an evaluation never samples with an iteration's random numbers.
_STREAM = 2**31


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
) -> dict[str, float]:
    """Plays the first `config.evaluation.tasks` tasks of a split k times each.

    Returns: `eval/avg@k` and `eval/pass@k` with `_low` and `_high`, of success (score 1) among the
      episodes whose environment did not fail; `eval_SPLIT/` for another split than the config's.
    """
    task_ids = envs.make(config.env.name, **config.env.options).task_ids(split)
    requests = group_requests(task_ids[: config.evaluation.tasks], k)
    collected = collect(
        engine,
        pool,
        tokenizer,
        params,
        requests,
        max_turns=config.rollout.max_turns,
        seed=config.seed,
        iteration=_STREAM + iteration,
        temperature=config.evaluation.temperature,
        deterministic=config.rollout.deterministic,
    )
    success = [np.nan if t.failed else float(t.info["score"] >= 1) for t in collected.trajectories]
    prefix = "eval" if split == config.evaluation.split else f"eval_{split}"
    return evaluation_metrics(prefix, np.array(success).reshape(-1, k))


class _Player(NamedTuple):
    """A policy that can be played with; `about` is what the JSON says of it."""

    engine: Engine
    tokenizer: Tokenizer
    params: Any
    iteration: int
    about: dict[str, Any]


@contextlib.contextmanager
def _own_policy(config: Config, workdir: Path) -> Iterator[_Player]:
    """The run's last checkpoint, or what it starts from, in our own engine."""
    if unused := [flag.name for flag in _OF_SERVER if flag.present]:
        raise ValueError(f"--{unused[0]}: got a value; allowed: none without --server.")
    build.check(config)
    made, params = build.load_policy(config, _folder(config, workdir))
    found = Checkpoints(workdir / "checkpoints", 1).restore({"params": params}, partial=True)
    iteration = 0
    if found is not None:
        iteration, state, _ = found
        params = state["params"]
    engine = build.build_engine(config, made)
    with jax.set_mesh(made.mesh):
        about = {"iteration": iteration}
        yield _Player(engine, made.tokenizer, made.whole(params), iteration, about)


@contextlib.contextmanager
def _served_policy(config: Config, workdir: Path) -> Iterator[_Player]:
    """What a server holds; at the end stderr has what the server cost, if it cost anything."""
    # The server may hold this machine's accelerator, and a TPU lets only one process in.
    jax.config.update("jax_platforms", "cpu")
    rollout, url = config.rollout, _SERVER.value
    if rollout.grammar is not None:
        raise ValueError(
            f"config.rollout.grammar: got {rollout.grammar!r}; allowed with --server: none, since a"
            " server is not told of it."
        )
    folder = _folder(config, workdir)
    tokenizer = read_tokenizer(folder, config.chat)
    if tokenizer is None:
        raise ValueError(f"{folder}: got no tokenizer; allowed: that of the model served.")
    open_at_once = rollout.concurrency
    if open_at_once is None:
        open_at_once = rollout.tasks * rollout.group_size
    engine = OpenAIServer(
        url,
        _SERVER_MODEL.value,
        concurrency=open_at_once,
        sampling=build.build_sampling(config, tokenizer),
        max_context=rollout.max_context,
        timeout_s=_SERVER_TIMEOUT_S.value,
        retries=config.env.retries,
        retry_wait_s=config.env.retry_wait_s,
        dialect=_SERVER_DIALECT.value,
        seeded=_SERVER_SEEDED.value,
    )
    with contextlib.closing(engine):
        yield _Player(engine, tokenizer, None, 0, {"server": url, "model": engine.model})
        usage = engine.usage()
    if any(usage.values()):
        print(
            f"{url}: requests repeated: {usage['server_retries']}; given up:"
            f" {usage['server_failures']}, whose episodes do not count.",
            file=sys.stderr,
        )


def _folder(config: Config, workdir: Path) -> str:
    folder = build.policy_folder(config, workdir)
    if folder is None:
        raise ValueError(f"--workdir: {workdir} holds no policy yet; run seeupo_jax.train first.")
    return folder


def main(_: Sequence[str]) -> None:
    with sentence_errors():
        config, workdir = read_config()
        split = config.evaluation.split if _SPLIT.value is None else _SPLIT.value
        k = config.evaluation.k if _K.value is None else _K.value
        policy = _own_policy if _SERVER.value is None else _served_policy
        with policy(config, workdir) as player:
            engine = player.engine
            with contextlib.closing(build.build_pool(config, engine.concurrency)) as pool:
                metrics = evaluate(
                    config,
                    engine,
                    pool,
                    player.tokenizer,
                    player.params,
                    split=split,
                    k=k,
                    iteration=player.iteration,
                )
    for name, value in metrics.items():
        print(f"{name} {value:.3f}")
    if _JSON.value is not None:
        Path(_JSON.value).write_text(json.dumps(player.about | metrics) + "\n")


if __name__ == "__main__":
    app.run(main, argv=parse_flags(sys.argv))
