"""Clients of AppWorld servers over loopback HTTP: a server started here, or one of a pool."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import describe
from seeupo_jax.envs.transport.processes import end, supervised

MAX_REPLY = 64 * 2**20  # bytes
_LAST = 2000  # characters at the end of a server's log that are searched for its last line
_GRACE_S = 10.0  # the client's timeout beyond the request limit at which a server ends itself
_LAST_S = 5.0  # for a server to remove its folder after this process has ended
_RETRY_S = 0.2  # between two rounds through a pool without a free server
_OUTPUTS = {"execute": [str], "task_completed": [bool], "evaluate": [list, int]}


class ServerError(RuntimeError):
    """A server ended, did not answer or refused a request; its world is lost."""


class ServerGone(ServerError):
    """The server ended before it took the request; if it runs again, its world is lost."""


class InvalidReply(ServerError):
    """The server took the request, but its reply is no valid answer."""


class RequestUnanswered(ServerError):
    """The server took the request and did not answer in time."""


class ServerDied(RequestUnanswered):
    """The server took the request and ended before it answered."""


# Statuses of a working server's refusals: a wrong token, another client's world, no world after a
# restart, too much memory.
_REFUSALS = {401: ServerError, 409: ServerError, 410: ServerGone, 503: ServerError}


@dataclass(frozen=True)
class Address:
    """A server's port, the token of every request, and the client that holds the world."""

    port: int
    token: str
    client: str = field(default_factory=lambda: secrets.token_hex(8))

    def ask(self, method: str, body: dict[str, Any], timeout_s: float) -> Any:
        """Calls one of AppWorld's methods and returns its output; without a body by GET.

        Raises:
          RequestUnanswered, ServerDied: the server took the request and did not answer.
          InvalidReply: the server took the request, and failed or sent an invalid answer.
          ServerGone: the server could not be reached, or has been restarted.
          ServerError: the server refused.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {
            "authorization": f"Bearer {self.token}",
            "x-client": self.client,
            "content-type": "application/json",
        }
        failure = ServerGone
        try:
            with contextlib.closing(connection):
                connection.connect()
                failure = ServerDied
                data = json.dumps(body).encode() if body else None
                connection.request("POST" if body else "GET", f"/{method}", data, headers)
                response = connection.getresponse()
                reply = response.read(MAX_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            if failure is ServerDied and isinstance(error, TimeoutError):
                failure = RequestUnanswered
            raise failure(f"{method} had no answer ({type(error).__name__})") from None
        if response.status != 200:
            text = reply[:200].decode(errors="replace")
            kind = _REFUSALS.get(response.status, InvalidReply)
            raise kind(f"{method} was answered with {response.status}, {text}")
        if len(reply) > MAX_REPLY:
            raise InvalidReply(f"{method} was answered with more than {MAX_REPLY} bytes")
        return _output(method, reply)


def _output(method: str, reply: bytes) -> Any:
    """Parses and checks a reply; the policy's code can change how the server writes it."""
    try:
        output = json.loads(reply)["output"]
        parts = [output["passes"], output["num_tests"]] if method == "evaluate" else [output]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidReply(f"{method} was answered with no answer ({describe(error)})") from None
    for part, kind in zip(parts, _OUTPUTS.get(method, [object]), strict=True):
        if not isinstance(part, kind):
            raise InvalidReply(f"{method} was answered with no answer ({type(part).__name__})")
    return output


