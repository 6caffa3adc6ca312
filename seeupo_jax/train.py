"""Training: a warm start where there is no policy yet, then SeeUPO.

    python -m seeupo_jax.train --config=FILE.py [--config.FIELD=VALUE ...] --workdir=DIR

A run that was stopped goes on from its last checkpoint, to the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app

from seeupo_jax import build
from seeupo_jax.cli import parse_flags, read_config, use_compilation_cache
from seeupo_jax.config import Config
from seeupo_jax.errors import sentence_errors
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.run import Run, warm_start
from seeupo_jax.telemetry.progress import Progress
from seeupo_jax.telemetry.report import learning_curve, print_summary
from seeupo_jax.types import TrainState


def train(config: Config, workdir: Path) -> None:
    """Runs a whole training, or what is left of it."""
    with Progress(config.iterations, display=config.telemetry.display) as progress:
        if build.policy_folder(config, workdir) is None:
            warm_start(config, workdir, progress)
        with sentence_errors():
            policy, params = build.load_policy(config, build.policy_folder(config, workdir))
            run = Run(config, workdir, progress, policy, params)
            state, done = run.restore()
        with jax.set_mesh(policy.mesh), run:
            iterate(run, state, done)
    learning_curve(workdir, split=config.evaluation.split)
    print_summary(workdir, split=config.evaluation.split)


def iterate(run: Run, state: TrainState, done: int) -> None:
    """Rollout, sweep, evaluation and checkpoint, iteration after iteration."""
    config = run.config
    if done < config.iterations:
        state = run.compile(state)
    if done == 0:
        run.evaluate(state, 0)
    for iteration in range(done + 1, config.iterations + 1):
        with run.phase("rollout"):
            collected = run.rollout(iteration, state)
        with run.phase("sweep"):
            state, metrics = sweep(
                run.learner, state, run.ref_params, collected.trajectories, iteration=iteration
            )
        run.record(iteration, state, collected, metrics)
        if run.due(iteration, config.evaluation.every):
            run.evaluate(state, iteration)
        if run.due(iteration, config.checkpoint.every):
            run.save(iteration, state)
    if config.checkpoint.export:
        run.export(state)


def main(_: Sequence[str]) -> None:
    use_compilation_cache()
    with sentence_errors():
        config, workdir = read_config()
        build.check(config)
    train(config, workdir)


if __name__ == "__main__":
    app.run(main, argv=parse_flags(sys.argv))
