"""Which platform jax computes on in this process: as it chooses, or the CPU for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax
from jax._src import xla_bridge  # it alone says whether a backend has started
from jax.extend.backend import clear_backends


@contextlib.contextmanager
def cpu_only() -> Generator[None]:
    """Keeps jax off this machine's accelerator where it has not started yet; then as it was.

    A server may hold the accelerator, and a TPU lets only one process in.
    """
    if xla_bridge.backends_are_initialized():  # this process holds what there is
        yield
        return
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        clear_backends()  # else jax would stay on the CPU
        jax.config.update("jax_platforms", platforms)
