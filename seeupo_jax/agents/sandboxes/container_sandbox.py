"""A sandbox that is a container of docker or podman.

Its first process reads a pipe that only the episode's driver holds: when the driver ends, however
it does, the pipe closes, that process ends, and with it the container.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from seeupo_jax.agents.sandboxes.sandbox_plan import (
    ENTRY,
    LOGS,
    PORT,
    PRIVATE,
    SandboxError,
    SandboxPlan,
)

_WAIT = ["sh", "-c", "echo; exec cat >/dev/null"]  # prints a line when the container runs
_KILL_ALL = ["sh", "-c", "kill -9 -1"]  # all but the first process
_END_S = 30.0


class ContainerSandbox:
    """A `Sandbox` by the command line of docker or podman, which is `plan.runtime`."""

    def __init__(self, plan: SandboxPlan, folder: Path):
        self._plan, self._folder = plan, folder
        self.logs, self.private = folder / "logs", folder / "private"
        self._name = f"seeupo-{secrets.token_hex(8)}"
        self._container: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Builds the image if it is not there, and starts the container.

        Raises:
          SandboxError: either fails; with what the program printed.
        """
        for place in (self.private, self.logs, *(self.logs / name for name in LOGS)):
            place.mkdir()
            place.chmod(0o777)  # the image's user may be another one
        shutil.copyfile(ENTRY, self.private / "entry.py")
        if self._plan.image is None and self._run("image", "inspect", self._plan.tag).returncode:
            self._check(*self.build_words(), limit_s=self._plan.build_timeout_s)
        self._container = subprocess.Popen(
            self.run_words(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if not self._container.stdout.readline():
            said = self._container.stderr.read().decode(errors="replace").strip()
            raise SandboxError(f"{self._plan.runtime} run: {said[-500:]}")

    def build_words(self) -> list[str]:
        """Arguments that build the task's image."""
        file = os.path.join(self._plan.build, "Dockerfile")
        return ["build", "--quiet", "--tag", self._plan.tag, "--file", file, self._plan.build]

    def run_words(self) -> list[str]:
        """The command line that starts the container and keeps it while standard input is open."""
        plan = self._plan
        words = [plan.runtime, "run", "--rm", "--interactive", "--name", self._name]
        words += ["--network", "none", "--memory", f"{plan.memory_mib}m", "--cpus", str(plan.cpus)]
        words += ["--pids-limit", str(plan.processes), "--security-opt", "no-new-privileges"]
        words += ["--volume", f"{self.logs}:/logs", "--volume", f"{self.private}:{PRIVATE}:ro"]
        words += ["--volume", f"{self._folder}/work:{self._folder}/work"]
        for path in plan.visible:
            words += ["--volume", f"{path}:{path}:ro"]
        for path in plan.hidden:
            words += ["--tmpfs", f"{path}:ro"]
        if plan.solution is not None:
            words += ["--volume", f"{plan.solution}:/solution:ro"]
        entry, *rest = _WAIT
        return [*words, "--entrypoint", entry, plan.image or plan.tag, *rest]

    def home(self) -> Path:
        """The agent's HOME: the task's, or else that of the image's user."""
        given = self._plan.variables.get("HOME")
        return Path(given or self._check("exec", self._name, "sh", "-c", 'printf %s "$HOME"'))

    def start_agent(
        self, words: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """As of `LocalSandbox`; the image must have python3 for the first program."""
        limits = {k: v for k, v in self._plan.limits().items() if k != "RLIMIT_NPROC"}
        port = {"port": PORT, "socket": f"{PRIVATE}/endpoint.sock"}
        settings = json.dumps({"limits": limits, "files": files, **port})
        command = ["python3", "-I", "-S", f"{PRIVATE}/entry.py", settings, *words]
        return self._exec(command, variables, None)

    def start_verifier(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts the verifier on what the agent left, with tests that it could not change."""
        self._check("exec", "--user", "0", self._name, "rm", "-rf", "/tests", "/logs/verifier")
        (self.logs / "verifier").mkdir(exist_ok=True)
        (self.logs / "verifier").chmod(0o777)
        self._check("cp", self._plan.tests, f"{self._name}:/tests")
        return self._exec(["bash", "/tests/test.sh"], self._plan.verifier_variables, output)

    def _exec(
        self, command: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        words = [self._plan.runtime, "exec"]
        words += ["--workdir", self._plan.workdir] if self._plan.workdir else []
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        return subprocess.Popen(
            [*words, self._name, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
        )

    def usage(self) -> tuple[int, float]:
        """(0, 0): the container's limits are docker's or podman's to keep."""
        return 0, 0.0

    def stop(self) -> None:
        """Kills all processes of the container but the first."""
        self._run("exec", "--user", "0", self._name, *_KILL_ALL)

    def finish(self) -> None:
        """Ends what an agent whose command has ended left running."""
        self.stop()

    def close(self) -> None:
        """Ends and removes the container."""
        self._run("kill", self._name)  # `rm` of podman would first wait for 10 s
        if self._container is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._container.wait(_END_S)  # it ends after it has removed the container
            self._container.kill()
            self._container.wait()
        self._run("rm", "--force", self._name)

    def _run(self, *words: str, limit_s: float = _END_S) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [self._plan.runtime, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self._plan.runtime} {words[0]}: {error}") from None

    def _check(self, *words: str, limit_s: float = _END_S) -> str:
        """What the program prints; raises SandboxError if it fails."""
        done = self._run(*words, limit_s=limit_s)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise SandboxError(f"{self._plan.runtime} {words[0]}: {said[-500:]}")
        return done.stdout.decode(errors="replace")
