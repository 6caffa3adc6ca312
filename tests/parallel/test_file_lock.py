"""A lock lets one process in, says which one holds it, and ends with its process."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from process_cases import PYTHONPATH

from seeupo_jax.checkpoint import exclusive_output, exclusive_run
from seeupo_jax.configuration.schema import Checkpoint
from seeupo_jax.parallel.file_lock import exclusive

HOLDER = """
import sys
from pathlib import Path
from seeupo_jax.parallel.file_lock import exclusive
with exclusive(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / ".lock"


@pytest.fixture
def holder(file):
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def refused(file):
    with pytest.raises(ValueError) as logged, exclusive(file, "--workdir: got runs/a"):
        raise AssertionError("two hold one lock")
    return str(logged.value)


def test_the_second_is_told_which_process_holds_it_and_gets_it_when_that_has_ended(file, holder):
    logged = refused(file)
    assert logged.startswith(
        f"--workdir: got runs/a, in use by process {holder.pid} on {socket.gethostname()} since 20"
    )
    assert f"({sys.executable} -c " in logged and "; allowed: one process at a time." in logged
    with exclusive(file.with_name("other"), "another one"):
        pass
    holder.communicate("")
    with exclusive(file, "it"):
        assert file.exists()
    assert not file.exists()


def test_a_holder_that_is_killed_leaves_it_free(file, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert file.exists()
    with exclusive(file, "it"):
        assert str(os.getpid()) in refused(file)  # and in no words of the dead one
    assert not file.exists()


def test_one_at_a_time_although_each_removes_the_file_at_its_end(file):
    inside, most, taken = [0], [0], [0]

    def take():
        while taken[0] < 300:
            try:
                with exclusive(file, "it"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    taken[0] += 1
                    inside[0] -= 1
            except ValueError:
                pass

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not file.exists()


def test_a_file_system_without_locks_is_told_and_works(file, monkeypatch, caplog):
    def without(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    with exclusive(file, "it"):
        (logged,) = caplog.messages
    assert logged.startswith(f"warning: {file} cannot be locked (No locks available)")


def test_runs_keep_apart_in_the_workdir_and_in_the_checkpoints_folder(tmp_path, capsys):
    shared = Checkpoint(directory=str(tmp_path / "shared"))
    with exclusive_run(tmp_path / "a", shared):
        for workdir, options, name in (
            (tmp_path / "a", Checkpoint(), "--workdir"),
            (tmp_path / "b", shared, "config.checkpoint.directory"),
        ):
            with pytest.raises(ValueError, match=f"^{name}: got .*, in use by process "):
                with exclusive_run(workdir, options):
                    pass
        with exclusive_run(tmp_path / "b", Checkpoint(directory="gs://bucket/run")):
            pass
    with exclusive_run(tmp_path / "c", Checkpoint(directory=str(tmp_path / "c"))):
        pass  # it is not in its own way
    assert capsys.readouterr().err == ""


def test_a_folder_is_kept_from_others_under_all_of_its_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with exclusive_output(tmp_path / "folder"):
        with pytest.raises(ValueError, match="^--output: got .*/link, in use by process "):
            with exclusive_output(tmp_path / "link"):
                pass
