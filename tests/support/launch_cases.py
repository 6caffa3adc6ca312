"""A checkout with the launch scripts, and stand-ins for the programs that they call."""

import os
import shutil
import subprocess
from pathlib import Path

from places import ROOT

NASTY = "--config.env.options={'a': 'b  c', \"d\": '$HOME `x` \\\\ * é'}"  # one argument
TRAINING = ["--config=configs/quickstart.py", "--workdir=/mnt/mine/run 1", NASTY]

# One write a record: the programs of a script run side by side.
RECORD = """#!/bin/sh
printf '%s\\0' {name} "$@" '{end}' >>{calls}
{body}
"""
END = "end of the call"


# All that a script finds beside the stand-ins: a real gcloud is out of its reach.
ORDINARY = """basename cat chmod cp date dirname du env find git grep gzip head mkdir mkfifo mktemp
    mv rm sed sh sleep sort tail tar touch tr xargs""".split()


class Stage:
    """Where a launch script runs.

    checkout: has launch/ and a configuration.
    bin: all that is on PATH, the stand-ins and a few ordinary programs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "the checkout"
        self.bin = folder / "bin"
        self._calls = folder / "calls"
        self.bin.mkdir()
        for name in ORDINARY:
            (self.bin / name).symlink_to(shutil.which(name))
        self._calls.touch()
        shutil.copytree(ROOT / "launch", self.checkout / "launch")
        (self.checkout / "configs").mkdir()
        (self.checkout / "configs" / "quickstart.py").touch()
        self.env = os.environ | {
            "PATH": str(self.bin),
            "STAGE": str(folder),
        }

    def tool(self, name: str, body: str = "", where: Path | None = None) -> None:
        """A program that records its arguments and then does what the shell lines say."""
        path = (self.bin if where is None else where) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(RECORD.format(name=name, end=END, calls=self._calls, body=body))
        path.chmod(0o755)

    def python(self, body: str = "") -> None:
        """The checkout's interpreter."""
        self.tool("python", body, self.checkout / ".venv" / "bin")

    def calls(self, name: str | None = None) -> list[list[str]]:
        """What was called so far, program first."""
        records = self._calls.read_text().split(f"\0{END}\0")[:-1]
        found = [record.split("\0") for record in records]
        return [call for call in found if name in (None, call[0])]

    def command(self, script: str, *arguments: str) -> list[str]:
        return [str(self.checkout / "launch" / script), *arguments]

    def run(self, script: str, *arguments: str, timeout: float = 60):
        """The finished script, with its output as text."""
        return subprocess.run(
            self.command(script, *arguments),
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
