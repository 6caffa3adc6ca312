"""A policy from demonstrations, where a run has none to start from."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from seeupo_jax.checkpoint.process_sync import on_primary
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.supervised_schema import WarmStartStage
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.durable_files import make_folder
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.imitation.action_segments import Segments
from seeupo_jax.learner.imitation.imitation_batches import Batches
from seeupo_jax.parallel.distributed import max_over_processes
from seeupo_jax.parallel.mesh import training_mesh
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Routing
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import replace_folder, starting_folder
from seeupo_jax.policy_io.resuming import WARM_START_FILE, check_same_warm_start, warm_start_note
from seeupo_jax.supervised.conversation_sources import (
    DEMONSTRATIONS,
    ToolCallsAsText,
    format_of_listing,
    open_conversations,
)
from seeupo_jax.supervised.data import tokenize
from seeupo_jax.supervised.sft_config import build_imitation, supervised_config

BLOCK = 16  # batches sorted by length together, as for the shipped policies
_SHOWN_EVERY_S = 5.0  # to give the loss, a step has to wait for the device
_AGREED = 10  # steps between two times that processes ask each other whether to stop


def start_policy(
    config: Config, workdir: Path, progress: ProgressDisplay, stop: Callable[[], bool]
) -> str:
    """The folder of the policy that training starts from, made by a warm start if need be.

    Args:
      stop: whether this process was asked to stop; the others may not know.

    Raises:
      Stopped: a process was asked to stop in a warm start, of which nothing is kept.
      ValueError: only some processes see it, or it was made of something else.
    """
    if max_over_processes([starting_folder(config, workdir) is not None])[0]:
        on_primary(lambda: check_same_warm_start(config, workdir))
    else:
        _warm_start(config, workdir, progress, stop)
    folder = starting_folder(config, workdir)
    if max_over_processes([folder is None])[0]:
        raise ValueError(
            f"--workdir: got {workdir}, whose warm_start not all processes see; allowed: a folder"
            " that all of them share."
        )
    _keep_output(config, folder)
    return folder


def _keep_output(config: Config, folder: str) -> None:
    """Copies the policy that a warm start has made to `config.warm_start.output`, once."""
    if config.warm_start.output is None or not config.warm_start.stages:
        return
    output = Path(config.warm_start.output)

    def copy(unfinished: Path) -> None:
        if jax.process_index() == 0:
            note = shutil.ignore_patterns(WARM_START_FILE)  # which is of this workdir
            make_folder(unfinished)
            shutil.copytree(folder, unfinished, ignore=note, dirs_exist_ok=True)

    if on_primary(lambda: not output.exists() or not any(output.iterdir())):
        replace_folder(output, copy)


def _warm_start(
    config: Config, workdir: Path, progress: ProgressDisplay, stop: Callable[[], bool]
) -> None:
    """Trains a policy on demonstrations and leaves it in WORKDIR/warm_start as a model folder."""
    stages, size = config.warm_start.stages, config.warm_start.batch_size
    mesh = training_mesh(config)
    progress.phase("warm start: demonstrations")
    sources = [
        open_conversations(
            config,
            DEMONSTRATIONS,
            split="train",
            options=stage.demonstrations,
            field=f"config.warm_start.stages[{index}]",
        )
        for index, stage in enumerate(stages)
    ]
    if config.model.path is None:
        texts = ToolCallsAsText(sources[-1], format_of_listing(config.chat.tools))
        policy, params = build.initial_policy(config, texts, mesh)
    else:
        policy, params = build.load_policy(config, config.model.path, mesh)
    shapes = build.build_shapes(config, policy.mesh, size)
    with jax.set_mesh(policy.mesh):
        for index, stage in enumerate(stages):
            progress.phase(f"warm start {index + 1}/{len(stages)}")
            shown = tokenize(sources[index], policy.tokenizer, limit=shapes.lengths[-1])
            routing = policy.network.arch.routing
            batches = stage_batches(config, index, shown, shapes, routing)
            next_shown = time.monotonic()

            def show(
                done: int, loss: Any, total: int = stage.steps, stage_number: int = index + 1
            ) -> None:
                nonlocal next_shown
                if done == total or time.monotonic() >= next_shown:
                    progress.step(done, total, f"loss {loss():.4f}")
                    next_shown = time.monotonic() + _SHOWN_EVERY_S
                # Each step may be another program. Several processes wait for each other to agree.
                if (jax.process_count() == 1 or done % _AGREED == 0) and max_over_processes(
                    [stop()]
                )[0]:
                    raise Stopped(f"in the warm start, {done} steps into stage {stage_number}")

            params = train_stage(config, policy, params, stage, batches, on_step=show)
            if shown.counts["cut"]:
                progress.log(
                    f"{shown.counts['cut']} demonstrations were cut at {shown.limit} tokens"
                )
    model, note = policy.network.bind(policy.merged(params)), warm_start_note(config)

    def write(unfinished: Path) -> None:
        save_pretrained(model, unfinished, policy.tokenizer)
        if jax.process_index() == 0:
            text = json.dumps(note, indent=1)
            (unfinished / WARM_START_FILE).write_text(text, encoding="utf-8")

    replace_folder(workdir / "warm_start", write)


def stage_batches(
    config: Config,
    index: int,
    shown: Sequence[Segments],
    shapes: Shapes,
    routing: Routing | None = None,
) -> Batches:
    """Batches of a stage's demonstrations, in another order than those of the other stages.

    Args:
      index: of the stage, from 0. routing: as of `Batches`.
    """
    seed = config.seed + index
    size = config.warm_start.batch_size
    return Batches(shown, shapes, size, seed=seed, block=BLOCK, routing=routing)


def stage_optimizer(stage: WarmStartStage) -> optax.GradientTransformation:
    """AdamW with a short rise and a cosine fall to a twentieth of the learning rate."""
    rise = max(1, min(200, stage.steps // 10))
    peak = stage.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, rise, stage.steps, peak / 20)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train_stage(
    config: Config,
    policy: build.Policy,
    params: Any,
    stage: WarmStartStage,
    batches: Batches,
    *,
    on_step: Callable[[int, Callable[[], float]], None],
) -> Any:
    """Runs one stage and returns the parameters.

    Args:
      on_step: called after every step with the steps done and a function that gives the loss.
    """
    optimizer = stage_optimizer(stage)
    plain = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema=None))
    plain = supervised_config(plain, stage.steps)
    imitation, state = build_imitation(plain, policy, optimizer, params)
    for step, batch in zip(range(stage.steps), batches, strict=False):
        state, metrics = imitation.step(state, batch.rows)
        on_step(step + 1, lambda loss=metrics["loss"]: float(loss))
    return state.params
