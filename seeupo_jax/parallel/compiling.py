"""Compiles programs ahead, side by side: XLA leaves Python's lock while it compiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from seeupo_jax.parallel.host_cores import cores

# At once: a large program takes gigabytes of the host's memory while it is compiled.
WORKERS = min(4, cores())
_POLL_S = 0.5


def compile_all(
    programs: Iterable[Callable[[], jax.stages.Lowered]],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Compiles programs, one on each core; calls with such arguments then compile nothing.

    They are traced and lowered in this thread and in this order, one more than are compiled.

    Args:
      programs: each gives what `jitted.lower(...)` returns; equal ones only once.
      between: called after each, in their order, so by several processes equally often; a process
        that is alone also calls it while it waits. What it raises ends the compilation at once;
        only the interpreter's end waits for what is being compiled.
    """
    compiled: deque[Future[jax.stages.Compiled]] = deque()
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="compile")
    try:
        for lower in programs:
            if len(compiled) > WORKERS:
                _wait(compiled.popleft(), between)
            compiled.append(pool.submit(lower().compile))
        for future in compiled:
            _wait(future, between)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(future: Future[jax.stages.Compiled], between: Callable[[], None]) -> None:
    timeout_s = _POLL_S if jax.process_count() == 1 else None
    while not wait([future], timeout_s).done:
        between()
    future.result()
    between()
