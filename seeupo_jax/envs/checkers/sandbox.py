"""Runs an untrusted Python program in a confined process, and ends it in time."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import platform
import selectors
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from seeupo_jax.envs.base import EnvironmentUnavailable
from seeupo_jax.envs.checkers import answer_harness, confinement
from seeupo_jax.envs.transport.processes import end, exit_code, supervised

_LOGGER = logging.getLogger(__name__)
_FREE = threading.Semaphore(len(os.sched_getaffinity(0)))  # more at once would wait for each other
_PIECE = 2**16
# Of a virtual environment the interpreter that it links to, which reads no .pth files of packages:
# an editable installation's take 50 ms.
_PYTHON = os.path.realpath(sys.executable)
# Runs `main` of a file alone: its package would take more time than most programs.
_MAIN = "import sys; exec(compile(open(sys.argv[1]).read(), sys.argv.pop(1), 'exec')); main()"
# What stays readable beside the program: Python, its packages and the system's libraries.
_READABLE = (
    *(sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"),
    *("/dev/null", "/dev/zero", "/dev/urandom", answer_harness.__file__),
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONPATH": os.pathsep.join(sysconfig.get_path(name) for name in ("purelib", "platlib")),
    "PYTHONHASHSEED": "0",  # so that a program prints the same in each run
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class Limits(NamedTuple):
    """Limits of one run. timeout_s: wall time; also CPU time, rounded up."""

    timeout_s: float
    memory_bytes: int
    output_bytes: int


class Run(NamedTuple):
    """A run that is over.

    failure: "timeout", "output" (it wrote too much), or "" where the program ended by itself.
    code: its exit code, or minus the signal that ended it.
    """

    failure: str
    code: int
    stdout: bytes
    stderr: bytes


def run_program(source: str, given: bytes, limits: Limits, *, harness: bool = False) -> Run:
    """Runs a program as a script, with `given` as its standard input.

    At most one program per core runs at a time; the others wait, which takes none of their time.

    Args:
      harness: the test harness runs instead, reads `given`, and then runs the program.

    Raises:
      RuntimeError: it could not be confined, and was not run.
    """
    with _FREE, tempfile.TemporaryDirectory(prefix="seeupo-check-") as folder:
        file = Path(folder, "program.py")
        file.write_bytes(source.encode("utf-8", "surrogatepass"))
        script = ["-c", _MAIN, answer_harness.__file__, str(file)] if harness else [str(file)]
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            process = subprocess.Popen(
                supervised([*_confined(folder, limits), *script], grace_s=0.0),
                cwd=folder,
                env=_ENVIRONMENT,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        return _finish(process, limits)


def _confined(folder: str, limits: Limits) -> list[str]:
    """The command that runs a script in a confined Python."""
    options = {
        "readable": [*_READABLE, folder],
        "memory_bytes": limits.memory_bytes,
        "cpu_s": math.ceil(limits.timeout_s),
        "is_hidden": confinement.landlock_version() > 0,
    }
    confine = [_PYTHON, "-I", "-S", "-c", _MAIN, confinement.__file__, json.dumps(options)]
    # Without the user's packages, and without the script's folder as a place of modules.
    return [*confine, _PYTHON, "-s", "-P"]


def _finish(process: subprocess.Popen[bytes], limits: Limits) -> Run:
    """Reads the output of a process until it ends, or must be ended."""
    try:
        failure, stdout, stderr = _read(process, limits)
    finally:
        end(process)
        code = exit_code(process)
        process.stdout.close()
        process.stderr.close()
    if not stderr.startswith(confinement.CONFINED) and failure != "timeout":
        reason = stderr.decode(errors="replace").strip()[-300:]
        raise RuntimeError(f"check code: {reason or 'the program was not started'}.")
    return Run(failure, code, stdout, stderr.removeprefix(confinement.CONFINED))


def _read(process: subprocess.Popen[bytes], limits: Limits) -> tuple[str, bytes, bytes]:
    """What failed, or ""; the standard output; the standard error."""
    until, failure = time.monotonic() + limits.timeout_s, ""
    output = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)}
    with selectors.DefaultSelector() as selector:
        for number in output:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map() and not failure:
            if not _read_pieces(selector, output, until - time.monotonic()):
                failure = "timeout"
            elif sum(map(len, output.values())) > limits.output_bytes:
                failure = "output"
    if not failure:  # it may have closed its output and go on
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            failure = "timeout"
    stdout, stderr = map(bytes, output.values())
    return failure, stdout, stderr


def _read_pieces(
    selector: selectors.BaseSelector, output: dict[int, bytearray], timeout_s: float
) -> bool:
    """Reads what there is within a time; False: nothing was written or closed in it."""
    ready = selector.select(timeout_s) if timeout_s > 0 else []
    for key, _ in ready:
        piece = os.read(key.fd, _PIECE)
        output[key.fd] += piece
        if not piece:
            selector.unregister(key.fd)
    return bool(ready)


@functools.cache
def check_sandbox() -> None:
    """Checks once that programs can be confined here, and warns if Landlock cannot hide files.

    Raises:
      EnvironmentUnavailable: they cannot.
    """
    allowed = "Linux on " + " or ".join(confinement.MACHINES)
    if platform.system() != "Linux" or platform.machine() not in confinement.MACHINES:
        raise EnvironmentUnavailable(
            f"check: 'code' runs programs confined, on {allowed}; this is"
            f" {platform.system()} on {platform.machine()}."
        )
    try:
        run = run_program("print(1)", b"", Limits(60.0, 2**30, 2**16))
    except RuntimeError as error:
        raise EnvironmentUnavailable(f"{error} Allowed: a kernel with seccomp filters.") from None
    if run.stdout != b"1\n":
        reason = run.failure or run.stderr.decode(errors="replace").strip()[-300:]
        raise EnvironmentUnavailable(f"check: 'code' cannot run a program here: {reason}.")
    if not confinement.landlock_version():
        _LOGGER.warning(
            "check code: this kernel or container has no Landlock, so programs of the policy can"
            " read every file that this user can read, but change none."
        )
