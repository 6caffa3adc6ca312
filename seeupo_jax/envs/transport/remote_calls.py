"""Calls to an environment in another process and their answers as JSON, over HTTP or pipes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from seeupo_jax.configuration.user_code import origin, text_of
from seeupo_jax.envs.base import Environment, ServerAtCapacity, StepResult, TransientError
from seeupo_jax.envs.transport.http_protocol import MAX_ANSWER_BYTES
from seeupo_jax.envs.validation import (
    check_finish,
    check_reset,
    check_score,
    check_step,
    first_role,
    has_finish,
    reset_episode,
)

STEP = ("observation", "reward", "done", "info")


def reset(
    environment: Environment, task_id: str, seed: int, episode_seed: int | None = None
) -> dict[str, Any]:
    opening = reset_episode(environment, task_id, seed, episode_seed)
    messages, tools = check_reset(opening)
    role = first_role(environment)
    named = {"role": role} if role else {}
    return {"messages": messages, "tools": tools, "finish": has_finish(environment), **named}


def step(environment: Environment, text: str) -> dict[str, Any]:
    return dict(vars(check_step(environment.step(text))))


def finish(environment: Environment, stop: str) -> dict[str, Any]:
    return {"reward": check_finish(environment.finish(stop))}


def score(environment: Environment) -> float:
    return check_score(environment.score())


# The calls of an episode and the types of their arguments.
EPISODE_CALLS = {
    "reset": (reset, {"task_id": str, "seed": int}),
    "step": (step, {"text": str}),
    "finish": (finish, {"stop": str}),
}
# Arguments that a request may lack; older clients do not know them.
OPTIONAL = {"reset": {"episode_seed": int}}


def answer(
    question: Callable[[], Any], on_error: Callable[[], None] = lambda: None
) -> tuple[bytes, bool]:
    """Executes a call. Returns its answer and whether it had effects.

    The answer is a JSON object with `result`, `transient` or `error`.

    Args:
      on_error: called while an error of the call is being handled.
    """
    try:
        data = json.dumps({"result": question()}, allow_nan=False).encode()
        if len(data) > MAX_ANSWER_BYTES:
            raise OverflowError(f"an answer of {len(data)} bytes; {MAX_ANSWER_BYTES} allowed")
        return data, True
    except TransientError as error:
        full = {"full": True} if issubclass(type(error), ServerAtCapacity) else {}
        return json.dumps({"transient": text_of(error)} | full).encode(), False
    except BaseException as error:  # even SystemExit ends this episode and no other
        on_error()
        stated = {"type": type(error).__name__, "text": f"{text_of(error)} {origin(error)}".strip()}
        return json.dumps({"error": stated}).encode(), True


def transient(answer: dict[str, Any]) -> TransientError:
    """Makes the error of an answer with `transient`."""
    return (ServerAtCapacity if answer.get("full") is True else TransientError)(
        str(answer["transient"])
    )


def read_opening(result: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Validates the answer to `reset`; returns its messages and tools."""
    return check_reset((result["messages"], result["tools"]))


def read_step(result: dict[str, Any]) -> StepResult:
    """Validates the answer to `step`; returns its result."""
    # Older servers have none of the others.
    more = (result.get("rewards", {}), result.get("role", ""), result.get("role_rewards", {}))
    return check_step(StepResult(*(result[name] for name in STEP), *more))
