"""What a run samples, and what it says about it."""

import contextlib
import dataclasses
import io
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_cases as cases
from etils import epath
from metric_names import checked
from places import TINY
from process_cases import free_port
from run_environment import Settled

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.checkpoint.manifest import read_manifest
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.errors import NotLearning
from seeupo_jax.learner.credit.running_rewards import Moments
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.statistics import evaluation_prefix
from seeupo_jax.parallel.stop_signal import Stopped, StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import most_frequent_failure, rollout_metrics
from seeupo_jax.rollout.resample import groups_of, has_signal
from seeupo_jax.train import iterate
from seeupo_jax.training import run as run_module
from seeupo_jax.training.iteration_source import SamplingOrigin
from seeupo_jax.training.run import begin_run
from seeupo_jax.training.run_checkpoints import RunCheckpoints
from seeupo_jax.training.run_components import RunComponents
from seeupo_jax.trajectories import trajectory_writer
from seeupo_jax.trajectories.reader import TrajectoryFile, find_shards, write_shard
from seeupo_jax.types import Segment, Trajectory, learnable


def collected(*reasons):
    """A collection with a trajectory a reason; None: it went well."""
    trajectories = [
        Trajectory.of((), 0.0, 0)
        if reason is None
        else Trajectory.of((), 0.0, 0, stop="env_error", info={"failure": reason, "retries": 0})
        for reason in reasons
    ]
    return Collected(tuple(trajectories), 1.0, 0.5, 10, 20)


def test_the_most_frequent_failure_is_told_in_a_line():
    logged = most_frequent_failure(collected("a: x", None, "b: y\n  z", "b: y\n  z"))
    assert logged == "3 environments failed, 2 of them so: b: y z"
    assert most_frequent_failure(collected(None, None)) is None
    assert len(most_frequent_failure(collected("long " * 1000))) < 260


def test_reasons_without_spaces_are_cut_by_characters_and_counted_apart():
    quota, argument = (f'HTTPStatusError: {{"detail":"{what}_{60 * "a"}"}}' for what in "qi")
    unspaced = "服务器连接失败" * 50
    metrics = rollout_metrics(collected(quota, argument, argument, unspaced))
    counts = {name.partition("=")[2]: n for name, n in metrics.items() if "/cause=" in name}
    cut = [f"{reason[:74]} [...]" for reason in (argument, quota, unspaced)]
    assert counts == dict(zip(cut, (2, 1, 1), strict=True))
    assert f"so: {unspaced[:194]} [...]" in str(most_frequent_failure(collected(unspaced)))
    assert describe(ValueError(unspaced)) == f"ValueError: {unspaced[:294]} [...]"


def test_metrics_by_turns_labels_and_causes():
    def episode(task, turns, score, failure=None):
        turn_L = np.array([-1, *range(turns)], np.int32)
        segment = Segment(turn_L, turn_L, turn_L.astype(np.float32))
        info = {"score": score, "retries": 0} | ({"failure": failure} if failure else {})
        stop = "env_error" if failure else "done"
        return Trajectory.of((segment,), score, 0, task_id=task, stop=stop, info=info)

    brought = [episode("a", 2, 1.0), episode("a", 3, 0.5), episode("b", 2, 0.0)]
    brought += [episode("b", 5, 0.0, f"no server\n{'x' * 200}"), episode("b", 1, 0.0, "gone")]
    brought += [episode("b", 1, 0.0, "gone")]
    metrics = rollout_metrics(
        Collected(tuple(brought), 1.0, 0.5, 10, 20, seconds={"decode_s": 0.25}),
        {"a": {"kind": "x/y"}, "b": {"kind": "z"}},
    )
    found = {name: value for name, value in metrics.items() if "=" in name}
    long = next(name for name in found if "no server" in name)
    assert len(long) <= len("rollout/failed/cause=") + 80 and found.pop(long) == 1
    assert found == {
        "rollout/success_rate/turns=2": 0.5,
        "rollout/success_rate/turns=3": 0.0,
        "rollout/trajectories/turns=2": 2,
        "rollout/trajectories/turns=3": 1,
        "rollout/success_rate/kind=x/y": 0.5,
        "rollout/success_rate/kind=z": 0.0,
        "rollout/failed/cause=gone": 2,
    }
    assert metrics["rollout/action_tokens_mean"] == pytest.approx(7 / 3)
    assert metrics["rollout/action_tokens_p90"] == pytest.approx(2.8)
    assert metrics["rollout/context_tokens_mean"] == metrics["rollout/context_tokens_p90"] == 1
    assert metrics["time/decode_s"] == 0.25


