"""A run whose samplers play beside training: the same data, bounded lag, and nothing lost."""

import contextlib
import dataclasses
import io
import re

import jax
import pytest
import run_cases as cases
from places import TINY

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import samplers_own_mesh, training_mesh
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.rollout.rollout_log import RolloutLog
from seeupo_jax.train import train
from seeupo_jax.training.run import begin_run

TASKS, MEMBERS = 4, 2
# Two devices train and two sample.
OVERRIDES = (
    *(text.removeprefix("--config.") for text in cases.CHOICES),
    f"rollout.tasks={TASKS}",
    f"rollout.group_size={MEMBERS}",
    "rollout.max_turns=4",
    "rollout.deterministic=False",
    "checkpoint.every=0",
    "checkpoint.export=False",
    "evaluation.tasks=0",
    "log_checksum=True",
)
BESIDE = ("rollout.devices=2",)
LAGGING = (*BESIDE, "rollout.max_lag=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("asynchronous") / "model")


@pytest.fixture
def configured(model, monkeypatch):
    """A configuration; the machine has four devices."""
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: four)

    def configured(*more):
        return load_config(TINY, [*OVERRIDES, f"model.path={model}", *more])

    return configured


@pytest.fixture
def begin(model, configured, tmp_path):
    """Begins a run; its state, and what it logs."""

    @contextlib.contextmanager
    def begin(name, *more, request=None):
        config = configured(*more)
        logged = io.StringIO()
        progress = ProgressDisplay(config.iterations, "plain", stream=logged)
        policy, params = build.load_policy(config, str(model), training_mesh(config))
        request = StopRequest() if request is None else request
        with progress, jax.set_mesh(policy.mesh):
            run, state = begin_run(config, tmp_path / name, progress, request, policy, params)
            run.logged = logged
            with run:
                yield run, state

    return begin


def by_member(trajectories):
    """Tokens and log-probabilities, by group and member."""
    return {
        (t.group, t.info["member"]): [(s.tokens_L.tolist(), s.logp_L.tolist()) for s in t.segments]
        for t in trajectories
    }


def moved(state, by=0.01):
    """The state with other parameters, as after a sweep."""
    params = jax.tree.map(lambda x: x + by, state.train.params)
    return state._replace(train=dataclasses.replace(state.train, params=params))


def checksums(workdir):
    return [line["state/checksum"] for line in read_metrics(workdir) if "state/checksum" in line]


def test_devices_are_split_into_those_that_train_and_the_last_which_sample(configured):
    devices = jax.devices()
    config = configured(*BESIDE)
    training = training_mesh(config)
    assert list(training.devices.flat) == devices[:2]
    assert list(samplers_own_mesh(config, training).devices.flat) == devices[2:]
    assert samplers_own_mesh(config, training).shape == training.shape
    uneven = configured("rollout.devices=1")
    assert list(samplers_own_mesh(uneven, training_mesh(uneven)).devices.flat) == devices[3:]
    chosen = configured(*BESIDE, "rollout.mesh={'data':1,'tensor':2}")
    assert samplers_own_mesh(chosen, training).shape["tensor"] == 2
    assert samplers_own_mesh(configured(), training_mesh(configured())) is None
    with pytest.raises(ValueError, match=r"rollout\.mesh: got .*; allowed: a product of 2"):
        samplers_own_mesh(configured(*BESIDE, "rollout.mesh={'data':4}"), training)


