"""An estimate of the time of one iteration, from compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from seeupo_jax.planning.collectives import Collective
from seeupo_jax.planning.dealt_conversations import dealt_conversations
from seeupo_jax.planning.expected_time import (
    copies,
    minibatches,
    pack,
    pass_ends,
    planned_sweep,
    rescored_ends,
    scoring_passes,
    step_flops,
)
from seeupo_jax.planning.slices import roofline
from seeupo_jax.planning.slices.slice_programs import Setup, SliceProgram

NEEDED = ("sweep/turn", "rollout/prefill", "rollout/decode")  # and what scores policies
# What no estimate contains, whatever the efficiency of the programs.
LEFT_OUT = (
    "the hosts' work (packing rows, tokenizing, scheduling)",
    "environments",
    "waves (slots that wait for the longest conversations, or for their turns)",
    "resharding beyond the transfers of rollout/reshard",
    "stragglers",
)


class ProgramFigures(Protocol):
    """Figures of a program. roofline: None where it did not compile."""

    @property
    def roofline(self) -> roofline.Roofline | None: ...

    @property
    def collectives(self) -> Sequence[Collective]: ...


@dataclass(frozen=True)
class IterationPart:
    """Some executions of a kind of program.

    step_s: seconds when computing, memory and network overlap fully. serial_s: when nothing does.
    published_s: at published efficiency.
    """

    name: str
    times: float
    step_s: float
    serial_s: float
    published_s: float

    @classmethod
    def of(cls, name: str, times: float, lines: Sequence[roofline.Roofline]) -> IterationPart:
        """So many executions of each of these estimates."""
        return cls(
            name,
            times * len(lines),
            times * sum(line.step_s for line in lines),
            times * sum(line.serial_s for line in lines),
            times * sum(line.published_s for line in lines),
        )


@dataclass(frozen=True)
class Iteration:
    """An estimate of one iteration, without what `LEFT_OUT` lists.

    sampled: assumed tokens of an action. context: tokens that are prefilled.
    """

    sampled: int
    context: int
    parts: tuple[IterationPart, ...]

    @property
    def step_s(self) -> float:
        return sum(part.step_s for part in self.parts)

    @property
    def serial_s(self) -> float:
        return sum(part.serial_s for part in self.parts)

    @property
    def published_s(self) -> float:
        return sum(part.published_s for part in self.parts)


def program_roofline(
    setup: Setup, program: SliceProgram, traffic: Sequence[Collective]
) -> roofline.Roofline:
    """An estimate of one execution of a program with this communication."""
    mesh = program.mesh
    return roofline.estimate(
        program.work.executed / mesh.size,
        program.hbm_bytes,
        traffic,
        setup.topology.chip,
        roofline.axis_links(mesh),
    )


def estimate_iteration(
    setup: Setup, programs: Mapping[str, SliceProgram], figures: Mapping[str, ProgramFigures]
) -> Iteration | None:
    """Every conversation grows evenly to `max_context` in `max_turns` turns, half of it sampled.

    No action is longer than `max_action_tokens`. The rollout takes as long as on the shard with the
    most conversations, whose slots are all busy in every round (`DealtConversations`); a context
    token of a conversation is computed once, on average behind half a context, also in prompts
    that a group shares.

    Args:
      programs, figures: the largest of each kind.

    Returns: None where a kind of program that it needs was not compiled.
    """
    config, rollout, experts = setup.config, setup.config.rollout, setup.learner.routing is not None
    plan = planned_sweep(config, experts=experts)
    # One program scores both policies, by the name of the first that is scored.
    scoring = "sweep/score" if plan.count("score") else "sweep/reference"
    needed = (*NEEDED, scoring) if scoring_passes(plan) else NEEDED
    if any(kind not in figures or figures[kind].roofline is None for kind in needed):
        return None
    tokens = rollout.max_context / rollout.max_turns
    sampled = min(rollout.max_action_tokens, int(tokens / 2))
    drawn = setup.trajectories * rollout.max_turns * sampled
    each_copy = copies(config)  # all but the last are prefilled only
    context = setup.trajectories * sum(each_copy) - drawn
    cache = setup.engine.plan
    dealt = dealt_conversations(rollout, cache)
    rows = dealt.rounds * cache.slots * cache.shards  # that decode a turn, idle ones included
    shapes, part = setup.learner.shapes, -(-setup.trajectories // minibatches(config))
    longest = pack(shapes, setup.trajectories, rollout.max_context, shapes.lengths[-1:]).tokens
    whole = pack(shapes, setup.trajectories, rollout.max_context, shapes.long).tokens / longest
    copied = sum(pack(shapes, setup.trajectories, end, shapes.long).tokens for end in each_copy)
    copied /= longest
    # Passes over less than that, in parts of one.
    scored = sum(pack(shapes, setup.trajectories, end).tokens for end in pass_ends(config, "old"))
    scored += sum(pack(shapes, part, end, shapes.long).tokens for end in rescored_ends(config))
    ends = pass_ends(config, "refresh")
    refreshed = sum(pack(shapes, setup.trajectories, end).tokens for end in ends)
    amounts = {
        "rollout/reshard": 1.0,
        "rollout/prefill": context
        * (dealt.busiest / setup.trajectories)
        / programs["rollout/prefill"].work.tokens,
        "rollout/decode": rows
        * (rollout.max_turns * sampled)
        / programs["rollout/decode"].work.tokens,
        scoring: scoring_passes(plan) * copied + scored / longest,
        "sweep/teacher": bool(plan.of("teacher")) * whole,  # each conversation has one at most
        "sweep/value": plan.count("value") * whole,
        "sweep/scorer": plan.count("scorer") * whole,
        "sweep/refresh": refreshed / longest,
    }
    parts = [
        IterationPart.of(kind, times, [line])
        for kind, times in amounts.items()
        if times and kind in figures and (line := figures[kind].roofline) is not None
    ]
    turns = list(_steps(setup, programs["sweep/turn"], figures["sweep/turn"]))
    return Iteration(sampled, context, (*parts, IterationPart.of("sweep/turn", 1, turns)))


def _steps(
    setup: Setup, program: SliceProgram, figures: ProgramFigures
) -> Iterator[roofline.Roofline]:
    """Each step, in the rows that a sweep takes for its conversations.

    Activations' traffic shrinks with the length of rows; weights' does not. A minibatch has its
    share of the microbatches, and the whole of the optimizer's memory traffic.
    """
    mesh, shapes = setup.mesh, setup.learner.shapes
    part = -(-setup.trajectories // minibatches(setup.config))
    for end in pass_ends(setup.config, "turn"):
        packed = pack(shapes, part, end)
        tripped = packed.microbatches / program.trips
        share = packed.length / shapes.lengths[-1]
        traffic = [
            dataclasses.replace(
                moved, bytes=moved.bytes * tripped * (share if _of_tokens(moved, mesh) else 1)
            )
            for moved in figures.collectives
        ]
        yield roofline.estimate(
            step_flops(setup, packed, computed=True) / mesh.size,
            (program.hbm_bytes - program.update_bytes) * tripped + program.update_bytes,
            traffic,
            setup.topology.chip,
            roofline.axis_links(mesh),
        )


def _of_tokens(moved: Collective, mesh: jax.sharding.Mesh) -> bool:
    """Whether activations are moved, or their gradients, and no weights.

    Along `context` alone these are keys and values, unless weights lie along it alone as well.
    """
    along_context = moved.axes == ("context",) and mesh.shape["fsdp"] > 1
    return along_context or "tensor" in moved.axes
