"""A sandbox of namespaces, by bubblewrap: a file system, processes and a loopback of its own.

The root of the sandbox is a folder of the episode, which the verifier sees as the agent left it.
Programs are those of the machine: /usr is read-only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
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

PROGRAM = "bwrap"
_FOLDERS = "dev etc home logs mnt opt proc root srv tmp usr var/tmp".split()
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # into /usr, or folders of the machine
# Of the machine's /etc: what programs of /usr need.
_ETC = ("alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
_ETC += ("magic", "mime.types", "ssl", "timezone")
_WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_MEMORY = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB", re.MULTILINE)  # of /proc/PID/status
_END_S = 10.0  # for a namespace to end after its first process was killed


class LocalSandbox:
    """A `Sandbox` of this machine's programs.

    Args:
      folder: of the episode, for the sandbox's files; `work` in it is the agent's too.
    """

    def __init__(self, plan: SandboxPlan, folder: Path):
        self._plan, self._folder, self._root = plan, folder, folder / "root"
        self.logs, self.private = folder / "logs", folder / "private"
        self._init: int | None = None  # a handle of the first process of the running sandbox
        self._pid = 0

    def prepare(self) -> None:
        """Makes the files that the agent begins with."""
        for name in _FOLDERS:
            (self._root / name).mkdir(parents=True)
        for place in (self.private, self.logs, self._folder / "shm", self._root / PRIVATE[1:]):
            place.mkdir()
        for name in LOGS:
            (self.logs / name).mkdir()
        for name in ("tmp", "var/tmp"):
            (self._root / name).chmod(0o1777)
        for name, text in _WRITTEN.items():
            (self._root / "etc" / name).write_text(text, encoding="utf-8")
        shutil.copyfile(ENTRY, self.private / "entry.py")
        self._link()
        for source, target in self._plan.copies:
            self._copy(Path(source), target)
        self._place(self._plan.workdir).mkdir(parents=True, exist_ok=True)

    def _copy(self, source: Path, target: str) -> None:
        place = self._place(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            for file in source.rglob("*"):
                self._place(f"{target}/{file.relative_to(source)}")
            leave = shutil.ignore_patterns("Dockerfile")
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True, ignore=leave)
        else:
            shutil.copy2(source, place)

    def _place(self, path: str) -> Path:
        """Where a path of the sandbox is on this machine.

        Raises:
          SandboxError: a link that was copied before leads out of the sandbox's files.
        """
        place = self._root / path.lstrip("/")
        if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(self._root)):
            raise SandboxError(f"{path} is behind a link that leads out of the task's files")
        return place

    def _link(self) -> None:
        """Makes the links from / into /usr, also where an agent has put something else."""
        for name in (each for each in _LINKS if os.path.lexists(f"/{each}")):
            place = self._root / name
            self._set_aside(place)
            if os.path.islink(f"/{name}"):
                place.symlink_to(os.readlink(f"/{name}"))
            else:
                place.mkdir()

    def _set_aside(self, place: Path) -> None:
        """Moves what an agent has put in a place out of the sandbox, whatever it is."""
        if not os.path.lexists(place):
            return
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o700)  # else an ordinary user could not move it
        aside = self._folder / "left"
        aside.mkdir(exist_ok=True)
        place.rename(aside / str(len(os.listdir(aside))))

    def home(self) -> Path:
        """The agent's HOME."""
        return Path(self._plan.variables["HOME"])

    def start_agent(
        self, words: Sequence[str], variables: Mapping[str, str], files: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts the agent's command, which prints to this process's output.

        Args:
          files: texts by their paths in the sandbox, which are written before.
        """
        mounts = ["--bind", str(self._folder / "work"), str(self._folder / "work")]
        if self._plan.solution is not None:
            mounts += ["--ro-bind", self._plan.solution, "/solution"]
        python = [os.path.realpath(sys.executable), "-I", "-S", f"{PRIVATE}/entry.py"]
        settings = {"port": PORT, "socket": f"{PRIVATE}/endpoint.sock", "files": files}
        return self._start([*python, self._settings(settings), *words], mounts, variables, None)

    def start_verifier(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts the verifier on what the agent left, with tests that it could not change."""
        for place in (self._root / "tests", self._root / "solution", self.logs / "verifier"):
            self._set_aside(place)
        (self.logs / "verifier").mkdir()
        self._link()
        shutil.copytree(self._plan.tests, self._folder / "tests", symlinks=True)
        mounts = ["--bind", str(self._folder / "tests"), "/tests"]
        python = [os.path.realpath(sys.executable), "-I", "-S", f"{PRIVATE}/entry.py"]
        words = [*python, self._settings({}), "/usr/bin/bash", "/tests/test.sh"]
        return self._start(words, mounts, self._plan.verifier_variables, output)

    def _settings(self, more: Mapping[str, object]) -> str:
        folder = self._plan.workdir
        return json.dumps({"limits": self._plan.limits(), "folder": folder, **more})

    def _start(
        self,
        words: Sequence[str],
        mounts: Sequence[str],
        variables: Mapping[str, str],
        output: IO[bytes] | None,
    ) -> subprocess.Popen[bytes]:
        here, there = os.pipe()
        argv = [*self.command(mounts, variables), "--info-fd", str(there), "--", *words]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=(there,),
            env={},  # the sandbox sees bubblewrap's own in /proc/1/environ
        )
        os.close(there)
        with os.fdopen(here, "rb") as info:
            told = info.read()
        if not told:
            process.wait()
            raise SandboxError(f"{PROGRAM} ended with exit code {process.returncode}")
        self._pid = json.loads(told)["child-pid"]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._init = os.pidfd_open(self._pid)
        return process

    def command(self, mounts: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """bubblewrap's command line, without the command in the sandbox."""
        root = str(self._root)
        argv = [shutil.which(PROGRAM) or PROGRAM, "--unshare-all", "--unshare-user"]
        argv += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        argv += ["--uid", "0", "--gid", "0", "--hostname", "sandbox"]
        argv += ["--bind", root, "/", "--ro-bind", "/usr", "/usr", "--bind", f"{root}/etc", "/etc"]
        for name in (each for each in _LINKS if os.path.isdir(f"/{each}")):
            argv += [] if os.path.islink(f"/{name}") else ["--ro-bind", f"/{name}", f"/{name}"]
        for name in _ETC:
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        argv += ["--proc", "/proc", "--dev", "/dev", "--bind", f"{self._folder}/shm", "/dev/shm"]
        argv += ["--remount-ro", "/dev", "--bind", str(self.logs), "/logs"]
        argv += ["--ro-bind", str(self.private), PRIVATE]
        for path in self._plan.visible:
            argv += ["--ro-bind", path, path]
        for path in self._plan.hidden:
            argv += ["--tmpfs", path, "--remount-ro", path]
        argv += [*mounts, "--chdir", "/", "--clearenv"]
        for name, value in variables.items():
            argv += ["--setenv", name, value]
        return argv

    def usage(self) -> tuple[int, float]:
        """Processes and threads of the running sandbox, and their memory in MiB.

        Memory that several processes share counts in each; files that are in memory do not count.
        """
        count, kib, pids = 0, 0, [] if self._init is None else [self._pid]
        while pids:
            threads, more_kib, children = _process(pids.pop())
            count, kib = count + threads, kib + more_kib
            pids += children
        return count - 1, kib / 1024  # bubblewrap's own is none

    def stop(self) -> None:
        """Kills all processes of the running sandbox."""
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def finish(self) -> None:
        """Waits until the last process of a sandbox whose command has ended is gone.

        Raises:
          SandboxError: one does not end.
        """
        if self._init is None:
            return
        ready = select.poll()
        ready.register(self._init, select.POLLIN)
        ended = ready.poll(_END_S * 1000)
        os.close(self._init)
        self._init = None
        if not ended:
            raise SandboxError(f"a process of the sandbox has not ended within {_END_S:g} s")

    def close(self) -> None:
        """Ends what still runs, and removes what an agent may have written."""
        self.stop()
        remove([self._folder / name for name in ("root", "logs", "shm", "work", "left")])


def _process(pid: int) -> tuple[int, int, list[int]]:
    """Threads, KiB of memory and children of a process; of one that has ended, what was read."""
    threads, kib, children = list[str](), 0, list[int]()
    with contextlib.suppress(OSError):
        kib = sum(map(int, _MEMORY.findall(Path(f"/proc/{pid}/status").read_bytes())))
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return len(threads), kib, children


def remove(folders: Sequence[Path]) -> None:
    """Removes folders of any depth, also ones without permissions; links are not followed."""
    for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*words, "--", *map(str, folders)], check=False, capture_output=True)
