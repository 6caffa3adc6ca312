"""An app of ours behind an address, in a thread of its own."""

from __future__ import annotations

import functools
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from seeupo_jax.agents.endpoint_http import StrictProtocol

KEEP_ALIVE_S = 600  # agents think between calls; a connection closed meanwhile costs a retry
CLOSE_S = 5


class Listener:
    """Serves an app over HTTP/1.1.

    Args:
      head_s: as of `StrictProtocol`.
    """

    def __init__(self, app: ASGIApp, *, head_s: float = 60.0):
        self._app, self._head_s = app, head_s
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts to listen, in a separate thread with its own event loop; the address.

        Args:
          port: 0: a free port.

        Raises:
          ValueError: the address is not available.
        """
        if not 0 <= port < 65_536:
            raise ValueError(f"endpoint: the port: got {port}; allowed: 0 to 65535.")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise ValueError(f"endpoint: {host}:{port} cannot be listened on: {error}.") from None
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=functools.partial(StrictProtocol, head_s=self._head_s),
                ws="none",
                loop="asyncio",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",  # mistakes of clients are not logged
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._thread = threading.Thread(
            target=_serve, args=(self._server, listener), name="endpoint", daemon=True
        )
        self._thread.start()
        name = f"[{host}]" if family == socket.AF_INET6 else host
        return f"http://{name}:{listener.getsockname()[1]}"

    def close(self) -> None:
        """Ends the thread; open requests have `CLOSE_S` seconds."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join()
        self._server = self._thread = None


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    with listener:
        server.run(sockets=[listener])
