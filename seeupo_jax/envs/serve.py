"""Serves any environment over HTTP, many episodes at once.

    python -m seeupo_jax.envs.serve --env=order_desk --port=8700

The client is `seeupo_jax.envs.transport.remote`; both are described in docs/environments.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from seeupo_jax import envs
from seeupo_jax.configuration.user_code import in_one_line
from seeupo_jax.envs.base import Environment, read_options
from seeupo_jax.envs.tasks import list_task_shares, list_tasks, task_labels, task_reference
from seeupo_jax.envs.transport import remote_calls
from seeupo_jax.envs.transport.bounded_server import BoundedServer
from seeupo_jax.envs.transport.http_protocol import (
    BUSY,
    GONE,
    MAX_REQUEST_BYTES,
    OUT_OF_ORDER,
    UNAUTHORIZED,
    UNKNOWN,
    ensure_token,
    read_token,
)
from seeupo_jax.envs.transport.open_files import raise_open_files

_log = logging.getLogger(__name__)
_CLOSING_S = 10.0  # for environments to close when the server ends
_HUNG = 20  # a request that runs for this many times `idle_s` counts as hanging


class _Refusal(Exception):
    """The request is refused without reaching an environment."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(eq=False)
class _Session:
    """One environment and its last answered request.

    used: when a request last began or ended, by the monotonic clock.
    retired: it has been removed from the table; the last holder of the lock closes the environment.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    environment: Environment | None = None
    number: int = -1
    request: tuple[str, dict[str, Any]] | None = None
    answer: bytes = b""
    used: float = field(default_factory=time.monotonic)
    retired: bool = False

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return not self.lock.locked()


_SESSION = {"session": str, "number": int}


class EnvServer:
    """Serves environments made by `make`, one per session, at `url`.

    Requests are POSTs of JSON with the header `Authorization: Bearer TOKEN`. The requests of a
    session are numbered from 0; a repeated request gets the stored answer and is not executed
    again.

    Args:
      make: makes an environment; called for every session, and once to list the tasks.
      token: of all clients.
      host, port: the address to listen on; port 0: a free port.
      max_sessions: sessions open at once.
      idle_s: a session without requests for longer is closed. A session and connection with a
        running request are abandoned after 20 times this duration; a hang then holds only a thread.
      max_connections: connections open at once; None: two per session (a client needs one).
      auth_s: seconds within which a new connection must send the token.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        max_sessions: int = 256,
        idle_s: float = 3600.0,
        max_connections: int | None = None,
        auth_s: float = 10.0,
    ):
        self._make, self._token = make, token.encode()
        self._max_sessions, self._idle_s = max_sessions, idle_s
        self._catalogue, self._catalogue_lock = make(), threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()  # of the dict
        self._stopped = threading.Event()
        most = 2 * max_sessions if max_connections is None else max_connections
        self._http = _Http((host, port), _Handler, max_connections=most, admit_s=auth_s)
        self._http.environments, self._http.running = self, {}
        self.url = "http://{}:{}".format(*self._http.server_address[:2])

    @property
    def sessions(self) -> int:
        """The number of open sessions."""
        with self._lock:
            return len(self._sessions)

    def serve_forever(self) -> None:
        """Answers requests, with one thread per connection, until `stop` or an interrupt.

        Then stops listening and closes every idle environment, for at most 10 s.
        """
        threading.Thread(target=self._expire, daemon=True).start()
        try:
            self._http.serve_forever(poll_interval=0.1)
        finally:
            self._stopped.set()
            self._http.server_close()
            until = time.monotonic() + _CLOSING_S
            own = _end_apart(_Session(environment=self._catalogue))
            for closing in [own, *self._end_sessions(lambda session: True)]:
                closing.join(max(0.0, until - time.monotonic()))

    def stop(self) -> None:
        """Makes `serve_forever` return, which must run in another thread."""
        self._http.shutdown()

    def knows(self, authorization: str | None) -> bool:
        """Whether a request has the right token; compared in constant time."""
        sent = "" if authorization is None else authorization
        return hmac.compare_digest(sent.encode("latin-1"), b"Bearer " + self._token)

    def answer(self, operation: str, request: Any) -> bytes:
        """Executes a request; returns JSON with `result`, `error` or `transient`.

        Raises:
          _Refusal: the request is refused without reaching an environment.
        """
        if operation in _OF_TASKS:
            name, call = _OF_TASKS[operation]
            _check(request, {name: str})
            with self._catalogue_lock:
                return _ask(lambda: call(self._catalogue, request[name]))[0]
        if operation == "close":
            _check(request, {"session": str})
            with self._lock:
                session = self._sessions.pop(request["session"], None)
            if session is not None:
                _end(session)
            return json.dumps({"result": None}).encode()
        if operation not in remote_calls.PLAYS:
            allowed = ", ".join([*_OF_TASKS, *remote_calls.PLAYS, "close"])
            raise _Refusal(UNKNOWN, f"path: got {operation!r}; allowed: {allowed}.")
        play, arguments = remote_calls.PLAYS[operation]
        _check(request, _SESSION | arguments, remote_calls.OPTIONAL.get(operation, {}))
        session = self._session(operation, request)
        try:
            with session.lock:
                try:
                    return self._play(session, (operation, request), play)
                finally:
                    session.used = time.monotonic()
        finally:
            if session.retired:
                _end(session)

    def _session(self, operation: str, request: dict[str, Any]) -> _Session:
        name = request["session"]
        with self._lock:
            if name in self._sessions:
                self._sessions[name].used = time.monotonic()
                return self._sessions[name]
            if operation != "reset" or request["number"] != 0:
                raise _Refusal(GONE, "the session is over, or the server was restarted.")
            if len(self._sessions) >= self._max_sessions:
                raise _Refusal(BUSY, f"all {self._max_sessions} sessions are open.")
            self._sessions[name] = _Session()
            return self._sessions[name]

    def _play(
        self,
        session: _Session,
        asked: tuple[str, dict[str, Any]],
        play: Callable[..., dict[str, Any]],
    ) -> bytes:
        """Returns the environment's answer, or a repeated request's stored one; holds the lock."""
        if asked == session.request:
            return session.answer
        if session.retired:
            raise _Refusal(GONE, "the session is over.")
        if asked[1]["number"] != session.number + 1:
            text = f"number: got {asked[1]['number']}; allowed: {session.number + 1}."
            raise _Refusal(OUT_OF_ORDER, text)

        def ask() -> Any:
            if session.environment is None:
                session.environment = self._make()
            arguments = {name: asked[1][name] for name in asked[1].keys() - _SESSION.keys()}
            result = play(session.environment, **arguments)
            return result | {"score": remote_calls.score(session.environment)}

        answer, happened = _ask(ask)
        if happened:
            session.number, session.request, session.answer = asked[1]["number"], asked, answer
        return answer

    def _expire(self) -> None:
        while not self._stopped.wait(min(self._idle_s / 4, 30.0)):
            self._expire_at(time.monotonic())

    def _expire_at(self, now: float) -> None:
        idle, hung = now - self._idle_s, now - _HUNG * self._idle_s
        for connection, began in self._http.running.copy().items():
            if began < hung:  # frees a connection; its thread ends with its request
                self._http.shutdown_request(connection)
        self._end_sessions(lambda session: session.used < (idle if session.idle else hung))

    def _end_sessions(self, condition: Callable[[_Session], bool]) -> list[threading.Thread]:
        with self._lock:
            retiring = {name: s for name, s in self._sessions.items() if condition(s)}
            for name in retiring:
                del self._sessions[name]
        return [_end_apart(session) for session in retiring.values()]


