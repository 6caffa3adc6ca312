"""A run that is stopped or killed loses nothing: the same command ends with the same bits."""

import random
import signal
import subprocess
import sys
import time
import traceback

import jax
import pytest
import run_cases as cases
from jax.experimental.compilation_cache import compilation_cache
from places import TINY

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.supervised import warm_starting
from seeupo_jax.train import train as train_run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOICES = ("--config.iterations=4", "--config.checkpoint.every=3", "--config.evaluation.every=2")
MANY = (
    *CHOICES,
    "--config.iterations=20",
    "--config.evaluation.tasks=2",
    "--config.checkpoint.export=False",
)


@pytest.mark.parametrize(
    "reasons, why",
    [((), "another process was asked to stop"), (("",), ""), (("first", "later"), "first")],
)
def test_a_run_says_what_it_was_first_asked_with(reasons, why):
    request = StopRequest()
    for reason in reasons:
        request.ask(reason)
    assert request.why == why


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("stop") / "model")


def assert_same_run(workdir, undisturbed):
    """Every iteration and every evaluation is there once, with the same state and success."""

    def logged(folder):
        lines = cases.read_metrics(folder)
        names = ("iteration", "state/checksum", "eval/avg@2", "rollout/reward_mean", "sweep/kl")
        return [{name: line[name] for name in names if name in line} for line in lines]

    assert logged(workdir) == logged(undisturbed)


def lives(model, workdir, end):
    """Starts the run until it is over; `end` ends it soon after its programs are compiled."""
    for life in range(100):
        (process,) = cases.start(model, workdir, *MANY)
        for line in process.stdout:
            if line.startswith("compiled the sweep") and end(life, process):
                break
        process.communicate(timeout=300)
        yield process.returncode
        if process.returncode == 0 and (workdir / "learning_curve.png").exists():
            return


def second_is_refused(model, workdir, first):
    """Another run in the workdir of one that is at work is told so, and leaves it alone."""
    assert first.stdout.readline()  # from here on it is held still, for another one to find
    first.send_signal(signal.SIGSTOP)
    there = {file: file.stat().st_mtime_ns for file in workdir.rglob("*") if file.is_file()}
    (second,) = cases.start(model, workdir, *MANY)
    _, logged = second.communicate(timeout=120)
    assert second.returncode == 2 and logged.startswith(
        f"error: --workdir: got {workdir}, in use by"
    )
    assert f" process {first.pid} on " in logged and len(logged.splitlines()) == 1
    assert {file: file.stat().st_mtime_ns for file in workdir.rglob("*") if file.is_file()} == there
    first.send_signal(signal.SIGCONT)


@pytest.mark.exhaustive
def test_killed_at_ten_random_moments_it_ends_with_the_same_bits(model):
    undisturbed, workdir = model.parent / "undisturbed", model.parent / "killed"
    (first,) = cases.start(model, undisturbed, *MANY)
    second_is_refused(model, undisturbed, first)
    cases.finish([first])
    moments = random.Random(0)

    def kill(life, process):
        if life == 10:
            return False
        with pytest.raises(subprocess.TimeoutExpired):  # it is not over yet
            process.wait(moments.uniform(0, 0.8))
        process.kill()
        return True

    codes = list(lives(model, workdir, kill))
    assert codes == [-signal.SIGKILL] * 10 + [0]
    assert_same_run(workdir, undisturbed)


@pytest.mark.exhaustive
def test_trajectories_of_other_parameters_are_thrown_away_after_a_kill(model, here, capsys):
    """A run is killed in a sweep and started again with another learning rate."""
    undisturbed, workdir = model.parent / "other_rate", model.parent / "killed_in_a_sweep"
    choices = ("iterations=3", "checkpoint.every=0", "evaluation.every=0")
    here(undisturbed, StopRequest(), *choices, "optimizer.learning_rate=0.05")
    (process,) = cases.start(model, workdir, *[f"--config.{each}" for each in choices])
    deadline = time.monotonic() + 120
    while not (workdir / "rollouts" / "2.rollouts").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    capsys.readouterr()
    here(workdir, StopRequest(), *choices, "optimizer.learning_rate=0.05")
    logged = [line for line in capsys.readouterr().out.splitlines() if "discarded" in line]
    assert logged and all("was sampled by other parameters" in line for line in logged)
    assert "2.rollouts" in logged[0]  # the first iteration's were sampled by the same ones
    assert cases.checksums(workdir) == cases.checksums(undisturbed)


class Asked(StopRequest):
    """Is asked to stop once a function of this name has looked so often."""

    def __init__(self, function, times):
        super().__init__()
        self._function, self._times = function, times

    @property
    def asked(self):
        inside = any(self._function == frame.name for frame in traceback.extract_stack())
        self._times -= inside
        return self._times < 0

    @asked.setter
    def asked(self, value):
        pass


