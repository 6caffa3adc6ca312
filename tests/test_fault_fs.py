"""The library that the tests preload fails the call it should, and logs what changed files."""

import errno
import subprocess
import sys

import pytest
from fault_fs import FaultFs
from process_cases import environment

CHANGES = """
import os, shutil
from pathlib import Path
root = Path(ROOT)
os.chdir(root)
(root / "folder").mkdir()
(root / "folder" / "file").write_text("one")
with open("folder/file", "ab") as file:
    file.write(b" two")
    file.flush()
    os.fsync(file.fileno())
folder = os.open("folder", os.O_RDONLY)
os.fsync(folder)
os.rename("file", "renamed", src_dir_fd=folder, dst_dir_fd=folder)
os.link("folder/renamed", "linked")
os.symlink("linked", "link")
os.truncate("linked", 3)
shutil.copyfile("linked", "copied")
shutil.rmtree("folder")
(root.parent / "beside").write_text("not below the root")
(root / "linked").read_text()
"""
# By hand: what POSIX has these lines of Python do.
CHANGED = [
    ("mkdir", "folder", ""),
    ("open", "folder/file", ""),
    ("write", "folder/file", ""),
    ("open", "folder/file", ""),
    ("write", "folder/file", ""),
    ("sync", "folder/file", "one two"),
    ("sync", "folder", ""),
    ("rename", "folder/renamed", "folder/file"),
    ("link", "linked", "folder/renamed"),
    ("link", "link", ""),
    ("truncate", "linked", ""),
    ("open", "copied", ""),
    ("write", "copied", ""),
    ("unlink", "folder/renamed", ""),
    ("unlink", "folder", ""),
]


@pytest.fixture
def faults(tmp_path):
    (tmp_path / "root").mkdir()
    return FaultFs(tmp_path / "faults", tmp_path / "root")


def run(faults, program):
    program = program.replace("ROOT", repr(str(faults.root)))
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment() | faults.environment,
        capture_output=True,
        text=True,
    )


def test_the_log_has_every_change_below_the_root_and_what_was_synced(faults):
    assert run(faults, CHANGES).stderr == ""
    below = str(faults.root) + "/"
    calls = [call for call in faults.calls() if not call.error]
    logged = []
    for kind, path, other, _, _ in calls:
        if kind == "sync" and other:
            other = (faults.log / other).read_text()
        entry = (kind, path.removeprefix(below), other.removeprefix(below))
        # The system chooses how much a call copies, and the last one copies none.
        if kind != "write" or entry != logged[-1]:
            logged.append(entry)
    assert logged == CHANGED
    assert faults.counted == len(faults.calls())


@pytest.mark.parametrize("sticky, written", [(False, ["1", "3", "4"]), (True, ["1"])])
def test_the_nth_call_of_a_kind_fails_once_or_from_there_on(faults, sticky, written):
    faults.fail(2, errno.ENOSPC, sticky=sticky, kinds=("write",))
    program = (
        "import os\n"
        "for name in '1234':\n"
        "    descriptor = os.open(ROOT + '/' + name, os.O_WRONLY | os.O_CREAT)\n"
        "    try: os.write(descriptor, b'data')\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    done = run(faults, program)
    failures = 4 - len(written)
    assert done.stdout == "No space left on device\n" * failures
    assert (faults.counted, faults.failed) == (4, failures)
    assert [file.name for file in sorted(faults.root.iterdir()) if file.read_bytes()] == written
    assert [call.error for call in faults.calls() if call.kind == "write"].count(28) == failures


def test_one_process_goes_through_many_faults(faults):
    program = (
        "import errno\nfrom pathlib import Path\nfrom fault_fs import FaultFs\n"
        "faults = FaultFs.attached()\n"
        "for error in (errno.EIO, errno.EROFS):\n"
        "    faults.fail(1, error)\n"
        "    try: (Path(ROOT) / 'file').write_text('text')\n"
        "    except OSError as error: print(errno.errorcode[error.errno], faults.counted)\n"
        "faults.count()\n"
        "(Path(ROOT) / 'file').write_text('text')\n"
        "print(faults.counted, faults.failed)\n"
    )
    assert run(faults, program).stdout == "EIO 1\nEROFS 1\n2 0\n"
    assert (faults.counted, faults.failed) == (2, 0)  # as the parent sees it