def _task_shares(catalogue: Environment, split: str) -> list[tuple[str, float, Sequence[str]]]:
    parts = list_task_shares(catalogue, split)
    return [(part.name, part.weight, list(part.task_ids)) for part in parts]


# Requests about tasks, outside of an episode: the name of the argument, and the function.
_OF_TASKS: dict[str, tuple[str, Callable[[Environment, str], Any]]] = {
    "task_ids": ("split", list_tasks),
    "task_shares": ("split", _task_shares),
    "labels": ("task_id", task_labels),
    "reference": ("task_id", task_reference),
}


def _end(session: _Session) -> None:
    """Closes the environment, or leaves that to the request that is running in it.

    `retired` is set before the lock is tried, and read after the lock is released, so exactly one
    of the two threads closes the environment.
    """
    session.retired = True
    if not session.lock.acquire(blocking=False):
        return
    try:
        environment, session.environment = session.environment, None
        if environment is not None:
            environment.close()
    except (Exception, SystemExit):
        _log.exception("an environment could not be closed")
    finally:
        session.lock.release()


def _end_apart(session: _Session) -> threading.Thread:
    """Ends a session in a separate thread, so that a hanging `close` blocks only that thread."""
    thread = threading.Thread(target=_end, args=(session,), daemon=True)
    thread.start()
    return thread


