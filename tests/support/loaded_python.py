"""Processes of this Python that begin with the package's libraries imported.

To import them takes a process 3 s, a third of what a short command takes, and tests start a
hundred. Here two servers import them once and fork for each process; the servers take turns, since
hashes of text differ from one to the other, as between processes that are started afresh. What is
forked is an ordinary child of the test: it has a pid, pipes, an environment and an exit code of its
own. Where the imports themselves could come out otherwise, a process is started afresh.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from places import ROOT, SUPPORT

# What a run imports late, beside the package's commands.
LATE_IMPORTS = (
    "altair.utils.save",
    "chex",
    "grain.python",  # by Orbax, to save and to load
    "jaxlib.mlir.dialects.mhlo",
    "ml_collections",
    "narwhals._interchange.dataframe",
    "openai.resources.chat",  # by runs with an agent
    "seeupo_jax.agents.endpoint",
    "tensorboardX",
    "transformers.models.auto.tokenization_auto",  # and what writes and reads model folders
    "transformers.models.llama.configuration_llama",
    "transformers.models.qwen3.configuration_qwen3",
    "vl_convert",
)
COMMANDS = ("train", "evaluate", "sft", "update", "report", "export")
WITHOUT_TORCH = str(SUPPORT / "without_torch")
# Variables that a process may have otherwise than its server: they are read late, or set again.
LATE = ("JAX_", "PYTEST_", "PYTHONPATH", "XDG_CACHE_HOME", "XLA_FLAGS")
# How a process is started where nothing else is asked for.
USUAL = {
    "executable": None,
    "preexec_fn": None,
    "pass_fds": (),
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "start_new_session": False,
    "process_group": -1,
}
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
_LARGEST = 1 << 20  # bytes of a request: its arguments and its environment


class LoadedPython(subprocess.Popen):
    """`subprocess.Popen`, quicker for [sys.executable, "-m", MODULE or FILE, argument ...]."""

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*values).arguments
        args = [os.fspath(arg) for arg in given["args"]]
        env = dict(os.environ if given["env"] is None else given["env"])
        usual = all(given[name] == value for name, value in USUAL.items())
        if not usual or not _is_forkable(args, env):
            return super()._execute_child(*values)
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if fd == -1 else fd for own, fd in enumerate(streams)]
        cwd = os.path.abspath(given["cwd"] or ".")
        self.pid = next(_servers()).fork({"args": args[1:], "cwd": cwd, "env": env}, streams)
        self._child_created = True
        self._close_pipe_fds(*[given[name] for name in PIPES])


def run(args: Sequence[object], *, timeout: float | None = None, **options: Any) -> Any:
    """`subprocess.run` with `LoadedPython`, its output captured as text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with LoadedPython(args, **streams, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, errors)


def _is_forkable(args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a process would import the same as the servers."""
    if sys.platform != "linux" or args[0] != sys.executable:
        return False
    if args[1] != "-m" and not args[1].endswith(".py"):
        return False
    if WITHOUT_TORCH not in env.get("PYTHONPATH", "").split(os.pathsep):
        return False
    differ = dict(os.environ.items() ^ env.items())
    return all(name.startswith(LATE) for name in differ)


class _Server:
    """A process that has imported everything, and forks."""

    def __init__(self) -> None:
        self._socket, reference = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join([WITHOUT_TORCH, str(SUPPORT), str(ROOT)])
        with reference:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(reference.fileno())],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[reference.fileno()],
            )

        atexit.register(self._close)

    def _close(self) -> None:
        self._socket.close()  # which ends it
        self._process.wait()

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """The pid of a new child of this process."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the child's own parent ends at once
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            return int(self._socket.recv(64))
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _servers() -> Iterator[_Server]:
    return itertools.cycle([_Server(), _Server()])


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns in the child, with what it is to run."""
    gc.disable()  # imports make no garbage, and looking for it takes a fifth of their time
    for command in COMMANDS:
        importlib.import_module(f"seeupo_jax.{command}")
    for module in LATE_IMPORTS:
        importlib.import_module(module)
    for command in COMMANDS:  # to be run as `__main__`
        del sys.modules[f"seeupo_jax.{command}"]
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 10, 10)  # as in conftest.py, and why
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of each fork: of threads that do not run yet
        return _fork_on_request(connection)


def _fork_on_request(connection: socket.socket) -> dict[str, Any]:
    while True:
        message, streams, *_ = socket.recv_fds(connection, _LARGEST, 3)
        if not message:
            os._exit(0)  # the tests have ended
        pids, written = os.pipe()
        between = os.fork()
        if between == 0:
            parent, child = os.getpid(), os.fork()
            if child == 0:
                while os.getppid() == parent:  # which ends now
                    time.sleep(0.0005)
                os.close(pids)
                os.close(written)
                _adopt(streams)
                connection.close()
                return json.loads(message)
            os.write(written, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(pids, 64))
        for fd in (pids, written, *streams):
            os.close(fd)


def _adopt(streams: Sequence[int]) -> None:
    """Makes these the standard streams of this process, and closes all else of the server's."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in streams:
        os.close(fd)


def _become(args: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    """Runs what `python ARGS` would, in this process."""
    import jax
    import numpy as np

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in {name for name, _ in os.environ.items() ^ env.items() if name.startswith("JAX_")}:
        option, value = name.lower(), env[name]
        before = getattr(jax.config, option)
        kind = str if before is None else type(before)
        jax.config.update(option, value in ("1", "true", "True") if kind is bool else kind(value))
    added = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    np.random.seed()
    module = args[0] == "-m"
    sys.argv = list(args[module:])
    first = cwd if module else os.path.dirname(os.path.abspath(args[0]))
    others = [path for path in sys.path[1:] if path not in added]
    sys.path = [first, *env["PYTHONPATH"].split(os.pathsep), *others]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _become(**_serve(socket.socket(fileno=int(sys.argv[1]))))
