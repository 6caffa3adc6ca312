"""Rough times of compiling and of an iteration on a CPU, for `--explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.shapes import Shapes
from seeupo_jax.learner.sweep_plan import (
    Kind,
    SweepPlan,
    plan_sweep,
    scores_old_policy,
)
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.parallel.compiling import WORKERS
from seeupo_jax.parallel.host_cores import usable_cores
from seeupo_jax.planning import flops
from seeupo_jax.planning.abstract_run import AbstractRun
from seeupo_jax.planning.flops import Pass
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy_io import build

# Seconds of one core of a kind of program: traced, lowered and compiled by XLA for CPU, jax 0.10.2,
# AMD EPYC: of the program, and of each of its layers. tests/planning/test_expected_time.py has the
# programs that they were measured on.
_COMPILING = {
    "rollout/prefill": (0.22, 0.17),
    "rollout/decode": (2.3, 0.3),
    "sweep/score": (1.8, 0.17),
    "sweep/reference": (1.8, 0.17),
    "sweep/teacher": (1.8, 0.17),
    "sweep/value": (1.8, 0.17),
    "sweep/old": (1.8, 0.17),
    "sweep/scores": (1.8, 0.17),
    "sweep/scorer": (6.7, 0.75),
    "sweep/refresh": (2.2, 0.2),
    "sweep/turn": (6.7, 0.75),
}
# Where attention computes all pairs of tokens: without loops over blocks.
_ALL_PAIRS = {
    "sweep/score": (0.6, 0.06),
    "sweep/reference": (0.6, 0.06),
    "sweep/teacher": (0.6, 0.06),
    "sweep/value": (0.6, 0.06),
    "sweep/old": (0.6, 0.06),
    "sweep/scores": (0.6, 0.06),
    "sweep/refresh": (0.7, 0.07),
    "sweep/scorer": (4.3, 0.32),
    "sweep/turn": (4.3, 0.32),
}
_OTHERS = (0.2, 0.02)
COMPILING_WITHIN = 1.5  # a factor: how far a program's seconds are from these, at the most
# FLOP/s of one core in sweeps of the bundled policy, measured as above; peak is several times it.
_CORE_FLOPS = 40e9


def compile_seconds(names: Sequence[str], arch: Architecture) -> float:
    """Seconds of one core, for programs of these names where none is in the cache."""
    layers = 1 if arch.scan_layers else arch.layers
    costs = _COMPILING | (_ALL_PAIRS if arch.attention == "all_pairs" else {})
    each = (costs.get(name.partition(" ")[0], _OTHERS) for name in names)
    return sum(whole + layers * layer for whole, layer in each)


class Packed(NamedTuple):
    """Rows of equally long conversations.

    length: tokens of a row. each: conversations per row. microbatches, rows: with the empty rows
    that fill up the last microbatch.
    """

    length: int
    each: int
    microbatches: int
    rows: int

    @property
    def tokens(self) -> int:
        """Computed tokens, with padding."""
        return self.rows * self.length


def pack(
    shapes: Shapes, conversations: int, tokens: int, lengths: Sequence[int] | None = None
) -> Packed:
    """The rows that a sweep packs conversations of so many tokens into, if they share nothing.

    As `token_trees.choose_length` does: the fewest tokens with padding, and then the longest rows.

    Args:
      lengths: of `shapes.lengths`, to choose from; None: all.
    """
    packed = list[Packed]()
    for length in shapes.allowed(tokens):
        if lengths is None or length in lengths:
            each = length // tokens
            microbatches = -(-conversations // (each * shapes.rows))
            packed.append(Packed(length, each, microbatches, microbatches * shapes.rows))
    return min(packed, key=lambda rows: (rows.tokens, -rows.length))


def planned_sweep(config: Config, *, experts: bool = False) -> SweepPlan:
    """The plan of an iteration whose conversations all have `max_turns` turns.

    Args:
      experts: whether the policy has any, whose loads the old policy's pass counts.
    """
    algorithm, turns = build.sweep_algorithm(config), config.rollout.max_turns
    teachers = len(config.teacher.places)
    return plan_sweep(
        algorithm,
        turns,
        trajectories=config.rollout.trajectories,
        ema=config.optimizer.ema is not None,
        score=bool(config.rollout.max_lag or teachers)
        or experts
        or scores_old_policy(algorithm, turns),
        teachers=teachers,
    )


def minibatches(config: Config) -> int:
    """Minibatches of a turn: each has an optimizer step in every pass over the turn."""
    return min(config.algorithm.minibatches_per_turn, config.rollout.trajectories)


def ends_of(config: Config, turns: Sequence[int]) -> list[int]:
    """Tokens of a conversation at the end of some turns: with adapters per turn of each one's.

    Every conversation grows evenly to `max_context` in `max_turns` turns.
    """
    rollout, adapters = config.rollout, max(1, config.lora.turn_adapters)
    last = {min(turn, adapters - 1): turn for turn in sorted(turns)}
    return [-(-rollout.max_context * (1 + turn) // rollout.max_turns) for turn in last.values()]


def copies(config: Config) -> list[int]:
    """Tokens of a conversation as each adapter per turn computes it; one number without such."""
    return ends_of(config, range(config.rollout.max_turns))


def pass_ends(config: Config, kind: Kind) -> list[int]:
    """`ends_of` every execution of a kind of pass over turns, in their order."""
    passes = planned_sweep(config).of(kind)
    return [
        end for each in passes for _ in range(each.times) for end in ends_of(config, each.turns)
    ]


def rescored_ends(config: Config) -> list[int]:
    """As `pass_ends`, for scoring a step's part under the current policy (`SweepPass.rescored`)."""
    passes = planned_sweep(config).of("turn")
    steps = [each.turns for each in passes for _ in range(each.rescored)]
    return [end for turns in steps for end in ends_of(config, turns)]


