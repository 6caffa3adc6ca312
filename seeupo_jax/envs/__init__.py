"""Environments: text worlds that run on the host, without jax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from seeupo_jax.configuration.user_code import (
    check_arguments,
    import_attribute,
    located,
    near_misses,
    public_functions,
)
from seeupo_jax.envs.base import (
    Demonstration,
    Demonstrator,
    Environment,
    Labelled,
    Message,
    Referenced,
    StepResult,
    Tool,
    TransientError,
)
from seeupo_jax.envs.tool_environment import ToolEnvironment, tool

# The class of each environment by name; imported on first use, since some need extra packages.
ENVIRONMENTS = {
    "order_desk": "seeupo_jax.envs.order_desk.environment:OrderDesk",
    "bfcl": "seeupo_jax.envs.bfcl.environment:Bfcl",
    "bfcl_worlds": "seeupo_jax.instruments.bfcl_worlds.environment:BfclWorlds",
    "appworld": "seeupo_jax.envs.appworld.environment:AppWorld",
    "remote": "seeupo_jax.envs.transport.remote:Remote",
    "prompts": "seeupo_jax.envs.prompts:Prompts",
    "gymnasium_text": "seeupo_jax.envs.gymnasium_text:GymnasiumText",
    "openenv": "seeupo_jax.envs.openenv:OpenEnv",
    "kuhn_poker": "seeupo_jax.envs.kuhn_poker.environment:KuhnPoker",
    "mixture": "seeupo_jax.envs.mixture:make_mixture",
    "textworld_express": "seeupo_jax.envs.textworld_express:TextWorldExpress",
    "lab_problem": "seeupo_jax.instruments.lab.text_problem:TextProblem",
}
_METHODS = ("task_ids", "reset", "step", "score", "close")
# Optional methods, as in the table of docs/environments.md.
_OPTIONAL = (
    *("finish", "labels", "reference", "task_shares", "fork", "demonstrations", "vocabulary"),
    *("action_texts", "expected_reward"),
)


def make(name: str, /, **options: Any) -> Environment:
    """Makes an environment by its name, or a user's `module:Class`.

    Raises:
      ValueError: the name or an option is unknown, or the class does not exist, lacks a method or
        cannot be instantiated.
    """
    kind = _find(name)
    try:
        check_arguments(inspect.signature(kind), (), options)
    except TypeError as error:
        raise ValueError(f"env.options: {name} refused {options}: {error}.") from None
    try:
        made = kind(**options)
    except (Exception, SystemExit) as error:  # of a user's class
        if isinstance(error, ValueError) and name in ENVIRONMENTS:
            raise  # already a full sentence
        raise ValueError(f"env.name: {name!r} cannot be made: {located(error)}.") from error
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing and name not in ENVIRONMENTS:
        raise ValueError(f"env.name: {name!r} has no {', no '.join(missing)}.")
    return made


def misspelt_methods(name: str) -> dict[str, str]:
    """Maps method names of a user's `module:Class` to the optional methods that they resemble."""
    kind = _find(name) if ":" in name else None
    return near_misses(public_functions(kind), _OPTIONAL) if isinstance(kind, type) else {}


def _find(name: str) -> Callable[..., Any]:
    if ":" not in name and name not in ENVIRONMENTS:
        allowed = ", ".join(ENVIRONMENTS)
        raise ValueError(f"env.name: got {name!r}; allowed: {allowed}, or module:Class.")
    return import_attribute(ENVIRONMENTS.get(name, name), "env.name", "class", callable)


__all__ = [
    "ENVIRONMENTS",
    "Demonstration",
    "Demonstrator",
    "Environment",
    "Labelled",
    "Message",
    "Referenced",
    "StepResult",
    "Tool",
    "ToolEnvironment",
    "TransientError",
    "make",
    "tool",
]