# Six of its 12 tasks can have a signal; an iteration is of four.
RESAMPLING = (
    "rollout.group_size=4",
    "seed=5",
    "env.name=run_environment:Settled",
    "algorithm.dynamic_sampling=3",
    "rollout.max_turns=4",
    "checkpoint.every=0",
    "evaluation.every=0",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture
def begin(model, tmp_path, monkeypatch):
    """Begins a run on one device; its state."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    options = [text.removeprefix("--config.") for text in cases.CHOICES]
    overrides = [*options, *RESAMPLING, f"model.path={model}"]

    @contextlib.contextmanager
    def begin(name, *more, request=None):
        config = load_config(TINY, [*overrides, *more])
        progress = ProgressDisplay(config.iterations, "plain", stream=io.StringIO())
        policy, params = build.load_policy(config, str(model))
        request = StopRequest() if request is None else request
        with progress, jax.set_mesh(policy.mesh):
            run, state = begin_run(config, tmp_path / name, progress, request, policy, params)
            with run:
                yield run, state

    return begin


def assert_same_trajectories(got, wanted):
    for trajectory, same in zip(got, wanted, strict=True):
        unlike = {"segments": (), "policy_version": None}
        assert dataclasses.replace(trajectory, **unlike) == dataclasses.replace(same, **unlike)
        for segment, other in zip(trajectory.segments, same.segments, strict=True):
            np.testing.assert_array_equal(segment.tokens_L, other.tokens_L)
            np.testing.assert_array_equal(segment.logp_L, other.logp_L)


def test_tasks_that_teach_nothing_are_replaced_the_same_way_in_every_life_of_a_run(
    begin, monkeypatch
):
    with begin("whole") as (run, state):
        run.parts.engine.compile(state.train.params)
        run.parts.source.compile(state.train.params)
        compilations = Compilations()
        collected = [run.rollout(iteration, state) for iteration in (1, 2)]
        compilations.close()
        assert compilations.programs == 0
        assert run.parts.engine.prepared == 1 + 2  # to compile, and once for all rounds
    # With this seed two tasks, then one of theirs, are replaced in the first iteration.
    assert [brought.rounds for brought in collected] == [3, 2]
    assert [len(brought.left_out) for brought in collected] == [3 * 4, 2 * 4]
    for brought in collected:
        every = groups_of(brought.trajectories)
        assert [*every] == [0, 1, 2, 3] and {len(group) for group in every.values()} == {4}
        assert all(map(has_signal, every.values())) and learnable(brought.trajectories).all()
        tasks = [t.task_id for t in brought.sampled]
        assert {tasks.count(task_id) for task_id in tasks} == {4}  # no task was sampled twice
        turns = [s.turn_L for t in brought.sampled for s in t.segments]
        assert brought.sampled_tokens == sum((turn_L >= 0).sum() for turn_L in turns)
        assert brought.usage["decoded_tokens"] == brought.sampled_tokens
    with begin("whole") as (run, state):
        monkeypatch.setattr(run.parts.source, "_sample", None)  # nobody needs it: they are stored
        again = run.rollout(2, state)
        assert_same_trajectories(again.sampled, collected[1].sampled)
        assert (again.rounds, len(again.left_out)) == (2, 2 * 4)
    with begin("second_only") as (run, state):
        assert_same_trajectories(run.rollout(2, state).sampled, collected[1].sampled)


SELECTING = ("checkpoint.every=2", "evaluation.tasks=2", "evaluation.k=2")


@pytest.mark.parametrize("name, split", [("Validated", "eval_validation"), ("Echo", "eval")])
def test_a_checkpoint_is_scored_on_validation_tasks_where_there_are_some(
    begin, tmp_path, name, split
):
    folder = tmp_path / name
    with begin(name, f"env.name=run_environment:{name}", *SELECTING) as (run, state):
        for iteration in (1, 2):  # after the first none is saved
            state = run.evaluate(state._replace(done=iteration))
        assert run.parts.engine.prepared == 2  # once for all splits
        run.checkpoints.save(state)
    first, second = checked(read_metrics(folder))
    assert "eval_validation/avg@2" not in first and "eval/selected_on" not in first
    assert second["eval/selected_on"] == (name == "Echo")
    score = second[f"{split}/avg@2"]
    assert second["eval/avg@2"] != score or name == "Echo"
    manifest = read_manifest(epath.Path(folder / "checkpoints" / "2"))
    assert manifest["score"] == score
    assert manifest["extra"]["selected_on"] == ("validation" if name == "Validated" else "test")


def test_a_checkpoint_whose_evaluation_was_stopped_is_scored_by_the_next_life(begin, tmp_path):
    echo, request = ("env.name=run_environment:Echo", *SELECTING, "iterations=2"), StopRequest()
    folder = tmp_path / "late"
    with begin("late", *echo, request=request) as (run, state):
        request.asked = True
        assert not iterate(run, state._replace(done=2, saved=False))
    assert read_manifest(epath.Path(folder / "checkpoints" / "2"))["score"] is None
    for _ in range(2):  # a third life has nothing left to evaluate
        with begin("late", *echo) as (run, state):
            assert state.done == run.parts.progress._state.done == 2 and iterate(run, state)
    (evaluated,) = read_metrics(folder)
    (saved,) = (folder / "checkpoints").glob("2*")
    manifest = read_manifest(epath.Path(saved))
    assert manifest["score"] == evaluated["eval/avg@2"] and manifest["extra"]["evaluated"]


def test_iterations_that_move_no_parameter_are_counted_over_a_restart(begin):
    choices = ("env.name=run_environment:Indifferent", "algorithm.dynamic_sampling=0")
    choices += ("rollout.max_turns=1", "stop_after_idle=2", "checkpoint.every=1")
    with begin("idle", *choices) as (run, state):
        collected = run.rollout(1, state)
        state, metrics, stats = run.sweep(1, state, collected)
        run.record(state, collected, metrics, stats)
        run.checkpoints.save(state)
    with begin("idle", *choices) as (run, state):
        collected = run.rollout(2, state)
        state, metrics, stats = run.sweep(2, state, collected)
        with pytest.raises(NotLearning, match="in a row: 2"):
            run.record(state, collected, metrics, stats)


def test_trajectories_of_failed_environments_are_sampled_again_by_the_same_command(begin):
    choices = ("env.name=run_environment:Broken", "env.retries=0", "algorithm.dynamic_sampling=0")
    for _ in range(2):
        with begin("broken", *choices) as (run, state):
            with pytest.raises(NotLearning, match="16 environments failed"):
                run.rollout(1, state)
            assert run.parts.source.stored(1, run.parts.source.origin) is None


@pytest.mark.parametrize(
    "choices", [("recipe=arpo",), ("recipe=slate", "judge={'function': 'run_environment:judge'}")]
)
def test_conversations_that_branched_are_stored_and_sampled_again_to_the_bit(
    begin, monkeypatch, choices
):
    choices = (*choices, "env.name=run_environment:Echo", "algorithm.dynamic_sampling=0")
    with begin("whole", *choices) as (run, state):
        first = run.rollout(1, state).sampled
    forks = [(trajectory.parent, trajectory.fork) for trajectory in first]
    assert any(fork for _, fork in forks)
    with begin("again", *choices) as (run, state):
        assert_same_trajectories(run.rollout(1, state).sampled, first)
    with begin("whole", *choices) as (run, state):
        monkeypatch.setattr(run.parts.source, "_sample", None)  # they are stored
        stored = run.rollout(1, state).sampled
    assert_same_trajectories(stored, first)
    assert [(trajectory.parent, trajectory.fork) for trajectory in stored] == forks


def test_groups_of_the_same_task_are_sampled_independently(begin):
    few = ("rollout.tasks=16", "rollout.concurrency=16", "algorithm.dynamic_sampling=0")
    with begin("few", *few) as (run, state):
        brought = run.rollout(1, state)
    texts: dict[str, list[str]] = {}
    for group in groups_of(brought.trajectories).values():
        logged = [[m["content"] for m in t.messages if m["role"] == "assistant"] for t in group]
        texts.setdefault(group[0].task_id, []).append(repr(logged))
    repeated = [logged for logged in texts.values() if len(logged) > 1]
    # 16 groups of 12 tasks: each once, and four of them once more, none of these alike.
    assert len(texts) == 12 and [len(logged) for logged in repeated] == [2] * 4
    assert all(first != second for first, second in repeated)
    assert rollout_metrics(brought)["rollout/repeated_tasks"] == 4


def test_a_run_with_fewer_tasks_than_an_iteration_takes_says_so(begin, monkeypatch):
    logged = []
    monkeypatch.setattr(ProgressDisplay, "log", lambda self, sentence: logged.append(sentence))
    for tasks, wanted in ((12, 0), (13, 1)):
        logged.clear()
        with begin(f"few{tasks}", f"rollout.tasks={tasks}", "rollout.concurrency=4"):
            pass
        found = [sentence for sentence in logged if "rollout.tasks" in sentence]
        assert len(found) == wanted and all("got 13" in each and "12" in each for each in found)


def test_statistics_of_rewards_are_in_the_checkpoint_to_the_last_bit(begin):
    kept = {"env": Moments(7, 0.1 + 0.2, 1 / 3), "late": Moments(2, -1e-17, 0.0)}
    with begin("statistics", "recipe=prorl") as (run, state):
        assert state.statistics is None
        run.checkpoints.save(state._replace(done=1, statistics=kept))
        run.checkpoints.wait()
    with begin("statistics", "recipe=prorl") as (run, state):
        assert state.done == 1 and state.statistics == kept


def test_the_steps_behind_each_version_are_in_the_checkpoint_and_give_the_lag(begin):
    with begin("steps", "algorithm.dynamic_sampling=0") as (run, state):
        assert state.steps_V == (0,)
        collected = run.rollout(1, state)
        run.checkpoints.save(state._replace(done=2, steps_V=(0, 3, 7)))
        run.checkpoints.wait()
    stale = []
    for t in collected.trajectories:
        segments = tuple(dataclasses.replace(each, version_L=None) for each in t.segments)
        stale.append(dataclasses.replace(t, policy_version=1, segments=segments))
    collected = dataclasses.replace(collected, trajectories=tuple(stale))
    lagging = (f"rollout.port={free_port()}", "rollout.max_lag=1", "rollout.deterministic=False")
    with begin("steps", *lagging, "algorithm.dynamic_sampling=0") as (run, state):
        assert state.steps_V == (0, 3, 7)
        after, metrics, stats = run.sweep(3, state, collected)
        steps = metrics["sweep/steps"] - metrics["sweep/updates_skipped"]
        assert after.steps_V == (0, 3, 7, steps)  # the optimizer of this state begins at 0
        run.record(after, collected, metrics, stats)
        (line,) = cases.iterations(run.parts.workdir)
    assert line["rollout/policy_lag"] == line["rollout/policy_lag_mean"] == 1
    assert line["rollout/policy_lag_steps"] == line["rollout/policy_lag_steps_mean"] == 4


def test_baselines_of_roles_are_in_the_checkpoint_to_the_last_bit(begin):
    kept = {"": 0.1 + 0.2, "a": -1e-17}
    rae = ("algorithm.advantage=rae", "roles=[{'name': 'a'}]", "algorithm.dynamic_sampling=0")
    with begin("baselines", *rae) as (run, state):
        assert state.baselines is None
        run.checkpoints.save(state._replace(done=1, baselines=kept))
        run.checkpoints.wait()
    with begin("baselines", *rae) as (run, state):
        assert state.done == 1 and state.baselines == kept


def test_a_run_that_is_stopped_in_a_round_samples_the_iteration_again(begin, monkeypatch):
    request, versions = StopRequest(), []
    with begin("stopped", request=request) as (run, state):
        engine_begins = run.parts.engine.begin

        def begins(params, *, version, **others):
            versions.append(version)
            request.asked = len(versions) == 2
            engine_begins(params, version=version, **others)

        monkeypatch.setattr(run.parts.engine, "begin", begins)
        with pytest.raises(Stopped):
            run.rollout(1, state)
    assert versions == [0, 0]
    with begin("stopped") as (run, state):
        assert run.rollout(1, state).rounds == 3


CURRICULUM = ("curriculum.by=variance", "algorithm.dynamic_sampling=1", "checkpoint.every=2")


def drawn_with_a_checkpoint(run, state):
    """The trajectories of three iterations, after the second of which a checkpoint is saved."""
    brought = [run.rollout(iteration, state) for iteration in (1, 2)]
    run.checkpoints.save(state._replace(done=2))
    brought.append(run.rollout(3, state))
    run.checkpoints.wait()
    return brought, run.parts.source


def test_a_resumed_run_draws_the_same_tasks_by_their_success(begin, tmp_path):
    with begin("drawn", *CURRICULUM) as (run, state):
        wanted, source = drawn_with_a_checkpoint(run, state)
        saved = source.success.state(2)
        assert source.metrics["curriculum/known_tasks"] == len(saved) > 4
    notes = read_manifest(epath.Path(tmp_path / "drawn" / "checkpoints" / "2"))["extra"]
    assert notes["task_success"] == saved
    (tmp_path / "drawn" / "rollouts" / "3.rollouts").unlink()
    with begin("drawn", *CURRICULUM) as (run, state):
        assert state.done == 2
        assert_same_trajectories(run.rollout(3, state).sampled, wanted[2].sampled)
        assert run.parts.source.success.state(3) == source.success.state(3)
    with pytest.raises(ValueError, match="config.curriculum.by: got"), begin("drawn"):
        pass


def test_a_run_that_is_refused_closes_what_it_has_opened(begin, monkeypatch):
    closed, close = [], RunComponents.close

    def refuse(self, train):
        raise ValueError("of another run")

    monkeypatch.setattr(RunCheckpoints, "restore", refuse)
    monkeypatch.setattr(RunComponents, "close", lambda parts: (closed.append(parts), close(parts)))
    with pytest.raises(ValueError, match="of another run"), begin("refused"):
        pass
    assert len(closed) == 1


def test_a_sweep_without_a_step_has_no_speed(begin):
    """Every token is too likely to be learned from."""
    choices = ("algorithm.mask_above=1e-9", "algorithm.dynamic_sampling=0")
    with begin("masked", *choices) as (run, state):
        _, metrics, _ = run.sweep(1, state, run.rollout(1, state))
    assert metrics["sweep/turns"] == 0 and "sweep/tokens_per_second" not in metrics


def test_a_stopped_sweep_knows_the_success_that_its_tasks_were_drawn_by(begin, monkeypatch):
    with begin("swept", *CURRICULUM) as (run, state):
        _, source = drawn_with_a_checkpoint(run, state)
        noted = []
        monkeypatch.setattr(run.checkpoints._stopped, "save", lambda *given: noted.append(given))
        stopped = SweepStopped.__new__(SweepStopped)
        stopped.arrays, stopped.notes = {}, {"done": 1}
        run.checkpoints.save_stopped(state._replace(done=2), stopped)
        ((iteration, _, notes),) = noted
        assert iteration == 3 and notes["task_success"] == source.success.state(2)
        assert source.success.state(2) != source.success.state(3)


def test_checkpoints_begin_when_the_trajectories_that_they_cover_are_on_the_disk(
    begin, monkeypatch, tmp_path
):
    """A resumed run writes none of them again: what is not there then is lost."""
    at_save, saving = [], threading.Event()

    def write(*shard):
        saving.wait(0.3)  # a checkpoint that does not wait is saved meanwhile
        write_shard(*shard)

    def save(_, step, *more):
        at_save.append((step, find_shards(tmp_path / "recorded")))
        saving.set()

    monkeypatch.setattr(trajectory_writer, "write_shard", write)
    monkeypatch.setattr(Checkpoints, "save", save)
    shards = [TrajectoryFile(iteration, "test", evaluation=True) for iteration in (1, 2)]
    segment = Segment(np.array([1, 2]), np.array([-1, 0]), np.zeros(2, np.float32))
    trajectory = Trajectory.of((segment,), 0.0, 0, task_id="a", info={"member": 0})
    stopped = SweepStopped.__new__(SweepStopped)
    stopped.arrays, stopped.notes = {}, {"done": 1}
    with begin("recorded") as (run, state):
        run.parts.source.origin = SamplingOrigin(0, 0)
        for done in (1, 2):
            saving.clear()
            run.parts.log.episodes(done, "test", [trajectory], {})
            if done == 1:
                run.checkpoints.save(state._replace(done=1))
            else:
                run.checkpoints.save_stopped(state._replace(done=2), stopped)
    assert at_save == [(1, shards[:1]), (3, shards)]


def began(run):
    """Environments that have been asked to begin, and nobody has heard of yet."""
    return run.parts.worker.host.pool.open


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "choices, wanted",
    [
        ((), [16, 16, 16, 0]),  # after the last iteration there is nothing to begin
        (("evaluation.every=2",), [16, 0, 16, 0]),
        (("checkpoint.every=1", "rollout.concurrency=4"), [4, 4, 4, 0]),
        (("rollout.reset_ahead_s=0",), [0, 0, 0, 0]),
    ],
)
def test_the_next_environments_begin_while_an_iteration_is_swept(begin, choices, wanted):
    choices = ("algorithm.dynamic_sampling=0", *choices)
    with begin("begun", *choices) as (run, state):
        counts = []
        for iteration in range(1, 5):
            run.rollout(iteration, state)
            counts.append(began(run))
            if not began(run):
                run.evaluate(state._replace(done=iteration))  # in these very environments
    assert counts == wanted


def test_what_was_begun_for_trajectories_that_are_stored_disturbs_nobody(begin, tmp_path):
    with begin("all") as (run, state):
        wanted = [run.rollout(iteration, state) for iteration in (1, 2, 3)]
    with begin("all") as (run, state):
        run.rollout(1, state)
        assert began(run) == 0  # it was stored, and so most likely is the next one
    (tmp_path / "all" / "rollouts" / "1.rollouts").unlink()
    (tmp_path / "all" / "rollouts" / "3.rollouts").unlink()
    with begin("all") as (run, state):
        got = [run.rollout(1, state)]
        assert began(run) == 16
        got.append(run.rollout(2, state))
        assert began(run) == 0
        got.append(run.rollout(3, state))
    for collected, same in zip(got, wanted, strict=True):
        assert_same_trajectories(collected.sampled, same.sampled)


def test_a_run_that_ends_while_environments_begin_leaves_none_of_them(begin, monkeypatch):
    reset, closed = Settled.reset, []

    def slow(self, *which):
        return time.sleep(0.05) or reset(self, *which)

    monkeypatch.setattr(Settled, "close", lambda self: closed.append(self))
    monkeypatch.setattr(Settled, "reset", slow)
    before = set(threading.enumerate())
    with begin("ended") as (run, state):
        run.rollout(1, state)
        assert began(run) == 16
    assert len(set(map(id, closed))) == 16 + 1  # that which lists the tasks
    assert set(threading.enumerate()) <= before


def test_a_stopped_sweep_is_saved_after_the_trajectories_it_is_of(begin, monkeypatch):
    with begin("order") as (run, state):
        collected, done = run.rollout(1, state), []
        monkeypatch.setattr(run.parts.source, "wait", lambda: done.append("trajectories"))
        monkeypatch.setattr(run.checkpoints._stopped, "save", lambda *_: done.append("sweep"))
        stopped = SweepStopped.__new__(SweepStopped)
        stopped.arrays, stopped.notes = {}, {"done": 1}
        run.checkpoints.save_stopped(state, stopped)
        assert collected.trajectories and done[:2] == ["trajectories", "sweep"]


@pytest.mark.parametrize("ended", ["finish", "save_stopped", "save"])
def test_a_run_that_lost_its_checkpoints_is_refused_and_keeps_its_record(begin, tmp_path, ended):
    folder = tmp_path / "lost"
    with begin("lost") as (run, state):
        run.parts.log.evaluation(1, {"eval/x": 0.5})
    with begin("lost") as (run, state):  # killed before its first checkpoint: it begins again
        assert not read_metrics(folder)
        run.parts.log.evaluation(1, {"eval/x": 0.5})
        run.checkpoints.save(state._replace(done=1))
        if ended == "save":
            run.checkpoints.save(state._replace(done=2))
        elif ended == "finish":
            run.checkpoints.wait()
        else:
            run.checkpoints.save_stopped(state._replace(done=1), Stopped("stopped"))
    elsewhere = f"checkpoint.directory={tmp_path / 'elsewhere'}"
    with (
        pytest.raises(ValueError, match="none was found in .*/elsewhere"),
        begin("lost", elsewhere),
    ):
        pass
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="none was found in .*/lost/checkpoints"), begin("lost"):
        pass
    assert [line["iteration"] for line in read_metrics(folder)] == [1]


def test_a_run_that_goes_on_with_other_activations_or_evaluations_says_so(begin, monkeypatch):
    logged = []
    monkeypatch.setattr(ProgressDisplay, "log", lambda self, sentence: logged.append(sentence))
    with begin("remat") as (run, state):
        run.checkpoints.save(state)
    selection = "checkpoints are selected by evaluations with k 9"
    recorded = "settings changed after 0: config.model.remat: none -> full; config.evaluation.k: "
    for changed, wanted in (
        (["model.remat=none"], []),
        (
            ["model.remat=full", "evaluation.k=9"],
            ["remat: full, and none when", selection, recorded],
        ),
    ):
        logged.clear()
        with begin("remat", *changed):
            pass
        said = [each for each in logged if "from now on" in each or "remat" in each]
        assert all(each.startswith(start) for each, start in zip(said, wanted, strict=True))


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_is_shortened_to_a_checkpoint_is_evaluated_there_once(begin, monkeypatch, every):
    with begin("shortened", f"evaluation.every={every}") as (run, state):
        run.checkpoints.save(state._replace(done=1, evaluated=True, score=0.5))
    played = []

    def play(*_, split, k, **others):
        played.append(split)
        return {f"{evaluation_prefix('test', split)}/avg@{k}": 0.25}

    monkeypatch.setattr(run_module, "evaluate_split", play)
    extra = "evaluation.extra_splits=train"
    for iterations, left in ((1, ["train"] if every else ["test", "train"]), (2, [])):
        with begin("shortened", f"iterations={iterations}", extra) as (run, state):
            assert (state.done, state.evaluated, state.left) == (1, not left, left)
            played.clear()
            if left:
                assert run.evaluate(state).score == (0.5 if every else 0.25)
            assert played == left


def save_stopped_sweep(run, state):
    """As one that was stopped in iteration 2."""
    collected = run.rollout(2, state)
    arrays = stopped_arrays(run.parts.learner, state.train, collected.trajectories)
    made = {name: jnp.zeros(of.shape, of.dtype) for name, of in arrays.items() if name != "state"}
    stopped = SweepStopped.__new__(SweepStopped)
    stopped.arrays, stopped.notes = made | {"state": state.train}, {"done": 1}
    run.checkpoints.save_stopped(state._replace(done=1), stopped)


def test_a_stopped_sweep_that_a_checkpoint_covers_is_not_resumed(begin, monkeypatch):
    with begin("covered") as (run, state):
        save_stopped_sweep(run, state)
        # Killed after the checkpoint, before the sweep that it covers was removed.
        monkeypatch.setattr(run.checkpoints, "_forget_covered", lambda: None)
        run.checkpoints.save(state._replace(done=2))
        run.checkpoints.wait()
    with begin("covered") as (run, state):
        assert state.done == 2 and state.stopped_sweep is None


def test_a_stopped_sweep_is_resumed_in_another_layout_and_skipped_where_it_cannot_be_used(
    begin, monkeypatch, tmp_path
):
    logged = []
    monkeypatch.setattr(ProgressDisplay, "log", lambda self, sentence: logged.append(sentence))
    with begin("lowered") as (run, state):
        save_stopped_sweep(run, state)
    for layout in ("remat=full", "attention=xla"):
        with begin("lowered", f"model.{layout}") as (run, state):
            assert state.done == 1 and state.stopped_sweep is not None
    changed = "config.model.remat: full -> none; config.model.attention: auto -> xla"
    assert logged[-2:] == [
        "resuming in the sweep of iteration 2",
        f"settings changed in the sweep of 2: {changed}",
    ]
    wanted = r"^config.algorithm.order: got 'forward'; allowed: 'reverse', .*/checkpoints/stopped: "
    with pytest.raises(ValueError, match=wanted), begin("lowered", "algorithm.order=forward"):
        pass
    with pytest.raises(ValueError, match="^config.seed: got 6; "), begin("lowered", "seed=6"):
        pass
    with begin("lowered", "iterations=1") as (run, state):
        assert state.done == 0 and state.stopped_sweep is None
    wanted = "the stopped sweep of iteration 2 is skipped: the last iteration is 1"
    assert [sentence for sentence in logged if "skipped" in sentence] == [wanted]
    wanted = "the stopped sweep of iteration 2 starts again: its checkpoint is damaged"
    for damaged in ("state/_CHECKPOINT_METADATA", "manifest.json"):
        (tmp_path / "lowered" / "checkpoints" / "stopped" / "2" / damaged).write_text("damaged")
        with begin("lowered") as (run, state):
            assert state.done == 0 and state.stopped_sweep is None
        assert "/stopped: checkpoint 2 " in logged[-2] and logged[-1] == wanted
