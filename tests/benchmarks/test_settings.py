"""Flags: what they mean, and one sentence for what is wrong with them."""

import jax
import pytest

from seeupo_jax import bench as command
from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.jax_runner import ABLATIONS, ablations
from seeupo_jax.benchmarks.settings import (
    CONTENDERS,
    MODELS,
    WORKLOADS,
    BenchSettings,
    add_flags,
    read,
)
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.instruments.bench.suites import SUITES


def parsed(line):
    benchmark, *flags = line.split()
    parser = Flags("bench", None)
    add_flags(parser, benchmark)
    return read(parser.read(flags))


def test_without_flags_everything_is_as_settings_say():
    for benchmark in ("update", "rollout", "iteration"):
        assert parsed(benchmark) == BenchSettings()
    assert BenchSettings().torch == CONTENDERS
    assert BenchSettings().command("rollout") == "python -m seeupo_jax.bench rollout"


def test_flags_come_back_as_they_were_given():
    line = "--workload=long --scale=0.5 --turns=3 --torch=none --without=buckets"
    settings = parsed(f"update {line}")
    assert settings.torch == () and settings.without == ("buckets",)
    assert settings.command("update") == f"python -m seeupo_jax.bench update {line}"


def test_every_command_of_the_page_is_one():
    for name, line in [pair for suite in SUITES.values() for pair in suite.items()]:
        settings = parsed(line)
        assert settings.workload in WORKLOADS and settings.model in MODELS, name
        ablations(settings.without)


def test_all_techniques_are_named_by_one_word():
    assert ablations(("all",)) == ABLATIONS
    with pytest.raises(ValueError, match="--without: got 'x'; allowed: all, share_prefixes"):
        ablations(("x",))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "",
            "bench: got ''; allowed: one of update, rollout, iteration, sft, gain,"
            " asynchronous, agents, processes, serving, all, report, estimates, accelerator.",
        ),
        ("sweep", "bench: got 'sweep'; allowed: one of update"),
        ("update --groups=0", "--groups: got '0'; allowed: a whole number >= 1."),
        ("update --group_size=1", "--group_size: got '1'; allowed: a whole number >= 2."),
        ("update --groups=x", "--groups: got 'x'; allowed: a whole number >= 1."),
        ("update --scale=0", "--scale: got '0'; allowed: a number > 0."),
        (
            "update --torch=fast",
            "--torch: got 'fast'; allowed: none, or some of eager, compile, recipe, packed.",
        ),
        (
            "rollout --without=all",
            "--without: bench rollout has no such flag; allowed: --workload,",
        ),
        ("update --model=7b", "--model: got '7b'; allowed: nano, tiny, 135m, 0.5b, 1.5b."),
        ("update --workload=chat", "--workload: got 'chat'; allowed: bfcl"),
        ("update --without=x", "--without: got 'x'; allowed: all, share_prefixes"),
        ("iteration --torch=none", "--torch: got none; allowed: a way to run"),
        ("all --suite=tpu", "--suite: got 'tpu'; allowed: cpu, accelerator."),
        ("all --results=/dev/null/x", "--results: got /dev/null/x (Not a directory); allowed: a"),
        ("report --results=/nowhere", "--results: got /nowhere; allowed: a folder with figures"),
    ],
)
def test_a_wrong_command_ends_with_one_sentence(line, sentence, capsys, monkeypatch):
    monkeypatch.setattr(machine, "only_device", lambda: jax.devices()[0])
    monkeypatch.setattr(command, "prepare_xla", lambda: None)
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", *line.split()])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {sentence}") and err.count("\n") == 1
