"""What an environment elsewhere is asked, and its answers as JSON: over HTTP, or over pipes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from seeupo_jax.configuration.user_code import text_of
from seeupo_jax.envs import gate
from seeupo_jax.envs.base import Environment, StepResult, TransientError
from seeupo_jax.envs.transport import wire

STEP = ("observation", "reward", "done", "info")


def reset(
    environment: Environment, task_id: str, seed: int, episode_seed: int | None = None
) -> dict[str, Any]:
    opening = gate.reset(environment, task_id, seed, episode_seed)
    messages, tools = gate.check_opening(opening)
    told = gate.has_finish(environment)  # else clients need not ask
    return {"messages": messages, "tools": tools, "finish": told}


def step(environment: Environment, text: str) -> dict[str, Any]:
    return dict(vars(gate.check_step(environment.step(text))))


def finish(environment: Environment, stop: str) -> dict[str, Any]:
    return {"reward": gate.check_last_reward(environment.finish(stop))}


def score(environment: Environment) -> float:
    return gate.check_score(environment.score())


# What plays an episode: the call, and the types of its arguments.
PLAYS = {
    "reset": (reset, {"task_id": str, "seed": int}),
    "step": (step, {"text": str}),
    "finish": (finish, {"stop": str}),
}
# Arguments that a request may lack; older clients do not know them.
OPTIONAL = {"reset": {"episode_seed": int}}


def answer(
    question: Callable[[], Any], on_error: Callable[[], None] = lambda: None
) -> tuple[bytes, bool]:
    """The answer in JSON, and whether anything has happened that must not happen again.

    Args:
      on_error: is called where the question raises, while the error is being handled.

    Returns: an object with `result`, `transient` or `error` in it.
    """
    try:
        data = json.dumps({"result": question()}, allow_nan=False).encode()
        if len(data) > wire.MAX_ANSWER_BYTES:
            raise OverflowError(f"an answer of {len(data)} bytes; {wire.MAX_ANSWER_BYTES} allowed")
        return data, True
    except TransientError as error:
        return json.dumps({"transient": text_of(error)}).encode(), False
    except BaseException as error:  # even SystemExit ends this episode and no other
        on_error()
        told = {"type": type(error).__name__, "text": text_of(error)}
        return json.dumps({"error": told}).encode(), True


def read_opening(result: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `reset` came to: its messages and its tools."""
    return gate.check_opening((result["messages"], result["tools"]))


def read_step(result: dict[str, Any]) -> StepResult:
    """What `step` came to."""
    return gate.check_step(StepResult(*(result[name] for name in STEP)))
