"""Connects a port of a sandbox with the endpoint: the sandbox's only way out."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

_PIECE = 2**16


class EndpointRelay:
    """Waits at a Unix socket for a sandbox's listening socket, and serves its connections.

    Args:
      path: of the Unix socket, which is made.
      endpoint: host and port that connections lead to.
    """

    def __init__(self, path: Path, endpoint: tuple[str, int]):
        self._endpoint = endpoint
        self._door = socket.socket(socket.AF_UNIX)
        folder = os.open(path.parent, os.O_PATH)
        self._door.bind(f"/proc/self/fd/{folder}/{path.name}")  # an address has at most 107 bytes
        os.close(folder)
        path.chmod(0o666)  # another user may own the sandbox's processes
        self._door.listen(1)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        sandbox, _ = self._door.accept()
        with sandbox, self._door:
            _, (number,), _, _ = socket.recv_fds(sandbox, 16, 1)
        with socket.socket(fileno=number) as listening:
            while True:
                try:
                    client, _ = listening.accept()
                except ConnectionError:  # the client has left already
                    continue
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            with socket.create_connection(self._endpoint) as server:
                back = threading.Thread(target=_forward, args=(server, client), daemon=True)
                back.start()
                _forward(client, server)
                back.join()


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Sends all that arrives, until either side ends; the end is passed on."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
