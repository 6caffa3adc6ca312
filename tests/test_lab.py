"""`python -m seeupo_jax.lab`."""

import json
import sys

import loaded_python
import numpy as np
import pytest
from process_cases import environment


def lab(*arguments):
    return loaded_python.run(
        [sys.executable, "-m", "seeupo_jax.lab", *arguments], env=environment()
    )


@pytest.fixture
def problem(tmp_path):
    path = tmp_path / "mine.npz"
    mean = np.arange(1.0, 5.0).reshape(2, 2)
    np.savez(path, mean=mean, probability=np.full((2, 2), 0.5))
    return str(path)


def test_the_command_runs_recipes_on_a_file_and_writes_what_it_found(problem, tmp_path):
    done = lab(
        f"--problem_file={problem}",
        "--recipes=seeupo,grpo",
        "--seeds=3",
        "--iterations=4",
        "--exact",
        f"--json={tmp_path / 'out.json'}",
        f"--plot={tmp_path / 'out.svg'}",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found) == {"problem", "optimum", "recipes"}
    assert found["optimum"] == 4 and list(found["recipes"]) == ["seeupo", "grpo"]
    for values in found["recipes"].values():
        of_seeds = ["final_over_optimum", "mean_over_optimum"]
        assert list(values) == [*of_seeds, "curve_mean", "solved", "drops"]
        assert all(len(values[name]) == 3 for name in of_seeds) and len(values["curve_mean"]) == 4
        assert values["curve_mean"][-1] / 4 == pytest.approx(np.mean(values["final_over_optimum"]))
    assert "seeupo" in done.stdout and "ran in" in done.stdout
    assert (tmp_path / "out.svg").stat().st_size > 1000


def test_the_command_measures_the_bias_of_stale_trajectories(problem, tmp_path):
    done = lab(
        f"--problem_file={problem}",
        "--bias=0,2",
        "--turn_tokens=2",
        "--iterations=4",
        f"--json={tmp_path / 'out.json'}",
        f"--plot={tmp_path / 'out.svg'}",
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "out.json").read_text())
    assert (found["recipe"], found["lags"]) == ("seeupo_noscale", [0, 2])
    assert list(found["corrections"])[:2] == ["none", "ratios to the sampler"]
    # One turn is the trajectory.
    figures = found["corrections"]
    assert figures["mask per turn"] == figures["mask per trajectory"] != figures["mask per token"]
    assert figures["none"]["bias"][0] == 0 < figures["none"]["bias"][1]
    assert "bias of the gradient" in done.stdout and "reject per trajectory" in done.stdout
    assert (tmp_path / "out.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--problem=lotery"], "--problem: got 'lotery'; allowed: "),
        (["--plot=a.pdf"], "--plot: got 'a.pdf'; allowed: a file ending .svg or .png."),
        (["--bias=1,two"], "--bias: got '1,two'; allowed: comma-separated whole numbers."),
        (["--seeds=many"], "lab.seeds: got 'many' (str); allowed: a whole number."),
    ],
)
def test_a_wrong_value_is_one_sentence(flags, said):
    done = lab(*flags)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
