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
    """An environment as it was after a turn; several episodes may continue from it.

    Args:
      environment: acted on by nothing else, with `fork`.
    """

    def __init__(self, environment: Environment):
        self._environment, self._lock = environment, threading.Lock()

    def fork(self) -> Environment:
        """Another environment in the same state; any thread may call it."""
        with self._lock:
            return fork(self._environment)

    def close(self) -> None:
        """Closes it; errors of a user's code concern no episode any more."""
        with contextlib.suppress(BaseException):
            self._environment.close()


def has_fork(environment: Environment) -> bool:
    """Whether an environment can be copied in the middle of its episode.

    By its class: what a wrapper's `__getattr__` passes on would copy the environment without it.
    """
    return callable(getattr(type(environment), "fork", None))


def take_snapshot(environment: Environment) -> Snapshot | None:
    """A copy of an environment; None: it has no `fork`."""
    return Snapshot(fork(environment)) if has_fork(environment) else None


def fork(environment: Environment) -> Environment:
    """A copy of an environment that has `fork`.

    Raises:
      ProtocolError: what it gave is no other environment.
    """
    copy = cast(Any, environment).fork()
    if copy is environment or not all(callable(getattr(copy, name, None)) for name in _METHODS):
        raise ProtocolError(
            f"fork(): got {shown(copy)}; allowed: another environment, with {', '.join(_METHODS)}"
        )
    return copy
