"""Builds a training service from a configuration."""

from __future__ import annotations

from pathlib import Path

from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.shapes import row_lengths
from seeupo_jax.parallel.mesh import row_shards
from seeupo_jax.policy.files.weights import resolve_path
from seeupo_jax.policy.kernels.fused import row_block
from seeupo_jax.policy_io import build
from seeupo_jax.train_service.adapter_run import BasePolicy
from seeupo_jax.train_service.adapter_sampler import Sampler
from seeupo_jax.train_service.saved_weights import SavedWeights
from seeupo_jax.train_service.service import TrainService

try:
    from seeupo_jax.agents.listening import Listener
    from seeupo_jax.train_service.api import TrainApi
except ModuleNotFoundError as error:
    if error.name not in ("uvicorn", "starlette", "h11"):
        raise
    raise ValueError(
        f"a training service needs the {error.name} package: pip install 'seeupo_jax[agents]'."
    ) from None


def check_server(config: Config) -> None:
    """ValueError: fields of the configuration or a policy that a training service cannot have."""
    allowed = "a model of one policy, since a client's samples and passes name no turn"
    build.check_one_adapter(config.model.path, "config.model.path", allowed)
    if config.optimizer.groups:
        raise ValueError(
            "config.optimizer.groups: got some; allowed: none, since clients train adapters with"
            " options of their own."
        )
    if config.rollout.engine != "built_in":
        raise ValueError(
            f"config.rollout.engine: got {config.rollout.engine!r}; allowed: built_in, which"
            " samples from adapters that never leave the devices."
        )
    if config.rollout.grammar is not None:
        raise ValueError(
            f"config.rollout.grammar: got {config.rollout.grammar!r}; allowed: none, since clients"
            " sample any tokens."
        )


def open_service(
    config: Config, workdir: Path, model_name: str | None, key: str
) -> tuple[TrainService, Listener]:
    """A service of the configuration's policy, and what listens for it once it is started.

    Args:
      model_name: None: the policy's folder.
    """
    path = str(config.model.path)
    policy, params = build.load_policy(config, path)
    folder = Path(resolve_path(path))
    base = base_policy(config, policy, params)
    saved = SavedWeights(Path(workdir), base, folder)
    service = TrainService(base, Sampler(config), saved, model_name or str(folder))
    return service, Listener(TrainApi(service, key).app)


def base_policy(config: Config, made: build.Policy, params: object) -> BasePolicy:
    """What all runs share, with the shapes of their passes."""
    platform = made.mesh.devices.flat[0].platform
    longest = config.rollout.max_context
    lengths = row_lengths(longest, block=row_block(platform) * made.mesh.shape["context"])
    fitting = (length for length in lengths if length < longest)
    tokens = config.batching.microbatch_tokens
    if tokens is None:
        tokens = max(2 * longest, build.LEAST_TOKENS.get(platform, 1024))
    enough = next(length for length in lengths if length >= longest)
    return BasePolicy(made, params, longest, (*fitting, enough), tokens, rows=row_shards(made.mesh))
