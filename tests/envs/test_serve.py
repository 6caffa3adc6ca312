"""The server lets in who has the token, keeps sessions apart, and bounds what it is sent."""

import json
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
import urllib3
from remote_cases import Echo, Process, remote, served

from seeupo_jax.envs import serve
from seeupo_jax.envs.base import ServerAtCapacity, TransientError
from seeupo_jax.envs.transport.http_protocol import MAX_REQUEST_BYTES
from seeupo_jax.envs.transport.remote import RemoteError

TOKEN = {"Authorization": "Bearer secret-token"}


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "token"


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(server, path, body, headers=TOKEN):
    """Status and JSON of a request of our own making."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib3.PoolManager() as pool:
        answer = pool.request("POST", f"{server.url}/{path}", body=data, headers=headers)
        return answer.status, json.loads(answer.data)


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer secret-toke", "Bearer \xff", "x"])
def test_every_request_needs_the_token(token_file, shown):
    with served(Echo, token_file) as server:
        headers = {} if shown is None else {"Authorization": shown}
        for path in ("task_ids", "nothing"):
            status, answer = post(server, path, {"split": "train"}, headers)
            assert (status, answer) == (401, {"refused": "the token is missing or wrong."})
        assert post(server, "task_ids", {"split": "train"})[0] == 200


PLAY = {"session": "a", "number": 0}


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("nothing", {}, 404, "allowed: task_ids, task_shares, labels, reference, reset"),
        ("__init__", {}, 404, "allowed: task_ids, task_shares, labels, reference, reset"),
        ("reset", b"{", 400, "allowed: JSON"),
        ("reset", b"[" * 100_000, 400, "allowed: JSON"),
        ("reset", b"\xff", 400, "allowed: JSON"),
        ("reset", [], 400, "exactly session"),
        ("reset", PLAY, 400, "task_id .str., seed .int."),
        ("reset", PLAY | {"task_id": "train/0", "seed": True}, 400, "seed .int."),
        ("reset", PLAY | {"task_id": "train/0", "seed": 0, "more": 1}, 400, "exactly"),
        ("reset", PLAY | {"task_id": "train/0", "episode_seed": 0}, 400, "optionally episode_seed"),
        (
            "reset",
            PLAY | {"task_id": "train/0", "seed": 0, "episode_seed": "1"},
            400,
            "episode_seed .int.",
        ),
        ("step", PLAY | {"text": 5}, 400, "text .str."),
        ("step", PLAY | {"text": "hi"}, 410, "the session is over"),
        ("close", {"session": ["a"]}, 400, "exactly session"),
    ],
)
def test_a_malformed_request_reaches_no_environment(token_file, path, body, status, text):
    with served(Echo, token_file) as server:
        got, answer = post(server, path, body)
        assert got == status and re.search(text, answer["refused"])
        assert server.sessions == 0


def raw(server, head):
    """The first line that a server answers to these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(head.encode())
        return wire.makefile("rb").readline().decode()


def test_sizes_are_bounded_before_anything_is_read(token_file):
    with served(Echo, token_file) as server:
        head = "POST /step HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-token\r\n"
        too_long = f"Content-Length: {MAX_REQUEST_BYTES + 1}\r\n\r\n"
        assert " 413 " in raw(server, head + too_long)
        assert " 413 " in raw(server, head + f"Content-Length: {'9' * 5000}\r\n\r\n")
        assert " 411 " in raw(server, head + "\r\n")
        assert " 411 " in raw(server, head + "Content-Length: -1\r\n\r\n")
        chunked = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"
        assert " 411 " in raw(server, head + chunked)
        assert " 401 " in raw(server, f"POST /step HTTP/1.1\r\n{too_long}")
        assert " 501 " in raw(server, "GET / HTTP/1.1\r\n\r\n")


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def cut(wire):
    """Whether the other side has ended a connection."""
    try:
        return wire.recv(1) == b""
    except ConnectionError:
        return True


