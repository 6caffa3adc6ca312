"""The programs of a run on a topology, at their real shapes and without a device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.parallel.mesh import make_mesh, sampler_mesh
from seeupo_jax.planning import flops
from seeupo_jax.planning.abstract_run import CACHE, SAMPLER, AbstractRun, abstract_run
from seeupo_jax.planning.chips import Topology, topology_devices, usable_hbm
from seeupo_jax.planning.expected_time import (
    Packed,
    pack,
    scorer_flops,
    separate_conversations,
    step_flops,
)
from seeupo_jax.planning.flops import Pass
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy_io import build

# The kinds of programs that a report is about. A run has more of each kind, of smaller shapes.
KINDS = (
    "sweep/turn",
    "sweep/score",
    "sweep/teacher",
    "sweep/value",
    "sweep/scorer",
    "sweep/refresh",
    "rollout/reshard",
    "rollout/prefill",
    "rollout/decode",
)
# Programs that move one tree of parameters towards those that train.
_MOVED = {"sweep/average": "average", "sweep/move reference": "reference"}


@dataclass(frozen=True)
class Setup(AbstractRun):
    """A run on a topology.

    given: the user's configuration; in `config` `model.remat=auto` is resolved.
    source: where the architecture was found.
    """

    given: Config
    source: str
    topology: Topology

    @property
    def arch(self) -> Architecture:
        return self.policy.network.arch

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.policy.mesh

    @property
    def sampler_mesh(self) -> jax.sharding.Mesh:
        return sampler_mesh(self.mesh, self.config.rollout.mesh)

    def resident(self, kind: str) -> dict[str, int]:
        """The parts that a device holds while a program of a kind, as `sweep/turn`, runs.

        The sampler's copy of the policy is made before the KV cache, and both are freed before the
        sweep.
        """
        absent = {CACHE} if kind == "rollout/reshard" else set()
        if kind.startswith("sweep"):
            absent = {CACHE, SAMPLER}
        return {name: size for name, size in self.parts.items() if name not in absent}


class UsefulWork(NamedTuple):
    """The useful work of one execution, over all devices.

    needed: FLOPs of the model. executed: FLOPs of its kernels, with recomputation and padded
    attention. tokens: computed by the model.
    """

    needed: float = 0.0
    executed: float = 0.0
    tokens: int = 0

    @classmethod
    def of(cls, arch: Architecture, each: Pass, times: int = 1) -> UsefulWork:
        """The work of so many forward passes."""
        needed, executed = (
            times * flops.forward_flops(arch, each, computed=c) for c in (False, True)
        )
        return cls(needed, executed, times * each.rows * each.new)


@dataclass(frozen=True)
class SliceProgram:
    """One of a run's programs, not compiled yet.

    lower: gives the program for the devices of `mesh`.
    uses, makes: which of `Setup.parts` are among its arguments, and which only among its results.
    trips: how often its outer loop runs, over tokens or over the microbatches of an iteration whose
      conversations are as long as they can be in its rows.
    hbm_bytes: that one device must read and write at least; update_bytes: of these, those of the
      optimizer, once however often the loop runs.
    row_length: tokens of its rows, where a score matrix or whole logits could appear.
    """

    name: str
    mesh: jax.sharding.Mesh
    lower: Callable[[], jax.stages.Lowered]
    uses: tuple[str, ...]
    makes: tuple[str, ...]
    work: UsefulWork
    trips: int
    hbm_bytes: float
    row_length: int | None = None
    update_bytes: float = 0.0

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers in its name."""
        return tuple(map(int, re.findall(r"\d+", self.name)))


def prepare(config: Config, topology: Topology) -> Setup:
    """The parts of a run that need neither its devices nor its weights.

    Raises:
      ValueError: no libtpu, a mesh that does not fit, an unknown model, devices that only sample.
    """
    if config.rollout.devices:
        raise ValueError(
            f"config.rollout.devices: got {config.rollout.devices}; allowed in aot: 0, since all"
            " devices of a topology do both: estimate trainer and samplers by a topology each."
        )
    given, source = build.find_model(config)
    mesh = make_mesh(given.mesh, topology_devices(topology))
    config = given
    if given.model.remat == "auto":
        config, _ = choose_remat(given, mesh, memory_bytes=usable_hbm(mesh.devices.flat[0]))
    run = vars(abstract_run(config, mesh))
    return Setup(**run, given=given, source=source, topology=topology)


def list_programs(setup: Setup) -> list[SliceProgram]:
    """Every program of a run, the smaller of a kind first; none is lowered yet."""
    return [*_sweep(setup), *_rollout(setup)]


def choose_programs(
    programs: Sequence[SliceProgram], wanted: Sequence[str] | None = None
) -> list[SliceProgram]:
    """Programs of these names, a kind alone meaning its largest; None: the largest of `KINDS`.

    Raises:
      ValueError: no program has the name.
    """
    kinds = dict.fromkeys(program.kind for program in programs)
    largest = {
        kind: max((p for p in programs if p.kind == kind), key=lambda p: math.prod(p.sizes))
        for kind in kinds
    }
    named = {program.name: program for program in programs}
    if wanted is None:
        wanted = [kind for kind in KINDS if kind in largest]
    unknown = [name for name in wanted if name not in largest | named]
    if unknown:
        raise ValueError(
            f"--programs: got {unknown[0]!r}; allowed: {', '.join(largest)}, or one of"
            f" {', '.join(named)}."
        )
    return [(largest | named)[name] for name in wanted]


