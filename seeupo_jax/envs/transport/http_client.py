"""An HTTP client with one connection, whose request another thread can end."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection


class HttpClient(PoolManager):
    """Keeps its connection between requests; uses no proxy, redirects or retries."""

    def __init__(self) -> None:
        super().__init__(maxsize=1, retries=False)
        self.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._current = _CurrentSocket()

    @property
    def killed(self) -> bool:
        return self._current.killed

    def kill(self) -> None:
        """Ends the running request and every later one; any thread may call it."""
        self._current.kill()

    def _new_pool(self, *arguments: Any, **options: Any) -> HTTPConnectionPool:
        pool = super()._new_pool(*arguments, **options)
        pool.conn_kw["current"] = self._current
        return pool


class _CurrentSocket:
    """The socket of a client's connection. killed: it is shut down, and so is every later one."""

    def __init__(self) -> None:
        self.killed = False
        self._socket: socket.socket | None = None

    def kill(self) -> None:
        self.killed = True
        if self._socket is not None:
            end_socket(self._socket)

    def opened(self, connected: socket.socket) -> None:
        self._socket = connected
        if self.killed:  # `kill` could not see this socket
            end_socket(connected)


def end_socket(connected: socket.socket) -> None:
    """Ends another thread's wait on a socket; that thread closes the socket."""
    with contextlib.suppress(OSError):  # it has already ended
        # Not SSLSocket's method, after which the socket would send plain text.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class _Tracked:
    """A connection that registers each socket that it opens."""

    def __init__(self, *arguments: Any, current: _CurrentSocket, **options: Any):
        super().__init__(*arguments, **options)
        self._current = current

    def connect(self) -> None:
        super().connect()
        self._current.opened(self.sock)


class _Connection(_Tracked, HTTPConnection):
    pass


class _TlsConnection(_Tracked, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