def test_who_shows_no_token_in_time_is_cut_however_busily_it_sends(token_file):
    with served(Echo, token_file, auth_s=0.3) as server:
        with connect(server) as silent, connect(server) as slow:
            slow.settimeout(0.05)
            sent = iter(b"POST /step HTTP/1.1\r\nX: " + b"y" * 10_000)
            deadline = time.monotonic() + 10
            assert cut(silent)
            while True:
                try:
                    slow.sendall(bytes([next(sent)]))
                    assert slow.recv(1) == b""
                    break
                except TimeoutError:
                    assert time.monotonic() < deadline
                except ConnectionError:
                    break
        env = remote(server.url, token_file)
        env.reset("train/0", 0)
        assert env.step("one").info == {"steps": 1}


def test_who_has_shown_the_token_keeps_its_connection(token_file):
    head = "POST /task_ids HTTP/1.1\r\nAuthorization: Bearer secret-token\r\n"
    body = '{"split": "train"}'
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    with served(Echo, token_file, auth_s=0.2) as server, connect(server) as wire:
        for _ in range(2):
            wire.sendall(request)
            assert wire.recv(2**16).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)


def test_connections_are_bounded_and_one_that_ends_makes_room(token_file):
    with served(Echo, token_file, max_connections=2) as server:
        env = remote(server.url, token_file, timeout_s=5)
        with connect(server), connect(server) as second:
            with pytest.raises(TransientError):
                env.reset("train/0", 0)
            with connect(server) as third:
                reported = third.makefile("rb").read()
            assert (
                reported.startswith(b"HTTP/1.1 503 ") and b"all 2 connections are open." in reported
            )
            second.close()
            deadline = time.monotonic() + 10
            while True:
                try:
                    env.reset("train/0", 0)
                    break
                except TransientError:
                    assert time.monotonic() < deadline
        assert env.step("one").info == {"steps": 1}


def test_a_request_whose_client_has_left_makes_room_though_it_hangs(token_file):
    echo = Echo()
    with served(lambda: echo, token_file, max_connections=1) as server:
        hung = remote(server.url, token_file)
        hung.reset("train/0", 0)

        def wait():
            with pytest.raises(TransientError):
                hung.step("wait")

        thread = threading.Thread(target=wait)
        thread.start()
        assert echo.entered.wait(10)
        with pytest.raises(ServerAtCapacity, match="all 1 connections are open"):
            remote(server.url, token_file).task_ids("train")  # the client waits
        hung._http.kill()
        thread.join(10)
        assert remote(server.url, token_file).task_ids("train") == ["train/0", "train/1"]
        assert echo.steps == 0
        echo.go_on.set()


def test_a_number_is_played_once_and_in_its_turn(token_file):
    with served(Echo, token_file) as server:
        reset = PLAY | {"task_id": "train/0", "seed": 3}
        first = post(server, "reset", reset)
        assert first == post(server, "reset", reset) and first[0] == 200
        step = {"session": "a", "number": 1, "text": "one"}
        answers = [post(server, "step", step) for _ in range(3)]
        assert [a["result"]["info"] for _, a in answers] == [{"steps": 1}] * 3
        for wrong in (0, 1, 3, -1):  # with another text, 1 is no repeat either
            status, answer = post(server, "step", step | {"number": wrong, "text": "two"})
            assert (status, answer) == (409, {"refused": f"number: got {wrong}; allowed: 2."})


def test_sessions_are_bounded_and_a_closed_one_makes_room(token_file):
    with served(Echo, token_file, max_sessions=2) as server:
        one, two, three = (remote(server.url, token_file) for _ in range(3))
        one.reset("train/0", 0)
        two.reset("train/0", 0)
        with pytest.raises(TransientError, match="all 2 sessions are open"):
            three.reset("train/0", 0)
        one.close()
        three.reset("train/0", 0)
        assert two.step("on").info == three.step("on").info == {"steps": 1}


