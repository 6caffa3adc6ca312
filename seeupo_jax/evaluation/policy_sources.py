"""Policies that an evaluation can play with: the run's own, and one that a server holds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.configuration.flags import command_name
from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.episode_host import check_host
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine, build_sampling
from seeupo_jax.policy_io.policy_folder import (
    restore_policy,
    saved_weights,
    starting_folder,
)
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.trajectories.policy_fingerprint import FINGERPRINT, fingerprint

_LOGGER = logging.getLogger(__name__)
_QUESTION = "Who are you, and what can you do?"  # its likeliest answer tells served policies apart


@dataclass(frozen=True)
class Server:
    """Where a policy is served.

    model: what the server calls it; None: the only one that it lists.
    dialect: vllm, sglang, or auto: by who the server says owns the model.
    seeded: give each request a seed.
    timeout_s: of a request.
    """

    url: str
    model: str | None = None
    dialect: str = "auto"
    seeded: bool = True
    timeout_s: float = 600.0


class PolicySource(NamedTuple):
    """A policy to be evaluated.

    about: its description in the JSON. same: values that must not change while its episodes are
    played; a served policy's has a fingerprint.
    """

    engine: Engine
    tokenizer: Tokenizer
    params: Any
    iteration: int
    about: dict[str, Any]
    same: dict[str, Any]


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
        iteration, state, _ = restored
        params = state[part]
    engine = build_engine(config, made, per_turn=per_turn)
    with jax.set_mesh(made.mesh):
        about = about_policy(config, iteration, None if untrained else part)
        merged = made.merged(params)
        same = about | {"policy": checksum(merged), "config.model.dtype": config.model.dtype}
        yield PolicySource(engine, made.tokenizer, merged, iteration, about, same)


@contextlib.contextmanager
def served_policy(config: Config, workdir: Path, server: Server) -> Iterator[PolicySource]:
    """The policy at a server; at the end its cost is logged, if there was any."""
    rollout, url = config.rollout, server.url
    check_served(config)
    folder = starting_policy_folder(config, workdir)
    tokenizer = read_tokenizer(folder, config.chat)
    if tokenizer is None:
        raise ValueError(f"{folder}: got no tokenizer; allowed: that of the model served.")
    engine = OpenAIServer(
        url,
        server.model,
        concurrency=rollout.open_at_once,
        sampling=build_sampling(config, tokenizer),
        max_context=rollout.max_context,
        timeout_s=server.timeout_s,
        retries=config.env.retries,
        retry_wait_s=config.env.retry_wait_s,
        dialect=server.dialect,
        seeded=server.seeded,
        prompt=_question(tokenizer),
    )
    with contextlib.closing(engine):
        about = {"server": url, "model": engine.model}
        tokens, logp = engine.trial
        same = about | {FINGERPRINT: fingerprint(tokenizer.text(tokens), tokens, logp)}
        yield PolicySource(engine, tokenizer, None, 0, about, same)
        usage = engine.usage()
    if any(usage.values()):
        _LOGGER.warning(
            f"{url}: requests repeated: {usage['server_retries']}; given up:"
            f" {usage['server_failures']}, whose episodes do not count."
        )


def _question(tokenizer: Tokenizer) -> Sequence[int]:
    """The prompt of a served policy's fingerprint; empty where the template refuses it."""
    try:
        return list(tokenizer.begin([{"role": "user", "content": _QUESTION}], ()).tokens)
    except Exception:  # a template may raise anything
        return ()


def check_served(config: Config) -> None:
    """ValueError: a setting that is not sent to servers, or what `check_host` refuses."""
    if config.rollout.grammar is not None:
        raise ValueError(
            f"config.rollout.grammar: got {config.rollout.grammar!r}; allowed with --server: none,"
            " since it is not sent to a server."
        )
    if config.agent.constraints:
        raise ValueError(
            "config.agent.constraints: got True; allowed with --server: False, since constraints"
            " are not sent to a server."
        )
    check_host(config)


def starting_policy_folder(config: Config, workdir: Path) -> str:
    """The folder of the policy that training starts from; ValueError: it has still to be made."""
    folder = starting_folder(config, workdir)
    if folder is None:
        command = command_name("train")
        raise ValueError(f"--workdir: {workdir} holds no policy yet; run {command} first.")
    return folder
