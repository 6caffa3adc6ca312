"""The sampler of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from seeupo_jax.algorithms.forks import EntropyForks
from seeupo_jax.configuration.role_schema import policy_roles
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.parallel.device_memory import free_memory
from seeupo_jax.parallel.devices import slice_block
from seeupo_jax.parallel.mesh import param_shardings, row_shards, sampler_mesh
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.files.template_knowledge import resolve_format
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.rollout.engine.cache_memory import CachePlan, plan_cache
from seeupo_jax.rollout.engine.constraints import Constraints
from seeupo_jax.rollout.engine.grammar import Grammars
from seeupo_jax.rollout.engine.read_plan import choose_read_plan
from seeupo_jax.rollout.engine.sampler_layout import SamplerLayout
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine


def for_evaluations(config: Config) -> Config:
    """The configuration of what samples on the devices that train.

    Where others sample for training it plays evaluations, meanwhile, and so has a layout and an
    endpoint of its own.
    """
    if not config.rollout.asynchronous:
        return config
    rollout = dataclasses.replace(config.rollout, mesh=None)
    agent = dataclasses.replace(config.agent, port=0)
    return dataclasses.replace(config, rollout=rollout, agent=agent)


def build_engine(
    config: Config,
    made: build.Policy,
    free: Callable[[jax.Device], int | None] | None = None,
    platform: str | None = None,
    *,
    per_turn: bool = False,
) -> SlotEngine:
    """The sampler, on a layout of its own of the policy's devices.

    Args:
      free: bytes that a device has left, or None where unknown; default: what it says.
      platform: as of `plan_sampler`. per_turn: as of `SlotEngine`.

    Raises:
      ValueError: its cache and its copy of the policy do not fit into what memory is free.
    """
    rollout, arch = config.rollout, made.network.arch
    mesh = sampler_mesh(made.mesh, rollout.mesh)
    device = mesh.local_devices[0]
    free_bytes = (free_memory if free is None else free)(device)
    return SlotEngine(
        made.network,
        build_sampling(config, made.tokenizer),
        plan_sampler(config, made, free_bytes, platform, per_turn=per_turn),
        mesh=mesh,
        group_size=rollout.group_size,
        steps=rollout.decode_steps,
        prefill_tokens=rollout.prefill_tokens,
        few=build.uses_few_shapes(config, made.mesh),
        records=config.algorithm.router_replay == "rollout",
        int8=rollout.quantize == "int8",
        fixed_steps=slice_block(list(mesh.devices.flat)) < mesh.size,
        per_turn=per_turn,
        on_swap=rollout.on_swap,
        read_plan=choose_read_plan(arch, rollout, device.platform),
        constraints=build_constraints(config, made.tokenizer, arch.vocab_size, served=per_turn),
        grammars=build_grammars(config, made.tokenizer, arch.vocab_size),
    )


def plan_sampler(
    config: Config,
    made: build.Policy,
    free_bytes: int | None = None,
    platform: str | None = None,
    *,
    per_turn: bool = False,
) -> CachePlan:
    """The KV cache, and how the policy comes to the sampler.

    Args:
      free_bytes: what a device has left; None: unknown.
      platform: that decodes, as `jax.Device.platform` names it; None: the mesh's.
      per_turn: as of `SlotEngine`.

    Raises:
      ValueError: as `build_engine`.
    """
    rollout = config.rollout
    mesh = sampler_mesh(made.mesh, rollout.mesh)
    if platform is None:
        platform = mesh.devices.flat[0].platform
    layout = SamplerLayout(made.network, mesh, int8=rollout.quantize == "int8")
    return plan_cache(
        made.network.arch,
        rollout,
        shards=row_shards(mesh),
        tensor=mesh.shape["tensor"],
        reshard=layout.reshard(_held(config, made)),
        free_bytes=free_bytes,
        read_plan=choose_read_plan(made.network.arch, rollout, platform),
        per_turn=per_turn,
        # A server has no episodes: each of its calls is a conversation.
        conversations=1 if per_turn else max(1, len(policy_roles(config.roles))),
    )


def _held(config: Config, made: build.Policy) -> Any:
    """Shape structs of all parameters, as the trainer holds them."""
    network, shapes = policy.abstract_network(made.network.arch)
    shapes = made.merged(split_trained(config.optimizer.groups, network, shapes)[0])
    where = param_shardings(made.mesh, network.logical_axes(), shapes)

    def struct(x: jax.Array, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(struct, shapes, where)


def build_grammars(config: Config, tokenizer: Tokenizer, vocab_size: int) -> Grammars | None:
    """The grammars that constrain actions; None: nothing does."""
    source = config.rollout.grammar
    if source is None:
        return None
    tool_format = environment_format(config)
    if config.agent.given:
        tool_format = resolve_format(config.agent.tool_format, tokenizer)
    return Grammars(source, tokenizer, vocab_size, tool_format)


def environment_format(config: Config) -> ToolFormat:
    """The format in which the environment reads calls."""
    named = config.env.options.get("format")
    return TOOL_FORMATS[named if named in TOOL_FORMATS else "hermes"]


def build_constraints(
    config: Config, tokenizer: Tokenizer, vocab_size: int, *, served: bool
) -> Constraints | None:
    """What makes the grammars that requests ask for; None: there are no requests."""
    if not (config.agent.given or served):
        return None
    tool_format = resolve_format(config.agent.tool_format, tokenizer)
    return Constraints(tokenizer, vocab_size, tool_format)


def build_sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    """How tokens are drawn in training."""
    rollout, forks = config.rollout, config.algorithm.forks
    return Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.max_action_tokens,
        tokenizer.end_ids,
        forks.entropy_tokens if isinstance(forks, EntropyForks) else 0,
    )