def test_an_idle_session_expires_and_its_environment_is_closed(token_file):
    made = []
    with served(lambda: made.append(Echo()) or made[-1], token_file, idle_s=0.2) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 0)
        until(lambda: server.sessions == 0 and made[1].closed)
        with pytest.raises(RemoteError, match="the session is over"):
            env.step("one")
        env.reset("train/0", 0)
        assert env.step("one").info == {"steps": 1}
        until(lambda: server.sessions == 0)  # between episodes, as while the policy is trained
        env.reset("train/1", 0)
        assert env.step("one").info == {"steps": 1}
    assert [one.closed for one in made] == [1, 1, 1, 1]


def test_a_session_whose_request_runs_is_not_idle(token_file):
    made = []
    with served(lambda: made.append(Echo()) or made[-1], token_file, idle_s=0.4) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 0)
        threading.Timer(1.2, made[1].go_on.set).start()
        assert env.step("wait").info == {"steps": 1} and server.sessions == 1
        assert env.step("two").info == {"steps": 2}  # its time counts from the answer
        until(lambda: server.sessions == 0)


class StubbornClose(Echo):
    """The first one made for a session hangs in `close`, the second one exits."""

    number = 0

    def reset(self, task_id, seed):
        self.number = int(task_id[-1])
        return super().reset(task_id, seed)

    def close(self):
        super().close()
        assert self.number != 1 or self.go_on.wait(30)
        if self.number == 2:
            sys.exit("no")


@pytest.mark.parametrize("task", [1, 2])
def test_an_environment_that_does_not_close_keeps_no_other_from_it(token_file, task):
    made = []
    with served(
        lambda: made.append(StubbornClose(4)) or made[-1], token_file, idle_s=0.2
    ) as server:
        remote(server.url, token_file).reset(f"train/{task}", 0)
        until(lambda: made[1].closed)
        remote(server.url, token_file).reset("train/3", 0)
        until(lambda: server.sessions == 0 and made[2].closed)
        made[1].go_on.set()


@pytest.mark.parametrize("own", [0, 1, 2])  # how the server's own, which lists the tasks, closes
def test_the_server_ends_although_an_environment_does_not_close(token_file, monkeypatch, own):
    monkeypatch.setattr(serve, "_CLOSING_S", 0.2)
    made = []
    with served(lambda: made.append(StubbornClose(4)) or made[-1], token_file) as server:
        made[0].number = own
        for task in (1, 3):
            remote(server.url, token_file).reset(f"train/{task}", 0)
    assert [one.closed for one in made] == [1, 1, 1]
    for one in made:
        one.go_on.set()


class HangingReset(Echo):
    def reset(self, task_id, seed):
        assert task_id == "train/0" or self.go_on.wait(20)
        return super().reset(task_id, seed)


def resets(env):
    """Whether an episode starts."""
    try:
        env.reset("train/0", 0)
    except TransientError:
        return False
    return True


def test_a_request_that_hangs_makes_room_after_much_longer(token_file):
    made, limits = [], {"max_sessions": 1, "max_connections": 1, "idle_s": 0.1}
    with served(lambda: made.append(HangingReset()) or made[-1], token_file, **limits) as server:
        with pytest.raises(TransientError):
            remote(server.url, token_file, timeout_s=0.4).reset("train/1", 0)
        other = remote(server.url, token_file)
        with pytest.raises(TransientError):
            other.reset("train/0", 0)
        assert server.sessions == 1
        until(lambda: server.sessions == 0)
        until(lambda: resets(other))  # its place is free once its last connection is forgotten
        assert made[1].closed == 0
        made[1].go_on.set()
        until(lambda: made[1].closed == 1)


def waiting_step(env, made):
    """A thread whose step, the first of an episode, waits in the environment for `go_on`."""
    env.reset("train/0", 0)
    stepping = threading.Thread(target=env.step, args=("wait",))
    stepping.start()
    assert made[1].entered.wait(10)
    return stepping


