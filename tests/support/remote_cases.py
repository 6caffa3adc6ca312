"""An environment to serve, servers in threads and in processes, and a wire that can be cut."""

import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading

from places import ROOT, SUPPORT
from serving import running

from seeupo_jax.envs import StepResult, TransientError, serve
from seeupo_jax.envs.serve import EnvServer
from seeupo_jax.envs.transport.remote import Remote


class Echo:
    """Echoes its input and counts; some words make it fail."""

    def __init__(self, tasks=2):
        self.tasks, self.steps, self.closed = tasks, 0, 0
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.busy = 0

    def task_ids(self, split):
        if split != "train":
            raise ValueError(f"echo split: got {split!r}; allowed: train.")
        return [f"train/{i}" for i in range(self.tasks)]

    def reset(self, task_id, seed):
        self.steps = 0
        tool = {"name": "look", "description": "", "parameters": {"type": "object"}}
        return ({"role": "user", "content": f"{task_id} {seed}"},), (tool,)

    def step(self, text):
        if text == "busy" and not self.busy:
            self.busy += 1
            raise TransientError("not yet")
        if text == "wait":
            self.entered.set()
            assert self.go_on.wait(20)
        self.steps += 1
        fail = {
            "key": KeyError("gone"),
            "value": ValueError("no such thing"),
            "exit": SystemExit(3),
        }
        if text in fail:
            raise fail[text]
        info = {"steps": self.steps, "odd": {1, 2}} if text == "set" else {"steps": self.steps}
        reward = float("nan") if text == "nan" else 0.25
        return StepResult(({"role": "tool", "content": text},), reward, text == "end", info)

    def score(self):
        return self.steps / 8

    def close(self):
        self.closed += 1


@contextlib.contextmanager
def served(make, token_file, *, kind=EnvServer, **options):
    """A server in this process."""
    token_file.write_text("secret-token\n")
    server = kind(make, token="secret-token", **options)
    returned = []
    thread = threading.Thread(target=lambda: returned.append(server.serve_forever()))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
        assert returned, "it hangs, or has raised"


@contextlib.contextmanager
def answering(answers):
    """A server of another make, at a URL: it answers each operation with a fixed JSON value."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answers[self.path.removeprefix("/")]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, running(server):
        yield "http://127.0.0.1:{}".format(*server.server_address[1:])


class OldServer(EnvServer):
    """One from before `episode_seed`: it refuses what it does not know."""

    refused = 0

    def answer(self, operation, request):
        if operation in ("reference", "task_shares", "labels"):
            raise serve._Refusal(404, f"path: got {operation!r}; allowed: task_ids, reset, ...")
        if operation == "reset" and request.keys() - {"session", "number", "task_id", "seed"}:
            self.refused += 1
            raise serve._Refusal(400, "body: allowed: a JSON object with exactly session, ...")
        return super().answer(operation, request)


class Process:
    """A server in a process of its own."""

    def __init__(self, token_file, *, port=0, env="remote_cases:Echo", flags=()):
        command = [sys.executable, "-m", "seeupo_jax.envs.serve", f"--env={env}", f"--port={port}"]
        self.process = subprocess.Popen(
            [*command, f"--token-file={token_file}", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{ROOT}"},
        )
        self.said = self.process.stdout.readline()
        self.url = re.search(r"http://\S+", self.said)[0]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(self.process.kill)

    def end(self, how):
        """The exit status after a signal."""
        how()
        self.process.stdout.close()
        return self.process.wait(20)


class CutWire:
    """Passes connections on to a server; the answer to the next request can be lost on the way."""

    def __init__(self, url):
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose_next = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client):
        server = socket.create_connection(self._target)
        threading.Thread(target=_pump, args=(client, server), daemon=True).start()
        with contextlib.suppress(OSError):
            while (answer := server.recv(1 << 20)) and not self.lose_next:
                client.sendall(answer)
        self.lose_next = False
        _hang_up(client, server)


def _pump(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 20):
            sink.sendall(data)
    _hang_up(source, sink)


def _hang_up(*sockets):
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def remote(url, token_file, **options):
    return Remote(url, token_file=str(token_file), **options)
