"""Policies that an evaluation can play with: the run's own, and one that a server holds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from seeupo_jax import build
from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.checks import check_config
from seeupo_jax.config import Config
from seeupo_jax.policy.tokenizer import Tokenizer
from seeupo_jax.policy.weights import read_tokenizer
from seeupo_jax.rollout.engine import Engine
from seeupo_jax.rollout.openai_server import OpenAIServer
from seeupo_jax.telemetry.checksum import checksum

SERVER = flags.DEFINE_string("server", None, "Play with the policy that this server holds.")
SERVER_MODEL = flags.DEFINE_string(
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
_OF_SERVER = (SERVER_MODEL, _SERVER_DIALECT, _SERVER_SEEDED, _SERVER_TIMEOUT_S)


class Player(NamedTuple):
    """A policy that can be played with.

    about: what the JSON says of it. same: what must not change while its episodes are played.
    """

    engine: Engine
    tokenizer: Tokenizer
    params: Any
    iteration: int
    about: dict[str, Any]
    same: dict[str, Any]


@contextlib.contextmanager
def own_policy(config: Config, workdir: Path) -> Iterator[Player]:
    """The run's last checkpoint, or what it starts from, in our own engine."""
    check_own(config)
    made, params = build.load_policy(config, policy_folder(config, workdir))
    files = Checkpoints(find_directory(config.checkpoint, workdir), 1)
    found = files.restore({"params": params}, partial=True)
    iteration = 0
    if found is not None:
        iteration, state, _ = found
        params = state["params"]
    engine = build.build_engine(config, made)
    with jax.set_mesh(made.mesh):
        about, whole = {"iteration": iteration}, made.whole(params)
        same = about | {"policy": checksum(whole), "config.model.dtype": config.model.dtype}
        yield Player(engine, made.tokenizer, whole, iteration, about, same)


@contextlib.contextmanager
def served_policy(config: Config, workdir: Path) -> Iterator[Player]:
    """What a server holds; at the end stderr has what the server cost, if it cost anything."""
    # The server may hold this machine's accelerator, and a TPU lets only one process in.
    jax.config.update("jax_platforms", "cpu")
    rollout, url = config.rollout, SERVER.value
    check_served(config)
    folder = policy_folder(config, workdir)
    tokenizer = read_tokenizer(folder, config.chat)
    if tokenizer is None:
        raise ValueError(f"{folder}: got no tokenizer; allowed: that of the model served.")
    open_at_once = rollout.concurrency
    if open_at_once is None:
        open_at_once = rollout.tasks * rollout.group_size
    engine = OpenAIServer(
        url,
        SERVER_MODEL.value,
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
        about = {"server": url, "model": engine.model}
        yield Player(engine, tokenizer, None, 0, about, about)
        usage = engine.usage()
    if any(usage.values()):
        print(
            f"{url}: requests repeated: {usage['server_retries']}; given up:"
            f" {usage['server_failures']}, whose episodes do not count.",
            file=sys.stderr,
        )


def check_own(config: Config) -> None:
    if unused := [flag.name for flag in _OF_SERVER if flag.present]:
        raise ValueError(f"--{unused[0]}: got a value; allowed: none without --server.")
    check_config(config)


def check_served(config: Config) -> None:
    if config.rollout.grammar is not None:
        raise ValueError(
            f"config.rollout.grammar: got {config.rollout.grammar!r}; allowed with --server: none,"
            " since a server is not told of it."
        )


def policy_folder(config: Config, workdir: Path) -> str:
    folder = build.policy_folder(config, workdir)
    if folder is None:
        raise ValueError(f"--workdir: {workdir} holds no policy yet; run seeupo_jax.train first.")
    return folder
