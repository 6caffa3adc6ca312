"""Workers are told apart, heard and refused, and no request harms the others or the run."""

import contextlib
import http.client
import ipaddress
import json
import os
import socket
import stat
import threading
import time

import numpy as np
import pytest
from etils import epath
from process_cases import free_port
from ticket_cases import bits, play, trajectory
from work_processes import HASH, Trainer, connect, held

from seeupo_jax.checkpoint.manifest import read_manifest
from seeupo_jax.rollout import stored_trajectories
from seeupo_jax.rollout.asynchronous import work_messages
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember, versions_of
from seeupo_jax.rollout.asynchronous.work_http import ConnectionLimits
from seeupo_jax.rollout.asynchronous.work_messages import (
    Alive,
    Deliver,
    LeaseTickets,
    Register,
    Status,
)
from seeupo_jax.rollout.asynchronous.work_server import WorkServer
from seeupo_jax.rollout.weights.versions import identity
from seeupo_jax.types import Segment, Trajectory


@pytest.fixture
def trainer(tmp_path):
    """A trainer of version 0 that listens."""
    said = []
    trainer = Trainer(tmp_path, patience_s=1.0, log=said.append)
    trainer.said = said
    trainer.publish()
    trainer.admit(9)
    trainer.server.start()
    yield trainer
    trainer.server.close()


@pytest.fixture
def address(trainer):
    return work_messages.read_address(trainer.workdir)


def test_a_server_for_all_machines_is_known_by_an_address_not_by_a_name(tmp_path):
    trainer = Trainer(tmp_path, patience_s=1.0)
    trainer.server.start("0.0.0.0")
    with contextlib.closing(trainer.server):
        address = work_messages.read_address(trainer.workdir)
        assert ipaddress.ip_address(address.host) != ipaddress.ip_address("0.0.0.0")
        socket.create_connection((address.host, address.port), timeout=10).close()


