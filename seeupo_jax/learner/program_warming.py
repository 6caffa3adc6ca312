"""Warms the programs of sweeps: lists them by name, compiles them, and calls each once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.learner.batching import SegmentBatch, batch_shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.advantages import compile_credit
from seeupo_jax.learner.expert_record import ExpertRecord
from seeupo_jax.learner.optimization.turn_moments import of_turn, put_back
from seeupo_jax.learner.reference_policy import reference_of
from seeupo_jax.learner.refresh_batch import refresh_shapes
from seeupo_jax.learner.step.turn_step import TurnStepResult
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.parallel.compiling import Between, compile_all, never_stop
from seeupo_jax.trajectories.rewards_by_name import OWN_REWARD
from seeupo_jax.types import TrainState, TurnBatch


@dataclass(frozen=True)
class SweepProgram:
    """A program of the sweep, and the arguments of a call without rows.

    function: the result of `jax.jit`.
    arguments: from the state and the reference policy's parameters (arrays, or shape structs with
      shardings) to the program's arguments; those that change are shape structs, without a sharding
      where they come from the host.
    returns_state: whether its first result is the donated state.
    teacher: whose layers it computes; None: the policy's, or none.
    """

    name: str
    function: Any
    arguments: Callable[[TrainState, Any], tuple[Any, ...]]
    returns_state: bool = False
    teacher: TeacherModel | None = None

    def lower(self, state: TrainState, ref_params: Any) -> jax.stages.Lowered:
        """The program before compilation, for the devices that the arguments lie on."""
        return self.function.lower(*self.arguments(state, ref_params))


COPY_RATIO = "sweep/copy cumulative ratio"  # small, and the same for all lengths


def sweep_programs(learner: Learner, trajectories: int) -> Iterator[SweepProgram]:
    """The programs that sweeps over so many trajectories may run, shortest rows first."""
    empty_S = np.zeros(0, np.int32)
    rows = SegmentBatch((), (), (), empty_S, empty_S, trajectories, 0, routing=learner.routing)
    rows = replace(rows, adapters=learner.adapters)
    if learner.algorithm.router_replay != "none":
        rows = replace(rows, experts=ExpertRecord(learner.routing, ()))
    shapes = learner.shapes
    for length in shapes.long:
        yield from _score_programs(learner, rows, length)
    for length in shapes.lengths:
        yield from _turn_programs(learner, rows, length)
    if "average" in learner.kinds:
        yield _call("sweep/average", learner.average, lambda state, _: (state.params, state.ema))
    if "move reference" in learner.kinds:
        yield _call(
            "sweep/move reference",
            learner.move_reference,
            lambda state, _: (state.params, state.reference),
        )


def distinct_programs(
    programs: Iterable[SweepProgram], state: TrainState, ref: Any
) -> list[SweepProgram]:
    """The first of each set of equal programs, for arrays or shape structs with shardings.

    The reference policy is scored by the old policy's program, unless it lies in other memory.
    """
    first: dict[Any, SweepProgram] = {}
    for program in programs:
        leaves, tree = jax.tree.flatten(program.arguments(state, ref))
        first.setdefault((program.function, tree, *map(_kind, leaves)), program)
    return list(first.values())


def _kind(leaf: Any) -> tuple[Any, ...]:
    """The properties of an argument that a program is compiled for."""
    return leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)


def compile_programs(
    learner: Learner,
    state: TrainState,
    ref_params: Any,
    trajectories: int,
    between: Between = never_stop,
) -> TrainState:
    """Compiles every program of the sweeps of a run, and runs each on a batch without rows.

    `between`: as of `compile_all`, for the programs that take longest. The batches are zeros, which
    hold no microbatch: a program without any does nothing.

    Returns: the state, which was donated and is returned unchanged.
    """
    names = [OWN_REWARD, *learner.reward_weights]
    views = trajectories * max(1, len(learner.roles))
    compile_credit(learner.algorithm, learner.shapes, views, names)
    programs = [*sweep_programs(learner, trajectories)]
    distinct = distinct_programs(programs, state, ref_params)
    compile_all([functools.partial(each.lower, state, ref_params) for each in distinct], between)

    def fill(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        zeros = np.zeros(x.shape, x.dtype)
        return zeros if x.sharding is None else learner.replicate(zeros)

    for program in programs:
        out = program.function(*jax.tree.map(fill, program.arguments(state, ref_params)))
        if program.returns_state:
            state = put_back(out[0], state, (0,))
        if isinstance(out, TurnStepResult):
            jnp.copy(out.cumulative_ratio_N)  # as a sweep keeps the cumulative ratios of every step
    return state


def _score_programs(learner: Learner, rows: SegmentBatch, length: int) -> Iterator[SweepProgram]:
    """Passes over trajectories by the policies, the critic and the scorer; the scorer's step."""
    given, rows = rows, replace(rows, experts=None)

    def batch_of(source: SegmentBatch, copies: int = learner.adapters) -> TurnBatch:
        room = {"action": learner.shapes.longest, "copies": copies}
        return batch_shapes(source, learner.shapes, length=length, **room)

    batch, replayed = batch_of(rows), batch_of(given)
    first = batch_of(
        given if learner.algorithm.router_replay == "rollout" else rows,
        # By branches, in the old policy's pass.
        2 if learner.algorithm.estimator.scores_answers else learner.adapters,
    )
    if "score" in learner.kinds:
        yield _call(
            f"sweep/score {length}",
            learner.score_old_policy,
            lambda state, _: (state.params, first),
        )
    if "reference" in learner.kinds:
        yield _call(
            f"sweep/reference {length}",
            learner.score_old_policy,
            lambda *given: (reference_of(*given), batch),
        )
    for teacher, program in zip(learner.teachers, learner.teacher_programs, strict=True):
        if program is None:
            continue
        scored = _call(
            f"sweep/teacher {length}",
            program,
            lambda *given, teacher=teacher: (teacher.parameters(*given), batch),
        )
        yield replace(scored, teacher=teacher)
    if "value" in learner.kinds:
        yield _call(
            f"sweep/value {length}",
            learner.value,
            lambda state, _: (state.params, state.critic.params, replayed),
        )
    if "scorer" in learner.kinds:
        yield from _scorer_programs(learner, rows, batch, length)


