"""The process that runs an agent's command line for each episode, and ends all that it started.

It has one thread and little memory, so that starting a command takes a millisecond, independent of
the trainer's memory. It detects the trainer's end, so no command outlives the trainer. Requests and
answers are lines of JSON. The first request has `argv`, `memory_bytes` and `output_bytes`; later
ones begin an episode (`start`, a key, with `env` and `task`) or end it (`stop`). Each episode is
answered once, by an `End`.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import signal
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seeupo_jax.envs.transport.processes import end, exit_code, has_ended, take_pipes
from seeupo_jax.envs.transport.supervisor import supervise

TAIL = 4096  # last bytes of output that are kept
RESULT_FILE, RESULT = "result.json", 2**20  # name of the result file, and its maximal bytes
_PIECE = 2**16


class End(NamedTuple):
    """The end of an agent.

    code: its exit code, or minus the signal that ended it; None: it could not be started.
    output: the end of its output, or the reason why it could not be started.
    printed: bytes of its output; more than `output_bytes` ended it.
    result: the content of its result file; None: there is none.
    result_bytes: bytes read of that file, at most one more than allowed.
    """

    key: int
    code: int | None
    output: str
    printed: int
    result: str | None
    result_bytes: int


@dataclass
class _Agent:
    key: int
    process: subprocess.Popen[bytes]
    folder: Path
    tail: bytes = b""
    printed: int = 0


class _Processes:
    def __init__(self, requests: int, answers: int):
        self._requests, self._answers, self._id = requests, answers, os.getpid()
        self._pending = b""  # the beginning of a line
        self._first: dict[str, Any] = {}
        self._agents: dict[int, _Agent] = {}  # by key
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serves requests until the trainer closes the pipe or ends."""
        woken, wake = os.pipe()
        for each in (woken, wake, self._requests):
            os.set_blocking(each, False)
        signal.set_wakeup_fd(wake)
        # Functions, since a command would inherit SIG_IGN. Only the trainer ends this process.
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._requests, selectors.EVENT_READ, None)
        self._selector.register(woken, selectors.EVENT_READ, None)
        while True:
            for ready, _ in self._selector.select():
                if ready.data is not None:
                    self._read_output(ready.data)
                elif ready.fd == woken:
                    os.read(woken, _PIECE)
                elif not self._read_requests():
                    return
            for agent in [a for a in self._agents.values() if has_ended(a.process)]:
                self._end(agent)

    def close(self) -> None:
        """Kills the running commands and removes their folders."""
        for agent in self._agents.values():
            end(agent.process)
        for agent in self._agents.values():
            agent.process.wait()
            shutil.rmtree(agent.folder, ignore_errors=True)

    def _read_requests(self) -> bool:
        """Executes the requests that have arrived; False: the trainer has closed the pipe."""
        piece = os.read(self._requests, _PIECE)
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request)
            elif "stop" not in request:
                self._first = request
            elif request["stop"] in self._agents:
                end(self._agents[request["stop"]].process)
        return bool(piece)

    def _start(self, request: dict[str, Any]) -> None:
        key, folder = request["start"], None
        try:
            folder = Path(tempfile.mkdtemp(prefix="seeupo-agent-"))
            process = self._run(folder, request["task"], request["env"])
        except (OSError, subprocess.SubprocessError) as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            return self._answer(End(key, None, str(error), 0, None, 0))
        agent = self._agents[key] = _Agent(key, process, folder)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, agent)

    def _run(self, folder: Path, task: Any, env: dict[str, str]) -> subprocess.Popen[bytes]:
        work, path = folder / "work", folder / "task.json"
        work.mkdir()
        path.write_text(json.dumps(task), encoding="utf-8")
        variables = {"SEEUPO_TASK": str(path), "SEEUPO_RESULT": str(folder / RESULT_FILE)}
        return subprocess.Popen(
            self._first["argv"],
            cwd=work,
            env=os.environ | env | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._limit,  # safe: this process has one thread
        )

    def _limit(self) -> None:
        """Supervises and limits the new process before it executes the command."""
        memory = self._first["memory_bytes"]
        supervise(self._id, grace_s=0.0)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def _read_output(self, agent: _Agent) -> bool:
        """Reads new output of an agent; False: there is none at present."""
        try:
            piece = os.read(agent.process.stdout.fileno(), _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._selector.unregister(agent.process.stdout)
            return False
        agent.tail, agent.printed = (agent.tail + piece)[-TAIL:], agent.printed + len(piece)
        most = self._first["output_bytes"]
        if most is not None and agent.printed > most:
            end(agent.process)
        return True

    def _end(self, agent: _Agent) -> None:
        """Ends an agent's descendants, reports its end and removes its folder."""
        process = agent.process
        end(process)
        while process.stdout in self._selector.get_map() and self._read_output(agent):
            pass
        if process.stdout in self._selector.get_map():  # another user's process holds it
            self._selector.unregister(process.stdout)
        process.stdout.close()
        data = _read_file(agent.folder / RESULT_FILE)
        code = exit_code(process)
        shutil.rmtree(agent.folder, ignore_errors=True)
        del self._agents[agent.key]
        output = agent.tail.decode(errors="replace")
        result, size = (None, 0) if data is None else (data.decode(errors="replace"), len(data))
        self._answer(End(agent.key, code, output, agent.printed, result, size))

    def _answer(self, end: End) -> None:
        data = json.dumps(end).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]


def main() -> None:
    """Serves requests on standard input and output, which commands do not inherit."""
    processes = _Processes(*take_pipes())
    try:
        processes.serve()
    except BrokenPipeError:
        pass  # the trainer has ended
    finally:
        processes.close()


def _read_file(path: Path) -> bytes | None:
    """Reads an agent's file, at most one byte more than allowed; None: it is no regular file."""
    try:
        # Neither blocks on a pipe nor follows a link.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return None
        return file.read(RESULT + 1)
