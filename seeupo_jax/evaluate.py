"""Evaluation: avg@k and pass@k of a policy on a split, with 95% intervals.

python -m seeupo_jax.evaluate --config=FILE.py --workdir=DIR [--split=test] [--k=4] [--json=OUT]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from seeupo_jax import build, envs
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.cli import parse_flags, read_config, sentence_errors
from seeupo_jax.config import Config
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.policy.tokenizer import Tokenizer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine import Engine
from seeupo_jax.telemetry.statistics import evaluation_metrics

_SPLIT = flags.DEFINE_string("split", None, "Split to evaluate; default: config.evaluation.split.")
_K = flags.DEFINE_integer("k", None, "Episodes a task; default: config.evaluation.k.")
_JSON = flags.DEFINE_string("json", None, "Also write the metrics to this file.")

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
    )
    success = [np.nan if t.failed else float(t.info["score"] >= 1) for t in collected.trajectories]
    prefix = "eval" if split == config.evaluation.split else f"eval_{split}"
    return evaluation_metrics(prefix, np.array(success).reshape(-1, k))


def main(_: Sequence[str]) -> None:
    with sentence_errors():
        config, workdir = read_config()
        build.check(config)
        folder = build.policy_folder(config, workdir)
        if folder is None:
            raise ValueError(
                f"--workdir: {workdir} holds no policy yet; run seeupo_jax.train first."
            )
        made, params = build.load_policy(config, folder)
        found = Checkpoints(workdir / "checkpoints", 1).restore({"params": params}, partial=True)
        iteration = 0
        if found is not None:
            iteration, state, _ = found
            params = state["params"]
        split = config.evaluation.split if _SPLIT.value is None else _SPLIT.value
        k = config.evaluation.k if _K.value is None else _K.value
        pool = build.build_pool(config)
        with jax.set_mesh(made.mesh):
            engine = build.build_engine(config, made, temperature=config.evaluation.temperature)
            metrics = evaluate(
                config,
                engine,
                pool,
                made.tokenizer,
                made.whole(params),
                split=split,
                k=k,
                iteration=iteration,
            )
        pool.close()
    for name, value in metrics.items():
        print(f"{name} {value:.3f}")
    if _JSON.value is not None:
        Path(_JSON.value).write_text(json.dumps({"iteration": iteration, **metrics}) + "\n")


if __name__ == "__main__":
    app.run(main, argv=parse_flags(sys.argv))
