"""A library to preload that counts, logs and fails calls that change files; see fault_fs.c.

    faults = FaultFs(tmp_path / "faults", root)      # builds the library
    subprocess.run(command, env=os.environ | faults.environment)
    faults.fail(3, errno.ENOSPC, kinds=("write",))   # at any time, also while a process runs

In the process that runs under it `FaultFs.attached()` is the same control, so that one process can
go through many faults.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_name("fault_fs.c")
KINDS = ("open", "write", "truncate", "rename", "link", "unlink", "mkdir", "sync")  # as the source
_FIELDS = ("calls", "fail_at", "error", "sticky", "kinds", "failed")  # of its control
_SIZE = 8  # bytes of each


class Call(NamedTuple):
    """A call that was logged.

    other: where a renamed or linked file came from; of a file that was synced the name of the copy
    in `FaultFs.log` of what it held. flags: of an opening. error: errno, 0 where it succeeded.
    """

    kind: str
    path: str
    other: str
    flags: int
    error: int


def require_cc() -> None:
    """Skips the test on a machine without a C compiler, unless SEEUPO_REQUIRE_CC is set."""
    if shutil.which("cc") is None:
        assert not os.environ.get("SEEUPO_REQUIRE_CC"), "got no cc; it is required here"
        pytest.skip("got no C compiler (cc) on the PATH")


class FaultFs:
    """The control of what happens to calls below a folder in processes with `environment`.

    Attributes:
      root: the folder; it need not exist yet.
      log: a folder with the calls and with what files held when they were synced.
      environment: of the processes, with what is preloaded already.
    """

    def __init__(self, folder: Path, root: Path):
        """Builds the library in a folder, which is made, and which is not below `root`."""
        require_cc()
        self.root, self.log = Path(os.path.realpath(root)), folder / "log"
        self.log.mkdir(parents=True)
        library, control = folder / "fault_fs.so", folder / "control"
        command = ("cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run([*command, "-o", library, SOURCE, "-lpthread"], check=True)
        control.write_bytes(bytes(_SIZE * len(_FIELDS)))
        preloaded = [str(library), *os.environ.get("LD_PRELOAD", "").split()]
        self.environment = {
            "LD_PRELOAD": " ".join(preloaded),
            "FAULT_FS_ROOT": str(self.root),
            "FAULT_FS_CONTROL": str(control),
            "FAULT_FS_LOG": str(self.log),
        }
        self._control = _open(control)

    @classmethod
    def attached(cls) -> FaultFs:
        """The control of the library that this process runs under."""
        faults = cls.__new__(cls)
        names = ("LD_PRELOAD", "FAULT_FS_ROOT", "FAULT_FS_CONTROL", "FAULT_FS_LOG")
        faults.environment = {name: os.environ[name] for name in names}
        faults.root, control, faults.log = (Path(os.environ[name]) for name in names[1:])
        faults._control = _open(control)
        return faults

    def fail(self, at: int, error: int, *, sticky: bool = False, kinds: Sequence[str] = ()) -> None:
        """Counts from here on, and fails call number `at` of these kinds, from 1.

        Args:
          error: errno; negative: of the signal that the process gets before the call.
          sticky: all later calls of these kinds fail, too.
          kinds: of `KINDS`; (): all.
        """
        bits = sum(1 << KINDS.index(kind) for kind in kinds)
        self._set(fail_at=0)
        self._set(calls=0, failed=0, error=error, sticky=int(sticky), kinds=bits)
        self._set(fail_at=at)

    def count(self, kinds: Sequence[str] = ()) -> None:
        """Counts from here on, and fails nothing."""
        self.fail(0, 0, kinds=kinds)

    @property
    def counted(self) -> int:
        """Calls since `fail` or `count`, of its kinds."""
        return self._get("calls")

    @property
    def failed(self) -> int:
        """How many of these failed."""
        return self._get("failed")

    def calls(self) -> list[Call]:
        """All that were logged, in their order."""
        calls = []
        for line in (self.log / "calls").read_text().splitlines():
            kind, path, other, flags, error = line.split("\t")
            calls.append(Call(kind, path, other, int(flags), int(error)))
        return calls

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            struct.pack_into("q", self._control, _SIZE * _FIELDS.index(name), value)

    def _get(self, name: str) -> int:
        return struct.unpack_from("q", self._control, _SIZE * _FIELDS.index(name))[0]


def _open(control: Path) -> mmap.mmap:
    with control.open("r+b") as file:
        return mmap.mmap(file.fileno(), _SIZE * len(_FIELDS))
