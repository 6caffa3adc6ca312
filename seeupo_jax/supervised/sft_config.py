"""The parts of supervised training, from the configuration of any training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.schema import Config, recipe_fields
from seeupo_jax.learner.imitation.imitation_step import Imitation
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.learner.state_layout import check_offload
from seeupo_jax.metrics.trackers import check_trackers
from seeupo_jax.parallel.mesh import make_mesh, sharding
from seeupo_jax.policy.lora import turn_folders
from seeupo_jax.policy_io import build
from seeupo_jax.supervised.conversation_sources import KINDS
from seeupo_jax.training.build_learner import new_state
from seeupo_jax.training.checks import check_model, check_optimizer
from seeupo_jax.types import TrainState


def supervised_config(config: Config, steps: int) -> Config:
    """The configuration of a run of supervised steps: an iteration is one of them.

    There is no algorithm, and so no critic, no scorer and no reference policy.
    """
    algorithm = Algorithm(**{**recipe_fields("reinforce"), "kl_coef": 0.0})
    return dataclasses.replace(
        config,
        iterations=steps,
        recipe="reinforce",
        algorithm=algorithm,
        rewards=(),
        _made_of="reinforce",
    )


def count_steps(config: Config, conversations: int) -> int:
    """Optimizer steps of a run on so many conversations."""
    sft = config.sft
    if sft.steps is not None:
        return sft.steps
    return -(-conversations * sft.epochs // sft.batch_size)


def check_sft(config: Config) -> None:
    """Finds what is wrong with a configuration before conversations are read.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    sft = config.sft
    if sft.data is None:
        raise ValueError(f"--data: got none; allowed: {KINDS}.")
    if config.warm_start.stages:
        raise ValueError(
            f"config.warm_start.stages: got {len(config.warm_start.stages)}; allowed for sft: none,"
            " since it is a warm start itself."
        )
    if config.profile.steps:
        raise ValueError(
            f"config.profile.steps: got {config.profile.steps}; allowed for sft: none, since it"
            " writes no traces."
        )
    if config.model.path is None:
        raise ValueError(
            "config.model.path: got none; allowed for sft: a model folder, a .gguf file or"
            " package:NAME."
        )
    if config.lora.turn_adapters:
        raise ValueError(
            f"config.lora.per_turn: got {config.lora.per_turn}; allowed for sft: 0 or 1, whose"
            " adapters each turn's can begin with, as config.lora.path of a training."
        )
    path = config.lora.path
    if path is not None and (folders := turn_folders(Path(path))):
        raise ValueError(
            f"config.lora.path: got {path!r}, which has {len(folders)} adapters per turn; allowed:"
            f" for sft those of one policy, such as {folders[0]}."
        )
    if sft.patience is not None and not sft.held_out and sft.held_out_data is None:
        raise ValueError(
            f"config.sft.patience: got {sft.patience}; allowed: none where config.sft.held_out=0"
            " and no held_out_data leave no loss to be measured."
        )
    mesh = make_mesh(config.mesh)
    check_offload(config.offload, mesh.local_devices[0])
    check_trackers(config.telemetry.trackers)
    build.check_network(supervised_config(config, 1), mesh)
    check_model(config, mesh)
    build.check_trainable(config)


def check_steps(config: Config, steps: int) -> None:
    """ValueError where the optimizer and its schedule do not go with so many steps."""
    Schedule(config.optimizer, steps)
    make_optimizer(config.optimizer, total_steps=steps)
    check_optimizer(config, make_mesh(config.mesh), steps)


def build_imitation(
    config: Config, policy: build.Policy, optimizer: optax.GradientTransformation, params: Any
) -> tuple[Imitation, TrainState]:
    """The programs, and the state before the first step.

    Args:
      config: of `supervised_config`. params: those of the policy that train.
    """
    state = new_state(config, policy, optimizer, params)
    imitation = Imitation(
        policy.network,
        optimizer,
        policy.frozen,
        config.optimizer.ema,
        config.experts,
        jax.tree.map(lambda leaf: leaf.sharding, state),
        sharding(policy.mesh, ()),
    )
    return imitation, state
