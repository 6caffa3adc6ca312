"""`bench asynchronous`: ways to run with as many devices each, and environments that wait."""

import json
import types

import pytest
from process_cases import environment

from seeupo_jax import bench as command
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.instruments.bench.asynchronous import asynchronous_comparison, slow_desk
from seeupo_jax.instruments.bench.asynchronous.slow_desk import SlowDesk


def flags(*given):
    parser = Flags("bench asynchronous", None)
    asynchronous_comparison.add_flags(parser)
    return parser.read(given)


def test_every_way_has_as_many_devices():
    ways = asynchronous_comparison._ways(flags("--lags=1,4"))
    assert [*ways] == ["synchronous", "devices, lag 1", "workers, lag 1"] + [
        "devices, lag 4",
        "workers, lag 4",
    ]
    for way in ways.values():
        assert 8 % (way.processes + way.workers) == 0
    assert ways["devices, lag 4"].fields == {"rollout.max_lag": 4, "rollout.devices": 4}


def test_whole_batches_of_iterations_are_timed():
    ways = asynchronous_comparison._ways(flags("--lags=1,4"))
    assert [way.timed(6) for way in ways.values()] == [6, 6, 6, 10, 10]


def test_an_iteration_takes_what_it_waits_and_what_it_sweeps():
    lines = [
        {"time/rollout_s": 3.0, "time/sweep_s": 1.0, "rollout/policy_lag_mean": 0.5},
        {"time/rollout_s": 1.0, "time/sweep_s": 2.0, "rollout/policy_lag_mean": 1.0},
    ]
    assert asynchronous_comparison._means(lines) == {
        "iteration_s": 3.5,
        "longest_s": 4.0,
        "rollout_s": 2.0,
        "sweep_s": 1.5,
        "rollout/policy_lag_mean": 0.75,
    }


def test_training_episodes_wait_as_their_seed_says(monkeypatch):
    slept = []
    # Its own `time`: threads of other tests sleep too.
    monkeypatch.setattr(slow_desk, "time", types.SimpleNamespace(sleep=slept.append))
    desk = SlowDesk(seconds=30.0)
    totals = []
    for seed in range(400):
        slept.clear()
        desk.reset("train/0", 0, episode_seed=seed)
        desk.reset("train/0", 0, episode_seed=seed)  # another episode waits anew
        for _ in range(3):
            desk.step("?")
        totals.append(sum(slept))
    slow = [total for total in totals if total > 30]
    assert slow == [pytest.approx(120.0)] * len(slow) and 8 <= len(slow) <= 32  # 1 in 20
    others = [total for total in totals if total <= 30]
    assert 14 < sum(others) / len(others) < 16  # uniform from 0 to 30
    slept.clear()
    desk.reset("test/0", 0, episode_seed=1)
    desk.step("?")
    assert not any(slept)


@pytest.mark.exhaustive
def test_samplers_of_their_own_are_measured_against_the_synchronous_run(
    tmp_path, monkeypatch, capsys
):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    file = tmp_path / "figures.json"
    small = ("--tasks=8", "--group_size=2", "--seconds=0.1", "--iterations=1", "--skip=1")
    command.main(["bench", "asynchronous", "--lags=1", *small, f"--json={file}"])
    ways = json.loads(file.read_text())["ways"]
    assert [*ways] == ["synchronous", "devices, lag 1", "workers, lag 1"]
    for name, way in ways.items():
        assert way["iteration_s"] > 0 and ("ratio" in way) == (name != "synchronous")