def _scorer_programs(
    learner: Learner, rows: SegmentBatch, batch: TurnBatch, length: int
) -> Iterator[SweepProgram]:
    """The pass of the model that scores turns, and its step."""
    action = learner.shapes.longest
    with_grad = batch_shapes(rows, learner.shapes, {"score_grad": ()}, length=length, action=action)

    def of_tokens(state: TrainState, _: Any) -> tuple[Any, ...]:
        return state.scorer.params["trunk"], batch

    def of_turns(state: TrainState, _: Any) -> tuple[Any, ...]:
        return state.params, state.scorer.params, batch

    scorer = (
        (learner.score_old_policy, of_tokens)
        if learner.scorer.of_tokens
        else (learner.value, of_turns)
    )
    yield _call(f"sweep/scores {length}", *scorer)
    yield _call(
        f"sweep/scorer {length}",
        learner.scorer_step,
        lambda state, _: (state, with_grad),
        returns_state=True,
    )


def _turn_programs(learner: Learner, rows: SegmentBatch, length: int) -> Iterator[SweepProgram]:
    """The passes of an update: its steps, and the scoring pass and the refresh around them."""
    shapes, kinds = learner.shapes, learner.kinds
    room = {"action": shapes.action, "copies": learner.adapters_per_update}
    batch = batch_shapes(rows, shapes, learner.per_token, length=length, **room)
    numbers_N = _on_device(learner, (rows.trajectories,))
    refresh_batch = None
    if learner.fused:
        refresh_batch = refresh_shapes(rows, shapes, length)
        if learner.loss_config.old_is_current:  # the step before leaves them on the device
            old_logp_PA = _on_device(learner, refresh_batch.old_logp_PA.shape)
            refresh_batch = refresh_batch._replace(old_logp_PA=old_logp_PA)
    if "old" in kinds:
        yield _call(f"sweep/old {length}", learner.score, lambda state, _: (state.params, batch))
    yield _call(
        f"sweep/turn {length}",
        learner.turn_step,
        lambda state, _: (of_turn(state, (0,)), batch, refresh_batch, numbers_N, np.float32(1)),
        returns_state=True,
    )
    # A fused refresh without room for some spans leaves them to a pass, in the longest rows.
    if "refresh" in kinds or (learner.fused and length == shapes.lengths[-1]):
        yield _call(
            f"sweep/refresh {length}",
            learner.refresh,
            lambda state, _: (state.params, batch, numbers_N),
        )


def _on_device(learner: Learner, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Numbers that an earlier program returns."""
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=learner.replicated)


def _call(
    name: str,
    program: functools.partial[Any],
    rest: Callable[[TrainState, Any], tuple[Any, ...]],
    returns_state: bool = False,
) -> SweepProgram:
    """A learner's program, whose first arguments are bound."""
    return SweepProgram(
        name, program.func, lambda *given: (*program.args, *rest(*given)), returns_state
    )
