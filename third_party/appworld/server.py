"""One AppWorld server, for one world at a time; it runs in AppWorld's virtual environment.

It listens on a port of 127.0.0.1 and writes the port to its output once it answers. The first line
of its input is the token that every request must carry, since requests run code. When the input is
closed, the process that started it has ended: it removes its folder and ends.
"""

import argparse
import asyncio
import faulthandler
import gc
import hmac
import io
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_RESIDENT, _DATA = 1, 5  # columns of /proc/self/statm
MAX_TEXT = MIB  # characters of a block's output, and of its request to an app


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    request_s: a longer request ends the process, except one that opens a world.
    memory_mb: resident or allocated memory above which the process ends instead of starting an
      episode. Within an episode the policy's code gets a MemoryError at twice this limit.
    idle_s: a client without requests for longer loses the server to the next client.
    """

    request_s: float
    memory_mb: int
    idle_s: float = float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a private folder, in which `data` is a link to the data")
    parser.add_argument("--request_s", type=float, required=True)
    parser.add_argument("--memory_mb", type=int, required=True)
    options = parser.parse_args()
    token = sys.stdin.readline().strip()
    watch_parent(os.dup(0), options.folder)
    listener = socket.create_server(("127.0.0.1", 0))
    app = load()
    print(listener.getsockname()[1], flush=True)
    os.dup2(2, 1)  # later output goes to the log
    serve(app, listener, token, options.folder, Limits(options.request_s, options.memory_mb))


def watch_parent(pipe: int, folder: str) -> None:
    """Ends this process and removes its folder when a pipe is closed."""
    # Bound now: AppWorld removes functions from `os` while it runs the policy's code.
    read, execute = os.read, os.execvp

    def wait() -> None:
        while read(pipe, 1):
            pass
        execute("rm", ["rm", "-rf", folder])  # replaces this process

    threading.Thread(target=wait, daemon=True).start()


def load():
    """Loads AppWorld's server application and adds the requests of this environment."""
    gc.disable()  # imports make little garbage: collecting it takes 1.5 of 4.5 s
    from appworld.apps import APP_TO_DESCRIPTION, get_all_apps, import_apis_module
    from appworld.serve.environment import app
    from starlette.responses import PlainTextResponse

    for name in get_all_apps():
        import_apis_module(name)  # once for all forks of a pool, instead of with the first world

    @app.get("/app_descriptions")
    async def app_descriptions() -> dict:
        return {
            "output": {name: APP_TO_DESCRIPTION[name] for name in get_all_apps(skip_admin=True)}
        }

    @app.get("/health")
    async def health() -> dict:
        return {"output": {"memory_mb": _memory_mb(_RESIDENT), "pid": os.getpid()}}

    @app.exception_handler(Exception)
    async def failed(request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=500)

    # Excludes all objects from collections, which in a fork would write to and unshare them.
    gc.freeze()
    gc.enable()
    return app


def serve(app, listener: socket.socket, token: str, folder: str, limits: Limits) -> None:
    """Answers requests until the process ends."""
    import uvicorn

    contain(2 * limits.memory_mb * MIB)
    guard = Guard(app, token, folder, limits)
    server = uvicorn.Server(uvicorn.Config(guard, log_level="warning", access_log=False))
    asyncio.run(server.serve(sockets=[listener]))