class ManagedServer:
    """A server process that is started on first use and again after it has died.

    It ends with this process, however that ends, and so do processes that the policy's code has
    started. Its files are in a private folder that is removed with it. Only this object knows its
    token.

    Args:
      home: the folder with AppWorld's `.venv` and `server.py`.
      data: the data folder with its tasks.
      start_s: seconds within which it must answer first.
      request_s: seconds of a request after which it ends itself.
      memory_mb: resident memory above which it ends itself instead of starting an episode.
    """

    def __init__(self, home: Path, data: Path, *, start_s: float, request_s: float, memory_mb: int):
        self._home, self._data = home, data
        self._start_s, self._request_s, self._memory_mb = start_s, request_s, memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._folder, self._address = Path(), Address(0, "")

    @property
    def pid(self) -> int | None:
        """The id of the running process's supervisor; None if none runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running else None

    @property
    def port(self) -> int:
        return self._address.port

    def begin(self, **body: Any) -> Any:
        """Opens a world in place of the last one, on a new server if none runs.

        Raises:
          ServerError: no server could be started, or it refused.
        """
        if self.pid is not None:
            # A server that is too large, or has died meanwhile, is replaced.
            with contextlib.suppress(ServerError):
                return self.call("initialize", **body)
        self.stop()
        self._start()
        return self.call("initialize", **body)

    def call(self, method: str, **body: Any) -> Any:
        """Calls one of AppWorld's methods and returns its output.

        Raises:
          ServerError: the server has been ended, since the state of its world is unknown;
            subclasses as in `Address.ask`.
        """
        if self.pid is None:
            raise self._failed(f"the server was gone before {method}", ServerGone)
        try:
            return self._address.ask(method, body, self._request_s + _GRACE_S)
        except ServerError as error:
            raise self._failed(str(error), type(error)) from None

    def stop(self) -> None:
        """Ends the server, if one runs, and removes its folder."""
        if self._process is None:
            return
        end(self._process)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="appworld-"))
        (self._folder / "data").symlink_to(self._data)
        token = secrets.token_hex(16)
        command = [
            str(python_path(self._home)),
            str(self._home / "server.py"),
            str(self._folder),
            f"--request_s={self._request_s}",
            f"--memory_mb={self._memory_mb}",
        ]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                supervised(command, grace_s=_LAST_S),
                cwd=self._folder,
                env=_environment(self._folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer only
            )
        with contextlib.suppress(BrokenPipeError):  # the server has died: reading its port fails
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()
        self._address = Address(self._read_port(), token)

    def _read_port(self) -> int:
        pipe = self._process.stdout
        until, line = time.monotonic() + self._start_s, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise self._failed(f"no server within {self._start_s:g} s")
            if not (part := os.read(pipe.fileno(), 100)):
                raise self._failed("the server did not start")
            line += part
        return int(line)

    def _failed(self, what: str, kind: type[ServerError] = ServerError) -> ServerError:
        """Ends the server; returns an error with the reason and the last line of its log."""
        try:
            log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
            lines = log[-_LAST:].splitlines()
        except OSError:
            lines = []
        self.stop()
        return kind(f"appworld: {what}; its log ends: {lines[-1] if lines else 'empty'}")


class PoolServer:
    """A server of a pool, held from the first `begin` until it dies or `stop` is called.

    Args:
      file: written by third_party/appworld/serve.py.
      start_s: seconds within which a server must become free.
      request_s: seconds of a request after which the servers end themselves.
    """

    def __init__(self, file: Path, *, start_s: float, request_s: float):
        self._file, self._start_s, self._request_s = file, start_s, request_s
        self._address: Address | None = None
        self._client = secrets.token_hex(8)

    @property
    def port(self) -> int | None:
        return None if self._address is None else self._address.port

    @property
    def limit_s(self) -> float | None:
        """The pool's time limit of a request, after which a server ends; None: not in its file."""
        try:
            limit = json.loads(self._file.read_text(encoding="utf-8"))["request_s"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return limit if isinstance(limit, int | float) else None

    def begin(self, **body: Any) -> Any:
        """Opens a world on the server that is held, otherwise on a free one.

        Raises:
          ServerError: the pool's file cannot be read, no server was free in time, or all refused;
            the last refusal is quoted.
        """
        until = time.monotonic() + self._start_s
        refusal: ServerError | str = "it lists none"
        while True:
            for address in self._candidates():
                try:
                    output = address.ask("initialize", body, self._start_s)
                except ServerError as error:
                    refusal = error
                    _leave(address, error)
                    continue
                self._address = address
                return output
            self._address = None
            if time.monotonic() > until:
                raise ServerError(f"appworld: no server of {self._file} took the task: {refusal}")
            time.sleep(_RETRY_S)

    def call(self, method: str, **body: Any) -> Any:
        """Calls one of AppWorld's methods and returns its output.

        Raises:
          ServerError: the server is no longer held; after an `InvalidReply` it has been ended.
            Subclasses as in `Address.ask`, but `ServerDied` and `ServerGone` only while the pool
            runs.
        """
        if self._address is None:
            raise ServerError(f"appworld: the server was gone before {method}")
        try:
            return self._address.ask(method, body, self._request_s + _GRACE_S)
        except ServerError as error:
            kind = type(error)
            if kind in (ServerDied, ServerGone) and not self._is_replaced():
                kind = ServerError
            _leave(self._address, error)
            self._address = None
            raise kind(f"appworld: {error}") from None

    def stop(self) -> None:
        """Releases the server."""
        if self._address is not None:
            with contextlib.suppress(ServerError):
                self._address.ask("release", {}, _GRACE_S)
        self._address = None

    def _is_replaced(self) -> bool:
        """Whether the pool has restarted the server that ended; otherwise the pool has ended."""
        try:
            self._address.ask("health", {}, self._start_s)
        except ServerError:
            return False
        return True

    def _candidates(self) -> list[Address]:
        """The held server first, then the others in random order; the file is read again."""
        try:
            pool = json.loads(self._file.read_text(encoding="utf-8"))
            ports, token = random.sample(pool["ports"], len(pool["ports"])), pool["token"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ServerError(
                f"appworld: {self._file}: got {describe(error)}; allowed: a file of servers that"
                " third_party/appworld/serve.py wrote."
            ) from None
        ports.sort(key=lambda port: port != self.port)
        return [Address(port, token, self._client) for port in ports]


def _leave(address: Address, error: ServerError) -> None:
    """Releases a pool's server after an error; after an invalid reply the server is to end."""
    if isinstance(error, InvalidReply | RequestUnanswered):  # after other errors it is not held
        with contextlib.suppress(ServerError):
            address.ask("end" if isinstance(error, InvalidReply) else "release", {}, _GRACE_S)


def python_path(home: Path) -> Path:
    """The path of AppWorld's Python interpreter."""
    return home / ".venv" / "bin" / "python"


def _environment(folder: Path) -> dict[str, str]:
    """The server's environment variables, without secrets, since it runs the policy's code."""
    places = dict.fromkeys(("HOME", "APPWORLD_ROOT", "APPWORLD_CACHE"), str(folder))
    path = os.environ["PATH"]
    return {"PATH": path, "LANG": "C.UTF-8", "PYTHON_DOTENV_DISABLED": "1"} | places