def _ask(question: Callable[[], Any]) -> tuple[bytes, bool]:
    return remote_calls.answer(
        question, lambda: _log.warning("an environment failed", exc_info=True)
    )


def _check(request: Any, fields: dict[str, type], optional: dict[str, type] | None = None) -> None:
    allowed = fields | (optional or {})
    # To isinstance a bool is an int; to a client it is no number.
    if (
        not isinstance(request, dict)
        or not fields.keys() <= request.keys() <= allowed.keys()
        or any(type(request[key]) is not allowed[key] for key in request)
    ):
        wanted = ", ".join(f"{key} ({kind.__name__})" for key, kind in fields.items())
        may = "".join(f", and optionally {key} ({allowed[key].__name__})" for key in optional or ())
        raise _Refusal(400, f"body: allowed: a JSON object with exactly {wanted}{may}.")


class _Http(BoundedServer):
    environments: EnvServer
    running: dict[socket.socket, float]  # when each connection's request began


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept open
    timeout = 300.0  # seconds until an idle connection is closed; clients reconnect
    wbufsize = -1  # headers and body in one packet: the second would wait for an acknowledgement
    disable_nagle_algorithm = True
    server: _Http

    def do_POST(self) -> None:
        try:
            status, answer = 200, self._answer()
        except _Refusal as refusal:
            # The request's body may be unread, so the connection cannot be reused.
            status, answer = refusal.status, json.dumps({"refused": str(refusal)}).encode()
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)

    def _answer(self) -> bytes:
        served = self.server.environments
        if not served.knows(self.headers["Authorization"]):
            raise _Refusal(UNAUTHORIZED, "the token is missing or wrong.")
        self.server.admit(self.connection)
        length = self.headers["Content-Length"]
        chunked = "Transfer-Encoding" in self.headers
        if chunked or length is None or not (length.isascii() and length.isdigit()):
            raise _Refusal(411, "Content-Length is missing.")
        if len(length) > 12 or int(length) > MAX_REQUEST_BYTES:
            raise _Refusal(413, f"body: at most {MAX_REQUEST_BYTES} bytes.")
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise _Refusal(400, "body: allowed: JSON.") from None
        self.server.running[self.connection] = time.monotonic()
        try:
            return served.answer(self.path.removeprefix("/"), request)
        finally:
            del self.server.running[self.connection]

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a line per request would bury the failures of environments."""


def _count(text: str) -> int:
    """Parses a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a whole number >= 1.")
    return int(text)


def _seconds(text: str) -> float:
    """Parses a number of seconds > 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number of seconds > 0.")


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m seeupo_jax.envs.serve", description=__doc__)
    parser.add_argument("--env", required=True, help="an environment's name, or module:Class")
    parser.add_argument("--options", default="{}", help="its options as a JSON object")
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen; default: this machine only"
    )
    parser.add_argument("--port", type=int, default=8700, help="0 is a free one")
    parser.add_argument("--token-file", help="created with a new token if it does not exist")
    parser.add_argument("--max-sessions", type=_count, default=256, help="of all trainers together")
    parser.add_argument(
        "--max-connections", type=_count, help="open at once; default: two per session"
    )
    parser.add_argument(
        "--idle-s",
        type=_seconds,
        default=3600.0,
        help="without a request until a session is closed",
    )
    flags = parser.parse_args(arguments)
    raise_open_files()  # each connection is an open file
    try:
        options = read_options(flags.options)
        token_file = ensure_token(flags.token_file)
        server = EnvServer(
            lambda: envs.make(flags.env, **options),
            token=read_token(str(token_file)),
            host=flags.host,
            port=flags.port,
            max_sessions=flags.max_sessions,
            idle_s=flags.idle_s,
            max_connections=flags.max_connections,
        )
    except (ValueError, OSError, OverflowError, RecursionError) as error:
        parser.error(in_one_line(str(error), most=1000))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"serving {flags.env} at {server.url} (token in {token_file})", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
