"""Results that clients ask for later: each has an id, and is kept for a while."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, NamedTuple

from seeupo_jax.train_service.refusals import RequestRefused

KEPT, KEPT_BYTES = 4096, 2**30  # finished results, at most; the oldest are forgotten
WAIT_S = 30.0  # of one request for a result; clients wait 45 s


class Failed:
    """Why there is no result. category: user or server, as whose mistake it is."""

    def __init__(self, error: Exception):
        self.category = "user" if isinstance(error, RequestRefused) else "server"
        self.sentence = str(error)


Result = dict[str, Any] | bytes | Failed


class _Done(NamedTuple):
    """A finished request. key: as of `Futures.add`. size: bytes of its result."""

    future: Future[Result]
    key: Any
    size: int


class Futures:
    """Ids and results; any thread may call.

    A request that is sent again (its connection broke) has the id of the first one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._open: OrderedDict[str, Future[Result]] = OrderedDict()
        self._done: OrderedDict[str, _Done] = OrderedDict()
        self._bytes = 0  # of finished results
        self._keys: dict[Any, str] = {}

    def add(self, key: Any) -> tuple[str, Future[Result] | None]:
        """An id for a request, and its future; None: the request has come before.

        Args:
          key: that no other request has; None: of this request nothing is known.
        """
        with self._lock:
            if key is not None and key in self._keys:
                return self._keys[key], None
            self._number += 1
            name, future = f"request-{self._number}", Future[Result]()
            future.set_running_or_notify_cancel()  # a client that gives up cancels nothing
            self._open[name] = future
            if key is not None:
                self._keys[key] = name
        future.add_done_callback(lambda _: self._finish(name, key))
        return name, future

    def _finish(self, name: str, key: Any) -> None:
        with self._lock:
            future = self._open.pop(name)
            result = future.result()
            self._done[name] = _Done(future, key, len(result) if isinstance(result, bytes) else 0)
            self._bytes += self._done[name].size
            while len(self._done) > KEPT or (self._bytes > KEPT_BYTES and len(self._done) > 1):
                _, old = self._done.popitem(last=False)
                self._keys.pop(old.key, None)
                self._bytes -= old.size

    async def result(self, name: str) -> Result | None:
        """A request's result; None: it is not there yet, after a while.

        Raises:
          RequestRefused: no such request, or its result is forgotten.
        """
        with self._lock:
            done = self._done.get(name)
            future = self._open.get(name) if done is None else done.future
        if future is None:
            raise RequestRefused(
                f"request_id: got {name[:80]!r}, which is not known (any more).", 410
            )
        waiting = asyncio.wrap_future(future)
        finished, _ = await asyncio.wait({waiting}, timeout=WAIT_S)
        return waiting.result() if finished else None
