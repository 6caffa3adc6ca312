"""A server of the Hugging Face Hub's HTTP API that takes and gives models, on this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving import running

TOKEN = "hf_of_the_test"
READ_ONLY = "hf_that_may_only_read"
NONE: Mapping[str, str] = {}


class Hub(ThreadingHTTPServer):
    """What was made and uploaded: repositories with whether they are private, and their files.

    Every file comes in a commit: the hub itself asks for large ones by a protocol of its own.
    Models to download are those of `published`: by repository, their commits, oldest first, each
    with its files. `sent` lists the files that were downloaded.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.published: dict[str, dict[str, dict[str, bytes]]] = {}
        self.sent: list[str] = []

    def publish(self, repository: str, folder: Path) -> str:
        """Makes a folder's files the newest commit of a repository; its id."""
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        commits = self.published.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

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

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if asked := re.fullmatch(r"/api/models/(.+)/(revision|tree)/(.+)", path):
            return self._describe(*asked.groups())
        if asked := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            return self._send(*asked.groups())
        repository = self.path.removeprefix("/api/models/")
        if self.path != repository and repository not in self.server.repositories:
            return self._answer(404, {"error": f"no repository {repository}"})
        self._refuse_or(lambda _: {"name": "someone", "type": "user", "id": repository})

    def _commit_of(self, repository: str, revision: str) -> str | None:
        """The commit of a revision; None: the answer has said why there is none."""
        commits = self.server.published.get(repository)
        if commits is None:
            self._answer(401, {"error": "no such model"}, {"X-Error-Code": "RepoNotFound"})
        elif revision != "main" and revision not in commits:
            self._answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            return list(commits)[-1] if revision == "main" else revision
        return None

    def _describe(self, repository: str, kind: str, revision: str) -> None:
        if (commit := self._commit_of(repository, revision)) is None:
            return
        files = self.server.published[repository][commit]
        siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
        tree = [
            {"type": "file", "path": name, "size": len(x), "oid": hashlib.sha1(x).hexdigest()}
            for name, x in files.items()
        ]
        known = {"id": repository, "sha": commit, "siblings": siblings}
        self._answer(200, known if kind == "revision" else tree)

    def _send(self, repository: str, revision: str, name: str) -> None:
        if (commit := self._commit_of(repository, revision)) is None:
            return
        body = self.server.published[repository][commit][name]
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.server.sent.append(name)
            self.wfile.write(body)

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

    def _answer(self, status: int, values: Any, headers: Mapping[str, str] = NONE) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