@pytest.fixture
def here(model, monkeypatch):
    """Trains in this process, on one device, and keeps what it compiles."""
    jax.config.update("jax_compilation_cache_dir", str(model.parent / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    overrides = [text.removeprefix("--config.") for text in (*cases.CHOICES, *CHOICES)]

    def configured(*more):
        every = [*overrides, f"model.path={model}", *more]
        return load_config(TINY, every)

    def train(workdir, request, *more):
        monkeypatch.setattr(sys.modules[train_run.__module__], "StopRequest", lambda: request)
        train_run(configured(*more), workdir)

    return train


def test_stopped_anywhere_it_goes_on_from_there(model, here, capsys):
    undisturbed, workdir = model.parent / "undisturbed_here", model.parent / "stopped"
    here(undisturbed, StopRequest())
    logged = []
    for function, times in (
        ("compile", 3),
        ("compile_programs", 2),
        ("evaluate", 3),
        ("_sample", 5),
        ("sweep", 2),
        ("compile_programs", 1),
        ("sweep", 1),
        ("evaluate", 2),
        ("compile", 1),
        ("sweep", 3),
        ("none of all", 0),
    ):
        here(workdir, Asked(function, times))
        logged += [line for line in capsys.readouterr().out.splitlines() if "stopped " in line]
    compiling = "before iteration {}, while programs were compiled; nothing {}"
    wanted = [
        *[compiling.format(1, "was saved, since no iteration was started")] * 2,
        "after iteration 0",
        "after iteration 0",
        "in the sweep of iteration 1, 2 turns in",
        compiling.format(1, "has changed since it was stopped in the sweep of 1"),
        "in the sweep of iteration 1, 3 turns in",
        "after iteration 2",
        compiling.format(3, "has changed since checkpoint 2"),
        "in the sweep of iteration 3, 3 turns in",
    ]
    assert logged == [f"stopped {where}; rerun the command to resume" for where in wanted]
    assert_same_run(workdir, undisturbed)
    for line in cases.iterations(workdir):
        counted = line["sweep/tokens_per_second"] * line["time/sweep_s"] / line["sweep/tokens"]
        # What was done before a sweep was stopped took none of the time that is counted.
        whole = line["iteration"] not in (1, 3)
        assert counted == pytest.approx(1) if whole else 0 < counted < 0.9
    assert not (workdir / "checkpoints" / "stopped").exists()
    assert list((workdir / "rollouts").iterdir()) == []


@pytest.mark.exhaustive
def test_a_signal_while_programs_are_compiled_is_heard_before_all_of_them_are(model):
    workdir = model.parent / "signalled"
    (process,) = cases.start(model, workdir, "--config.iterations=1", "--config.rollout.slots=4")
    for line in process.stdout:
        if line.startswith("KV cache: "):  # the last line before programs are compiled
            process.send_signal(signal.SIGTERM)
            break
    logged, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "compiled the" not in logged
    assert logged.splitlines()[-1] == (
        "stopped before iteration 1, while programs were compiled; nothing was saved, since no"
        " iteration was started; rerun the command to resume"
    )


@pytest.mark.exhaustive
def test_stopped_in_a_warm_start_it_says_that_nothing_of_it_is_kept(
    here, model, capsys, monkeypatch
):
    workdir, shown = model.parent / "warm", []
    monkeypatch.setattr(warm_starting, "_SHOWN_EVERY_S", 0.0)
    monkeypatch.setattr(ProgressDisplay, "step", lambda _, *step: shown.append(step[:2]))
    stage = "({'steps': 30, 'demonstrations': {}},)"
    choices = ("env.name=order_desk", f"warm_start.stages={stage}", "warm_start.batch_size=4")
    here(workdir, Asked("show", 2), *choices)
    logged = capsys.readouterr().out.splitlines()[-1]
    assert logged == (
        "stopped in the warm start, 3 steps into stage 1; rerun the command to start it again"
    )
    assert shown == [(1, 30), (2, 30), (3, 30)]
    assert not (workdir / "warm_start").exists()


def test_a_relative_workdir_is_that_of_the_folder_that_the_run_began_in(model, here, monkeypatch):
    monkeypatch.chdir(model.parent)
    choices = ("iterations=1", "evaluation.every=0", "checkpoint.directory=relative_saved")

    class Left(Asked):
        """Nobody asks for a stop; the process goes to another folder in the sweep."""

        def __init__(self):
            super().__init__("none of all", 0)

        @property
        def asked(self):
            monkeypatch.chdir("/")
            return False

        @asked.setter
        def asked(self, value):
            pass

    here("relative", Left(), *choices)
    assert (model.parent / "relative" / "metrics.jsonl").is_file()
    assert (model.parent / "relative" / "policy" / "config.json").is_file()
    assert (model.parent / "relative" / "learning_curve.png").is_file()
    assert (model.parent / "relative_saved" / "1" / "manifest.json").is_file()


@pytest.fixture
def hangup():
    """The tests may run under nohup, which has them ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_of_an_application_that_embeds_python_stays(number, hangup, monkeypatch):
    found = signal.getsignal
    before = [found(each) for each in SIGNALS]
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == number else found(n))
    with StopRequest():
        taken = [each for each, old in zip(SIGNALS, before, strict=True) if found(each) != old]
        assert taken == [each for each in SIGNALS if each != number]
    assert [found(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_interrupt_acts_as_usual_and_a_second_of_the_others_does_not(number, hangup):
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as request:
        signal.raise_signal(number)
        assert (request.asked, request.reason) == (True, signal.Signals(number).name)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            signal.raise_signal(number)
    assert before == [signal.getsignal(each) for each in SIGNALS]


def test_a_hangup_that_is_ignored_stays_so(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGHUP)
        assert not request.asked