def test_an_environment_is_closed_once_and_not_while_it_is_at_work(token_file):
    made = []
    with served(lambda: made.append(Echo()) or made[-1], token_file) as server:
        env = remote(server.url, token_file, timeout_s=20)
        stepping = waiting_step(env, made)
        began = time.monotonic()
        assert post(server, "close", {"session": env._session})[0] == 200
        assert time.monotonic() - began < 5 and made[1].closed == 0
        made[1].go_on.set()
        stepping.join(10)
        until(lambda: made[1].closed == 1)


def test_a_request_that_waited_while_its_session_was_closed_reaches_no_environment(token_file):
    made, answers = [], []
    with served(lambda: made.append(Echo()) or made[-1], token_file) as server:
        env = remote(server.url, token_file, timeout_s=20)
        stepping = waiting_step(env, made)
        body = {"session": env._session, "number": 2, "text": "late"}
        late = threading.Thread(target=lambda: answers.append(post(server, "step", body)))
        session = server._sessions[env._session]
        before = session.used
        late.start()
        until(lambda: session.used > before)  # it has found its session
        assert post(server, "close", {"session": env._session})[0] == 200
        made[1].go_on.set()
        for thread in (stepping, late):
            thread.join(20)
    assert answers == [(410, {"refused": "the session is over."})]
    assert made[1].steps == 1 and len(made) == 2


def test_a_connection_that_the_server_gave_up_is_replaced_unnoticed(token_file, monkeypatch):
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    with served(Echo, token_file) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 0)
        time.sleep(0.5)
        assert env.step("one").info == {"steps": 1}


def test_the_command_makes_a_private_token_and_listens_on_this_machine_only(token_file):
    with Process(token_file) as server:
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert server.url.startswith("http://127.0.0.1:") and str(token_file) in server.said
        token = token_file.read_text()
        assert len(token.strip()) >= 40
        assert remote(server.url, token_file).task_ids("train") == ["train/0", "train/1"]
        with Process(token_file, flags=['--options={"tasks": 3}']) as other:
            assert token_file.read_text() == token
            assert len(remote(other.url, token_file).task_ids("train")) == 3
            assert other.end(other.process.terminate) == 0


def test_the_command_starts_without_jax_and_reports_mistakes_in_a_sentence(tmp_path):
    program = (
        "import sys, seeupo_jax.envs.serve as s\n"
        "try: s.main(['--env=order_desk', '--port=0', '--token-file={}', '--options={}'])\n"
        "finally: print('jax' in sys.modules)"
    ).format(tmp_path / "token", '{"nope": 1}')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.strip() == "False"
    assert "env.options: order_desk refused {'nope': 1}" in done.stderr


@pytest.mark.parametrize(
    "flag, allowed",
    [
        *((f"--idle-s={value}", "a number of seconds > 0") for value in ("0", "-1", "nan", "x")),
        *((f"--max-sessions={value}", "a whole number >= 1") for value in ("0", "-2", "1.5")),
        ("--max-connections=0", "a whole number >= 1"),
        ("--options={bad", "a JSON object"),
    ],
)
def test_limits_under_which_nobody_would_be_served_are_refused(capsys, flag, allowed):
    with pytest.raises(SystemExit) as ended:
        serve.main(["--env=order_desk", "--port=0", flag])
    name, value = flag.split("=")
    assert ended.value.code == 2
    assert f"{name}: got '{value}'; allowed: {allowed}." in capsys.readouterr().err


def test_a_port_that_cannot_be_is_a_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(["--env=order_desk", "--port=99999", f"--token-file={tmp_path / 'token'}"])
    assert ended.value.code == 2 and "port must be 0-65535" in capsys.readouterr().err


def test_the_command_may_open_as_many_files_as_the_system_allows(tmp_path, monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    with pytest.raises(SystemExit):
        serve.main(["--env=order_desk", "--port=99999", f"--token-file={tmp_path / 'token'}"])
    assert limits[-1] == (4096, 4096)
