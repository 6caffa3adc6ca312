"""Rematerialisation: recomputes as few activations in the backward pass as memory allows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.parallel.device_memory import device_bytes, format_bytes, total_memory
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.activation_memory import microbatch_bytes, remats, share_of
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.teachers import load_teachers
from seeupo_jax.training.build_learner import new_state, place_reference, run_optimizer

# Of a device's memory, what a sweep's step may take by our estimate: a CPU's is its host's, which
# has environments and other programs to hold, and allocators need some room to themselves.
_SHARES = {"cpu": 0.5}
SHARE = 0.9
# The assumed platform of devices that are not here: there a sampler needs the most memory, not
# counting its cache.
PLATFORM = "gpu"


@dataclass(frozen=True)
class RematPlan:
    """The level that `model.remat=auto` takes; bytes per device.

    standing: bytes that a step holds at any level: state, reference policy, gradients.
    activations: of one microbatch, by the choices there are, the least recomputation first.
    allowed: for a step; None: unknown.
    replayed: experts that a step's routers are given. taught: teachers' likeliest tokens, and their
      log-probabilities, that a step reads.
    """

    standing: int
    activations: dict[str, int]
    allowed: int | None
    replayed: int = 0
    taught: int = 0

    @property
    def selected(self) -> str:
        """The least recomputation that fits; the most of all where nothing does."""
        allowed = self.allowed
        fitting = [n for n in self.activations if allowed is None or self.needed(n) <= allowed]
        return [*fitting, [*self.activations][-1]][0]

    def same_as(self, name: str) -> str:
        """The one of `activations` that a choice comes to: the last, where it is none of them."""
        return name if name in self.activations else [*self.activations][-1]

    def needed(self, name: str) -> int:
        """Bytes that a step needs with this choice."""
        held = self.standing + self.replayed + self.taught
        return held + self.activations[self.same_as(name)]

    def __str__(self) -> str:
        name, least = self.selected, next(iter(self.activations))
        if self.allowed is None:
            return f"remat: {name} (model.remat=auto; how much memory devices have is not known)"
        allowed = f"of {format_bytes(self.allowed)} per device for a step"
        text = (
            f"remat: {name} (model.remat=auto): about {format_bytes(self.needed(name))} {allowed},"
            f" {format_bytes(self.activations[name])} of it activations"
        )
        if self.needed(name) > self.allowed:
            return f"{text}, which is more than available"
        return (
            text if name == least else f"{text}; {least} needs {format_bytes(self.needed(least))}"
        )


def choose_remat(
    config: Config, mesh: jax.sharding.Mesh | None = None, *, memory_bytes: int | None = None
) -> tuple[Config, RematPlan | None]:
    """The configuration with `model.remat` decided, and the plan that decided it if it was `auto`.

    Nothing but the configuration and what memory devices have, free or not, decides: the same
    command on the same machine computes the same numbers to the bit. Every process of a
    multi-process run calls it.

    Args:
      mesh: that the run trains on; its devices need not be here. None: the configuration's.
      memory_bytes: that programs of one device may use; None: as the device reports it.
    """
    if config.model.remat != "auto":
        return config, None
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    if memory_bytes is None:
        memory_bytes = min(gather(total_memory(mesh.local_devices[0]) or 0))
    plan = plan_remat(config, mesh, memory_bytes or None)
    model = dataclasses.replace(config.model, remat=plan.selected)
    return dataclasses.replace(config, model=model), plan


def plan_remat(
    config: Config,
    mesh: jax.sharding.Mesh,
    memory_bytes: int | None,
    *,
    share: float | None = None,
) -> RematPlan:
    """The estimate; nothing is compiled or allocated.

    Args:
      memory_bytes: that programs of one device may use; None: unknown.
      share: of it that a step may take; None: what suits the devices of the mesh.
    """
    policy, params = build.abstract_policy(config, mesh)
    state = new_state(config, policy, run_optimizer(config), params)
    trained = device_bytes((state.params, None if state.critic is None else state.critic.params))
    # Gradients are added up, and those of one more microbatch come to them.
    standing = device_bytes((state, policy.frozen)) + 2 * trained
    standing += device_bytes(place_reference(config, params))
    teachers = load_teachers(config, policy, shapes=True)
    standing += device_bytes([teacher.params for teacher in teachers])
    platform, arch = mesh.devices.flat[0].platform, policy.network.arch
    shapes = build.build_shapes(config, mesh, 1)
    networks = 2 if config.algorithm.critic.kind == "model" else 1
    activations = {
        name: networks
        * microbatch_bytes(
            share_of(arch, mesh.shape["tensor"]),
            name,
            rows=1,
            length=-(-shapes.lengths[-1] // mesh.shape["context"]),
            platform=platform,
            expert=mesh.shape["expert"],
        )
        for name in remats(arch, platform)
    }
    share = _SHARES.get(platform, SHARE) if share is None else share
    allowed = memory_bytes and int(share * memory_bytes)
    read = _replayed_bytes(config, mesh, arch), _taught_bytes(config, mesh)
    return RematPlan(standing, activations, allowed, *read)


def _replayed_bytes(config: Config, mesh: jax.sharding.Mesh, arch: Architecture) -> int:
    """Bytes of the routing record of a step's longest rows: all microbatches, on every device."""
    if config.algorithm.router_replay == "none" or arch.routing is None:
        return 0
    shapes = build.build_shapes(config, mesh, config.rollout.trajectories)
    length, chunk = shapes.lengths[-1], shapes.chunk
    refreshed = (1 + 2 * (length // chunk)) * chunk  # as `RefreshBatch` has room for
    tokens = shapes.microbatches(length) * shapes.rows * (length + refreshed)
    return tokens * arch.routing.size * arch.routing.dtype.itemsize


def _taught_bytes(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Bytes of teachers' likeliest tokens of a step's longest rows: all microbatches, on every
    device."""
    if config.teacher.top_k is None:
        return 0
    shapes = build.build_shapes(config, mesh, config.rollout.trajectories)
    length = shapes.lengths[-1]
    each = 4 * (2 * config.teacher.top_k + 1)  # int32 and float32
    return shapes.microbatches(length) * shapes.rows * length * each
