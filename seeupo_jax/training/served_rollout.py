"""The engine of a run whose servers sample: `rollout.engine=openai`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.agents.action_client import ActionClient, ServerRequests
from seeupo_jax.agents.server_pool import PublishedFolder, ServerPool
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_sampling
from seeupo_jax.policy_io.policy_folder import publish_policy
from seeupo_jax.types import UNKNOWN_VERSION

FOLDER = "served_weights"  # in the workdir: the versions that servers read


def build_server_pool(
    config: Config, workdir: Path, policy: build.Policy, log: Callable[[str], None]
) -> ServerPool:
    """The servers of a run, each of which is tried.

    One that does not answer is left out until it does, at an update.

    Raises:
      ValueError: none answers, or the run has several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"config.rollout.engine: got openai in {jax.process_count()} processes; allowed: one"
            " process."
        )
    rollout = config.rollout
    sampling = build_sampling(config, policy.tokenizer)
    requests = ServerRequests(
        rollout.server_timeout_s,
        config.env.retries,
        config.env.retry_wait_s,
        dialect=rollout.server_dialect,
    )

    def connect(url: str) -> ActionClient:
        return ActionClient(
            url,
            rollout.server_model,
            requests,
            connections=rollout.open_at_once,
            sampling=sampling,
            max_context=rollout.max_context,
        )

    publish = _Publisher(config, workdir / FOLDER, policy)
    return ServerPool(
        rollout.servers,
        connect,
        publish,
        log,
        concurrency=rollout.open_at_once,
        sampling=sampling,
        max_context=rollout.max_context,
    )


class _Publisher:
    """Writes versions of a policy where servers read them.

    Parameters of no known version, which evaluations have, are published as the next one: they are
    the same, unless the average of `optimizer.ema` is evaluated.
    """

    def __init__(self, config: Config, folder: Path, policy: build.Policy):
        self._config, self._folder, self._policy = config, folder, policy
        self._latest = UNKNOWN_VERSION

    def __call__(self, params: Any, version: int) -> PublishedFolder:
        """Publishes all parameters of a policy.

        Raises:
          OSError: they could not be written.
        """
        number = self._latest + 1 if version == UNKNOWN_VERSION else version
        if version != UNKNOWN_VERSION:
            self._latest = version
        made = publish_policy(self._config, self._policy, params, self._folder, number)
        if made.failure is not None:
            raise OSError(made.failure)
        seen = self._config.rollout.server_folder
        root = self._folder.resolve() if seen is None else Path(seen)
        return PublishedFolder(str(root / str(number)), f"{number}-{made.identity[:12]}")
