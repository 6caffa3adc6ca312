"""A run whose samplers play beside training: the same data, bounded lag, and nothing lost."""

import contextlib
import io
import re
import shutil

import jax
import pytest
import run_cases as cases
from places import TINY

from seeupo_jax import Callback
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.errors import NameTaken, NotLearning
from seeupo_jax.evaluation.episode_host import check_host
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import samplers_own_mesh, training_mesh
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.planning.explain.explain_training import explain_training
from seeupo_jax.planning.explain.explanation import print_explanation
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
    return state._replace(train=state.train._replace(params=params))


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


def test_explain_says_who_samples_and_how_old_the_data_may_be(configured, tmp_path, capsys):
    def explained(*choices):
        print_explanation(explain_training(configured(*choices), tmp_path / "run"))
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    said = explained(*LAGGING)
    for fact in (
        "2 x cpu (cpu): data 2",
        "2 devices sample while 2 train: data 2 each holds KV cache: 4 slots on each of 2 shards",
        "may begin 1 sweep before the policy that they train is there; those under way keep",
        "at most 8 groups have begun",
        "SeeUPO's guarantee needs on-policy data",
    ):
        assert fact in said
    said = explained("rollout.port=0")
    assert "it listens on 127.0.0.1, a free port, and publishes weights/" in said
    assert "the data are on-policy; at most 4 groups" in said and "guarantee" not in said
    assert "weights/, workers.json" in said and "samplers" not in explained()
    served = ("rollout.engine=openai", "rollout.servers=('http://a:1', 'http://b:2')")
    said = explained(*served, "rollout.max_lag=1")
    for fact in (
        "http://a:1, http://b:2 sample beside training, and the devices here play evaluations",
        "may begin 1 sweep before the policy that they train is there",
        "served_weights/",
    ):
        assert fact in said
    with pytest.raises(ValueError, match=r"engine: got openai with rollout\.max_lag=0; allowed"):
        explained(*served)


def test_a_server_that_keeps_one_episode_is_not_asked_for_two_at_once(configured):
    url = ("env.name=openenv", "env.options={'url': 'http://localhost:1'}", "rollout.concurrency=1")
    with pytest.raises(
        ValueError, match=r"http address of env openenv, .*samplers beside training"
    ):
        check_host(configured(*BESIDE, *url))


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
    "stored, said",
    [
        (False, "8 finished conversations of iteration 3 were sampled by other parameters"),
        (True, "the stored trajectories of iteration 3 were sampled by other parameters"),
    ],
)
def test_what_other_parameters_have_sampled_is_discarded_and_said(begin, tmp_path, stored, said):
    """As after a change of the learning rate: the policy of version 1 is another one."""
    with begin("changed", *LAGGING) as (run, state):
        run.rollout(1, state)
        assert run.parts.source._book.wait(2, 60)  # by version 0 alone
        run.rollout(2, moved(state))
        assert run.parts.source._book.wait(3, 60)
        third = run.rollout(3, moved(state, 0.02)) if stored else None
    shutil.copytree(tmp_path / "changed", tmp_path / "same")
    with begin("same", *LAGGING) as (run, state):
        run.rollout(1, state)
        run.rollout(2, moved(state))
        again = run.rollout(3, moved(state, 0.02))
        assert "other parameters" not in run.logged.getvalue()
        assert third is None or by_member(again.trajectories) == by_member(third.trajectories)
    with begin("changed", *LAGGING) as (run, state):
        run.rollout(1, state)
        assert "other parameters" not in run.logged.getvalue()  # not known before version 1 is
        run.rollout(2, moved(state, 0.03))
        assert said in run.logged.getvalue()
        other = run.rollout(3, moved(state, 0.04))
    assert by_member(other.trajectories) != by_member(again.trajectories)


def test_with_less_lag_a_resumed_run_discards_what_is_too_old_then(begin):
    with begin("lowered", *BESIDE, "rollout.max_lag=2") as (run, state):
        first = run.rollout(1, state)
        assert run.parts.source._book.wait(3, 60)
    with begin("lowered", *BESIDE) as (run, state):
        assert by_member(run.rollout(1, state).trajectories) == by_member(first.trajectories)
        for iteration in (2, 3):
            collected = run.rollout(iteration, moved(state, iteration / 100))
            assert {t.policy_version for t in collected.trajectories} == {iteration - 1}
            said = f"8 finished conversations of iteration {iteration} were sampled by a policy of"
            assert said in run.logged.getvalue()
    with begin("lowered") as (run, state):  # and without samplers beside training
        assert by_member(run.rollout(1, state).trajectories) == by_member(first.trajectories)


