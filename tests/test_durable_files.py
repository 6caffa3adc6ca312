"""What is written is on the disk when a function returns, and is there whole or not at all."""

import errno
import os
import re
import subprocess
import sys

import pytest
from fault_fs import FaultFs
from process_cases import environment

from seeupo_jax.durable_files import sync_tree, write_atomically


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR)  # so that neither of them waits
    try:
        write_atomically(pipe, b"a page")
        assert pipe.is_fifo() and os.read(both_ends, 6) == b"a page"
    finally:
        os.close(both_ends)


def test_each_write_has_a_temporary_file_of_its_own(tmp_path, monkeypatch):
    replace, seen = os.replace, []

    def by_another_too(source, target):
        seen.append(source.name)
        if len(seen) == 1:  # another process writes the file meanwhile
            write_atomically(target, b"its page")
        replace(source, target)

    monkeypatch.setattr(os, "replace", by_another_too)
    write_atomically(tmp_path / "page.md", b"a page")
    assert (tmp_path / "page.md").read_bytes() == b"a page"
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]
    assert all(re.fullmatch(r"page\.md\.[0-9a-f]{8}\.tmp", name) for name in seen)


@pytest.fixture
def faults(tmp_path):
    (tmp_path / "root").mkdir()
    return FaultFs(tmp_path / "faults", tmp_path / "root")


def run(faults, program):
    """What a program prints that has a folder `root`."""
    head = (
        "import errno, logging\nfrom pathlib import Path\nfrom fault_fs import FaultFs\n"
        "from seeupo_jax import durable_files as files\n"
        f"root, faults = Path({str(faults.root)!r}), FaultFs.attached()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + program],
        env=environment() | faults.environment,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.stdout


def changes(faults):
    """Kinds of calls and paths below the root, temporary names as TMP."""
    return [
        (call.kind, re.sub(r"\.[0-9a-f]{8}\.tmp$", ".TMP", os.path.relpath(call.path, faults.root)))
        for call in faults.calls()
        if not call.error
    ]


def test_a_file_counts_when_its_bytes_are_synced_and_is_there_when_its_folders_are(faults):
    run(faults, "files.write_atomically(root / 'a' / 'b' / 'file', b'text')")
    assert changes(faults) == [
        ("mkdir", "a"),
        ("mkdir", "a/b"),
        ("sync", "a"),
        ("sync", "."),
        ("open", "a/b/file.TMP"),
        ("write", "a/b/file.TMP"),
        ("sync", "a/b/file.TMP"),
        ("rename", "a/b/file"),
        ("sync", "a/b"),
    ]


def test_a_folder_takes_its_place_when_all_in_it_is_synced_and_the_older_goes_last(faults):
    for folder in ("place", "unfinished/inner", "before"):
        (faults.root / folder).mkdir(parents=True)
        (faults.root / folder / "file").write_text(folder)
    run(faults, "files.move_folder(root / 'place', root / 'unfinished', root / 'before')")
    assert changes(faults) == [
        ("sync", "unfinished/inner/file"),
        ("sync", "unfinished/inner"),
        ("sync", "unfinished"),
        ("sync", "."),
        ("unlink", "before/file"),
        ("unlink", "before"),
        ("rename", "before"),
        ("rename", "place"),
        ("sync", "."),
        ("unlink", "before/file"),
        ("unlink", "before"),
    ]
    assert [path.name for path in faults.root.iterdir()] == ["place"]
    assert (faults.root / "place" / "inner" / "file").read_text() == "unfinished/inner"


@pytest.mark.parametrize("refused", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_is_one_warning(faults, refused):
    printed = run(
        faults,
        "import sys\nlogging.basicConfig(stream=sys.stdout)\n"
        "for name in 'ab':\n"
        f"    faults.fail(2, {refused}, kinds=('sync',))\n"  # the first is the file's
        "    files.write_atomically(root / name, b'text')\n"
        "    assert faults.failed == 1\n",
    )
    assert printed == (
        f"WARNING:seeupo_jax.durable_files:{faults.root}: folders cannot be synced there"
        f" ({os.strerror(refused)}): new files may be missing after a power cut.\n"
    )
    assert {file.read_text() for file in faults.root.iterdir()} == {"text"}


@pytest.mark.parametrize("at", [1, 2])  # its bytes, which have another name until then; its name
def test_a_disk_that_fails_is_an_error_that_names_what_was_not_written(faults, at):
    printed = run(
        faults,
        f"faults.fail({at}, errno.EIO, kinds=('sync',))\n"
        "try: files.write_atomically(root / 'a', b'text')\n"
        "except OSError as error: print(error.strerror, error.filename)\n",
    )
    assert printed == f"Input/output error {faults.root / 'a'}\n"


def test_pipes_and_links_of_a_folder_are_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for a writer
    (tmp_path / "link").symlink_to("nowhere")
    sync_tree(tmp_path)
