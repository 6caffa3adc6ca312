"""Processes that sample: what a trainer gets from them, and how they begin and end."""

import contextlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from loaded_python import LoadedPython
from places import TINY
from process_cases import environment, free_port
from rollout_cases import stir
from run_cases import CHOICES, save_policy

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.asynchronous.ticket_book import TicketBook
from seeupo_jax.rollout.asynchronous.work_messages import read_address
from seeupo_jax.rollout.asynchronous.work_server import WorkServer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import FOLDER
from seeupo_jax.train import main
from seeupo_jax.training.sampler_parts import build_sampler

TASKS, GROUP_SIZE = 4, 2
PORT = "rollout.port=0"
SLEEPY = "env.name=run_environment:Sleepy"
LIMIT_S = 240


class Trainer:
    """The side of a trainer that workers see; it trains nothing.

    recorded: number and member of each conversation that counted, as they came.
    """

    def __init__(self, model, workdir, *overrides):
        self.workdir, self._given = workdir, [f"model.path={model}", PORT, *overrides]
        choices = [choice.removeprefix("--config.") for choice in CHOICES]
        self.config = load_config(TINY, [*choices, *self._given])
        mesh = make_mesh(self.config.mesh, jax.devices()[:1])
        self.policy, self.params = build.load_policy(self.config, str(model), mesh)
        self.recorded, self.server = [], None

    def open(self):
        """Serves a new book, as a trainer that was just started; workers may be there already."""
        self.book = TicketBook(TASKS, GROUP_SIZE, record=self._record)
        self.server = WorkServer(
            self.book,
            self.workdir,
            sampling_hash(self.config),
            max_lag=0,
            patience_s=3.0,
            log=print,
        )
        self.server.start()

    def publish(self, version, params=None):
        params = self.params if params is None else params
        published = publish(self.workdir / FOLDER, params, version, self.policy.network)
        assert published.failure is None
        self.server.publish(version)

    def take(self, iteration):
        """The trajectories of an iteration that was admitted."""
        assert self.book.wait(iteration, LIMIT_S)
        return self.book.take(iteration).trajectories

    def worker(self, *flags, workdir=None, key=None):
        """A process that samples."""
        called = [sys.executable, "-m", "seeupo_jax.train", "--role=rollout", f"--config={TINY}"]
        given = [f"--config.{each}" for each in self._given]
        called += [*CHOICES, *given, f"--workdir={workdir or self.workdir}", *flags]
        return LoadedPython(
            called,
            env=environment() | ({} if key is None else {"SEEUPO_ROLLOUT_KEY": key}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _record(self, finished):
        self.recorded += [(each.number, each.member) for each in finished]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("role") / "model")


@pytest.fixture
def trainer_of(model, tmp_path):
    made = []

    def make(*overrides):
        made.append(Trainer(model, tmp_path / f"run{len(made)}", *overrides))
        made[-1].workdir.mkdir()
        return made[-1]

    yield make
    for trainer in made:
        if trainer.server is not None:
            trainer.server.close()


def until(holds):
    """Waits for a function to be true."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def ended(process, code=0, limit_s=120):
    """What a process printed until its end, with this code."""
    try:
        printed, errors = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    assert process.returncode == code, (printed[-2000:], errors[-3000:])
    return printed if code == 0 else errors


def collected_here(trainer, params, iteration, tasks):
    """The trajectories of a collection in this process."""
    config, policy = trainer.config, trainer.policy
    with contextlib.closing(find_tasks(config)) as named:
        parts = build_sampler(
            config, policy, named, stop=lambda: False, watch=Watch(), log=lambda _: None
        )
        with contextlib.closing(parts):
            requests = group_requests(tasks, GROUP_SIZE, iteration)
            options = CollectionOptions(config.seed, policy_version=iteration - 1)
            return collect(parts.worker, policy.merged(params), requests, options).trajectories


def test_a_process_samples_to_the_bit_what_a_collection_does(trainer_of, tmp_path):
    """Without a shared folder: weights and conversations go over the network."""
    trainer, own = trainer_of(), tmp_path / "elsewhere"
    trainer.open()
    address = read_address(trainer.workdir)
    flag = f"--trainer={address.host}:{address.port}"
    worker = trainer.worker(flag, workdir=own, key=address.key)
    tasks = ["t0", "t1", "t2", "t1"]
    for iteration in (1, 2):
        params = stir(trainer.params, iteration)
        trainer.publish(iteration - 1, params)
        trainer.book.admit(iteration, tasks)
        got = trainer.take(iteration)
        wanted = collected_here(trainer, params, iteration, tasks)
        assert {t.policy_version for t in got} == {iteration - 1} and len(got) == 8
        for one, other in zip(got, wanted, strict=True):
            assert (one.messages, one.reward, one.info) == (
                other.messages,
                other.reward,
                other.info,
            )
            for segment, same in zip(one.segments, other.segments, strict=True):
                for name in ("tokens_L", "turn_L", "logp_L", "version_L"):
                    np.testing.assert_array_equal(getattr(segment, name), getattr(same, name))
    trainer.server.finish()
    assert "the run is over" in ended(worker)
    assert not [*own.rglob("*.safetensors")]


def test_a_killed_process_is_replaced_and_each_conversation_counts_once(trainer_of):
    """It is killed amid its conversations; another one is there, and a third one comes."""
    trainer = trainer_of(SLEEPY, "rollout.concurrency=2", "rollout.deterministic=False")
    trainer.open()
    trainer.publish(0)
    first, second = trainer.worker(), trainer.worker()
    until(lambda: trainer.book.counts().workers == 2)
    trainer.book.admit(1, ["t0", "t1", "t2", "t1"])
    until(lambda: trainer.book.counts().finished >= 1)
    first.kill()
    third = trainer.worker()
    assert len(trainer.take(1)) == 8
    until(lambda: trainer.book.counts().workers == 2)
    trainer.publish(1)
    trainer.book.admit(2, ["t0", "t1", "t2", "t1"])
    assert {t.policy_version for t in trainer.take(2)} == {1}
    assert trainer.book.counts().reissued > 0
    assert len(trainer.recorded) == len({*trainer.recorded}) == 16
    trainer.server.finish()
    for each in (second, third):
        ended(each)
    assert first.wait() == -signal.SIGKILL
    for pipe in (first.stdout, first.stderr):
        pipe.close()


def test_a_process_survives_its_trainer(trainer_of):
    """Conversations that were under way when the trainer ended are of its next process."""
    trainer = trainer_of(SLEEPY)
    trainer.open()
    trainer.publish(0)
    worker, tasks = trainer.worker(), ["t0", "t2", "t2", "t1"]
    until(lambda: trainer.book.counts().workers == 1)
    trainer.book.admit(1, tasks)
    until(lambda: trainer.book.counts().leased)
    trainer.server.close()
    time.sleep(3.0)  # conversations end meanwhile
    trainer.open()
    trainer.publish(0)
    trainer.book.admit(1, tasks)
    assert len(trainer.take(1)) == 8
    trainer.publish(1)
    trainer.book.admit(2, tasks)
    assert {t.policy_version for t in trainer.take(2)} == {1}
    trainer.server.finish()
    ended(worker)


def test_a_signal_ends_a_process_whose_environment_hangs(trainer_of):
    trainer = trainer_of(SLEEPY)
    trainer.open()
    trainer.publish(0)
    worker = trainer.worker()
    until(lambda: trainer.book.counts().workers == 1)
    trainer.book.admit(1, ["t0", "t3", "t0", "t0"])
    until(lambda: trainer.book.counts().finished == 6)
    line = next(line for line in worker.stdout if line.startswith("policy 0, "))
    assert re.fullmatch(r"policy 0, \d+ s old: 2 conversations open, \d+ tokens/s\n", line)
    worker.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert "stopped by SIGTERM" in ended(worker)
    assert time.monotonic() - began < 20
    assert trainer.book.counts()[:3] == (2, 0, 6)  # two wait for another process


def test_a_process_of_another_configuration_is_refused(trainer_of):
    trainer = trainer_of()
    trainer.open()
    errors = ended(trainer.worker("--config.rollout.temperature=0.5"), code=2)
    assert errors.count("\n") == 1 and "sampl" in errors and "Traceback" not in errors


def test_a_process_waits_for_its_trainer_no_longer_than_it_was_told(trainer_of):
    trainer = trainer_of()
    errors = ended(trainer.worker("--patience=1"), code=2)
    wanted = "where no trainer was found for 1 s (--patience), since there is no workers.json"
    assert wanted in errors and "Traceback" not in errors
    nowhere = f"--trainer=127.0.0.1:{free_port()}"
    worker = trainer.worker("--patience=1", nowhere, key="k" * 20)
    assert "the trainer was not reached" in ended(worker, code=2)


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--trainer=a:1"], "--trainer: got a:1 with --role=train; allowed: with --role=rollout."),
        (["--patience=3"], "--patience: got 3.0 with --role=train"),
        (["--role=rollout", "--explain"], "--explain: got True with --role=rollout; allowed: none"),
        (["--role=rollout", "--num_processes=2"], "--num_processes: got 2 with --role=rollout"),
        (["--role=sampler"], "--role: got 'sampler'; allowed: train, rollout"),
        (["--role=rollout"], "config.rollout.port: got none with --role=rollout; allowed: the"),
        (
            ["--role=rollout", "--config.rollout.devices=2"],
            "config.rollout.devices: got 2 with --role=rollout; allowed: 0",
        ),
    ],
)
def test_flags_that_do_not_go_with_the_role_are_refused(model, tmp_path, capsys, flags, wanted):
    called = ["train", f"--config={TINY}", *CHOICES, f"--config.model.path={model}"]
    with pytest.raises(SystemExit) as exit:
        main([*called, f"--workdir={tmp_path}", *flags])
    assert exit.value.code == 2
    assert wanted in capsys.readouterr().err