def send(address, path, data, head=None, method="POST"):
    """Status, type and content of the answer to a request."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    with contextlib.closing(connection):
        key = {"Authorization": f"Bearer {address.key}"}
        connection.request(method, path, data, key if head is None else head)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read()


def ask(address, path, message):
    status, _, data = send(address, path, work_messages.pack(message))
    return work_messages.unpack(data, Status) if status == 200 else (status, data.decode())


def register(address, worker="w", held=()):
    about = Register(worker, worker, HASH, work_messages.PROGRAM, tuple(held))
    return ask(address, "/register", about)


def lease(address, conversations=3, worker="w", held=(), version=0, policy=None):
    newest = register(address, worker, held).policy
    name = newest if policy is None else policy
    return ask(address, "/lease", LeaseTickets(worker, conversations, version, name, tuple(held)))


def named(trainer, version=0):
    """The name of a version."""
    manifest = read_manifest(epath.Path(trainer.workdir / "weights" / str(version)))
    return f"{version}-{identity(manifest)[:12]}"


def serve(tmp_path, **given):
    """A trainer of version 0 that listens, and its address."""
    trainer = Trainer(tmp_path, **given)
    trainer.publish()
    trainer.admit(9)
    trainer.server.start()
    return contextlib.closing(trainer.server), trainer, work_messages.read_address(tmp_path)


def deliver(address, finished, number=1, worker="w", policies=None, usage=None):
    message = Deliver(worker, number, tuple(finished), usage or {}, policies or {})
    return ask(address, "/deliver", message)


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_the_file_with_the_key_is_its_owners_alone_and_goes_with_the_server(trainer):
    file = trainer.workdir / "workers.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    assert found.keys() == {"address", "key"} and len(found["key"]) >= 32
    assert found["address"].startswith("127.0.0.1:")
    trainer.server.close()
    assert not file.exists()


def test_a_key_of_the_environment_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "of-the-environment")
    assert work_messages.write_address(tmp_path, "::1", 7) == "of-the-environment"
    assert json.loads((tmp_path / "workers.json").read_text()) == {"address": "[::1]:7"}
    assert work_messages.read_address(tmp_path) == ("::1", 7, "of-the-environment")
    monkeypatch.delenv("SEEUPO_ROLLOUT_KEY")
    with pytest.raises(ValueError, match="SEEUPO_ROLLOUT_KEY: got none"):
        work_messages.read_address(tmp_path)
    monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "two words")
    with pytest.raises(ValueError, match="SEEUPO_ROLLOUT_KEY: got one that is empty or not"):
        work_messages.write_address(tmp_path, "::1", 7)


def test_a_key_that_cannot_be_sent_is_one_sentence_and_frees_the_port(tmp_path, monkeypatch):
    server, port = WorkServer(TicketBook(1, 1), tmp_path, HASH, max_lag=0), free_port()
    monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "two words")
    with pytest.raises(ValueError, match="SEEUPO_ROLLOUT_KEY: got one that is empty or not"):
        server.start(port=port)
    server.close()
    socket.create_server(("127.0.0.1", port)).close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"address": 3}', '{"address": "x"}'])
def test_what_is_no_address_is_none(tmp_path, content):
    assert work_messages.read_address(tmp_path) is None
    (tmp_path / "workers.json").write_text(content)
    assert work_messages.read_address(tmp_path) is None


@pytest.mark.parametrize("host, port", [("127.0.0.1", 1), ("127.0.0.1", 70_000), ("192.0.2.1", 0)])
def test_an_address_that_is_not_available_is_one_sentence(tmp_path, monkeypatch, host, port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port == 1 else port
        server = WorkServer(TicketBook(1, 1), tmp_path, HASH, max_lag=0)
        with pytest.raises(ValueError, match=r"config.rollout.port: \S+ cannot be listened on"):
            server.start(host, port)
        server.close()
    assert not (tmp_path / "workers.json").exists()


@pytest.mark.parametrize(
    "head",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic é"}, {"x-api-key": "k"}],
)
@pytest.mark.parametrize("method, path", [("POST", "/lease"), ("GET", "/weights/0-x/policy.bin")])
def test_without_the_key_nothing_is_answered(address, head, method, path):
    status, kind, data = send(address, path, b"x" * 3_000_000, head, method)
    assert (status, kind) == (401, "text/x-seeupo-refusal; charset=utf-8")
    assert b"WORKDIR/workers.json" in data and address.key.encode() not in data


def test_another_hash_and_another_version_are_refused_by_name(address):
    about = Register("w", "one", "6" * 64, work_messages.PROGRAM, ())
    status, sentence = ask(address, "/register", about)
    assert status == 403 and "worker one" in sentence
    assert "6" * 64 in sentence and HASH in sentence
    status, sentence = ask(address, "/register", Register("w", "one", HASH, "0.0.7", ()))
    assert status == 403 and "0.0.7" in sentence and work_messages.PROGRAM in sentence
    assert ask(address, "/alive", Alive("w"))[0] == 410


def hostile_bodies():
    whole = work_messages.pack(Alive("w"))
    packed = stored_trajectories.pack
    types = (*work_messages.MESSAGES.values(), FinishedMember, Trajectory, Segment)
    odd = Segment(np.zeros(3, np.int32), np.zeros(2, np.int32), np.zeros(3, np.float32))
    floats = Segment(np.zeros(3), np.zeros(3, np.int32), np.zeros(3, np.float32))
    of_segments = [Trajectory.of((each,), 0.0, 0) for each in (odd, floats, "text")]
    members = [FinishedMember(0, 0, each) for each in of_segments]
    members += [FinishedMember(-1, 0, Trajectory.of((), 0.0, 0)), FinishedMember(0, "x", None), 7]
    return {
        "empty": b"",
        "garbage": bytes(range(256)) * 40,
        "cut": whole[:-1],
        "changed": whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
        "another message": whole,
        "no message": packed({"worker": "w"}),
        "another type of a field": packed(LeaseTickets(3, "x", None, "x", "y"), types),
        "a negative number": packed(LeaseTickets("w", -3, 0, "x", ()), types),
        **{
            f"member {i}": packed(Deliver("w", 1, (member,), {}, {}), types)
            for i, member in enumerate(members)
        },
        "usage": packed(Deliver("w", 1, (), {"tokens": "many"}, {}), types),
    }


@pytest.mark.parametrize("name", hostile_bodies())
@pytest.mark.parametrize("path", ["/lease", "/deliver"])
def test_a_malformed_body_is_a_sentence_and_harms_nothing(trainer, address, name, path):
    before = trainer.book.counts()
    status, _, data = send(address, path, hostile_bodies()[name])
    assert status == 400 and data.startswith(b"the body: ") and len(data) < 500
    assert trainer.book.counts() == before and register(address).version == 0


def test_bodies_are_bounded(tmp_path):
    serving, trainer, address = serve(tmp_path, limits=ConnectionLimits(body_bytes=2**20))
    key = {"Authorization": f"Bearer {address.key}"}
    bomb = stored_trajectories.pack(bytes(2**24))
    assert len(bomb) < 2**20
    with serving:
        for length, wanted in (("1048577", 413), ("1" * 30, 411), ("-1", 411), ("x", 411)):
            status, _, data = send(address, "/lease", b"abc", key | {"Content-Length": length})
            assert status == wanted and data.startswith(b"the body: ")
        status, _, data = send(address, "/lease", bomb)
        assert status == 400 and b"too many" in data
        assert register(address).version == 0


@pytest.mark.parametrize(
    "path",
    [
        "/weights/0-000000000000/policy.bin",
        "/weights/NAME/nothing",
        "/weights/NAME/../../workers.json",
        "/weights/NAME/%2e%2e/workers.json",
        "/weights/../workers.json",
        "/weights/",
        "/",
        "/etc/passwd",
    ],
)
def test_only_files_of_versions_are_served(trainer, address, path):
    name = named(trainer)
    assert send(address, path.replace("NAME", name), None, method="GET")[0] == 404
    assert send(address, path, b"")[0] == 404


def test_a_file_comes_from_any_byte_on(trainer, address):
    place = f"/weights/{named(trainer)}/policy.bin"
    whole = next(trainer.workdir.glob("weights/0/policy.bin")).read_bytes()
    for first in (0, 1, len(whole) - 1, len(whole)):
        head = {"Authorization": f"Bearer {address.key}", "Range": f"bytes={first}-"}
        status, _, data = send(address, place, None, head, "GET")
        assert data == whole[first:] and status == (206 if first else 200)
    for text in (f"bytes={len(whole) + 1}-", "bytes=-5", "bytes=3-7", "words=1-", "bytes=x-"):
        head = {"Authorization": f"Bearer {address.key}", "Range": text}
        assert send(address, place, None, head, "GET")[0] == 416


def test_a_client_that_reads_nothing_and_one_that_sends_half_a_head_hold_up_no_other(tmp_path):
    limits = ConnectionLimits(head_s=1.0, body_s=1.0)
    serving, trainer, address = serve(tmp_path, patience_s=60.0, limits=limits)
    name = named(trainer)
    (tmp_path / "weights" / "0" / "big.bin").write_bytes(bytes(2**26))
    key = f"Authorization: Bearer {address.key}\r\n"
    begun = [
        f"GET /weights/{name}/big.bin HTTP/1.1\r\n{key}\r\n",
        "POST /lease HTTP/1.1\r\nAuthor",
        "",
        f"POST /deliver HTTP/1.1\r\n{key}Content-Length: 5000\r\n\r\nabc",
    ]
    with serving, contextlib.ExitStack() as opened:
        slow = []
        for text in begun:
            slow.append(opened.enter_context(socket.create_connection(address[:2], timeout=30)))
            slow[-1].sendall(text.encode())
        began = time.monotonic()
        assert register(address).version == 0 and len(lease(address).tickets) == 1
        assert time.monotonic() - began < 1.0
        for connection in slow[1:]:
            assert connection.recv(2**16) == b""  # disconnected
        time.sleep(1.5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := slow[0].recv(2**16):
                received += len(chunk)
        assert received < 2**26


def test_connections_are_bounded(tmp_path):
    serving, _, address = serve(tmp_path, limits=ConnectionLimits(connections=4))

    def is_refused():
        try:
            return register(address) is None
        except (ConnectionError, http.client.HTTPException):
            return True

    with serving:
        with contextlib.ExitStack() as opened:
            for _ in range(4):
                opened.enter_context(socket.create_connection(address[:2], timeout=30))
            wait_until(is_refused)
        wait_until(lambda: not is_refused())


def test_trajectories_arrive_to_the_bit_and_usage_counts_once(trainer, address):
    (ticket,) = lease(address).tickets
    finished = play(ticket)
    for _ in range(3):  # the answers to the first two are lost
        assert deliver(address, finished, usage={"tokens": 5}).tickets == ()
    deliver(address, [], number=2, usage={"tokens": 2, "wall_s": 0.5})
    for other in lease(address, 99).tickets:
        deliver(address, play(other), number=3 + other.number)
    taken = trainer.book.take(1)
    got = [bits(t.segments) for t in taken.trajectories[:3]]
    assert got == [bits(each.trajectory.segments) for each in finished]
    assert [bits(t.reward) for t in taken.trajectories[:3]] == [
        bits(each.trajectory.reward) for each in finished
    ]
    assert taken.usage == {"tokens": 7, "wall_s": 0.5} and trainer.book.counts().doubled == 6


def test_a_worker_that_is_silent_is_lost_and_may_come_back(trainer, address):
    first, second = lease(address, 6).tickets
    deliver(address, play(first)[:1])
    wait_until(lambda: trainer.book.counts().reissued == 5)
    assert trainer.said[-1] == (
        "worker w does not answer: 5 conversations that it played are for others."
    )
    assert ask(address, "/alive", Alive("w"))[0] == 410
    assert deliver(address, play(first), number=2)[0] == 410
    (other,) = lease(address, 2, worker="other").tickets
    assert other.members == (1, 2)
    register(address, held=[first, second])  # plays on; the members of `first` are another's now
    assert trainer.said[-1] == "worker w has come back."
    deliver(address, play(first), number=2)
    assert trainer.book.counts().leased == 3 + 0
    assert held(lease(address, 3, worker="other").tickets) == [(2, 0), (2, 1), (2, 2)]


def test_a_worker_whose_connection_ends_is_lost_before_its_patience_ends(tmp_path):
    serving, trainer, address = serve(tmp_path, patience_s=600.0)
    with serving:
        began = time.monotonic()
        lease(address, 6)  # each request has a connection of its own
        wait_until(lambda: trainer.book.counts().reissued == 6)
        assert 4.0 < time.monotonic() - began < 15.0


def test_a_worker_gets_only_what_its_policy_may_play(trainer, address):
    assert trainer.book.admitted == 2  # max_lag is 1
    name = named(trainer)
    trainer.version = 1
    trainer.publish()
    trainer.admit(9)
    assert trainer.book.admitted == 3
    old = held(lease(address, 99, policy=name).tickets)
    assert {number for number, _ in old} == set(range(8))
    newest = register(address, "new")
    assert (newest.version, newest.policy) == (1, named(trainer, 1))
    new = held(lease(address, 99, "new", version=1, policy=newest.policy).tickets)
    assert {number for number, _ in new} == set(range(8, 12))


def test_what_a_policy_of_an_earlier_start_has_sampled_is_sampled_again(trainer, address):
    (ticket,) = lease(address, 3).tickets
    name = named(trainer)
    assert lease(address, 3, version=0, policy="0-000000000000", held=[ticket]).tickets == ()
    newer, other = play(ticket, version=5), play(ticket, version=0)
    deliver(address, newer, policies={5: "5-000000000000"})
    deliver(address, other[1:2], number=2, policies={0: "0-000000000000"})
    counts = trainer.book.counts()
    assert (counts.finished, counts.leased, counts.waiting, counts.reissued) == (0, 0, 24, 3)
    assert "3 conversations are sampled again" in trainer.said[-2]
    assert lease(address, 3).tickets == (ticket,)
    deliver(address, other, number=3, policies={0: name})
    assert trainer.book.counts().finished == 3


def test_before_the_first_policy_there_are_no_tickets_and_deliveries_wait(tmp_path):
    """A trainer that was resumed listens before it has published, beside older versions."""
    trainer = Trainer(tmp_path)
    trainer.publish()
    name = named(trainer)
    trainer.server.close()
    trainer = Trainer(tmp_path)
    trainer.admit(9)
    trainer.server.start()
    with contextlib.closing(trainer.server):
        address = work_messages.read_address(tmp_path)
        assert register(address).policy is None
        assert lease(address, policy=name).tickets == ()
        finished = [FinishedMember(0, 0, trajectory("t1", 0, 0))]
        status, sentence = deliver(address, finished, usage={"tokens": 1})
        assert status == 503 and "no policy yet" in sentence
        trainer.publish()
        deliver(address, finished, usage={"tokens": 1})
        assert trainer.book.counts().finished == 1


def test_a_version_that_was_published_anew_replaces_the_newer_ones(trainer, address):
    for version in (1, 2, 1):
        trainer.version = version
        trainer.publish()
    assert register(address).version == 1


def test_versions_of_a_trajectory_are_those_of_its_sampled_tokens():
    turn_L = np.array([-1, 0, 0, -1, 1], np.int32)
    version_L = np.array([-1, 3, 4, -1, 4], np.int32)
    one = Segment(turn_L, turn_L, np.zeros(5, np.float32))
    assert versions_of(Trajectory.of((one,), 0.0, 0, policy_version=2)) == {2}
    several = Segment(turn_L, turn_L, np.zeros(5, np.float32), version_L=version_L)
    assert versions_of(Trajectory.of((one, several), 0.0, 0, policy_version=2)) == {2, 3, 4}
    assert versions_of(Trajectory.of((one,), 0.0, 0)) == set()


def test_a_run_that_is_over_tells_its_workers(trainer, address):
    register(address, "one")
    register(address, "two")
    ending = threading.Thread(target=trainer.server.finish)
    ending.start()
    wait_until(lambda: ask(address, "/alive", Alive("one")).closed)
    assert ending.is_alive()
    assert ask(address, "/alive", Alive("two")).closed
    ending.join(1.0)
    assert not ending.is_alive()


def test_a_port_may_be_given(tmp_path):
    trainer, port = Trainer(tmp_path), free_port()
    for _ in range(2):  # and is free again at once
        server = WorkServer(trainer.book, tmp_path, HASH, max_lag=0)
        assert server.start(port=port) == f"127.0.0.1:{port}"
        client = connect(tmp_path, "w")
        assert client.newer_policy(None) is None and client.lease(3) == []
        server.close()
    assert os.listdir(tmp_path) == ["taken"]
