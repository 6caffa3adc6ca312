"""Copies of environments in the middle of an episode, for episodes that branch."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs.base import Environment
from seeupo_jax.envs.validation import ProtocolError

_METHODS = ("reset", "step", "score", "close")


class Snapshot:
    """An environment's state after a turn, from which several episodes may continue.

    Args:
      environment: has `fork`; nothing else acts on it.
    """

    def __init__(self, environment: Environment):
        self._environment, self._lock = environment, threading.Lock()

    def fork(self) -> Environment:
        """Makes another environment in the same state; any thread may call it."""
        with self._lock:
            return fork(self._environment)

    def close(self) -> None:
        """Closes the environment; errors are ignored, since they affect no episode."""
        with contextlib.suppress(BaseException):
            self._environment.close()


def has_fork(environment: Environment) -> bool:
    """Whether an environment can be copied in the middle of its episode.

    The class decides: a `fork` that a wrapper forwards by `__getattr__` would not copy the wrapper.
    """
    return callable(getattr(type(environment), "fork", None))


def take_snapshot(environment: Environment) -> Snapshot | None:
    """Copies an environment; None: it has no `fork`."""
    return Snapshot(fork(environment)) if has_fork(environment) else None


def fork(environment: Environment) -> Environment:
    """Copies an environment that has `fork`.

    Raises:
      ProtocolError: `fork` did not return another environment.
    """
    copy = cast(Any, environment).fork()
    if copy is environment or not all(callable(getattr(copy, name, None)) for name in _METHODS):
        raise ProtocolError(
            f"fork(): got {shown(copy)}; allowed: another environment, with {', '.join(_METHODS)}"
        )
    return copy
