"""A token is made once, for its owner, and read back as it is."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seeupo_jax.envs.transport.http_protocol import ensure_token, read_token


def test_a_token_is_made_where_there_is_none_and_kept_where_there_is_one(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "token"
    assert ensure_token(str(file)) == file
    token = read_token(str(file))
    assert len(token) >= 40 and stat.S_IMODE(file.stat().st_mode) == 0o600
    ensure_token(str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_token(str(file)) == read_token("~/deep/token") == token
    other = tmp_path / "other"
    ensure_token(str(other))
    assert read_token(str(other)) != token


def test_a_token_is_made_where_no_file_can_have_two_names(tmp_path, monkeypatch):
    def link(*names):
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as on FAT

    monkeypatch.setattr(os, "link", link)
    file = ensure_token(str(tmp_path / "token"))
    assert len(read_token(str(file))) >= 40 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_servers_that_begin_at_once_have_one_token(tmp_path):
    def begin(file):
        ensure_token(str(file))
        return read_token(str(file))

    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            assert len(set(pool.map(begin, [tmp_path / str(number)] * 4))) == 1


def test_client_and_server_on_one_machine_agree_on_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    made = ensure_token(None)
    assert made.is_relative_to(tmp_path) and read_token(None) == made.read_text().strip()


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines\n", b"\xff", None])
def test_what_is_no_token_is_refused(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="token_file: got '.*token'"):
        read_token(str(file))
