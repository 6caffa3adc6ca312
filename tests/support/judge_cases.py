"""A server of chat completions on this machine that misbehaves as it is told."""

import contextlib
import http.server
import json
import threading
import time

from serving import running


def completion(text, finish="stop"):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


class JudgeServer(http.server.ThreadingHTTPServer):
    """Answers a prompt by its entry of `answers`: the first attempt by the first item, and so on.

    An item is a text, a JSON value, (status, headers), bytes without meaning, seconds to wait
    before a good answer, or None to hang up.
    """

    daemon_threads = True

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.lock = answers, threading.Lock()
        self.requests, self.times, self.keys = [], [], []
        self.now = self.most = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, address):
        pass  # clients that gave up


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
            asked = request["messages"][0]["content"]
            attempt = sum(r["messages"][0]["content"] == asked for r in server.requests)
            server.requests.append(request)
            server.times.append(time.monotonic())
            server.keys.append(self.headers["Authorization"])
        try:
            items = server.answers.get(asked, ["Score: 5"])
            self._answer(items[min(attempt, len(items) - 1)])
        finally:
            with server.lock:
                server.now -= 1

    def _answer(self, item):
        status, headers = item if isinstance(item, tuple) else (200, {})
        if item is None:
            self.close_connection = True
            return
        if isinstance(item, float):
            time.sleep(item)
            item = "Score: 5"
        body = item if isinstance(item, bytes) else b"{}"
        if isinstance(item, str | dict | list):
            body = json.dumps(completion(item) if isinstance(item, str) else item).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def judging(answers=()):
    """A server of these answers."""
    with JudgeServer(dict(answers)) as server, running(server):
        yield server
