"""Workers and trainers that are killed and come back lose nothing and double nothing."""

import contextlib
import http.server
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from places import SUPPORT
from process_cases import environment, free_port
from ticket_cases import bits, play, trajectory
from work_processes import GROUP_SIZE, HASH, TASKS, Trainer, connect, held, sample, tasks_of

from seeupo_jax.rollout.asynchronous.work import FinishedMember
from seeupo_jax.rollout.asynchronous.work_client import TrainerLost
from seeupo_jax.rollout.collect import group_requests
from seeupo_jax.types import Segment, Trajectory


@contextlib.contextmanager
def serving(workdir, *, admitted=9, port=0, **given):
    """A trainer that listens, as a restarted one does."""
    trainer = Trainer(workdir, **given)
    trainer.publish()
    trainer.admit(admitted)
    trainer.address = trainer.server.start(port=port)
    with contextlib.closing(trainer.server):
        yield trainer


def stop(trainer):
    """Ends a trainer as SIGKILL does: connections end, the file stays."""
    text = (trainer.workdir / "workers.json").read_text()
    trainer.server.close()
    (trainer.workdir / "workers.json").write_text(text)


@pytest.fixture
def client(tmp_path):
    client = connect(tmp_path, "w", log=pytest.fail)
    yield client
    client.close()


def check(workdir, iterations):
    """Every iteration that was taken has each of its trajectories, to the bit, once.

    Of what was recorded a list may lack a line, where the trainer was killed before it wrote that.
    """
    recorded = (workdir / "recorded").read_text().split("\n")[:-1]
    assert len(recorded) == len(set(recorded)) > iterations * TASKS * GROUP_SIZE - 10
    for k in range(1, iterations + 1):
        taken = pickle.loads((workdir / "taken" / str(k)).read_bytes()).trajectories
        requests = group_requests(tasks_of(k), GROUP_SIZE, k)
        for got, request in zip(taken, requests, strict=True):
            number = (k - 1) * TASKS + request.group
            wanted = trajectory(request.task_id, number, request.member)
            assert (got.group, got.task_id) == (request.group, request.task_id)
            assert bits(got.segments) == bits(wanted.segments)
            assert got.policy_version >= k - 2  # max_lag is 1


def test_a_policy_is_read_before_tickets_come_and_once(tmp_path, client):
    with serving(tmp_path):
        assert client.lease(5) == []
        policy = client.newer_policy(None)
        assert (policy.version, policy.params) == (0, "parameters 0" * 1000)
        assert client.newer_policy(0) is None
        assert held(client.lease(5)) == [(0, 0), (0, 1), (0, 2)]
        assert held(client.lease(5)) == [(1, 0), (1, 1), (1, 2)] and not client.closed


def test_a_newer_policy_comes_within_two_seconds(tmp_path, client):
    with serving(tmp_path) as trainer:
        client.newer_policy(None)
        trainer.version = 1
        trainer.publish()
        end = time.monotonic() + 2.0
        while (policy := client.newer_policy(0)) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (policy.version, policy.params) == (1, "parameters 1" * 1000)


def test_a_trainer_that_is_away_holds_up_no_one_but_who_delivers(tmp_path, client):
    with serving(tmp_path) as trainer:
        client.newer_policy(None)
        (ticket,) = client.lease(3)
        stop(trainer)
    began = time.monotonic()
    for _ in range(50):
        assert client.lease(3) == [] and client.newer_policy(0) is None and not client.closed
    assert time.monotonic() - began < 2.0
    deliver = threading.Thread(target=client.deliver, args=(play(ticket), {"tokens": 3}))
    deliver.start()
    time.sleep(1.0)
    assert deliver.is_alive()
    with serving(tmp_path) as trainer:  # at another port, with another key
        deliver.join(10.0)
        assert not deliver.is_alive()
        assert trainer.book.counts()[:3] == (21, 0, 3)


