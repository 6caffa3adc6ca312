"""`bench estimates`: the work that is measured is the work that is estimated."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from bench_cases import small  # noqa: F401

from seeupo_jax import bench as command
from seeupo_jax.benchmarks import machine
from seeupo_jax.instruments.bench import estimates

PEAK, BANDWIDTH = 1e11, 1e10


@pytest.fixture
def quick(monkeypatch):
    """The machine's own figures take seconds to measure."""
    monkeypatch.setattr(estimates, "prepare_xla", lambda: None)
    monkeypatch.setattr(machine, "matmul_peak", lambda dtype: PEAK)
    monkeypatch.setattr(machine, "memory_bandwidth", lambda: BANDWIDTH)


def test_every_part_of_an_iteration_is_estimated_and_measured(quick, tmp_path, capsys):
    file = tmp_path / "estimates.json"
    command.main(["bench", "estimates", "--smallest", "--repeats=1", f"--json={file}"])
    found = json.loads(file.read_text())
    assert [row["part"] for row in found["rows"]] == [
        "rollout/prefill",
        "rollout/decode",
        "sweep/score",
        "sweep/turn",
    ]
    for row in found["rows"]:
        assert 0 < row["overlap_s"] <= row["serial_s"] and row["measured_s"] > 0
    over = [row["measured_s"] / row["serial_s"] for row in found["rows"]]
    assert (found["least"], found["most"]) == (min(over), max(over))
    assert found["median"] == pytest.approx(np.median(over))
    assert f"median {found['median']:.2f}" in capsys.readouterr().out


def test_a_programs_seconds_are_those_of_the_clock(monkeypatch):
    clock = itertools.count(step=0.25)
    monkeypatch.setattr(estimates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = estimates.Timer()
    (name, kind), *_ = estimates._KINDS.items()
    program = timer.wrap_program(name, lambda x: x + 1)
    assert [program(1), program(2)] == [2, 3]
    assert timer.seconds == {kind: 0.5}


def test_another_device_is_refused(quick, monkeypatch, capsys):
    gpu = type("Device", (), {"platform": "gpu"})()
    monkeypatch.setattr(machine, "only_device", lambda: gpu)
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", "estimates"])
    assert ended.value.code == 2
    assert "got a gpu; allowed: a CPU" in capsys.readouterr().err
