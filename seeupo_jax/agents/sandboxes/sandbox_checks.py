"""Checks of sandboxes, before a run begins."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from seeupo_jax.agents.calls import Access
from seeupo_jax.agents.sandboxes.local_sandbox import PROGRAM, LocalSandbox
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes

_CHECK_S = 60.0  # for a runtime to answer


def check_sandboxes(sandboxes: Sandboxes) -> None:
    """Checks that sandboxes can be made here, and that they have the agent's program.

    Raises:
      ValueError: the runtime does not work here, or a path of `config.sandbox.visible`, a solution
        or the program is missing.
    """
    sandbox = sandboxes.sandbox
    for path in sandbox.visible:
        if not os.path.exists(path):
            raise ValueError(
                f"config.sandbox.visible: got {path}, which is not there; allowed: absolute paths"
                " of this machine."
            )
    if sandbox.solution and (missing := sandboxes.tasks.without_solution()):
        raise ValueError(
            f"config.sandbox.solution: got True with {missing[0]}, which has no solution/solve.sh;"
            " allowed: False, or a solution of each task."
        )
    program = PROGRAM if sandbox.runtime == "local" else sandbox.runtime
    if shutil.which(program) is None:
        package = "bubblewrap" if sandbox.runtime == "local" else sandbox.runtime
        raise ValueError(
            f"config.sandbox.runtime: got {sandbox.runtime}, whose program {program} is not on the"
            f" PATH; allowed: a runtime of this machine (Debian and Ubuntu: apt-get install"
            f" {package})."
        )
    if sandbox.runtime == "local":
        _check_local(sandboxes)
    else:
        _check_works(sandbox.runtime, [program, "version"])


def _check_local(sandboxes: Sandboxes) -> None:
    """Makes a sandbox of the first task, and looks for the agent's program in it."""
    tasks, program = sandboxes.tasks, sandboxes.words[0]
    split = next(iter(tasks.count))
    task = tasks.task(tasks.task_ids(split)[0], split)
    plan = sandboxes.plan(task, Access("http://127.0.0.1:9/v1", "none"))
    with tempfile.TemporaryDirectory(prefix="seeupo-check-") as folder:
        sandbox = LocalSandbox(plan, Path(folder))
        sandbox.prepare()
        inside = [*sandbox.command([], plan.variables), "--"]
        _check_works("local", [*inside, "/usr/bin/env", "true"])
        failed = _failure([*inside, "sh", "-c", 'command -v -- "$1"', "sh", program])
    if failed:
        raise ValueError(
            f"config.agent.command: got {program}, which a sandbox does not have ({failed});"
            " allowed: a program in /usr, one on the PATH in a folder bin, or one in a folder of"
            " config.sandbox.visible that is on the PATH."
        )


def _check_works(runtime: str, command: Sequence[str]) -> None:
    if failed := _failure(command):
        raise ValueError(
            f"config.sandbox.runtime: got {runtime}, with which no sandbox can be made here"
            f" ({failed}); allowed: one that works on this machine."
        )


def _failure(command: Sequence[str]) -> str:
    """How a command fails; empty: it does not."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    printed = (done.stderr + done.stdout).decode(errors="replace").strip()[-300:]
    said = f"; it printed: {printed}" if printed else ""
    return f"exit code {done.returncode}{said}" if done.returncode else ""
