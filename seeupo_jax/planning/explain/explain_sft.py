"""The explanation of a supervised fine-tuning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import jax

from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.parallel.device_memory import device_bytes, format_bytes, total_memory
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.explain.explain_files import checkpoint_lines, file_lines
from seeupo_jax.planning.explain.explain_parts import model_lines
from seeupo_jax.planning.explain.explanation import Section, listed
from seeupo_jax.planning.remat import choose_remat, plan_remat
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.resume_check import SUPERVISED
from seeupo_jax.policy_io.resuming import check_no_lost_checkpoints, resume_message
from seeupo_jax.supervised.data import SftData, load_data
from seeupo_jax.supervised.sft_checkpoints import check_same_sft
from seeupo_jax.supervised.sft_config import (
    build_imitation,
    check_steps,
    count_steps,
    supervised_config,
)
from seeupo_jax.types import TrainState


class AbstractSft(NamedTuple):
    """A run's policy and state, with shapes in place of arrays."""

    config: Config
    policy: build.Policy
    state: TrainState


def explain_sft(config: Config, workdir: Path) -> list[Section]:
    """The explanation of `seeupo_jax.sft` with a configuration that passes every check.

    Conversations are read, tokenised and checked, as the run would.

    Raises:
      ValueError: the errors that the run would raise.
    """
    with ProgressDisplay(0, "plain", shown=False) as quiet:
        data = load_data(config, quiet)
    steps = count_steps(config, len(data.training))
    check_steps(config, steps)
    run, mesh = _abstract(config, steps), make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    where = f"{mesh.size} x {device.platform} ({device.device_kind}): {axes or 'one device'}"
    shapes = build.build_shapes(run.config, mesh, config.sft.batch_size)
    rows = f"rows of {listed(shapes.lengths)} tokens, {shapes.rows} a microbatch"
    kinds = "a step" if data.held_out is None else "a step and a loss"
    return [
        ("model", model_lines(run, config.model.path)),
        ("mesh", [where]),
        ("memory", _memory(run, mesh)),
        ("data", [f"{config.sft.data}: {line}" for line in data.lines()]),
        ("programs", [f"{kinds} for each length that is needed", rows]),
        ("optimizer", _optimizer(config, steps)),
        ("steps", _steps(config, data, steps, _start_lines(run, workdir, data))),
        ("evaluations", _evaluations(config, data)),
        ("checkpoints", checkpoint_lines(config, workdir, run.state, _saved(config, data))),
        ("files", file_lines(config, workdir, {})),
    ]


def _abstract(config: Config, steps: int) -> AbstractSft:
    config, _ = choose_remat(supervised_config(config, steps))
    policy, params = build.abstract_policy(config, make_mesh(config.mesh))
    optimizer = make_optimizer(config.optimizer, total_steps=steps)
    _, state = build_imitation(config, policy, optimizer, params)
    return AbstractSft(config, policy, state)


def _memory(run: AbstractSft, mesh: jax.sharding.Mesh) -> list[str]:
    """The memory of one device during a step, by part."""
    remat = plan_remat(run.config, mesh, total_memory(mesh.local_devices[0]))
    sizes = {
        "parameters that train": device_bytes(run.state.params),
        "optimizer": device_bytes(run.state.opt_state),
        "parameters that do not train": device_bytes(run.policy.frozen),
        "average of the parameters": device_bytes(run.state.ema),
    }
    name = remat.same_as(run.policy.network.arch.remat)
    sizes["gradients, two copies at most"] = 2 * sizes["parameters that train"]
    sizes[f"activations of a microbatch, remat {name}"] = remat.activations[name]
    lines = [f"{format_bytes(size):>12}  {label}" for label, size in sizes.items() if size]
    allowed = "" if remat.allowed is None else f", of {format_bytes(remat.allowed)}"
    return [
        "of one device, by estimate:",
        *lines,
        f"{format_bytes(sum(sizes.values())):>12}  a step{allowed}",
    ]


def _optimizer(config: Config, steps: int) -> list[str]:
    optimizer, schedule = config.optimizer, Schedule(config.optimizer, steps)
    shown = sorted({1, *(math.ceil(part * steps) for part in (0.25, 0.5, 0.75, 1))})
    rates = ", ".join(f"{i}: {schedule.rate(i, i - 1):.3g}" for i in shown if 0 < i <= steps)
    average = "" if optimizer.ema is None else f", average with decay {optimizer.ema:g} per step"
    return [f"{optimizer.name}, {optimizer.schedule}{average}", f"learning rate by step: {rates}"]


def _start_lines(run: AbstractSft, workdir: Path, data: SftData) -> list[str]:
    """The point where a run in this folder would begin."""
    passed: list[str] = []
    folder = find_directory(run.config.checkpoint, workdir)
    files = Checkpoints(folder, 1, log=passed.append)
    noted = files.newest({}, partial=True, optional=True)
    if noted is not None:
        check_same_sft(run.config, data.fingerprint, noted[1])
    newest = files.newest(run.state)
    files.close()
    if newest is None:
        check_no_lost_checkpoints(run.config, workdir)
        return [f"from the start: {folder} has no checkpoint", *passed]
    best = newest[1][SUPERVISED]["best"]
    lowest = "" if best is None else f"; the lowest held-out loss is {best[1]:.4f} at {best[0]}"
    line = resume_message("step", newest[0], run.config.iterations)
    return [f"{line}, from {folder}{lowest}", *passed]


def _steps(config: Config, data: SftData, steps: int, begins: list[str]) -> list[str]:
    sft = config.sft
    epochs = steps * sft.batch_size / len(data.training)
    return [
        f"{steps:,} of {sft.batch_size} conversations: {epochs:.2f} epochs; loss on"
        f" {sft.train_on} assistant messages",
        *begins,
    ]


def _evaluations(config: Config, data: SftData) -> list[str]:
    sft = config.sft
    if data.held_out is None:
        return ["none: nothing is held out"]
    every = f", every {sft.eval_every} steps" if sft.eval_every else ""
    ends = "" if sft.patience is None else f"; {sft.patience} without a lower loss end the run"
    return [f"loss of {len(data.held_out):,} conversations before, after{every}{ends}"]


def _saved(config: Config, data: SftData) -> str:
    every = f"every {config.checkpoint.every} steps, " if config.checkpoint.every else ""
    compared = data.held_out is not None and config.checkpoint.keep_best
    return f"{every}at the end{' and at the lowest held-out loss so far' if compared else ''}"
