"""The policies that play roles without being trained: model folders, and models at servers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.configuration.model_schema import Lora
from seeupo_jax.configuration.role_schema import Role
from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.device_memory import free_memory
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine, build_sampling
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.rollout.engine.role_engine import FrozenPolicy, RoleEngine
from seeupo_jax.rollout.engine.slots import SlotEngine

SERVER_TIMEOUT_S = 600.0  # of a request


def check_frozen_roles(config: Config, mesh: jax.sharding.Mesh | None = None) -> None:
    """Checks what plays the roles that are not trained, before anything is loaded.

    Args:
      mesh: the policy's; None: that of `config.mesh`, over all devices.

    Raises:
      ValueError: a folder without a model that fits, another tokenizer than the policy's, or a
        grammar for a server; one sentence.
    """
    for number, role in enumerate(config.roles):
        field = f"config.roles[{number}]"
        if role.server is not None and config.rollout.grammar is not None:
            raise ValueError(
                f"config.rollout.grammar: got {config.rollout.grammar!r} with {field}.server;"
                " allowed: none, since it is not sent to a server."
            )
        if role.path is not None:
            build.check_one_adapter(role.path, f"{field}.path", "a model of one policy")
            own = role_config(config, role)
            build.check_layout(own, make_mesh(own.mesh) if mesh is None else mesh)
            if config.model.path is not None:
                _check_tokenizer(role, read_tokenizer(config.model.path, config.chat), config)


def role_config(config: Config, role: Role) -> Config:
    """The configuration of the policy of a frozen role's folder, which plays this role alone and
    has nothing that trains."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=role.path),
        roles=(),
        lora=Lora(),
        optimizer=dataclasses.replace(config.optimizer, groups=()),
    )


def with_frozen_roles(
    config: Config, engine: Engine, tokenizer: Tokenizer, mesh: jax.sharding.Mesh | None = None
) -> Engine:
    """The engine of a run, which gives turns of frozen roles to engines of their own.

    Args:
      engine: of the policy. tokenizer: the policy's, in whose tokens all roles are sampled.
      mesh: the policy's; None: that of `config.mesh`, over all devices.

    Raises:
      ValueError: a role's policy does not fit into the memory that is left, has another tokenizer,
        or its server does not answer.
    """
    frozen: dict[str, FrozenPolicy] = {}
    taken = engine.plan.bytes + engine.plan.policy_bytes if isinstance(engine, SlotEngine) else 0
    for role in config.roles:
        if role.path is not None:
            _check_tokenizer(role, tokenizer, config)
            local, params = _local(role_config(config, role), str(role.path), mesh, taken)
            taken += local.plan.bytes + local.plan.policy_bytes
            frozen[str(role.name)] = FrozenPolicy(local, params)
        elif role.server is not None:
            served = _served(config, role, tokenizer, engine.concurrency)
            frozen[str(role.name)] = FrozenPolicy(served)
    return RoleEngine(engine, frozen) if frozen else engine


def _local(
    config: Config, path: str, mesh: jax.sharding.Mesh | None, taken: int
) -> tuple[SlotEngine, Any]:
    """The engine and the parameters of a model folder.

    Args:
      taken: bytes of a device that other engines will take.
    """
    made, params = build.load_policy(config, path, mesh)

    def free(device: jax.Device) -> int | None:
        memory = free_memory(device)
        return None if memory is None else max(0, memory - taken)

    return build_engine(config, made, free), made.merged(params)


def _served(config: Config, role: Role, tokenizer: Tokenizer, concurrency: int) -> OpenAIServer:
    """The engine that asks a role's server. concurrency: conversations of this process."""
    rollout = config.rollout
    return OpenAIServer(
        str(role.server),
        role.model,
        concurrency=concurrency,
        sampling=build_sampling(config, tokenizer),
        max_context=rollout.max_context,
        timeout_s=SERVER_TIMEOUT_S,
        retries=config.env.retries,
        retry_wait_s=config.env.retry_wait_s,
    )


def _check_tokenizer(role: Role, policys: Tokenizer | None, config: Config) -> None:
    """ValueError: the tokenizer of a role's folder is not the policy's."""
    own = read_tokenizer(str(role.path), config.chat)
    if policys is None or own is None or _identity(own) != _identity(policys):
        raise ValueError(
            f"config.roles: {role.name}: got the tokenizer of {role.path!r}; allowed: one with the"
            " tokens of the policy's, since all roles of an episode are sampled in them."
        )


def _identity(tokenizer: Tokenizer) -> tuple[Any, ...]:
    return tokenizer.token_bytes(), tuple(tokenizer.end_ids)
