"""A server of the Hugging Face Hub's HTTP API that takes models, on this machine."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serving import running

TOKEN = "hf_of_the_test"
READ_ONLY = "hf_that_may_only_read"


class Hub(ThreadingHTTPServer):
    """What was made and uploaded: repositories with whether they are private, and their files.

    Every file comes in a commit: the hub itself asks for large ones by a protocol of its own.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """The server, until the block ends."""
    with Hub() as hub, running(hub):
        yield hub


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        repository = self.path.removeprefix("/api/models/")
        if self.path != repository and repository not in self.server.repositories:
            return self._answer(404, {"error": f"no repository {repository}"})
        self._refuse_or(lambda _: {"name": "someone", "type": "user", "id": repository})

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        routes = {
            "/api/repos/create": self._create,
            "/api/validate-yaml": lambda _: {"errors": [], "warnings": []},
        }
        ends = {
            "/preupload/main": self._preupload,
            "/commit/main": self._commit,
        }
        route = routes.get(path) or next((ends[end] for end in ends if path.endswith(end)), None)
        if route is None:
            self._content()
            return self._answer(404, {"error": f"no such place: {path}"})
        self._refuse_or(route)

    def _refuse_or(self, route: Any) -> None:
        content = self._content()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_ONLY):
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        if token == READ_ONLY and self.command == "POST":
            return self._answer(403, {"error": "this token may only read"})
        self._answer(200, route(content))

    def _create(self, content: bytes) -> dict[str, Any]:
        asked = json.loads(content)
        name = f"{asked.get('organization', 'someone')}/{asked['name']}"
        private = asked.get("private", False) or asked.get("visibility") == "private"
        self.server.repositories.setdefault(name, private)
        return {"url": f"{self.server.url}/{name}"}

    def _preupload(self, content: bytes) -> dict[str, Any]:
        files = json.loads(content)["files"]
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files
        ]
        return {"files": modes}

    def _commit(self, content: bytes) -> dict[str, Any]:
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
        repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        commit = f"{self.server.url}/{repository}/commit/0123456789"
        return {"success": True, "commitOid": "0123456789", "commitUrl": commit, "hookOutput": ""}

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, status: int, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