def iteration_flops(run: AbstractRun) -> float:
    """FLOPs of an iteration whose conversations all end at `max_context` and share nothing.

    Every round of dynamic sampling is assumed to sample as many conversations, and scored reference
    answers to have as many tokens.
    """
    config, arch, learner = run.config, run.policy.network.arch, run.learner
    algorithm, shapes = config.algorithm, learner.shapes
    plan = planned_sweep(config, experts=learner.routing is not None)
    context = config.rollout.max_context
    part = -(-run.trajectories // minibatches(config))
    whole = pack(shapes, run.trajectories, context, shapes.long)

    each_copy = copies(config)
    sampled = [Pass(run.trajectories, context, head=context // 2)]
    sampled += [Pass(run.trajectories, end) for end in each_copy[:-1]]
    scored = [pack(shapes, run.trajectories, end, shapes.long) for end in each_copy]
    scored *= scoring_passes(plan) + algorithm.estimator.scores_answers
    of_turns = pass_ends(config, "refresh") + pass_ends(config, "old")
    scored += [pack(shapes, run.trajectories, end) for end in of_turns]
    scored += [pack(shapes, part, end, shapes.long) for end in rescored_ends(config)]
    passes = sampled * (1 + algorithm.dynamic_sampling)
    passes += [
        Pass(each.rows, each.length, head=each.length, trees=shapes.share) for each in scored
    ]
    passes += [Pass(whole.rows, whole.length, trees=shapes.share)] * plan.count("value")
    stepped = [pack(shapes, part, end) for end in pass_ends(config, "turn")]
    steps = [step_flops(run, each, computed=True) for each in stepped]
    steps += [scorer_flops(run, whole, computed=True) for _ in plan.of("scorer")]
    by_policy = sum(flops.forward_flops(arch, each) for each in passes) + sum(steps)
    # Each conversation has one teacher at most: here that with the most FLOPs.
    return by_policy + max(
        (teacher_flops(run, each, whole) for each in learner.teachers), default=0
    )


def teacher_flops(run: AbstractRun, teacher: TeacherModel, packed: Packed) -> float:
    """FLOPs of a teacher's pass over packed conversations."""
    if teacher.ask is not None:
        return 0.0
    trees = run.learner.shapes.share
    each = Pass(packed.rows, packed.length, head=packed.length, trees=trees)
    return flops.forward_flops(teacher.architecture(run.policy.network.arch), each)


def step_flops(run: AbstractRun, packed: Packed, *, computed: bool) -> float:
    """FLOPs of a sweep's step on packed conversations; see `flops.turn_step_flops`."""
    shapes, rollout = run.learner.shapes, run.config.rollout
    turn = -(-rollout.max_context // rollout.max_turns)
    return flops.turn_step_flops(
        run.policy.network.arch,
        packed.rows,
        packed.length,
        shapes.action,
        trees=shapes.share,
        each=separate_conversations(run, packed, computed=computed),
        refresh=shapes.chunk if run.learner.fused else 0,
        chunks=refresh_chunks(shapes, packed, turn),
        critic=run.config.algorithm.critic.kind,
        computed=computed,
    )


def refresh_chunks(shapes: Shapes, packed: Packed, turn: int) -> int:
    """Chunks of each row's refresh, if every conversation continues by a turn of so many tokens.

    Each turn lies in one chunk, after the last token before it, as in `make_refresh_batch`.
    """
    chunks = -(-packed.each // max(1, shapes.chunk // (1 + turn)))
    return min(chunks, 1 + 2 * (packed.length // shapes.chunk))


def scorer_flops(run: AbstractRun, packed: Packed, *, computed: bool) -> float:
    """FLOPs of the scorer's step on all action tokens; see `flops.scorer_step_flops`."""
    return flops.scorer_step_flops(
        run.policy.network.arch,
        run.config.algorithm.scorer,
        packed.rows,
        packed.length,
        trees=run.learner.shapes.share,
        each=separate_conversations(run, packed, computed=computed),
        computed=computed,
    )


def separate_conversations(run: AbstractRun, packed: Packed, *, computed: bool) -> int:
    """Conversations of a row whose attention is counted separately; see `flops.turn_step_flops`.

    The model needs no pair of tokens of two conversations. Kernels for trees skip these pairs;
    other kernels compute them (`computed`).
    """
    kernels = ("splash", "cudnn")
    if run.policy.mesh.devices.flat[0].platform == "cpu":
        kernels = (*kernels, "xla")
    skips = run.learner.shapes.share and run.policy.network.arch.attention in kernels
    return packed.each if skips or not computed else 1


def scoring_passes(plan: SweepPlan) -> int:
    """Passes over whole trajectories by the old policy, the reference policy and a scorer."""
    return plan.count("score") + plan.count("reference") + plan.count("scores")


def time_lines(run: AbstractRun) -> list[str]:
    """The estimates in words, with their assumptions."""
    platform, count = run.policy.mesh.devices.flat[0].platform, usable_cores()
    if platform != "cpu":
        arch = run.policy.network.arch
        lines = [f"not estimated for {platform}; python -m seeupo_jax.aot estimates TPU slices"]
        if arch.layers > 1 and not arch.scan_layers:
            lines.append(
                f"{arch.layers} layers are compiled one by one: a step's program of 24 took 35 s on"
                " an H200's busy host; with config.model.scan_layers=True one layer is compiled"
            )
        return lines
    names = [*run.rollout_programs(), *run.sweep_programs()]
    compiling = compile_seconds(names, run.policy.network.arch)
    iteration = iteration_flops(run) / _CORE_FLOPS
    rollout = run.config.rollout
    return [
        f"compiling what is not in the cache: about {compiling / min(WORKERS, count):.0f} s on the"
        f" {count} cores here, where nothing else runs: {compiling:.0f} s of one core, each program"
        f" within a factor of {COMPILING_WITHIN:g}",
        f"an iteration: at most about {max(1.0, iteration / count):,.0f} s besides its"
        f" environments: {rollout.max_turns} turns and {rollout.max_context:,} tokens in every"
        f" conversation, nothing shared, {_CORE_FLOPS / 1e9:g} GFLOP/s per core",
    ]
