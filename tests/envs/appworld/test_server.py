"""What a client of a pool says about its file of servers, and about answers that are lost."""

import contextlib
import json
import socket
import threading

import pytest

from seeupo_jax.envs.appworld.server import (
    InvalidReply,
    PoolServer,
    RequestUnanswered,
    ServerDied,
    ServerError,
    ServerGone,
)


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"token": "x", "ports": []}', "no server of .* took the task: it lists none"),
        ('{"token": "x", "po', "servers: got JSONDecodeError: .*; allowed: a file of servers"),
        ('{"token": "x"}', "servers: got KeyError: 'ports'; allowed"),
        ("[]", "servers: got TypeError: .*; allowed"),
        (None, "servers: got FileNotFoundError: .*; allowed"),
    ],
)
def test_a_pool_file_without_usable_servers_is_a_sentence(text, reason, tmp_path):
    file = tmp_path / "servers"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ServerError, match=reason):
        PoolServer(file, start_s=0.0, request_s=1.0).begin()


def _reply(status: int, output: object) -> bytes:
    body = json.dumps({"output": output}).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@contextlib.contextmanager
def _server(tmp_path, replies):
    """A pool client that holds a server whose connections get these replies; None: no reply.

    When they have run out, the port is closed.
    """

    def serve():
        with listener:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    if reply is None:
                        stopped.wait(30)
                    else:
                        connection.sendall(reply)

    listener, stopped = socket.create_server(("127.0.0.1", 0)), threading.Event()
    file = tmp_path / "servers"
    file.write_text(json.dumps({"token": "x", "ports": [listener.getsockname()[1]]}))
    thread = threading.Thread(target=serve)
    thread.start()
    pool = PoolServer(file, start_s=5.0, request_s=0.1)
    try:
        pool.begin(task_id="t")
        yield pool
    finally:
        stopped.set()
        thread.join(30)


BEGUN = _reply(200, None)  # of initialize


@pytest.mark.parametrize(
    "replies, kind",
    [
        ([b"", _reply(200, {}), BEGUN], ServerDied),  # it died, and the pool has started another
        ([b"HTTP/1.1 2", _reply(200, {}), BEGUN], ServerDied),  # in the middle of its answer
        ([b""], ServerError),  # it died with its pool
        ([b"", b""], ServerError),
        ([_reply(410, "no world"), _reply(200, {})], ServerGone),  # started anew before it
        ([], ServerError),  # gone before the request, with its pool
        ([_reply(409, "another client")], ServerError),
        ([_reply(500, "TypeError"), BEGUN], InvalidReply),
        ([_reply(404, "no such path"), BEGUN], InvalidReply),
        ([_reply(200, None), BEGUN], InvalidReply),  # no text that a block printed
    ],
)
def test_a_server_ended_with_a_request_where_it_took_it_and_its_pool_lives(tmp_path, replies, kind):
    with _server(tmp_path, [BEGUN, *replies]) as pool, pytest.raises(ServerError) as caught:
        if not replies:
            with contextlib.suppress(OSError):  # until the port is closed
                while True:
                    socket.create_connection(("127.0.0.1", pool.port)).close()
        pool.call("execute", code="")
    assert type(caught.value) is kind


def test_a_request_beyond_its_time_is_unanswered(tmp_path, monkeypatch):
    monkeypatch.setattr("seeupo_jax.envs.appworld.server._GRACE_S", 0.1)
    with _server(tmp_path, [BEGUN, None]) as pool, pytest.raises(ServerError) as caught:
        pool.call("execute", code="")
    assert type(caught.value) is RequestUnanswered