def test_at_least_one_device_trains_and_several_processes_have_their_samplers_apart(
    configured, monkeypatch
):
    with pytest.raises(ValueError, match=r"rollout\.devices: got 4; allowed: .* from 0 to 3"):
        training_mesh(configured("rollout.devices=4"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"got 2 with 2 processes; allowed: 0, .*--role=rollout"):
        training_mesh(configured(*BESIDE))


def test_without_lag_a_run_ends_with_the_bits_of_one_that_samples_in_its_turn(
    configured, tmp_path, monkeypatch
):
    choices = ("iterations=2", "rollout.deterministic=True")
    train(configured(*choices, *BESIDE), tmp_path / "beside")
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    train(configured(*choices), tmp_path / "in_turn")
    assert checksums(tmp_path / "beside") == checksums(tmp_path / "in_turn")
    assert len(checksums(tmp_path / "beside")) == 2
    for line in read_metrics(tmp_path / "beside"):
        assert line["rollout/policy_lag"] == 0 and line["rollout/workers"] == 1


def test_with_lag_it_trains_on_what_at_most_so_many_sweeps_follow(begin, tmp_path):
    with begin("lagging", *LAGGING, "iterations=4") as (run, state):
        book, source = run.parts.source._book, run.parts.source
        admitted = []
        for iteration in range(1, 5):
            assert iteration == 1 or book.wait(iteration, 60)  # sampled beside the sweep
            collected = run.rollout(iteration, state)
            admitted.append(book.admitted)
            for trajectory in collected.trajectories:
                assert 0 <= iteration - 1 - trajectory.policy_version <= 1
            assert [t.group for t in collected.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
            state, metrics, stats = run.sweep(iteration, state, collected)
            run.record(state, collected, metrics, stats)
        assert admitted == [2, 3, 4, 4]  # of the newest version v: up to v + 2, and the last is 4
        assert source.origin.swept not in source.origin.sampled_by  # the last ones are of version 2
    lines = read_metrics(tmp_path / "lagging")
    assert [line["rollout/policy_lag"] for line in lines] == [0, 1, 1, 1]
    assert all(0 < line["rollout/policy_lag_mean"] <= 1 for line in lines[1:])
    assert [line["rollout/groups_ahead"] for line in lines] == [0, 4, 4, 4]
    assert all(0 <= line["rollout/idle_fraction"] <= 1 for line in lines)
    assert "guarantee needs on-policy data" in run.logged.getvalue()


def left_over(run, iteration):
    """What the log of a run that has ended has of an iteration."""
    source = run.parts.source
    return RolloutLog(source._store._folder, source._made_by).load(iteration)


def test_finished_conversations_of_later_iterations_outlive_the_process(begin, tmp_path):
    """Nothing is trained: the policy of every version is the same."""
    with begin("outlived", *LAGGING) as (run, state):
        first, second = (run.rollout(iteration, state) for iteration in (1, 2))
        assert run.parts.source._book.wait(3, 60)
    kept, folder = left_over(run, 3), tmp_path / "outlived" / "rollouts"
    assert sorted(file.name for file in folder.iterdir()) == ["1.rollouts", "2.rollouts", "3.log"]
    data = (folder / "3.log").read_bytes()
    (folder / "3.log").write_bytes(data[: len(data) // 2])  # as where it was killed before its end
    with begin("outlived", *LAGGING) as (run, state):
        for iteration, same in ((1, first), (2, second)):
            again = run.rollout(iteration, state)
            assert by_member(again.trajectories) == by_member(same.trajectories)
        third = by_member(run.rollout(3, state).trajectories)
    (finished,) = re.findall(r"iteration 3: (\d) of 8 conversations", run.logged.getvalue())
    same = [
        key
        for key, trajectory in kept.trajectories.items()
        if third[key] == by_member([trajectory])[(trajectory.group, key[1])]
    ]
    assert 0 < int(finished) <= len(same)


@pytest.mark.parametrize(
    "changed, other", [(True, "were sampled by other parameters"), (False, "")]
)
def test_what_other_parameters_have_sampled_is_discarded_and_counted(begin, changed, other):
    """As after a change of the learning rate: the policy of version 1 is another one."""
    with begin(f"changed_{changed}", *LAGGING) as (run, state):
        run.rollout(1, state)
        run.rollout(2, moved(state))
        assert run.parts.source._book.wait(3, 60)
        assert {t.policy_version for t in run.rollout(2 + 1, moved(state, 0.02)).trajectories} == {
            1
        }
    with begin(f"changed_{changed}", *LAGGING) as (run, state):
        run.rollout(1, state)
        run.rollout(2, moved(state, 0.03 if changed else 0.01))
        assert (other in run.logged.getvalue()) == changed
        third = run.rollout(3, moved(state, 0.02))
    assert third.trajectories
