"""What is written is on the disk when a function returns, and is there whole or not at all."""

import os
import re

from seeupo_jax.durable_files import write_atomically


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