def test_tasks_are_drawn_as_their_iteration_is_admitted_and_kept_for_a_resumed_run(begin):
    band = ("curriculum.by=band", "curriculum.low=0.4", "curriculum.high=0.6")
    choices = (*LAGGING, *band, "curriculum.floor=0.001", "checkpoint.every=1", "seed=3")
    with begin("drawn", *choices) as (run, state):
        source = run.parts.source
        run.rollout(1, state)
        drawn = source._tasks.of(3)  # as it is admitted, with version 1
        second = [t.task_id for t in run.rollout(2, state).trajectories]
        assert source.metrics["curriculum/known_tasks"] > 0 < source.metrics["rollout/workers"]
        run.checkpoints.save(state._replace(done=1))
        run.checkpoints.wait()
        success = source.success.state(2)
        assert source._tasks.of(3) != drawn  # by now
    assert [*left_over(run, 3).tasks] == drawn
    with begin("drawn", *choices) as (run, state):
        assert state.done == 1
        assert [t.task_id for t in run.rollout(2, state).trajectories] == second
        assert run.parts.source.success.state(2) == success
        third = run.rollout(3, state).trajectories
        assert [t.task_id for t in third[::MEMBERS]] == drawn


def test_a_stop_ends_the_wait_and_keeps_what_is_finished(begin):
    request, finished = StopRequest(), []
    with begin("stopped", *LAGGING, request=request) as (run, state):
        deliver = run.parts.source._book.deliver

        def delivered(*given):
            finished.append(deliver(*given).taken)
            request.asked = sum(finished) >= 3

        run.parts.source._book.deliver = delivered
        with pytest.raises(Stopped):
            run.rollout(1, state)
    kept = {number: left_over(run, number) for number in (1, 2)}
    assert sum(len(each.trajectories) for each in kept.values()) == sum(finished) >= 3
    with begin("stopped", *LAGGING) as (run, state):
        again = by_member(run.rollout(1, state).trajectories)
    for (group, member), trajectory in kept[1].trajectories.items():
        assert again[group, member] == by_member([trajectory])[trajectory.group, member]


def test_an_environment_that_fails_is_data_and_an_error_of_the_sampler_ends_the_run(begin):
    broken = ("env.name=run_environment:Broken", "env.retries=0")
    for _ in range(2):  # the second one samples again
        with begin("broken", *LAGGING, *broken) as (run, state):
            with pytest.raises(NotLearning, match="8 environments failed"):
                run.rollout(1, state)
    taken = ("env.name=run_environment:Named", "rewards=[{'function': 'run_environment:judge'}]")
    with begin("taken", *LAGGING, *taken) as (run, state):
        with pytest.raises(NameTaken, match="pays a reward of that name itself"):
            run.rollout(1, state)


def test_adapters_alone_go_to_the_sampler(begin):
    with begin("adapters", *BESIDE, "lora.rank=2") as (run, state):
        for iteration in (1, 2):
            collected = run.rollout(iteration, state)
            state, metrics, _ = run.sweep(iteration, state, collected)
            # The sampler had its copy of the base, and the adapters before this sweep.
            assert metrics["logp/sampler_trainer_gap"] < 1e-4
        moved = jax.tree.leaves(state.train.params)
        assert len(moved) and all("lora" in str(path) for path in _paths(state.train.params))


def _paths(params):
    return [path for path, _ in jax.tree.leaves_with_path(params)]


class StopInSweep(Callback):
    def on_step(self, run, iteration, step, steps):
        if iteration == 2 and step == 1:
            run.stop("in the sweep")


def test_a_sweep_that_was_stopped_ends_with_the_bits_of_one_that_was_not(configured, tmp_path):
    """The same data: the run that was not stopped finds them stored."""
    choices = (*LAGGING, "iterations=3")
    result = train(configured(*choices), tmp_path / "stopped", [StopInSweep()])
    assert result.stopped == "in the sweep"
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(tmp_path / "stopped", undisturbed)
    shutil.rmtree(undisturbed / "checkpoints")
    (undisturbed / "metrics.jsonl").unlink()
    for workdir in (tmp_path / "stopped", undisturbed):
        assert train(configured(*choices), workdir).stopped is None
    assert checksums(tmp_path / "stopped")[:2] == checksums(undisturbed)[:2]
    assert len(checksums(undisturbed)) == 3
