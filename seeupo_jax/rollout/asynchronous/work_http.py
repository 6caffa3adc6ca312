"""HTTP of the work server: a thread for each connection, within limits of size, time and number."""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.rollout.asynchronous.work_messages import CONTENT_TYPE, REFUSAL_TYPE

_LOGGER = logging.getLogger(__name__)
_CHUNK = 2**20
# The rest of a refused body is read and discarded: some clients read no answer before it is sent.
_REST_BYTES, _REST_S = 2**26, 5.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of what clients may cost.

    connections: open at a time. body_bytes: of a message, and of what it is decompressed to.
    head_s, body_s: until a request's headers, and its body, have arrived; a client that reads a
    file reads 1 MiB within `body_s`. idle_s: until a connection's next request.
    """

    connections: int = 512
    body_bytes: int = 2**30
    head_s: float = 30.0
    body_s: float = 120.0
    idle_s: float = 600.0


class Refusal(Exception):
    """A request is not served; the text is a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Service(NamedTuple):
    """What a server answers. Functions raise `Refusal`; any thread calls them.

    key: of every request. post: the answer to a body sent to a path, and a mark of the client.
    file: the file of a path. hung_up: receives the last mark of a connection that has ended.
    """

    key: str
    post: Callable[[str, bytes], tuple[bytes, str]]
    file: Callable[[str], Path]
    hung_up: Callable[[str], None]


class HttpServer(socketserver.ThreadingTCPServer):
    """Serves from its making to `close`, in threads of its own.

    Raises:
      OSError: the address is not available.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, limits: ConnectionLimits):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.limits = limits
        self._service: Service | None = None
        self._connections: dict[socket.socket, float | None] = {}  # when each is to be closed
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="work-server",
            daemon=True,
        )

    @property
    def port(self) -> int:
        """That it listens on."""
        return self.server_address[1]

    @property
    def service(self) -> Service:
        """What `serve` was given."""
        assert self._service is not None
        return self._service

    def serve(self, service: Service) -> None:
        """Begins to answer; until then connections wait."""
        self._service = service
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the socket and all connections."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _cut(connection)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._connections) >= self.limits.connections:
                return False
            self._connections[request] = time.monotonic() + self.limits.head_s
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [
                each for each, end in self._connections.items() if end is not None and end < now
            ]
        for connection in late:
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # that is a connection that ended early
            _LOGGER.exception("a connection of the work server ended with an error")

    def limit(self, connection: socket.socket, seconds: float | None) -> None:
        """Disconnects a client after so many seconds, unless it is limited anew."""
        with self._lock:
            end = None if seconds is None else time.monotonic() + seconds
            self._connections[connection] = end


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection and its requests, one after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "seeupo_jax", ""
    disable_nagle_algorithm = True
    error_message_format, error_content_type = "%(message)s\n", "text/plain; charset=utf-8"
    wbufsize = -1  # an answer's head and body leave together
    server: HttpServer

    def setup(self) -> None:
        self._limits = self.server.limits
        super().setup()
        self._client = ""  # the mark of the last message
        self._unread = True  # the body of the request
        assert isinstance(self.rfile, io.BufferedReader)
        self._peek = self.rfile.peek

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        if self._client:
            self.server.service.hung_up(self._client)

    def handle_one_request(self) -> None:
        self._peek(1)  # waits for the first byte
        self.server.limit(self.connection, self._limits.head_s)
        self._unread = True
        super().handle_one_request()
        self.server.limit(self.connection, self._limits.idle_s)

    def do_POST(self) -> None:
        """Answers a message."""
        try:
            self._check_key()
            body = self._read_body()
            self.server.limit(self.connection, None)
            data, self._client = self.server.service.post(self.path, body)
        except Refusal as refusal:
            return self._refuse(refusal)
        self.server.limit(self.connection, self._limits.body_s)
        self._send_head(200, CONTENT_TYPE, len(data))
        self.wfile.write(data)
        self.wfile.flush()

    def do_GET(self) -> None:
        """Sends a file, or the end of it from the first byte of `Range: bytes=FIRST-`."""
        try:
            self._check_key()
            path = self.server.service.file(self.path)
            try:
                file = path.open("rb")
            except OSError:
                raise Refusal(404, "weights: got a version that is no longer there.") from None
            with file:
                self._send_file(file)
        except Refusal as refusal:
            self._refuse(refusal)

    def _send_file(self, file: Any) -> None:
        size = file.seek(0, 2)
        first = self._first_byte()
        if first > size:
            raise Refusal(416, f"Range: got byte {first}; allowed: at most {size}.")
        file.seek(first)
        partial = {"Content-Range": f"bytes {first}-{size - 1}/{size}"} if first else {}
        self._send_head(206 if first else 200, CONTENT_TYPE, size - first, partial)
        while chunk := file.read(_CHUNK):
            self.server.limit(self.connection, self._limits.body_s)
            self.wfile.write(chunk)
            self.wfile.flush()

    def _first_byte(self) -> int:
        wanted = self.headers.get("Range", "bytes=0-")
        first = wanted.removeprefix("bytes=").removesuffix("-")
        if f"bytes={first}-" != wanted or not first.isdecimal() or len(first) > 18:
            raise Refusal(416, f"Range: got {wanted[:80]!r}; allowed: bytes=FIRST-.")
        return int(first)

    def _check_key(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not secrets.compare_digest(given, f"Bearer {self.server.service.key}".encode()):
            raise Refusal(
                401,
                "the key: got another one; allowed: that of WORKDIR/workers.json or"
                " SEEUPO_ROLLOUT_KEY, as `Authorization: Bearer KEY`.",
            )

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 18:
            raise Refusal(411, "the body: got no Content-Length; allowed: one, in bytes.")
        most = self._limits.body_bytes
        if int(length) > most:
            raise Refusal(413, f"the body: got {length} bytes; allowed: {most}.")
        self.server.limit(self.connection, self._limits.body_s)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the client has hung up")
        self._unread = False
        return body

    def _refuse(self, refusal: Refusal) -> None:
        """Answers with a sentence; the connection ends, unless its body was read."""
        data = f"{refusal}\n".encode()
        self.close_connection = self.close_connection or self._unread
        head = {"Connection": "close"} if self.close_connection else {}
        self._send_head(refusal.status, REFUSAL_TYPE, len(data), head)
        self.wfile.write(data)
        self.wfile.flush()
        if self._unread:
            self._discard_rest()

    def _discard_rest(self) -> None:
        left = self.headers.get("Content-Length", "")
        left = min(int(left[:18]), _REST_BYTES) if left.isdecimal() else 0
        self.server.limit(self.connection, _REST_S)
        while left > 0 and (chunk := self.rfile.read1(min(left, _CHUNK))):
            left -= len(chunk)

    def _send_head(
        self, status: int, kind: str, length: int, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": length, **(more or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: mistakes of clients are not logged."""