@pytest.mark.parametrize("shared", [True, False])
def test_a_restarted_trainer_gets_what_its_workers_play(tmp_path, monkeypatch, shared):
    """At the same port where that is all that a worker knows."""
    if not shared:
        monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "secret")
    port = free_port()
    given = {} if shared else {"workdir": None, "address": f"127.0.0.1:{port}"}
    client = connect(tmp_path, "w", **given)
    with contextlib.closing(client):
        with serving(tmp_path, port=0 if shared else port) as trainer:
            client.newer_policy(None)
            first, second = client.lease(6)
            client.deliver(play(first)[1:], {})
            stop(trainer)
        with serving(tmp_path, port=0 if shared else port) as trainer:
            while trainer.book.counts().leased != 4:  # the thread reports what is played
                time.sleep(0.05)
            other = connect(tmp_path, "other", **given)
            with contextlib.closing(other):
                other.newer_policy(None)
                assert held(other.lease(3)) == [(2, 0), (2, 1), (2, 2)]
            client.deliver([play(first)[0], *play(second)], {})
            counts = trainer.book.counts()
            assert (counts.finished, counts.doubled, counts.leased) == (6, 0, 0)


def test_a_trainer_that_went_back_to_an_older_policy_hands_it_over(tmp_path, client):
    with serving(tmp_path) as trainer:
        trainer.version = 3
        trainer.publish()
        assert client.newer_policy(None).version == 3
        stop(trainer)
    with serving(tmp_path, admitted=1):
        end = time.monotonic() + 10.0
        while (policy := client.newer_policy(3)) is None:
            assert client.lease(9) == [] and time.monotonic() < end
            time.sleep(0.1)
        assert policy.version == 0 and len(client.lease(99)) == TASKS


def test_policies_are_copied_where_no_folder_is_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "secret")
    with serving(tmp_path / "trainer") as trainer:
        client = connect(
            tmp_path / "worker", "w", workdir=None, address=f"http://{trainer.address}"
        )
        with contextlib.closing(client):
            for version in (0, 1, 2):
                trainer.version = version
                trainer.publish()
                time.sleep(1.1)  # the status is older than a second
                policy = client.newer_policy(version - 1 if version else None)
                assert policy == (version, f"parameters {version}" * 1000)
            kept = {each.name for each in (tmp_path / "worker/downloads/w").iterdir()}
            assert kept == {"1", "2"}


