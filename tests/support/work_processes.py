"""A trainer and its workers as processes: tickets, a log and published files, but no model.

python work_processes.py trainer WORKDIR ITERATIONS
python work_processes.py worker WORKDIR NAME SECONDS [HOST:PORT]

A finished iteration of the trainer is WORKDIR/taken/K, which stands for its checkpoint; a worker
takes up to SECONDS for a conversation.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ticket_cases import play

from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket
from seeupo_jax.rollout.asynchronous.work_client import WorkClient
from seeupo_jax.rollout.asynchronous.work_server import WorkServer
from seeupo_jax.rollout.rollout_log import LoggedMember, RolloutLog
from seeupo_jax.rollout.weights.publishing import publish_folder
from seeupo_jax.rollout.weights.versions import checked_version

TASKS, GROUP_SIZE, MAX_LAG = 4, 3, 1
HASH = "5" * 64


def tasks_of(iteration: int) -> list[str]:
    """A task comes twice in an iteration."""
    return [f"t{iteration}", "a", "b", "a"]


class Trainer:
    """A run that trains on nothing: it takes iterations, and publishes a file after each."""

    def __init__(self, workdir: Path, **given: Any):
        self.workdir, self.taken = workdir, workdir / "taken"
        self.taken.mkdir(parents=True, exist_ok=True)
        self.version = len([*self.taken.iterdir()])
        self.log = RolloutLog(workdir / "rollouts", HASH, log=print)
        self.book = TicketBook(TASKS, GROUP_SIZE, record=self.record)
        usual = {"max_lag": MAX_LAG, "patience_s": 3.0, "log": print}
        self.server = WorkServer(self.book, workdir, HASH, **(usual | given))
        self.recorded = workdir / "recorded"

    def record(self, finished: Sequence[FinishedMember]) -> None:
        for each in finished:
            iteration, group = divmod(each.number, TASKS)
            members = [LoggedMember(group, each.member, each.trajectory, {})]
            self.log.append(iteration + 1, members)
            with self.recorded.open("a") as file:
                file.write(f"{each.number} {each.member}\n")

    def publish(self) -> None:
        text = f"parameters {self.version}" * 1000
        done = publish_folder(
            self.workdir / "weights", self.version, lambda to: _write(to / "policy.bin", text)
        )
        assert done.failure is None
        self.server.publish(self.version)

    def admit(self, iterations: int) -> None:
        first = max(self.book.admitted, self.version) + 1
        for k in range(first, min(iterations, self.version + MAX_LAG + 1) + 1):
            logged = self.log.load(k)
            if logged is None:
                self.log.begin(k, tasks_of(k))
            self.book.admit(k, tasks_of(k), None if logged is None else logged.trajectories)

    def run(self, iterations: int) -> None:
        self.publish()
        self.admit(iterations)
        print(self.server.start(), flush=True)
        for k in range(self.version + 1, iterations + 1):
            assert self.book.wait(k)
            (self.taken / f".{k}").write_bytes(pickle.dumps(self.book.take(k)))
            (self.taken / f".{k}").rename(self.taken / str(k))
            self.version = k
            self.publish()
            self.log.remove(k)
            self.admit(iterations)
        self.server.finish()
        self.server.close()


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def read_policy(folder: Path) -> str:
    """What a version's file says."""
    with checked_version(folder):
        return (folder / "policy.bin").read_text()


def connect(folder: Path, name: str, **given: Any) -> WorkClient:
    """A client of a trainer that shares its folder, unless `given` says otherwise."""
    usual = {
        "workdir": folder,
        "name": name,
        "sampling_hash": HASH,
        "read_policy": read_policy,
        "downloads": folder / "downloads" / name,
        "patience_s": 60.0,
        "log": print,
    }
    return WorkClient(**(usual | given))


def sample(client: WorkClient, name: str, seconds: float, room: int = 4) -> None:
    """Plays until the run is over, several conversations at a time, which end in any order."""
    rng, version = random.Random(name), None
    playing: list[FinishedMember] = []
    while not client.closed:
        policy = client.newer_policy(version)
        if policy is not None:
            assert policy.params == f"parameters {policy.version}" * 1000
            version = policy.version
        if len(playing) < room:
            for ticket in client.lease(room - len(playing)):
                assert version is not None and ticket.iteration <= version + MAX_LAG + 1
                playing += play(ticket, version)
        time.sleep(rng.random() * seconds)
        if playing:
            done = [playing.pop(rng.randrange(len(playing))) for _ in range(min(2, len(playing)))]
            client.deliver(done, {"tokens": len(done)})
    client.close()


def held(tickets: Sequence[Ticket]) -> list[tuple[int, int]]:
    """Numbers and members of tickets."""
    return [(ticket.number, member) for ticket in tickets for member in ticket.members]


if __name__ == "__main__":
    role, folder, *rest = sys.argv[1:]
    if role == "trainer":
        Trainer(Path(folder)).run(int(rest[0]))
    else:
        given = {}
        if len(rest) > 2:
            given = {"workdir": None, "address": rest[2]}
        sample(connect(Path(folder), rest[0], **given), rest[0], float(rest[1]))
