"""Whole runs with samplers beside training, in processes that are killed and restarted."""

import contextlib
import io
import signal
import subprocess
import time

import jax
import pytest
import run_cases as cases
from loaded_python import LoadedPython
from places import TINY
from process_cases import environment

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import training_mesh
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.rollout_log import RolloutLog
from seeupo_jax.training.run import begin_run

CHOICES = (
    "rollout.tasks=4",
    "rollout.group_size=2",
    "rollout.max_turns=4",
    "checkpoint.every=0",
    "checkpoint.export=False",
    "evaluation.tasks=0",
    "log_checksum=True",
)
LAGGING = ("rollout.max_lag=1", "rollout.deterministic=False")
LIMIT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("runs") / "model")


def flags(*choices):
    return [f"--config.{choice}" for choice in (*CHOICES, *choices)]


def _texts(choices):
    return [text.removeprefix("--config.") for text in (*cases.CHOICES, *flags(*choices))]


def started(model, workdir, *more, devices=1):
    """A process of a run; what it prints is left in a pipe."""
    return LoadedPython(
        cases.command(model, workdir, *more),
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(holds, process):
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(process):
    printed, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, printed[-3000:]
    return printed


def checksums(workdir):
    found = [line for line in read_metrics(workdir) if "state/checksum" in line]
    return {line["iteration"]: line["state/checksum"] for line in found}


def test_a_worker_process_gives_its_trainer_the_bits_that_it_samples_itself(model, tmp_path):
    choices = flags("iterations=2", "rollout.deterministic=True")
    served = [*choices, "--config.rollout.port=0"]
    trainer = started(model, tmp_path / "served", *served)
    worker = started(model, tmp_path / "served", "--role=rollout", *served)
    alone = started(model, tmp_path / "alone", *choices)
    printed, sampled, _ = ended(trainer), ended(worker), ended(alone)
    assert checksums(tmp_path / "served") == checksums(tmp_path / "alone")
    assert len(checksums(tmp_path / "alone")) == 2
    assert "workers get their work at 127.0.0.1:" in printed and "the run is over" in sampled


@pytest.mark.exhaustive
def test_two_trainer_processes_get_the_bits_that_a_worker_of_two_devices_samples(model, tmp_path):
    choices = flags("iterations=2", "rollout.deterministic=True", "rollout.port=0")
    served = tmp_path / "served"
    trainers = cases.start(model, served, *choices, processes=2)
    worker = started(model, served, "--role=rollout", *choices, devices=2)
    cases.finish(trainers)
    ended(worker)
    ended(started(model, tmp_path / "alone", *choices[:-1], devices=2))
    assert checksums(served) == checksums(tmp_path / "alone")
    assert len(checksums(served)) == 2


@pytest.fixture
def resumed(model, monkeypatch):
    """Resumes a run of two devices in this process; its state."""
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)

    @contextlib.contextmanager
    def resumed(workdir, *choices):
        config = load_config(TINY, [*_texts(choices), f"model.path={model}"])
        progress = ProgressDisplay(config.iterations, "plain", stream=io.StringIO())
        policy, params = build.load_policy(config, str(model), training_mesh(config))
        with progress, jax.set_mesh(policy.mesh):
            run, state = begin_run(config, workdir, progress, StopRequest(), policy, params)
            with run:
                yield run, state

    return resumed


def tokens_of(trajectory):
    return [(s.tokens_L.tolist(), s.logp_L.tolist()) for s in trajectory.segments]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_run_that_is_killed_loses_no_finished_conversation(model, tmp_path, resumed, done):
    """It is killed after so many iterations, when some conversations of later ones are finished."""
    slow = ("env.name=run_environment:Slow", "rollout.concurrency=2")
    choices = ("rollout.devices=1", *slow, *LAGGING)
    workdir, rollouts = tmp_path / "killed", tmp_path / "killed" / "rollouts"
    process = started(model, workdir, *flags("iterations=40", *choices), devices=2)
    config = load_config(TINY, [*_texts(choices), f"model.path={model}"])
    log = RolloutLog(rollouts, sampling_hash(config), log=lambda _: None)

    def finished():
        numbers = sorted(int(file.stem) for file in rollouts.glob("*.log"))
        loaded = {number: log.load(number) for number in numbers}
        return {number: each.trajectories for number, each in loaded.items() if each is not None}

    def is_due():
        return len(read_metrics(workdir)) >= done and sum(map(len, finished().values())) >= 2

    until(is_due, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = checksums(workdir)
    kept = finished()
    last = max(kept)
    with resumed(workdir, f"iterations={last}", *choices) as (run, state):
        for iteration in range(1, last + 1):
            collected = run.rollout(iteration, state)
            again = {(t.group, t.info["member"]): t for t in collected.trajectories}
            for key, trajectory in kept.get(iteration, {}).items():
                assert tokens_of(again[key]) == tokens_of(trajectory)
            state, metrics, stats = run.sweep(iteration, state, collected)
            run.record(state, collected, metrics, stats)
    after = checksums(workdir)
    assert len(after) == last > len(before) >= done and after.items() >= before.items()
    assert sum(map(len, kept.values())) >= 2


def lagging(model, workdir, *more):
    """The lines of four iterations, half of whose devices sample up to a sweep ahead."""
    slow = ("env.name=run_environment:Slow", "rollout.concurrency=4", "rollout.devices=1")
    ended(started(model, workdir, *flags("iterations=4", *slow, *LAGGING, *more), devices=2))
    lines = [line for line in read_metrics(workdir) if "rollout/policy_lag_mean" in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    lags = [line["rollout/policy_lag_mean"] for line in lines]
    assert lags[0] == 0 and all(0 <= lag <= 1 for lag in lags) and max(lags) > 0
    return lines


@pytest.mark.parametrize("choice", ["rollout.quantize=int8", "rollout.on_swap=prefill"])
def test_other_ways_to_sample_go_with_a_lag(model, tmp_path, choice):
    lines = lagging(model, tmp_path, choice, "algorithm.importance.clip=2")
    assert all(0 < line["sweep/importance_ess"] <= 1 for line in lines)


def test_experts_are_replayed_as_an_earlier_policy_chose_them(tmp_path):
    mixture = cases.save_policy(tmp_path / "model", moe=Moe(4, 2, 16, normalize=True))
    lines = lagging(mixture, tmp_path / "run", "algorithm.router_replay=rollout")
    assert all("sweep/router_mismatch" in line for line in lines)


@pytest.mark.parametrize("port", ["none", "0"])
def test_a_run_that_is_stopped_ends_with_the_bits_of_one_that_was_not(model, tmp_path, port):
    """With devices that sample, and with a worker, which waits for the trainer to come back."""
    apart = "rollout.devices=1" if port == "none" else f"rollout.port={port}"
    choices = flags("iterations=4", "env.name=run_environment:Slow", "rollout.deterministic=True")
    served, split = tmp_path / "stopped", [*choices, f"--config.{apart}"]
    devices = 2 if port == "none" else 1
    stopped = started(model, served, *split, devices=devices)
    worker = None if port == "none" else started(model, served, "--role=rollout", *split)
    until(lambda: len(read_metrics(served)) >= 1, stopped)
    stopped.terminate()
    ended(stopped)
    done = len(checksums(served))
    assert 1 <= done < 4
    ended(started(model, served, *split, devices=devices))
    if worker is not None:
        assert "the run is over" in ended(worker)
    ended(started(model, tmp_path / "alone", *choices))
    assert checksums(served) == checksums(tmp_path / "alone")
    assert len(checksums(served)) == 4
