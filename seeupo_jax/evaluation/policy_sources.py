"""A policy that an evaluation plays with, and the run's own; see `served_policy` for servers'."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.configuration.flags import command_name
from seeupo_jax.configuration.schema import Config
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.policy_io.policy_folder import (
    restore_policy,
    saved_weights,
    starting_folder,
)
from seeupo_jax.rollout.engine.protocol import Engine


class PolicySource(NamedTuple):
    """A policy to be evaluated.

    about: its description in the JSON. same: values that must not change while its episodes are
    played; a served policy's has a fingerprint.
    policy: whose parameters these are; None: a server's.
    """

    engine: Engine
    tokenizer: Tokenizer
    params: Any
    iteration: int
    about: dict[str, Any]
    same: dict[str, Any]
    policy: build.Policy | None = None


def about_policy(config: Config, iteration: int, part: str | None) -> dict[str, Any]:
    """Returns what identifies a run's own policy in the JSON and in the names of episode files.

    Args:
      part: of `saved_weights`; None: what the run starts from.
    """
    about: dict[str, Any] = {"iteration": iteration}
    if part is not None and config.optimizer.ema is not None:
        about["weights"] = {"ema": "ema", "params": "trained"}[part]
    return about


@contextlib.contextmanager
def run_policy(
    config: Config,
    workdir: Path,
    *,
    untrained: bool = False,
    weights: str | None = None,
    step: str | None = None,
    per_turn: bool = False,
) -> Iterator[PolicySource]:
    """A run's checkpoint in our own engine; what it starts from, where that is meant.

    Args:
      weights: as of `saved_weights`. step: as of `find_step`. per_turn: as of `SlotEngine`.
    """
    part = saved_weights(config, weights)
    made, params = build.load_policy(config, starting_policy_folder(config, workdir))
    restored, iteration = None, 0
    if not untrained:
        restored = restore_policy(config, workdir, step, {part: params})
    if restored is not None:
        iteration, params = restored[0], restored[1][part]
    engine = build_engine(config, made, per_turn=per_turn)
    with jax.set_mesh(made.mesh):
        about = about_policy(config, iteration, None if untrained else part)
        merged = made.merged(params)
        same = about | {"policy": checksum(merged), "config.model.dtype": config.model.dtype}
        given = [merged]
        del params, merged, restored  # a server that gets other weights lets go of these
        yield PolicySource(engine, made.tokenizer, given.pop(), iteration, about, same, made)


def starting_policy_folder(config: Config, workdir: Path) -> str:
    """The folder of the policy that training starts from; ValueError: it has still to be made."""
    folder = starting_folder(config, workdir)
    if folder is None:
        command = command_name("train")
        raise ValueError(f"--workdir: {workdir} holds no policy yet; run {command} first.")
    return folder
