"""`bench processes`: several processes do the work of one, and who idles longest counts."""

import json

import pytest
from process_cases import environment

from seeupo_jax import bench as command
from seeupo_jax.instruments.bench.processes import process_comparison
from seeupo_jax.instruments.bench.processes.device_idle import CHANNEL, ROLLOUT, SWEEP, IdleTimes

STEP = {"turns": [1], "loss": 0.5, "kl": 0.1, "grad_norm": 1.0, "weights": [1.0, -1.0]}


def of_count(idle, *, tokens="a", bits="b", **changes):
    """The figures of so many processes, whose devices idle this share of a rollout."""
    results = {"rollout_hash": tokens, "sweep_hash": bits, "steps": [STEP | changes]}
    parts = [{"part": ROLLOUT, "way": CHANNEL, "idle": idle}]
    return {"devices": 4, "results": results, "parts": parts}


def test_the_process_whose_devices_idle_longest_counts():
    each = [
        [IdleTimes(9.0, 1.0, 4, 0.02), IdleTimes(8.0, 2.0, 4, 0.04)],
        [IdleTimes(6.0, 4.0, 4, 0.08), IdleTimes(9.5, 0.5, 4, 0.06)],
        [IdleTimes(9.0, 1.0, 4, 0.02), IdleTimes(7.0, 3.0, 4, 0.02)],
    ]
    assert process_comparison._figures(each) == {
        "idle": pytest.approx(0.3),  # of 0.2, 0.4 and 0.3
        "each_idle": pytest.approx([0.2, 0.4, 0.3]),
        "idle_s": 3.0,
        "busy_s": 7.0,
        "agreements": 4,
        "agreement_ms": pytest.approx(7.5),  # of 5, 10, 20, 15, 5, 5
    }


def test_several_processes_must_do_what_one_does():
    one = of_count(0.02)
    against = process_comparison._against_one
    found = against(of_count(0.05, bits="c", loss=0.50001), one, 2)
    assert found["parts"][0]["over_one"] == pytest.approx(0.03)
    assert not found["same_bits"] and found["largest_difference"] == pytest.approx(1e-5)
    for wrong in (of_count(0.02, tokens="c"), of_count(0.02, weights=[1.0, -0.9])):
        with pytest.raises(ValueError, match="4 processes sample or update otherwise than one"):
            against(wrong, one, 4)


def test_two_processes_are_measured_against_one_in_both_ways(tmp_path, monkeypatch, capsys):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    file = tmp_path / "figures.json"
    small = ("--scale=0.05", "--turns=2", "--group_size=2", "--decode_steps=2", "--repeats=1")
    command.main(["bench", "processes", "--processes=2", "--model=nano", *small, f"--json={file}"])
    figures = json.loads(file.read_text())["of_processes"]
    assert figures.keys() == {"1", "2"}
    for count, ways in (("1", 1), ("2", 2)):
        parts = [row["part"] for row in figures[count]["parts"]]
        assert sorted(parts) == sorted([ROLLOUT, SWEEP] * ways) and figures[count]["devices"] == 4
        for row in figures[count]["parts"]:
            assert 0 <= row["idle"] < 1 and row["busy_s"] > 0 and row["agreements"] >= 2
    assert figures["2"]["largest_difference"] < 1e-4
    steps = {row["way"]: row["agreements"] for row in figures["2"]["parts"] if row["part"] == SWEEP}
    assert set(steps.values()) == {2}  # one before the step of each turn
    printed = capsys.readouterr().out
    assert "device collective" in printed and "2: the same samples" in printed


def test_other_numbers_of_processes_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["bench", "processes", "--processes=3"])
    assert ended.value.code == 2
    assert "--processes: got '3'; allowed: some of 1, 2, 4" in capsys.readouterr().err
