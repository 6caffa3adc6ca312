"""Streams that fail, and short forms."""

import errno
import io
import os
import subprocess
import sys
import tomllib
from pkgutil import resolve_name

import pytest
from places import ROOT

from seeupo_jax.display.terminal import (
    SafeStream,
    can_redraw,
    format_count,
    format_duration,
    safe_output,
)
from seeupo_jax.errors import file_sentences

COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


class _Failing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, *_):
        raise self.error

    flush = isatty = write


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("closed file")]
)
def test_a_failing_stream_never_raises(error):
    stream = SafeStream(_Failing(error))
    assert stream.write("text") == 4
    stream.flush()
    assert stream.isatty() is False


def test_a_missing_standard_output_is_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    stream = SafeStream()
    stream.write("text")
    stream.flush()
    assert not stream.isatty()


def test_marks_that_a_terminal_cannot_show_are_replaced():
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("ok ▁\n")
    stream.flush()
    assert raw.getvalue() == b"ok ?\n"


def test_a_reader_that_leaves_does_not_end_the_process():
    code = """if True:
        from seeupo_jax.display.terminal import SafeStream
        stream = SafeStream()
        for _ in range(5):
            stream.write("x" * 100_000)
            stream.flush()
        print("plain prints survive too", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_leaves_does_not_end_a_command(command, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    room = 2**20  # for all of the help: argparse hides errors of writing
    with os.fdopen(write, "w", room) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            resolve_name(COMMANDS[command])([command, "--help"])
        assert ended.value.code == 0
        stream.flush()  # as the interpreter does at its end


def test_a_commands_output_is_the_standard_output_to_a_users_code(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="strict", newline="")
    monkeypatch.setattr(sys, "stdout", stream)
    with safe_output():
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        assert sys.stdout.line_buffering and sys.stdout.errors == "backslashreplace"
        sys.stdout.writelines(["a\n", "b\n"])
        sys.stdout.buffer.write(b"board\n")
        assert not sys.stdout.closed
    assert raw.getvalue() == b"a\nb\nboard\n" and sys.stdout is stream


def whole():
    print("text")


def at_once():
    print("text", flush=True)


def helped():
    print("text")
    sys.exit(0)


def in_a_sentence():
    with file_sentences():
        at_once()


def failed():
    print("text")
    sys.exit(1)


def in_progress():
    stream = SafeStream()
    stream.write("text")
    stream.flush()
    sys.exit(1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize(
    "command, code",
    [(whole, 2), (at_once, 2), (helped, 2), (in_a_sentence, 2), (failed, 1), (in_progress, 1)],
)
def test_a_full_disk_under_the_output_is_one_sentence(command, code, monkeypatch, capsys):
    with open("/dev/full", "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as end:
            safe_output()(command)()
        assert end.value.code == code
        stream.flush()  # as the interpreter does at its end
    sentence = "error: standard output could not be written: No space left on device"
    assert capsys.readouterr().err.startswith(sentence) == (code == 2)


def test_output_to_a_terminal_that_is_gone_is_lost_and_the_command_goes_on(monkeypatch):
    ended = []

    def command():
        print("text", flush=True)
        ended.append(True)

    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        os.close(master)
        safe_output()(command)()
        stream.flush()
    assert ended == [True]


@pytest.mark.parametrize(("term", "able"), [("xterm", True), ("dumb", False), ("", False)])
def test_only_a_terminal_that_moves_its_cursor_is_redrawn(monkeypatch, term, able):
    monkeypatch.setenv("TERM", term)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        assert can_redraw(SafeStream(stream)) is able
    os.close(master)
    assert not can_redraw(SafeStream(io.StringIO()))


def test_counts_and_durations_by_hand():
    assert [format_count(n) for n in (0, 850, 999.6, 5123, 9960, 12_345, 1.2e6)] == [
        "0", "850", "1.0k", "5.1k", "10k", "12k", "1.2M",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0, 45.2, 59.7, 115, 7500, 273_600)] == [
        "0s", "45s", "1m00s", "1m55s", "2h05m", "3d04h",
    ]  # fmt: skip
