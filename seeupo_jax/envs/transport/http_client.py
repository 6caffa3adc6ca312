"""An HTTP client of one connection, whose request another thread can end."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection


class HttpClient(PoolManager):
    """Keeps its connection between requests; no proxy, redirect or retry."""

    def __init__(self) -> None:
        super().__init__(maxsize=1, retries=False)
        self.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._line = _Line()

    @property
    def killed(self) -> bool:
        return self._line.cut

    def kill(self) -> None:
        """Ends the request that runs, and every later one; any thread may call it."""
        self._line.end()

    def _new_pool(self, *arguments: Any, **options: Any) -> HTTPConnectionPool:
        pool = super()._new_pool(*arguments, **options)
        pool.conn_kw["line"] = self._line
        return pool


class _Line:
    """The socket of a client's connection. cut: it is ended, and so is each that is opened."""

    def __init__(self) -> None:
        self.cut = False
        self._socket: socket.socket | None = None

    def end(self) -> None:
        self.cut = True
        if self._socket is not None:
            end_socket(self._socket)

    def opened(self, connected: socket.socket) -> None:
        self._socket = connected
        if self.cut:  # else `end` finds this socket
            end_socket(connected)


def end_socket(connected: socket.socket) -> None:
    """Ends what another thread waits for at a socket, which that thread closes."""
    with contextlib.suppress(OSError):  # it has ended
        # Not that of an SSLSocket, after which it would send as plain text.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


class _OnLine:
    """A connection that hands over each socket that it opens."""

    def __init__(self, *arguments: Any, line: _Line, **options: Any):
        super().__init__(*arguments, **options)
        self._line = line

    def connect(self) -> None:
        super().connect()
        self._line.opened(self.sock)


class _Connection(_OnLine, HTTPConnection):
    pass


class _TlsConnection(_OnLine, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
