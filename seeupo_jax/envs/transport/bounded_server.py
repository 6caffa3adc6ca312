"""An HTTP server that limits its connections and the time until they authenticate."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from seeupo_jax.envs.transport.http_protocol import BUSY

_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # the client has closed the connection


class BoundedServer(ThreadingHTTPServer):
    """A server with one thread per connection and a limit on connections.

    At the limit, a new connection replaces one that its client has closed while its handler still
    works; without such a connection it is answered with `BUSY` and closed. A connection whose
    handler does not call `admit` in time is closed, whatever its client sends.

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
        """Keeps a connection whose client has authenticated."""
        with self._lock:
            if connection in self._opened:
                self._opened[connection] = float("inf")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a new connection, or refuses the connection."""
        with self._lock:
            crowded = len(self._opened) >= self._max_connections
            closed = _closed_by_client(self._opened) if crowded else []
        for connection in closed:
            self.shutdown_request(connection)
        with self._lock:
            full = len(self._opened) >= self._max_connections
            if not full:
                self._opened[request] = time.monotonic()
        if not full:
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):
            request.settimeout(0.0)  # the client may not be reading
            request.sendall(_busy(f"all {self._max_connections} connections are open."))
        self.shutdown_request(request)

    def close_request(self, request: Any) -> None:
        """Removes a connection that has ended."""
        with self._lock:
            self._opened.pop(request, None)
        super().close_request(request)

    def service_actions(self) -> None:
        """Closes connections that are late to authenticate; `serve_forever` calls it repeatedly."""
        limit = time.monotonic() - self._admit_s
        with self._lock:
            for connection in [one for one, opened in self._opened.items() if opened < limit]:
                with contextlib.suppress(OSError):  # its handler then reads the end and closes it
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnected; they repeat a request whose answer they need."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _closed_by_client(connections: Collection[socket.socket]) -> list[socket.socket]:
    """The connections that their clients have closed."""
    poll = select.poll()
    for connection in connections:
        with contextlib.suppress(ValueError):  # already closed here
            poll.register(connection, _CLOSED)
    ended = {number for number, _ in poll.poll(0)}
    return [connection for connection in connections if connection.fileno() in ended]


def _busy(reason: str) -> bytes:
    body = json.dumps({"refused": reason}).encode()
    head = f"HTTP/1.1 {BUSY} Busy\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