def test_a_copy_continues_where_a_connection_ended(tmp_path, monkeypatch):
    """A proxy ends every connection for files after 5,000 bytes."""
    monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "secret")
    ranges = []
    with serving(tmp_path / "trainer") as trainer:

        class Proxy(http.server.BaseHTTPRequestHandler):
            def forward(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                head = {n: self.headers[n] for n in ("Authorization", "Range") if n in self.headers}
                connection = http.client.HTTPConnection(trainer.address)
                with contextlib.closing(connection):
                    connection.request(self.command, self.path, body, head)
                    answer = connection.getresponse()
                    data = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.path.endswith("policy.bin"):
                    ranges.append(self.headers["Range"])
                    data = data[:5000]
                self.wfile.write(data)

            do_GET = do_POST = forward

            def log_message(self, *_):
                pass

        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{proxy.server_address[1]}"
        client = connect(tmp_path / "worker", "w", workdir=None, address=address)
        with contextlib.closing(client):
            policy = client.newer_policy(None)
        assert policy == (0, "parameters 0" * 1000)
        assert ranges == ["bytes=0-", "bytes=5000-", "bytes=10000-"]
        proxy.shutdown()
        proxy.server_close()


def test_a_damaged_copy_is_one_sentence_and_not_used(tmp_path):
    said = []
    client = connect(tmp_path, "w", log=said.append)
    with serving(tmp_path) as trainer, contextlib.closing(client):
        (file,) = tmp_path.glob("weights/0/policy.bin")
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        for _ in range(3):
            assert client.newer_policy(None) is None and client.lease(3) == []
        assert len(said) == 1 and "version 0-" in said[0] and "tried again" in said[0]
        trainer.version = 1
        trainer.publish()
        time.sleep(1.1)
        assert client.newer_policy(None).version == 1


def test_a_worker_that_is_refused_says_why_in_every_call(tmp_path):
    with serving(tmp_path):
        client = connect(tmp_path, "the worker", sampling_hash="6" * 64)
        with contextlib.closing(client):
            for call in (lambda: client.newer_policy(None), lambda: client.deliver([], {})):
                with pytest.raises(ValueError, match=f"worker the worker: got .*6666.*{HASH}"):
                    call()


def test_another_key_is_refused(tmp_path, monkeypatch):
    with serving(tmp_path) as trainer:
        monkeypatch.setenv("SEEUPO_ROLLOUT_KEY", "another")
        client = connect(tmp_path, "w", workdir=None, address=trainer.address)
        with contextlib.closing(client), pytest.raises(ValueError, match="^the key: got another"):
            client.newer_policy(None)


class SomethingElse(http.server.BaseHTTPRequestHandler):
    """Another program at the trainer's old address, which wants another key."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(self.server.status)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("there", ["nothing", "no one", 200, 401, 403, 410, 500])
def test_a_trainer_that_stays_away_ends_the_worker_with_a_sentence(tmp_path, there):
    with contextlib.ExitStack() as opened:
        port = free_port()
        if isinstance(there, int):
            other = http.server.HTTPServer(("127.0.0.1", 0), SomethingElse)
            other.status = there
            threading.Thread(target=other.serve_forever, daemon=True).start()
            opened.callback(other.server_close)
            opened.callback(other.shutdown)
            port = other.server_address[1]
        if there != "nothing":
            text = json.dumps({"address": f"127.0.0.1:{port}", "key": "k"})
            (tmp_path / "workers.json").write_text(text)
        client = connect(tmp_path, "w", patience_s=1.0)
        opened.callback(client.close)
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=r"the trainer was not reached for \d+ s \(.*\); al"):
            client.deliver([], {})
        assert 1.0 < time.monotonic() - began < 5.0
        with pytest.raises(TrainerLost):
            client.lease(1)


def test_a_large_delivery_is_cut_into_messages(tmp_path, client):
    with serving(tmp_path) as trainer:
        client.newer_policy(None)
        tickets = client.lease(99)
        tokens_L = np.arange(200_000, dtype=np.int32)
        turn_L, logp_L = np.zeros(200_000, np.int32), np.zeros(200_000, np.float32)
        segment = Segment(tokens_L, turn_L, logp_L)
        finished = [
            FinishedMember(number, member, Trajectory.of((segment,), 0.0, 0, ticket.task_id))
            for ticket in tickets
            for number, member in held([ticket])
        ]
        client.deliver(finished, {"tokens": 7.0})
        assert trainer.book.counts()[:3] == (0, 0, 24)
        taken = trainer.book.take(1)
        assert taken.usage == {"tokens": 7.0}
        assert all((t.segments[0].tokens_L == tokens_L).all() for t in taken.trajectories)


def test_eight_workers_at_once(tmp_path):
    with serving(tmp_path, admitted=0) as trainer:
        trainer.version, iterations = 0, 20
        clients = [connect(tmp_path, f"w{i}") for i in range(8)]
        with contextlib.ExitStack() as opened:
            workers = [
                threading.Thread(target=sample, args=(client, f"w{i}", 0.002))
                for i, client in enumerate(clients)
            ]
            for worker in workers:
                worker.start()
                opened.callback(worker.join)
            for k in range(1, iterations + 1):
                trainer.admit(iterations)
                assert trainer.book.wait(k, 120.0)
                (tmp_path / "taken" / str(k)).write_bytes(pickle.dumps(trainer.book.take(k)))
                trainer.version = k
                trainer.publish()
            trainer.server.finish()
    check(tmp_path, iterations)


def start(*arguments):
    variables = environment() | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, SUPPORT / "work_processes.py", *map(str, arguments)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, *processes):
    end = time.monotonic() + 200.0
    while not condition():
        assert time.monotonic() < end and all(each.poll() is None for each in processes)
        time.sleep(0.02)


def test_killed_workers_and_a_killed_trainer_lose_nothing_and_double_nothing(tmp_path):
    """The trainer is killed, one worker is killed, another one is stopped and comes back."""
    iterations, recorded = 12, tmp_path / "recorded"

    def count():
        return recorded.read_text().count("\n") if recorded.exists() else 0

    whole = iterations * TASKS * GROUP_SIZE
    workers = [start("worker", tmp_path, f"w{i}", 0.3) for i in range(3)]
    trainer = start("trainer", tmp_path, iterations)
    try:
        wait_for(lambda: count() > 0.2 * whole, trainer)
        workers[0].send_signal(signal.SIGKILL)
        os.kill(workers[1].pid, signal.SIGSTOP)  # as a machine that hangs
        wait_for(lambda: count() > 0.5 * whole, trainer)
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
        os.kill(workers[1].pid, signal.SIGCONT)
        trainer = start("trainer", tmp_path, iterations)
        for process in (trainer, *workers[1:]):
            printed, _ = process.communicate(timeout=300)
            assert process.returncode == 0, printed
    finally:
        for process in (trainer, *workers):
            process.kill()
            process.communicate()
    check(tmp_path, iterations)
    assert list((tmp_path / "rollouts").iterdir()) == []
