"""A training service in a process of its own, and programs of Tinker's SDK that call it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loaded_python import LoadedPython
from places import CONFIGS, ROOT
from process_cases import environment

TINKER = ROOT / "third_party" / "tinker"
PYTHON = TINKER / ".venv" / "bin" / "python"
KEY = "tml-the-users.key"


def needs_sdk(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test of the second tier, which is skipped where the SDK is not set up."""
    reason = "Tinker's SDK is not set up: sh third_party/tinker/setup.sh"
    there = (TINKER / ".venv" / "installed.txt").is_file()
    return pytest.mark.exhaustive(pytest.mark.skipif(not there, reason=reason)(test))


class Server:
    """A server of the bundled policy, or of another one, until it is killed."""

    def __init__(self, workdir: Path, *flags: str):
        config = f"--config={CONFIGS / 'quickstart.py'}"
        command = [sys.executable, "-m", "seeupo_jax.train_server", config, "--port=0"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        own = environment() | {"SEEUPO_API_KEY": KEY}
        self.process = LoadedPython([*command, f"--workdir={workdir}", *flags], env=own, **streams)
        self.lines = [self.process.stdout.readline() for _ in range(3)]
        found = re.search(r"http://\S+", self.lines[0])
        if found is None:
            self.process.kill()
            pytest.fail(f"the server did not start: {self.process.communicate()[1]}")
        self.url = found[0]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def run_client(server: Server, *arguments: str | Path) -> str:
    """What a program of the SDK's Python printed."""
    own = environment() | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    own |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    command = [PYTHON, *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