def _sweep(setup: Setup) -> Iterator[SliceProgram]:
    arch, shapes, mesh = setup.arch, setup.learner.shapes, setup.mesh
    passes = 2 if arch.remat == "none" else 3
    update = 7 * setup.parts["parameters"]  # four trees of its size are read, three written
    critic = setup.config.algorithm.critic.kind
    if critic == "model":
        passes, update = 2 * passes, 2 * update

    trunk = () if critic == "model" else ("parameters",)  # a model has its own
    state = ("parameters", "optimizer", "critic", "average", "scorer")
    read_too = ("parameters",) if setup.config.algorithm.scorer == "head" else ()
    read = {
        "sweep/turn": (*state, "frozen"),
        "sweep/reference": ("reference", "frozen"),
        "sweep/teacher": tuple({"teacher", "reference"} & {*setup.parts}),
        "sweep/value": (*trunk, "frozen", "critic"),
        "sweep/scores": (*read_too, "frozen", "scorer"),
        "sweep/scorer": (*state, "frozen"),
    }
    for program in sweep_programs(setup.learner, setup.trajectories):
        kind, _, size = program.name.partition(" ")

        def lower(program: Any = program) -> jax.stages.Lowered:
            with jax.set_mesh(mesh):
                return program.lower(setup.state, setup.reference)

        if program.name in _MOVED:  # two trees are read, and one is written
            parts, hbm_bytes = ("parameters", _MOVED[program.name]), 3 * setup.parts["parameters"]
            yield SliceProgram(program.name, mesh, lower, parts, (), UsefulWork(), 1, hbm_bytes)
            continue
        length = int(size)
        packed = pack(shapes, setup.trajectories, min(length, shapes.longest), (length,))
        trips = packed.microbatches
        # Logits of every token, of none, or of an action's.
        of_tokens = length if setup.config.algorithm.scorer == "policy" else 0
        logits = dict.fromkeys(("sweep/score", "sweep/reference", "sweep/teacher"), length)
        logits |= {"sweep/value": 0, "sweep/scores": of_tokens}
        head = logits.get(kind, shapes.action)
        steps = {"sweep/turn": step_flops, "sweep/scorer": scorer_flops}
        computed_by = arch if program.teacher is None else program.teacher.architecture(arch)
        once = _weight_bytes(setup, computed_by)  # read by every pass over the layers
        hbm_bytes, updated = once * trips, update if kind in steps else 0
        if kind in steps:
            done = (steps[kind](setup, packed, computed=computed) for computed in (False, True))
            work = UsefulWork(*done, packed.tokens)
            hbm_bytes = hbm_bytes * passes + updated
        else:
            work = _scored(setup, computed_by, packed, head)
        yield SliceProgram(
            program.name,
            mesh,
            lower,
            uses=read.get(kind, ("parameters", "frozen")),
            makes=(),
            work=work,
            trips=trips,
            hbm_bytes=hbm_bytes,
            row_length=length,
            update_bytes=updated,
        )


def _scored(setup: Setup, arch: Architecture, packed: Packed, head: int) -> UsefulWork:
    """The work of a pass forwards over packed conversations, with logits of so many tokens each."""
    done = []
    for computed in (False, True):
        each = separate_conversations(setup, packed, computed=computed)
        new = packed.length // each
        work = Pass(packed.rows * each, new, head=min(head, new), trees=setup.learner.shapes.share)
        done.append(flops.forward_flops(arch, work, computed=computed))
    return UsefulWork(*done, packed.tokens)


def _rollout(setup: Setup) -> Iterator[SliceProgram]:
    arch, rollout, plan = setup.arch, setup.config.rollout, setup.engine.plan
    steps = (
        1 if rollout.grammar is not None else min(rollout.decode_steps, rollout.max_action_tokens)
    )
    past = rollout.max_context // 2  # tokens that lie before those that are computed, on average
    separate_sampler = SAMPLER in setup.parts
    policy = (SAMPLER,) if separate_sampler else ("parameters", "frozen")
    held = sum(setup.parts.get(name, 0) for name in policy)
    trained = sum(setup.parts.get(name, 0) for name in ("parameters", "frozen"))
    for program in setup.engine.programs(setup.policy.merged(setup.state.params)):
        kind, _, sizes = program.name.partition(" ")
        rows, each = map(int, sizes.split("x")) if sizes else (0, 0)
        seen = rows // plan.shards * past * plan.token_bytes  # keys and values that rows attend to
        work, trips, read = UsefulWork(), 1, 0.0
        if kind == "rollout/prefill":
            work, read = UsefulWork.of(arch, Pass(rows, each, past, cached=True)), held + seen
        elif kind == "rollout/decode":
            work = UsefulWork.of(arch, Pass(rows, 1, past, head=1, cached=True), steps)
            trips, read = steps, steps * (held + seen)
        elif kind == "rollout/reshard":
            read = trained + held

        def lower(program: Any = program) -> jax.stages.Lowered:
            with setup.engine.mesh_in_force():
                return program.lower()

        reshards = kind == "rollout/reshard"
        yield SliceProgram(
            program.name,
            setup.sampler_mesh,
            lower,
            uses=("parameters", "frozen") if reshards else (CACHE, *policy),
            makes=policy if reshards else (),
            work=work,
            trips=trips,
            hbm_bytes=read,
        )


def _weight_bytes(setup: Setup, arch: Architecture) -> float:
    """A model's matrices as a device multiplies by them: gathered, in the compute dtype."""
    return flops.gathered_parameters(arch, setup.mesh.shape) * jnp.dtype(arch.dtype).itemsize