def contain(memory: int) -> None:
    """Turns all errors of a block of code into its output, so that they do not fail the server.

    Args:
      memory: bytes above which the code gets a MemoryError; AppWorld's code does not.
    """
    import IPython.utils.capture
    from appworld.environment import AppWorld
    from appworld.requester import Requester
    from starlette.responses import JSONResponse

    run, ask = AppWorld.execute, Requester._request
    most = resource.getrlimit(resource.RLIMIT_DATA)

    def execute(world: AppWorld, code: str) -> str:
        try:
            output = run(world, code)
        except BaseException as error:  # AppWorld catches only `Exception`
            world.safety_guard.disable()
            output = f"Execution failed. Traceback:\n{type(error).__name__}: {error}"
        return output if len(output) <= MAX_TEXT else output[:MAX_TEXT] + "\n[output cut]"

    def request(requester: Requester, **data) -> object:
        if len(str(data)) > MAX_TEXT:
            raise ValueError(f"A request of more than {MAX_TEXT} characters.")
        return ask(requester, **data)

    AppWorld.execute = execute
    AppWorld._shell_run_cell = _within((memory, most[1]), AppWorld._shell_run_cell)
    AppWorld._save_environment_io_log = lambda world: None  # unread; some texts cannot be written
    Requester._request = _within(most, request)
    IPython.utils.capture.StringIO = Printed
    # For this server and the apps: accepts any float and any text, including lone surrogates.
    JSONResponse.render = lambda response, content: json.dumps(content).encode()


def _within(limits: tuple[int, int], function):
    """Wraps a function: during its calls the process's memory has these limits."""
    get, put = resource.getrlimit, resource.setrlimit

    def call(*args, **named):
        before = get(resource.RLIMIT_DATA)
        put(resource.RLIMIT_DATA, limits)
        try:
            return function(*args, **named)
        finally:
            put(resource.RLIMIT_DATA, before)

    return call


class Printed(io.StringIO):
    """The output of code; text beyond the limit is discarded."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, MAX_TEXT + 1 - self.tell())])
        return len(text)


class Guard:
    """The ASGI application, protected by a token, for one client at a time, within limits.

    A process in which code has run ends when a request fails, or when its client requests `/end`.
    """

    def __init__(self, app, token: str, folder: str, limits: Limits):
        self._app, self._folder, self._limits, self._exit = app, folder, limits, os._exit
        self._secret = f"Bearer {token}".encode()
        self._client, self._asked = b"", 0.0  # the client of the world, and its last request's time
        self._ran_code = False

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        done = False
        try:
            await self._serve(scope, receive, send)
            done = True
        finally:  # no `except`: the code can rebind names of exceptions
            if not done and self._ran_code:  # before code has run, a new process would fail too
                self._exit(1)

    async def _serve(self, scope, receive, send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._secret):
            return await _answer(send, 401, "a request must bring the server's token")
        client = headers.get(b"x-client", b"")
        if path != "/health" and (refusal := self._refusal(client, path == "/initialize")):
            return await _answer(send, *refusal)
        if path in ("/release", "/end"):
            self._client = b""
            await _answer(send, 200, '{"output": null}')
            if path == "/end" and self._ran_code:
                self._exit(1)
            return
        if path == "/initialize":
            # Allocated memory counts too, since the limit of the next code includes it.
            if max(_memory_mb(_RESIDENT), _memory_mb(_DATA)) > self._limits.memory_mb:
                await _answer(send, 503, "the server has grown too large and ends")
                self._exit(1)
            shutil.rmtree(Path(self._folder) / "experiments", ignore_errors=True)
            return await self._app(scope, receive, send)
        self._ran_code |= path == "/execute"
        # Ends the process from outside of Python, even if its code hangs.
        faulthandler.dump_traceback_later(self._limits.request_s, exit=True)
        try:
            await self._app(scope, receive, send)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _refusal(self, client: bytes, opens: bool) -> tuple[int, str] | None:
        """Returns a refusal, or None; a client that opens a world takes a free server."""
        now = time.clock_gettime(time.CLOCK_MONOTONIC)  # AppWorld freezes all other clocks
        free = not self._client or now - self._asked >= self._limits.idle_s
        if client != self._client and not (opens and free):
            if self._client:
                return 409, "another client has this server"
            return 410, "the server was restarted and has no world"
        self._client, self._asked = client, now
        return None


async def _answer(send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _memory_mb(kind: int) -> float:
    """Memory in MiB; 0, and therefore no limit, if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[kind])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / MIB


if __name__ == "__main__":
    main()
