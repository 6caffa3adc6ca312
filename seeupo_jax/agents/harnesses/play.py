"""The process that plays an episode by a harness, in the episode's folder, and checks the result.

The command runner starts it as it starts any command. It writes the harness's configuration into a
HOME beside the folder, so that neither the settings nor the credentials of the user are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from seeupo_jax.agents.harnesses.harness import PolicyAccess
from seeupo_jax.agents.harnesses.harness_task import HarnessTask, read_harness_task, write_files
from seeupo_jax.agents.harnesses.table import HARNESSES

_SHOWN = 1000  # characters of a check's output in the result


def main() -> None:
    """Plays the episode that the command runner's variables describe.

    Arguments: the harness's name, tokens of a conversation and of an answer, the folder in which
    the run was started, and the words of the program.
    """
    name, max_context, max_answer, start, *program = sys.argv[1:]
    file = Path(os.environ["SEEUPO_TASK"])
    task = read_harness_task(json.loads(file.read_bytes())["data"])
    file.unlink()  # it has the check, which the policy could read
    access = PolicyAccess(
        os.environ["OPENAI_BASE_URL"],
        os.environ["OPENAI_API_KEY"],
        os.environ["OPENAI_MODEL"],
        int(max_context),
        int(max_answer),
    )
    work, home = Path.cwd(), file.parent / "home"
    task.prepare(work, Path(start))
    launch = HARNESSES[name].launch(task.instruction, access, home)
    home.mkdir()
    write_files(home, launch.files)
    # opencode works in PWD.
    env = launch.variables(os.environ | {"HOME": str(home), "PWD": str(work)})
    code = subprocess.run([*program, *launch.words], env=env).returncode
    _finish(task, work, code)


def _finish(task: HarnessTask, work: Path, code: int) -> None:
    """Writes the result; a harness that failed and left the task unsolved exits with 1."""
    write_files(work, task.check_files)
    check = subprocess.run(
        ["sh", "-c", task.check], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    solved = check.returncode == 0
    if code != 0 and not solved:
        sys.exit(f"the harness ended with exit code {code}, and the check does not succeed.")
    output = check.stdout.decode(errors="replace")[-_SHOWN:]
    info = {"harness_exit_code": code, "check_output": output}
    result = {"reward": float(solved), "info": info}
    Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(result), encoding="utf-8")
