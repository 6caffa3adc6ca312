"""Brings an environment to the state in which a branch begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs import validation
from seeupo_jax.envs.base import Environment, Message
from seeupo_jax.envs.pool import EnvCall
from seeupo_jax.envs.snapshot import has_fork
from seeupo_jax.rollout.episode import Episode


def check_replayable(
    environment: Environment, task_ids: Sequence[str], seed: int, name: str | None = None
) -> None:
    """Checks that an environment can be copied, or that `reset` repeats itself, as replay needs.

    Args:
      name: of the environment in errors; None: its class's.

    Raises:
      ValueError: one sentence with what differs, or what it failed by.
    """
    for task_id in () if has_fork(environment) else task_ids:
        _check_task(environment, task_id, seed, name or type(environment).__name__)


def _check_task(environment: Environment, task_id: str, seed: int, name: str) -> None:
    try:
        one, other = (
            validation.check_reset(
                validation.reset_episode(environment, task_id, seed, episode_seed=0)
            )
            for _ in range(2)
        )
        for what, got, wanted in zip(("messages", "tools"), other, one, strict=True):
            _check_same(what, got, wanted)
    except (Exception, SystemExit) as error:  # of a user's code
        raise ValueError(
            f"config.algorithm.forks.kind: {name}.reset({task_id!r}, {seed}), called twice:"
            f" {validation.describe(error)}; allowed: an environment with fork() and"
            " env.isolation=thread, or whose episodes can be replayed."
        ) from error


def begin_call(episode: Episode, seed: int, episode_seed: int) -> EnvCall:
    """The call that restores a branch's environment, or resets one for a replay."""
    start, request = episode.request.fork.start, episode.request
    if start.snapshot is not None:
        return EnvCall(episode.slot, lambda env: None, fresh=True, make=start.snapshot.fork)
    opening = start.messages[: start.action_message_indices[0]]

    def check(env: Environment, answer: Any) -> None:
        messages, tools = validation.check_reset(answer)
        _check_same("reset() messages", messages, opening)
        _check_same("reset() tools", tools, start.tools)

    def reset(env: Environment) -> Any:
        return validation.reset_episode(env, request.task_id, seed, episode_seed)

    return EnvCall(episode.slot, reset, check, fresh=True)


def step_call(episode: Episode, turn: int) -> EnvCall:
    """The call that replays a turn of a branch and checks that the reply is the same."""
    start = episode.request.fork.start
    index, end = [*start.action_message_indices, len(start.messages)][turn : turn + 2]
    text, reply = start.messages[index]["content"], start.messages[index + 1 : end]

    def check(env: Environment, answer: Any) -> None:
        step = validation.check_step(answer, turn=turn)
        _check_same(f"step() observation of turn {turn}", step.observation, reply)
        if step.done:
            raise validation.ProtocolError(f"step() of turn {turn}: got done=True; allowed: False")

    return EnvCall(episode.slot, lambda env: env.step(text), check)


def _check_same(where: str, got: Any, wanted: list[Message] | Any) -> None:
    if list(got) != list(wanted):
        raise validation.ProtocolError(
            f"{where}: got {shown(list(got))}; allowed: what it was before, {shown(list(wanted))}"
        )
