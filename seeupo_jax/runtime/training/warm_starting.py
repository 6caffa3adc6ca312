"""A policy from demonstrations, where a run has none to start from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seeupo_jax import envs
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import Progress
from seeupo_jax.learner.warm_start import Batches, train_stage
from seeupo_jax.parallel.distributed import agree
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy import save_pretrained
from seeupo_jax.runtime import build
from seeupo_jax.runtime.policy_folder import starting_folder

_AGREED = 10  # steps between two times that processes ask each other whether to stop


def start_policy(
    config: Config, workdir: Path, progress: Progress, stop: Callable[[], bool]
) -> str:
    """The folder of the policy that training starts from, made by a warm start if need be.

    Args:
      stop: whether this process was asked to stop; the others may not know.

    Raises:
      Stopped: a process was, in a warm start; nothing of it is kept.
      ValueError: only some processes see it.
    """
    if not agree([starting_folder(config, workdir) is not None])[0]:
        _warm_start(config, workdir, progress, stop)
    folder = starting_folder(config, workdir)
    if agree([folder is None])[0]:
        raise ValueError(
            f"--workdir: got {workdir}, whose warm_start not all processes see; allowed: a folder"
            " that all of them share."
        )
    _keep_output(config, folder)
    return folder


def _keep_output(config: Config, folder: str) -> None:
    """Copies the policy that a warm start has made to `config.warm_start.output`, once."""
    output = config.warm_start.output
    if output is None or not config.warm_start.stages or jax.process_index() != 0:
        return
    if not Path(output).exists():
        unfinished = Path(f"{output}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder, unfinished)
        unfinished.rename(output)


def _warm_start(
    config: Config, workdir: Path, progress: Progress, stop: Callable[[], bool]
) -> None:
    """Trains a policy on demonstrations and leaves it in WORKDIR/warm_start as a model folder."""
    environment = envs.make(config.env.name, **config.env.options)
    stages = config.warm_start.stages
    progress.phase("warm start: demonstrations")
    load = environment.demonstrations
    demonstrations = [load("train", **stage.demonstrations) for stage in stages]
    if config.model.path is None:
        policy, params = build.new_policy(config, demonstrations[-1])
    else:
        policy, params = build.load_policy(config, config.model.path)
    shapes = build.build_shapes(config, policy.mesh, config.warm_start.batch_size)
    with jax.set_mesh(policy.mesh):
        for index, stage in enumerate(stages):
            progress.phase(f"warm start {index + 1}/{len(stages)}")
            batches = Batches(
                demonstrations[index],
                policy.tokenizer,
                shapes,
                config.warm_start.batch_size,
                seed=config.seed + index,
            )

            def show(
                done: int, loss: Any, total: int = stage.steps, stage_number: int = index + 1
            ) -> None:
                if done % 100 == 0 or done == total:
                    progress.step(done, total, f"loss {loss():.4f}")
                # Each step may be another program. Several processes wait for each other to agree.
                if (jax.process_count() == 1 or done % _AGREED == 0) and agree([stop()])[0]:
                    raise Stopped(f"in the warm start, {done} steps into stage {stage_number}")

            params = train_stage(policy.network, params, stage, batches, on_step=show)
            if batches.counts["cut"]:
                limit = shapes.lengths[-1]
                progress.log(f"{batches.counts['cut']} demonstrations were cut at {limit} tokens")
    unfinished = workdir / "warm_start.unfinished"
    if jax.process_index() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    save_pretrained(policy.network.bind(params), unfinished, policy.tokenizer)
    if jax.process_index() == 0:
        unfinished.rename(workdir / "warm_start")
    agree([0])  # the others look for it next
