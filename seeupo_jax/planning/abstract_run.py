"""A run with shapes in place of arrays: its memory and its programs, with nothing allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.evaluation.frozen_roles import role_config
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.advantages import credit_programs
from seeupo_jax.learner.program_warming import COPY_RATIO, distinct_programs, sweep_programs
from seeupo_jax.parallel.device_memory import device_bytes, free_memory
from seeupo_jax.planning.remat import PLATFORM, SHARE
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine, for_evaluations
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.types import TrainState

SAMPLER, CACHE, ROLES = "sampler's policy", "KV cache", "frozen roles"


class EndIds(NamedTuple):
    """Stands for a tokenizer that is not here: the ids that end an action, here any one."""

    end_ids: tuple[int, ...] = (0,)


class Planned(NamedTuple):
    """Devices of a planned run that are not here. memory_bytes: per device; None: unknown."""

    memory_bytes: int | None = None


@dataclass(frozen=True)
class AbstractRun:
    """The parts of a run, with shapes in place of arrays.

    state, reference: shape structs with shardings.
    parts: bytes on one device that a run keeps between programs, by name.
    """

    config: Config
    policy: build.Policy
    learner: Learner
    engine: SlotEngine
    state: TrainState
    reference: Any
    parts: Mapping[str, int]

    @property
    def trajectories(self) -> int:
        """The number of trajectories of an iteration."""
        return self.config.rollout.trajectories

    def rollout_programs(self) -> list[str]:
        """Names of the programs that `engine.compile` compiles."""
        every = self.engine.programs(self.policy.merged(self.state.params))
        return ["rollout/allocate", *(program.name for program in every)]

    def sweep_programs(self) -> list[str]:
        """Names of the programs that `compile_programs` compiles; equal ones count once."""
        every = sweep_programs(self.learner, self.trajectories)
        distinct = distinct_programs(every, self.state, self.reference)
        credit = [f"sweep/credit {name}" for name in credit_programs(self.config.algorithm)]
        return credit + [program.name for program in distinct] + [COPY_RATIO]


def abstract_run(
    config: Config, mesh: jax.sharding.Mesh, planned: Planned | None = None
) -> AbstractRun:
    """The parts of a run on a mesh, whose devices need not be here.

    Args:
      config: with `model.remat` decided, and a model whose architecture can be read.
      planned: the devices that those of the mesh stand for; None: themselves.

    Raises:
      ValueError: an impossible mesh, model or cache.
    """
    rollout = config.rollout
    if rollout.engine != "built_in" and not rollout.asynchronous:
        raise ValueError(
            f"config.rollout.engine: got {rollout.engine} with rollout.max_lag=0; allowed:"
            " built_in, or a lag, with which the devices here play evaluations: what servers take"
            " is not known here."
        )
    build.check_layout(config, mesh)
    policy, params = build.abstract_policy(config, mesh)
    if policy.tokenizer is None:
        if config.rollout.grammar is not None:
            raise ValueError(
                f"config.rollout.grammar: got {config.rollout.grammar!r}; allowed: none where the"
                " model's tokenizer is not here."
            )
        policy = dataclasses.replace(policy, tokenizer=EndIds())
    learner, state, reference = build_learner(config, policy, params)
    taught = [teacher.params for teacher in learner.teachers]
    held = device_bytes((state, reference, policy.frozen, taught))
    if planned is None and mesh.devices.flat[0].platform == "cpu":
        # All devices share the host's memory equally, also those that are not in the mesh.
        held = held * len(mesh.local_devices) // jax.local_device_count()

    def free(device: jax.Device) -> int | None:
        if planned is None:
            memory = free_memory(device)
        else:
            memory = planned.memory_bytes and int(SHARE * planned.memory_bytes)
        return None if memory is None else max(0, memory - held)

    platform = None if planned is None else PLATFORM
    engine = build_engine(for_evaluations(config), policy, free, platform)
    parts = {
        "parameters": device_bytes(state.params),
        "optimizer": device_bytes(state.opt_state),
        "reference": device_bytes((reference, state.reference)),
        "teacher": device_bytes(taught),
        "frozen": device_bytes(policy.frozen),
        "critic": device_bytes(state.critic),
        "average": device_bytes(state.ema),
        "scorer": device_bytes(state.scorer),
        CACHE: engine.plan.bytes,
        SAMPLER: engine.plan.policy_bytes,
        ROLES: _frozen_role_bytes(config, mesh),
    }
    return AbstractRun(
        config,
        policy,
        learner,
        engine,
        state,
        reference,
        {name: size for name, size in parts.items() if size},
    )


def _frozen_role_bytes(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Bytes on one device of the policies that play roles from a folder, and of their samplers."""
    total = 0
    for role in config.roles:
        if role.path is None:
            continue
        own = role_config(config, role)
        policy, params = build.abstract_policy(own, mesh)
        policy = dataclasses.replace(policy, tokenizer=EndIds())
        plan = build_engine(own, policy, lambda device: None).plan
        total += device_bytes(params) + plan.bytes + plan.policy_bytes
    return total
