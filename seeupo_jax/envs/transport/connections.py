"""An HTTP server with a bound on its connections, and on those whose client is not known yet."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seeupo_jax.envs.transport import wire


class BoundedServer(ThreadingHTTPServer):
    """Each connection has a thread of its own, so there are only so many of both.

    A further connection is answered with `wire.BUSY` and closed. A connection whose handler does
    not call `admit` in time is cut, however busily its client sends.

    Args:
      max_connections: open at once.
      admit_s: seconds from the connection to `admit`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        *,
        max_connections: int,
        admit_s: float,
    ):
        self._max_connections, self._admit_s = max_connections, admit_s
        self._lock = threading.Lock()
        # When each open connection was made, by the monotonic clock; infinity once it is admitted.
        self._opened: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def admit(self, connection: socket.socket) -> None:
        """Lets a connection stay: its client has shown who it is."""
        with self._lock:
            if connection in self._opened:
                self._opened[connection] = float("inf")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Of a connection that has been made."""
        with self._lock:
            full = len(self._opened) >= self._max_connections
            if not full:
                self._opened[request] = time.monotonic()
        if not full:
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):
            request.settimeout(0.0)  # nobody waits for who may not be listening
            request.sendall(_busy(f"all {self._max_connections} connections are open."))
        self.shutdown_request(request)

    def close_request(self, request: Any) -> None:
        """Of a connection that is over."""
        with self._lock:
            self._opened.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """Cuts what is late; the loop of `serve_forever` calls it at every turn."""
        limit = time.monotonic() - self._admit_s
        with self._lock:
            for connection in [one for one, opened in self._opened.items() if opened < limit]:
                with contextlib.suppress(OSError):  # its handler reads the end, and closes it
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; it asks again if it wants the answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _busy(reason: str) -> bytes:
    body = json.dumps({"refused": reason}).encode()
    head = f"HTTP/1.1 {wire.BUSY} Busy\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
