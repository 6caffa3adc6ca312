"""What a run has whose servers sample (`rollout.engine=openai`): their engine and its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath

from seeupo_jax.agents.action_client import ActionClient, ServerRequests
from seeupo_jax.agents.server_pool import PublishedFolder, ServerPool
from seeupo_jax.checkpoint.manifest import DamagedCheckpoint, read_manifest
from seeupo_jax.configuration.schema import Config
from seeupo_jax.errors import WriteError
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_sampling
from seeupo_jax.policy_io.policy_folder import publish_policy
from seeupo_jax.rollout.weights.versions import identity
from seeupo_jax.types import UNKNOWN_VERSION

FOLDER = "served_weights"  # in the workdir: the versions that servers read


def build_server_pool(
    config: Config,
    policy: build.Policy,
    publish: Callable[[Any, int], PublishedFolder] | None,
    log: Callable[[str], None],
) -> ServerPool:
    """The servers of a run, each of which is tried.

    One that does not answer is left out until it does, at an update.

    Args:
      publish: as of `ServerPool`.

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

    return ServerPool(
        rollout.servers,
        connect,
        publish,
        log,
        concurrency=rollout.open_at_once,
        sampling=sampling,
        max_context=rollout.max_context,
    )


class ServedWeights:
    """Writes versions of a policy where servers read them.

    Parameters of no known version, which evaluations have, are published as the next one: they are
    the same, unless the average of `optimizer.ema` is evaluated.
    """

    def __init__(self, config: Config, workdir: Path, policy: build.Policy):
        self._config, self._folder, self._policy = config, workdir / FOLDER, policy
        self._latest = UNKNOWN_VERSION

    def __call__(self, params: Any, version: int) -> PublishedFolder:
        """Publishes a policy; of its parameters at least those that train are given.

        Raises:
          WriteError: they could not be written.
        """
        number = self._latest + 1 if version == UNKNOWN_VERSION else version
        if version != UNKNOWN_VERSION:
            self._latest = version
        made = publish_policy(self._config, self._policy, params, self._folder, number)
        if made.failure is not None:
            raise WriteError(made.failure)
        return self._named(number, made.identity)

    def find(self, version: int) -> PublishedFolder | None:
        """A version that is there; None: it is not."""
        try:
            manifest = read_manifest(epath.Path(self._folder / str(version)))
        except (DamagedCheckpoint, OSError):
            return None
        return self._named(version, identity(manifest))

    def _named(self, version: int, digest: str) -> PublishedFolder:
        seen = self._config.rollout.server_folder
        root = self._folder.resolve() if seen is None else Path(seen)
        return PublishedFolder(str(root / str(version)), f"{version}-{digest[:12]}")
