"""A run whose samplers play beside training: the same data, bounded lag, and nothing lost."""

import contextlib
import dataclasses
import io

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
    assert all(line["rollout/groups_ahead"] == 4 for line in lines[2:])  # sweeps compile meanwhile
    assert all(0 <= line["rollout/idle_fraction"] <= 1 for line in lines)
    assert "guarantee needs on-policy data" in run.logged.getvalue()


def test_finished_conversations_of_later_iterations_outlive_the_process(begin, tmp_path):
    """Nothing is trained here: a policy is the same before and after."""
    with begin("outlived", *LAGGING, "iterations=3") as (run, state):
        first = run.rollout(1, state)
        run.rollout(2, state)
        run.parts.source._book.wait(3, 60)
    log = RolloutLog(tmp_path / "outlived" / "rollouts", run.parts.source._made_by)
    kept = log.load(3)
    assert len(kept.trajectories) == TASKS * MEMBERS
    # A part of them is gone, as where the process was killed before they were finished.
    log.begin(3, kept.tasks)
    some = [*kept.trajectories][:5]
    from seeupo_jax.rollout.rollout_log import LoggedMember

    log.append(
        3, [LoggedMember(*key, kept.trajectories[key], kept.origins[key]) for key in some]
    )
    with begin("outlived", *LAGGING, "iterations=3") as (run, state):
        again = run.rollout(1, state)
        assert by_member(again.trajectories) == by_member(first.trajectories)
        run.rollout(2, state)
        third = run.rollout(3, state)
    assert by_member(third.trajectories).items() >= {
        key: by_member(kept.trajectories.values())[key[0] + 2 * TASKS, key[1]] for key in some
    }.items()
    assert "iteration 3: 5 of 8 conversations are finished" in run.logged.getvalue()
