"""Compiles programs ahead, side by side: XLA leaves Python's lock while it compiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from seeupo_jax.parallel.host_cores import usable_cores

# At once: a large program takes gigabytes of the host's memory while it is compiled.
WORKERS = min(4, usable_cores())
_POLL_S = 0.5

# Called with the number of programs that are compiled and that of all; it may raise to stop.
Between = Callable[[int, int], None]


def never_stop(done: int, total: int) -> None:
    """A `Between` that does nothing."""


def compile_all(
    programs: Sequence[Callable[[], jax.stages.Lowered]], between: Between = never_stop
) -> None:
    """Compiles programs, one on each core; calls with such arguments then compile nothing.

    They are traced and lowered in this thread and in this order, one more than are compiled.

    Args:
      programs: each gives what `jitted.lower(...)` returns; equal ones only once.
      between: called before the first and after each, in their order, so by several processes
        equally often; a process that is alone also calls it while it waits. What it raises ends the
        compilation at once; only the interpreter's end waits for what is being compiled.
    """
    compiled: deque[Future[jax.stages.Compiled]] = deque()
    pool, total = ThreadPoolExecutor(WORKERS, thread_name_prefix="compile"), len(programs)

    def wait_for(future: Future[jax.stages.Compiled], done: int) -> None:
        timeout_s = _POLL_S if jax.process_count() == 1 else None
        while not wait([future], timeout_s).done:
            between(done, total)
        future.result()
        between(done + 1, total)

    between(0, total)
    try:
        for number, lower in enumerate(programs):
            if len(compiled) > WORKERS:
                wait_for(compiled.popleft(), number - len(compiled) - 1)
            compiled.append(pool.submit(lower().compile))
        for done, future in enumerate(compiled, total - len(compiled)):
            wait_for(future, done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
