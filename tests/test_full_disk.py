"""A disk without room ends a run with one sentence and 2; what was saved before is whole."""

import contextlib
import errno
import importlib
import os
import resource
import signal

import jax
import learner_cases
import numpy as np
import pytest
import report_cases
import run_cases as cases
import stored_cases
from jax.experimental.compilation_cache import compilation_cache
from places import TINY

from seeupo_jax.cli.command_line import run_file_errors
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.schema import Config
from seeupo_jax.errors import WriteError, is_full
from seeupo_jax.evaluate import main as evaluate
from seeupo_jax.metrics.metrics_log import MetricsWriter, read_metrics
from seeupo_jax.train import main

ONE_FILE = 40_000  # bytes; a checkpoint's largest file has some 400,000


@contextlib.contextmanager
def limited(size):
    """No file grows beyond a size: the system refuses it as it does on a full disk.

    It needs no rights, unlike a small disk of one's own, and is an error of the same calls.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    received = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, received)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("full_disk") / "model")


def run(model, workdir, iterations):
    more = [f"--config.iterations={iterations}", "--config.evaluation.every=0"]
    more += ["--config.evaluation.tasks=1", "--config.rollout.tasks=2"]
    main(cases.command(model, workdir, *more, "--config.checkpoint.export=False")[2:])


def refused(capfd, model, workdir, iterations):
    """The sentence that a run ends with."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end, limited(ONE_FILE):
        run(model, workdir, iterations)
    assert end.value.code == 2
    (sentence,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error: ")]
    return sentence.removeprefix("error: ")


def checkpoints(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


# Compiled programs are kept on disk as well; that there is no room for one is JAX's warning.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache entry")
def test_a_run_without_room_ends_in_a_sentence_and_resumes_when_there_is_room(
    model, tmp_path, capfd, monkeypatch
):
    one = jax.devices()[:1]  # programs of one device compile sooner
    monkeypatch.setattr(jax, "devices", lambda: one)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    workdir, fresh = tmp_path / "run", tmp_path / "fresh"
    run(model, workdir, 1)
    assert refused(capfd, model, workdir, 2) == (
        f"checkpoint 2 could not be written to {workdir / 'checkpoints'}: File too large;"
        " checkpoint 1 there is intact."
    )
    assert checkpoints(workdir) == ["1"]
    assert refused(capfd, model, fresh, 1) == (
        f"checkpoint 1 could not be written to {fresh / 'checkpoints'}: File too large; no other is"
        " there."
    )
    assert checkpoints(fresh) == []
    run(model, workdir, 2)
    assert "resuming after iteration 1" in capfd.readouterr().out
    assert checkpoints(workdir) == ["1", "2"]
    assert [line["iteration"] for line in cases.iterations(workdir)] == [1, 2]
    evaluated = cases.command(model, workdir, "--config.evaluation.tasks=2")[2:]
    with pytest.raises(SystemExit) as end, limited(1000):
        evaluate(evaluated)
    assert end.value.code == 2
    assert "could not be written: File too large; what is finished is" in capfd.readouterr().err
    jax.clear_caches()
    evaluate(evaluated)
    read = capfd.readouterr()
    assert "avg@2" in read.out
    assert f"{tmp_path}/programs/jit_decode" in read.err and "is incomplete" in read.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["train", "sft", "update", "report"])
def test_a_command_that_starts_without_room_names_a_file_in_one_sentence(
    command, model, tmp_path, capsys
):
    report_cases.write_run(tmp_path / "run", iterations=1)
    stored = stored_cases.write(tmp_path / "stored.jsonl", learner_cases.ragged())
    run = cases.command(model, tmp_path / "run")[3:]
    line, lock = {
        "train": (run, "run/.lock"),
        "sft": ([*run, "--config.sft.data=demonstrations"], "run/.lock"),
        "update": (
            [f"--config={TINY}", f"--model={model}", f"--trajectories={stored}"]
            + [f"--output={tmp_path / 'out'}"],
            ".out.lock",
        ),
        "report": ([f"--workdir={tmp_path / 'run'}"], "run/.report.html.lock"),
    }[command]
    module = importlib.import_module(f"seeupo_jax.{command}")
    with pytest.raises(SystemExit) as end, limited(0):
        module.main([command, *line])
    assert end.value.code == 2
    (sentence,) = [x for x in capsys.readouterr().err.splitlines() if "could not be written" in x]
    assert sentence.startswith(f"error: {tmp_path / lock} could not be written: File too large; ")
    assert not (tmp_path / lock).exists()


def test_a_line_of_metrics_without_room_is_not_there_at_all(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": "x" * 1000})
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with limited(1500):
            with pytest.raises(OSError) as error:
                writer.write(2, {"a": "x" * 1000})
            assert is_full(error.value) and (tmp_path / "metrics.jsonl").read_bytes() == before
        writer.write(2, {"a": "y"})
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2]


def test_what_has_no_room_says_what_is_kept_and_ends_with_2(tmp_path):
    config = Config()
    with pytest.raises(WriteError) as error, run_file_errors(config, tmp_path), limited(100):
        (tmp_path / "file").write_bytes(bytes(1000))
    assert str(error.value) == (
        f"{tmp_path} could not be written: File too large; no checkpoint was saved yet."
    )
    assert error.value.exit_code == 2
    assert WriteError("checkpoint 2 could not be written to x: Not a directory.").exit_code == 1


@pytest.mark.parametrize(
    "error, code, tried, mend",
    [
        (errno.ENOSPC, 2, "written: No space left on device", "make room"),
        (errno.EIO, 1, "read or written: Input/output error", "mend that"),
    ],
)
@pytest.mark.parametrize("command", ["aot", "bench", "compare", "lab", "serve", "train_server"])
def test_whatever_a_command_writes_a_disk_that_fails_is_one_sentence(
    command, error, code, tried, mend, monkeypatch, capsys
):
    def write(*_):
        raise OSError(error, os.strerror(error), "/x/out.json")

    monkeypatch.setattr(Flags, "read", write)  # in the place of whatever they write
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"seeupo_jax.{command}").main([command, "update"])
    assert end.value.code == code
    assert capsys.readouterr().err == (
        f"error: /x/out.json could not be {tried}; what is finished is kept: {mend} and rerun the"
        " command.\n"
    )


def test_event_files_of_tensorboard_without_room_are_told_once_and_nothing_waits(tmp_path, caplog):
    with limited(2000), MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        for iteration in range(50):
            writer.draw(iteration, {f"metric/{i}": np.ones(1) for i in range(20)}, [])
    assert caplog.text.count("File too large); nothing more is written to it") == 1


def test_event_files_in_the_place_of_whose_folder_a_file_is_are_told(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("")
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(1, {"a": 1.0})
    assert "nothing more is written to it" in caplog.text
