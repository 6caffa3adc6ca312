"""Environments: text worlds on the host; nothing here imports jax."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from seeupo_jax.envs.base import (
    Demonstration,
    Demonstrator,
    Environment,
    Labelled,
    Message,
    StepResult,
    Tool,
    TransientError,
)
from seeupo_jax.envs.gate import describe


def _order_desk(**options: Any) -> Environment:
    from seeupo_jax.envs.order_desk.environment import OrderDesk

    return OrderDesk(**options)


def _bfcl(**options: Any) -> Environment:
    from seeupo_jax.envs.bfcl.environment import Bfcl

    return Bfcl(**options)


def _appworld(**options: Any) -> Environment:
    from seeupo_jax.envs.appworld.environment import AppWorld

    return AppWorld(**options)


def _remote(**options: Any) -> Environment:
    from seeupo_jax.envs.transport.remote import Remote

    return Remote(**options)


def _gymnasium_text(**options: Any) -> Environment:
    from seeupo_jax.envs.gymnasium_text import GymnasiumText

    return GymnasiumText(**options)


def _openenv(**options: Any) -> Environment:
    from seeupo_jax.envs.openenv import OpenEnv

    return OpenEnv(**options)


def _textworld_express(**options: Any) -> Environment:
    from seeupo_jax.envs.textworld_express import TextWorldExpress

    return TextWorldExpress(**options)


ENVIRONMENTS = {
    "order_desk": _order_desk,
    "bfcl": _bfcl,
    "appworld": _appworld,
    "remote": _remote,
    "gymnasium_text": _gymnasium_text,
    "openenv": _openenv,
    "textworld_express": _textworld_express,
}
_METHODS = ("task_ids", "reset", "step", "score", "close")
_ANYTHING = (Exception, SystemExit)  # what a user's code may raise, but for the user's Ctrl-C


def make(name: str, **options: Any) -> Environment:
    """An environment by name, or by `module:Class` where its code lies.

    Raises:
      ValueError: an unknown name or option; a class that is not there, lacks a method or cannot be
        made.
    """
    if ":" in name:
        return _from_module(name, options)
    if name not in ENVIRONMENTS:
        allowed = ", ".join(ENVIRONMENTS)
        raise ValueError(f"env.name: got {name!r}; allowed: {allowed}, or module:Class.")
    try:
        return ENVIRONMENTS[name](**options)
    except TypeError as error:
        raise ValueError(f"env.options: {name} refused {options}: {error}.") from None
    except ValueError:
        raise  # a sentence of its own
    except Exception as error:
        raise ValueError(f"env.name: {name!r} cannot be made: {describe(error)}.") from error


def _from_module(name: str, options: dict[str, Any]) -> Environment:
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except _ANYTHING as error:  # the module is run by this
        raise ValueError(f"env.name: {name!r} cannot be imported: {describe(error)}.") from error
    if not callable(found):
        raise ValueError(f"env.name: {name!r} is a {type(found).__name__}; allowed: a class.")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ValueError(f"env.options: {name} refused {options}: {error}.") from None
    try:
        made = found(**options)
    except _ANYTHING as error:
        raise ValueError(f"env.name: {name!r} cannot be made: {describe(error)}.") from error
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ValueError(f"env.name: {name!r} has no {', no '.join(missing)}.")
    return made


__all__ = [
    "ENVIRONMENTS",
    "Demonstration",
    "Demonstrator",
    "Environment",
    "Labelled",
    "Message",
    "StepResult",
    "Tool",
    "TransientError",
    "make",
]
