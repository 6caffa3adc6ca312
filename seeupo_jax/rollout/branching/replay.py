"""How an environment comes to the state that a branch begins in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs import gate
from seeupo_jax.envs.base import Environment, Message
from seeupo_jax.envs.pool import Call
from seeupo_jax.envs.snapshot import has_fork
from seeupo_jax.rollout.episode import Episode


def check_replayable(
    environment: Environment, task_ids: Sequence[str], seed: int, name: str | None = None
) -> None:
    """Whether an environment can be copied or begins each task alike, as a replay needs.

    Args:
      name: what the error calls it; None: its class's.

    Raises:
      ValueError: one sentence with what differs, or what it failed by.
    """
    for task_id in () if has_fork(environment) else task_ids:
        _check_task(environment, task_id, seed, name or type(environment).__name__)


def _check_task(environment: Environment, task_id: str, seed: int, name: str) -> None:
    try:
        one, other = (
            gate.check_opening(gate.reset(environment, task_id, seed, episode_seed=0))
            for _ in range(2)
        )
        for what, got, wanted in zip(("messages", "tools"), other, one, strict=True):
            _check_same(what, got, wanted)
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(
            f"config.algorithm.forks.kind: {name}.reset({task_id!r}, {seed}), called twice:"
            f" {gate.describe(error)}; allowed: an environment with fork() and"
            " env.isolation=thread, or whose episodes can be replayed."
        ) from error


def begin_call(episode: Episode, seed: int, episode_seed: int) -> Call:
    """Gives a branch's slot an environment: one in its state, or one that begins its replay."""
    start, request = episode.request.fork.start, episode.request
    if start.snapshot is not None:
        return Call(episode.slot, lambda env: None, fresh=True, make=start.snapshot.fork)
    opening = start.messages[: start.said[0]]

    def check(env: Environment, answer: Any) -> None:
        messages, tools = gate.check_opening(answer)
        _check_same("reset() messages", messages, opening)
        _check_same("reset() tools", tools, start.tools)

    def reset(env: Environment) -> Any:
        return gate.reset(env, request.task_id, seed, episode_seed)

    return Call(episode.slot, reset, check, fresh=True)


def step_call(episode: Episode, turn: int) -> Call:
    """Replays a turn of a branch, whose reply must be the one that it had."""
    start = episode.request.fork.start
    said, ends = start.said[turn], [*start.said, len(start.messages)]
    text, reply = start.messages[said]["content"], start.messages[said + 1 : ends[turn + 1]]

    def check(env: Environment, answer: Any) -> None:
        step = gate.check_step(answer, turn=turn)
        _check_same(f"step() observation of turn {turn}", step.observation, reply)
        if step.done:
            raise gate.ProtocolError(f"step() of turn {turn}: got done=True; allowed: False")

    return Call(episode.slot, lambda env: env.step(text), check)


def _check_same(where: str, got: Any, wanted: list[Message] | Any) -> None:
    if list(got) != list(wanted):
        raise gate.ProtocolError(
            f"{where}: got {shown(list(got))}; allowed: what it was before, {shown(list(wanted))}"
        )
