"""Runs a pool of AppWorld servers on loopback ports, for `env.options.servers`.

Usage: third_party/appworld/.venv/bin/python third_party/appworld/serve.py --servers=8 --file=FILE

AppWorld is loaded once and every server is a fork, so that they share unchanged memory. A server
that dies (over its memory limit, stuck, or killed) is restarted immediately, on its port. FILE,
readable only by its owner, has the ports, the token and the time limit of a request. The servers
end with this process.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from server import Limits, load, serve, watch_parent

HOME = Path(__file__).resolve().parent
RESTART_S = 0.2  # servers that fail immediately must not keep the machine busy
IDLE_S = 600.0  # seconds after which the server of a silent client is free
# Blocked and received one by one: an exception that a handler raises during a fork is lost, since
# exceptions in functions of `os.register_at_fork` are only printed.
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True, help="written: ports and token")
    parser.add_argument("--root", type=Path, default=HOME, help="the folder that holds data")
    parser.add_argument("--port", type=int, default=0, help="of the first server; 0: any free ones")
    parser.add_argument("--request_s", type=float, default=50.0)
    parser.add_argument("--memory_mb", type=int, default=2000)
    options = parser.parse_args()
    data = options.root.resolve() / "data"
    if not (data / "tasks").is_dir():
        sys.exit(f"serve.py: --root: got {options.root}, which has no data/tasks.")
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    Pool(options, data).run()


class Pool:
    """The servers, one per port, and their current processes."""

    def __init__(self, options: argparse.Namespace, data: Path):
        self._options, self._data = options, data
        self._token = secrets.token_hex(16)
        ports = [options.port and options.port + i for i in range(options.servers)]
        # Kept by this process: while a server restarts, requests wait instead of failing.
        self._listeners = [socket.create_server(("127.0.0.1", port)) for port in ports]
        self._folder = Path(tempfile.mkdtemp(prefix="appworld-pool-"))
        self._pipe, self._end = os.pipe()
        self._processes: dict[int, int] = {}  # number by process id

    def run(self) -> None:
        """Runs until SIGTERM or SIGINT."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            app = load()
            for number in range(len(self._listeners)):
                self._fork(app, number)
            self._announce()
            while signal.sigwait(SIGNALS) == signal.SIGCHLD:
                self._restart_ended(app)
        finally:
            self._withdraw()
            for pid in self._processes:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _restart_ended(self, app) -> None:
        """Restarts all servers that have ended: one signal may stand for several."""
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            number = self._processes.pop(pid)
            print(f"server {number} ended ({status}) and is started again", flush=True)
            time.sleep(RESTART_S)
            self._fork(app, number)

    def _announce(self) -> None:
        ports = [listener.getsockname()[1] for listener in self._listeners]
        part = self._options.file.with_suffix(".part")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            limit = self._options.request_s
            json.dump({"token": self._token, "ports": ports, "request_s": limit}, file)
        part.rename(self._options.file)
        print(
            f"{len(ports)} servers; --config.env.options.servers={self._options.file}", flush=True
        )

    def _withdraw(self) -> None:
        """Removes the file, unless another pool has rewritten it."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # removed or rewritten
            if json.loads(self._options.file.read_text())["token"] == self._token:
                self._options.file.unlink()

    def _fork(self, app, number: int) -> None:
        folder = self._folder / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "data").symlink_to(self._data)
        pid = os.fork()
        if pid:
            self._processes[pid] = number
            return
        try:
            self._become(app, number, str(folder))
        finally:
            os._exit(1)

    def _become(self, app, number: int, folder: str) -> None:
        """Runs the server with this number, in the fork."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(self._end)  # otherwise the servers would keep each other alive
        watch_parent(self._pipe, str(self._folder))
        os.chdir(folder)
        path = os.environ["PATH"]
        os.environ.clear()  # no secrets, since the server runs the policy's code
        places = dict.fromkeys(("HOME", "APPWORLD_ROOT", "APPWORLD_CACHE"), folder)
        os.environ.update(places, PATH=path, LANG="C.UTF-8")
        limits = Limits(self._options.request_s, self._options.memory_mb, IDLE_S)
        serve(app, self._listeners[number], self._token, folder, limits)


if __name__ == "__main__":
    main()
